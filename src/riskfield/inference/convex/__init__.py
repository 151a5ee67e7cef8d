"""Inference as the minimisation of a convex free energy."""

from riskfield.inference.convex.free_energy import ConvexFreeEnergy, InteriorPoint, SumProduct
from riskfield.inference.convex.terms import NEGATIVE_ENTROPY, NEGATIVE_LOG, SQUARE, ConvexFunction, Term

__all__ = [
    "NEGATIVE_ENTROPY",
    "NEGATIVE_LOG",
    "SQUARE",
    "ConvexFreeEnergy",
    "ConvexFunction",
    "InteriorPoint",
    "SumProduct",
    "Term",
]
