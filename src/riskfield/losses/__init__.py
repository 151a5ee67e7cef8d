"""Losses, one family per file. A loss maps theta and labels to one number per example, which training minimises."""

from riskfield.infer import Role
from riskfield.losses.contrastive_divergence import ContrastiveDivergence
from riskfield.losses.hybrid import Hybrid
from riskfield.losses.l1_mse_f_measure import L1, MSE, FMeasure
from riskfield.losses.likelihood import SurrogateEM, SurrogateLikelihood
from riskfield.losses.loss import AbstractLoss, AbstractMarginalLoss, Custom, Target, empirical_risk, num_counted
from riskfield.losses.marginal import (
    CliqueLogistic,
    CliqueQuadratic,
    CliqueSmoothedClassification,
    SmoothedClassification,
    UnivariateLogistic,
    UnivariateQuadratic,
)
from riskfield.losses.piecewise import Independent, Piecewise
from riskfield.losses.pseudolikelihood import PatchPseudolikelihood, Pseudolikelihood
from riskfield.losses.saddle_point import SaddlePoint

__all__ = [
    "L1",
    "MSE",
    "AbstractLoss",
    "AbstractMarginalLoss",
    "CliqueLogistic",
    "CliqueQuadratic",
    "CliqueSmoothedClassification",
    "ContrastiveDivergence",
    "Custom",
    "FMeasure",
    "Hybrid",
    "Independent",
    "PatchPseudolikelihood",
    "Piecewise",
    "Pseudolikelihood",
    "Role",
    "SaddlePoint",
    "SmoothedClassification",
    "SurrogateEM",
    "SurrogateLikelihood",
    "Target",
    "UnivariateLogistic",
    "UnivariateQuadratic",
    "empirical_risk",
    "num_counted",
]
