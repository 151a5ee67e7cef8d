r"""`Envelope`: dA/dtheta = mu at convergence.

The log-partition value is the maximum of theta . mu + H(mu) over mu, so by Danskin's theorem its gradient is the
maximiser (Domke 2013, eq. 9): no derivative of mu is needed. That serves every objective made of log-partition
functions, such as the surrogate likelihood A(theta) - theta . f(x), whose gradient is mu - f(x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from riskfield.adjoints._attach import constant_in, without_gradient
from riskfield.adjoints._refusals import require_convergence, require_theta_only
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.errors import AdjointError
from riskfield.inference.request import Request
from riskfield.inference.solution import Deferred, Solution, version_of
from riskfield.kernels import is_differentiated, is_transformed

_NO_MARGINALS = (
    "`Envelope` differentiates the log-partition value only, and the loss depends on the marginals. Use another "
    "adjoint, such as `Unroll()`, or detach the marginals."
)


@dataclass(frozen=True)
class Envelope(AbstractAdjoint):
    """Differentiate the log-partition value only, as dA/dtheta = mu.

    Exact at convergence (and always for `Exact`). A loss on the marginals themselves needs another adjoint; the
    backward pass refuses it. For a truncated run use `Unroll`, which differentiates the truncated log-partition.

    Arguments:
        curvature: the adjoint that computes dmu/dtheta, the second derivative of the value, which `SMD` needs. By
            default second derivatives raise an error.

    >>> import torch
    >>> from riskfield import Envelope, Exact, chain, infer
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> solution = infer(graph, theta, Exact(), adjoint=Envelope())
    >>> (gradient,) = torch.autograd.grad(solution.log_partition, theta)
    >>> torch.equal(gradient, solution.mu)
    True
    """

    curvature: AbstractAdjoint | None = None

    def __post_init__(self) -> None:
        if self.curvature is not None and not isinstance(self.curvature, AbstractAdjoint):
            raise TypeError(f"`curvature` must be an object such as `Unroll()`, or None. Got {self.curvature!r}.")

    def apply(self, request: Request) -> Solution:
        """Run without gradients, or with those of the marginals, and attach the gradient of the value."""
        require_convergence(request, "Envelope")
        require_theta_only(request, "Envelope")
        curvature = self.curvature if is_differentiated(request.theta) else None
        solution = request.solve() if curvature is None else curvature.apply(request)
        theta = request.theta
        if curvature is None and solution.lazy:
            value = _Value.apply(theta, solution.log_partition, solution.statistics, True)
            mu = _refused(theta, lambda: solution.mu)
            return solution.replaced(
                theta=theta, _mu=mu, _nodes=_refused(theta, lambda: solution.node_mu), _value=value
            )
        plain = solution.with_mu(solution.mu.detach(), theta=theta.detach())
        value = _Value.apply(theta, plain.log_partition, _unchanged(request.graph.collapse(solution.mu)), False)
        return plain.with_mu(without_gradient(plain.mu, (theta,), _NO_MARGINALS), theta=theta, _value=value)


def _unchanged(statistics: Tensor) -> Callable[[], Tensor]:
    """The statistics; an error if they, which may be the marginals of the solution, have been changed since."""
    version = version_of(statistics)

    def read() -> Tensor:
        if version_of(statistics) != version:
            raise AdjointError("`Envelope`: the marginals, its gradient, were changed in place. Change a copy of them.")
        return statistics

    return read


def _refused(theta: Tensor, value: Callable[[], Tensor]) -> Deferred:
    """The value, without a derivative in theta."""

    def refuse() -> Tensor:
        with torch.enable_grad():
            return without_gradient(value(), (theta,), _NO_MARGINALS)

    return Deferred(refuse)


def require_marginal_gradient(adjoint: AbstractAdjoint | None) -> None:
    """Refuse to differentiate marginals by `Envelope`: they would be constants, and nothing would be learned."""
    if isinstance(adjoint, Envelope):
        raise ValueError(
            "`adjoint` must differentiate marginals, as `Unroll()` or `FixedPoint()` does; `Envelope` serves losses on "
            f"the log-partition value only, such as `SurrogateLikelihood()`. Got {adjoint!r}."
        )


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, value: Tensor, statistics: Callable[[], Tensor], computed_anew: bool
    ) -> Tensor:
        # Autograd does not see the statistics: they are no input of the value, and only its gradient leads to theirs.
        ctx.save_for_backward(theta)
        ctx.statistics, ctx.computed_anew = statistics, computed_anew
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (theta,) = ctx.saved_tensors
        statistics, grad = ctx.statistics(), grad.unsqueeze(-1)
        if statistics.requires_grad:
            return grad * statistics, None, None, None
        in_place = ctx.computed_anew and not is_transformed(grad)  # not for a batch of gradients
        gradient = statistics.mul_(grad) if in_place else grad * statistics
        return constant_in(gradient, (theta,), "`Envelope` without `curvature`"), None, None, None
