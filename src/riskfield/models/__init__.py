"""Models: torch modules that compute theta from inputs and learned parameters."""

from riskfield.models.chain import ChainModel
from riskfield.models.conditional import Conditional, LinearModel, Tables
from riskfield.models.convex import ConvexModel, LearnsInference, inference_of
from riskfield.models.generative import Generative
from riskfield.models.sparse import SparseRows

__all__ = [
    "ChainModel",
    "Conditional",
    "ConvexModel",
    "Generative",
    "LearnsInference",
    "LinearModel",
    "SparseRows",
    "Tables",
    "inference_of",
]
