r"""Optimality conditions of marginals on the local polytope: what an algorithm offers for `KKT`.

Marginals that maximise theta . mu + H(mu) under the constraints B mu = d of the local polytope satisfy

    theta + dH/dmu + B^T lambda = 0,        B mu = d.

The constraints follow from the graph. An algorithm describes H by its derivatives, entry by entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from riskfield.inference.solution import Solution


class AbstractOptimality(ABC):
    """The derivatives of a sum H(mu) = sum_k h_k(mu_k) that an algorithm maximises beside theta . mu."""

    # What to do where the conditions cannot be solved or the marginals do not meet them; the end of an error message.
    remedy: ClassVar[str] = (
        "Run inference to a smaller tolerance, or use `Unroll`, which differentiates the sweeps that ran."
    )
    # Whether `parameter_slopes` has the derivatives in the algorithm's parameters.
    differentiates_parameters: ClassVar[bool] = False

    @abstractmethod
    def curvature(self, mu: Tensor) -> Tensor:
        """Compute -h_k''(mu_k), of the shape of mu: 1 / mu for the entropy -mu log mu. 0 where mu is 0."""

    def parameter_slopes(self, mu: Tensor) -> tuple[Tensor, ...]:
        """Compute the derivative of h_k'(mu_k) in each of the algorithm's parameters, each of the shape of mu."""
        return ()

    def undecided(self, solution: Solution) -> Tensor | None:
        """Which marginals are about to reach 0 or to leave it, where they are not differentiable; None if none is."""
        return None
