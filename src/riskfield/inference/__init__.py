"""Algorithms, one to a file, and the loop they share."""

from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.ancestral import sample_exactly
from riskfield.inference.convex import (
    NEGATIVE_ENTROPY,
    NEGATIVE_LOG,
    SQUARE,
    ConvexFreeEnergy,
    ConvexFunction,
    InteriorPoint,
    SumProduct,
    Term,
)
from riskfield.inference.evidence import clamp
from riskfield.inference.exact import Exact, ExactMAP
from riskfield.inference.gibbs import effective_sample_size, frequencies, sample
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.solution import JointMode, Solution
from riskfield.inference.stop import Stop
from riskfield.kernels import Run

__all__ = [
    "NEGATIVE_ENTROPY",
    "NEGATIVE_LOG",
    "SQUARE",
    "AbstractAlgorithm",
    "ConvexFreeEnergy",
    "ConvexFunction",
    "Exact",
    "ExactMAP",
    "InteriorPoint",
    "JointMode",
    "MaxProduct",
    "MeanField",
    "MessagePassing",
    "Run",
    "Solution",
    "Stop",
    "SumProduct",
    "Term",
    "clamp",
    "effective_sample_size",
    "frequencies",
    "sample",
    "sample_exactly",
]
