"""Gradients through inference, one method per file."""

from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.fixed_point_solvers import GMRES, Iterate
from riskfield.adjoints.kkt import KKT
from riskfield.adjoints.kkt_solvers import Direct, Minres
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.second_order import hessian_vector_product
from riskfield.adjoints.unroll import Unroll

__all__ = [
    "GMRES",
    "KKT",
    "AbstractAdjoint",
    "Direct",
    "Envelope",
    "FixedPoint",
    "Iterate",
    "Minres",
    "Perturb",
    "Unroll",
    "hessian_vector_product",
]
