"""Optimisers for `fit`."""

from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.stochastic import SMD, Torch

__all__ = [
    "LBFGS",
    "SMD",
    "AbstractOptimiser",
    "Torch",
]
