"""Optimisers for `fit`."""

from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.smd import SMD
from riskfield.learning.stochastic import Torch

__all__ = [
    "LBFGS",
    "SMD",
    "AbstractOptimiser",
    "Torch",
]
