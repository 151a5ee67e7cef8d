r"""`Perturb`: the gradient of a loss from two more runs of inference.

With mu(theta) = dA/dtheta (Domke 2010, eqs. 4-5) the Jacobian dmu/dtheta is a matrix of second derivatives of A, so it
is symmetric, and dL/dtheta = (dmu/dtheta)^T g = (dmu/dtheta) g is the derivative of mu in the direction g = dL/dmu,

    dL/dtheta = lim_{r -> 0} (mu(theta + r g) - mu(theta)) / r                        (Domke 2010, eq. 23; 2013, eq. 24)

taken by one-, two- or four-sided differences (Domke 2013, section 6) with the step

    r = m eps^(1/2, 1/3, 1/5) (1 + |theta|_inf) / |g|_inf,

eps the machine epsilon of theta's dtype; these powers balance truncation against rounding. It needs no derivative of
the algorithm, so it serves every one whose marginals are the gradient of its value: message passing with any counting
numbers (on a non-concave entropy at the local optimum it found), mean field, exact inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from riskfield.adjoints._attach import Jacobian, attach
from riskfield.adjoints._refusals import require_convergence, require_finite, require_symmetry, require_theta_only
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.errors import AdjointWarning, warn
from riskfield.inference.request import Request
from riskfield.inference.solution import Solution

# By `sides`: the steps, in units of r, at which mu is computed, their weights, and the power of eps.
_SCHEMES = {
    1: ((0.0, 1.0), (-1.0, 1.0), 1 / 2),
    2: ((1.0, -1.0), (1 / 2, -1 / 2), 1 / 3),
    4: ((2.0, 1.0, -1.0, -2.0), (-1 / 12, 8 / 12, -8 / 12, 1 / 12), 1 / 5),
}
# Rounding of a marginal, in units of eps (1 + |theta|_inf): log-potentials of that size are added and exponentiated.
_ROUNDING = 4.0
_PIECE = 1 << 15  # numbers worked on at a time
# A warning is due where rounding alone may take this share of the gradient.
_NOISE = 1e-2
# The perturbed runs aim at the accuracy that rounding allows, which slow convergence may not reach. A warning is due
# where what is missing may take this share of the gradient.
_MISSED = 1e-3


@dataclass(frozen=True)
class Perturb(AbstractAdjoint):
    """Differentiate converged marginals by differences along dL/dmu.

    The perturbed runs start from the converged messages and run together as one batch. Memory does not grow with the
    number of sweeps. The run itself must converge: its error enters the gradient.

    Arguments:
        sides: 1, 2 or 4; more sides are more accurate and need more runs.
        multiplier: scales the step. A loss whose gradient is dominated by a few very improbable states needs a larger
            one; a warning says so.
        tol: the tolerance of the perturbed runs. By default the run's own tolerance times the size of the perturbation,
            as far as rounding permits, so that the gradient has the relative accuracy of the marginals.

    Raises:
        ValueError: on use, for a run without a tolerance (use `Unroll`) and for `MaxProduct`.

    Warns:
        AdjointWarning: in the backward pass, if the perturbed runs do not reach the `tol` that was given, or miss the
            default one by more than 1e-3 of the gradient, or if rounding may spoil the differences.

    >>> import torch
    >>> from riskfield import MessagePassing, Perturb, Stop, TRW, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(tol=1e-10), adjoint=Perturb())
    >>> loss = -graph.node(solution.mu, 4)[1].log()
    >>> loss.backward()
    >>> graph.node(theta.grad, 4)
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    sides: int = 2
    multiplier: float = 1.0
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.sides not in _SCHEMES:
            raise ValueError(f"`sides` must be 1, 2 or 4. Got {self.sides!r}.")
        if isinstance(self.multiplier, str) or not 0 < self.multiplier < float("inf"):
            raise ValueError(f"`multiplier` must be above 0 and finite. Got {self.multiplier!r}.")
        if self.tol is not None and (isinstance(self.tol, str) or not 0 <= self.tol < float("inf")):
            raise ValueError(f"`tol` must be a non-negative number or None. Got {self.tol!r}.")

    def apply(self, request: Request) -> Solution:
        """Run without gradients; the backward pass runs again, perturbed."""
        require_convergence(request, "Perturb")
        require_symmetry(request, "Perturb")
        require_theta_only(request, "Perturb")
        graph, solution = request.graph, request.solve()
        jacobian = Jacobian(
            vjp=lambda grad: (graph.collapse(self._product(request, solution, grad)),),
            jvp=lambda v: self._product(request, solution, graph.expand(v[0])),
        )
        return attach(request, solution, jacobian)

    def _product(self, request: Request, solution: Solution, grad: Tensor) -> Tensor:
        """The symmetric dmu/dtheta of the graph without ties times `grad`, all in the layout of mu."""
        graph = request.graph
        if grad.numel() == 0:
            return grad
        # The factors that share a table are perturbed each by its own part of g: sums over a table would be wrong.
        theta = graph.expand(request.theta.detach())
        size, scale = 1 + _largest(theta), _largest(grad)
        if not torch.isfinite(scale).all():
            require_finite(grad, "Perturb")
        if not torch.isfinite(size).all():
            # Mu stays 0 where theta is -inf: such states take no part in the step size.
            possible = theta > -torch.inf
            grad = torch.where(possible, grad, 0)
            size, scale = 1 + _largest(torch.where(possible, theta, 0)), _largest(grad)
        divisor = torch.where(scale > 0, scale, 1)
        steps, weights, power = _SCHEMES[self.sides]
        eps = torch.finfo(theta.dtype).eps
        reach = self.multiplier * eps**power * size  # r |g|_inf

        stop = replace(request.stop, tol=self._tolerance(request.stop.tol, eps, size, reach))
        again = replace(request, graph=graph.untied, theta=theta, messages=solution.messages, stop=stop)
        along = torch.stack([step * reach / divisor for step in steps])[..., 0]
        share = torch.stack([weight * (scale / reach).double() for weight in weights])[..., 0]
        runs = again.solve_steps(grad, along, share)
        worst = float(runs.residual.max())
        missed = worst / float(reach.min())
        if stop.tol is not None and not worst <= stop.tol and (self.tol is not None or not missed <= _MISSED):
            warn(
                f"`Perturb`: the perturbed marginals still change by {worst:.2g} after {stop.sweeps} sweeps; the "
                f"tolerance is {stop.tol:.2g}, and the gradient may be off by {missed:.2g} times "
                f"its scale. Allow more sweeps, damp the messages, or use `Unroll`.",
                AdjointWarning,
            )
        # Marginals are rounded to about eps; mu g is the size of what their differences must resolve.
        signal = reach * _largest(solution.mu, grad) / divisor
        noise = float(torch.where(signal > 0, _ROUNDING * eps / signal, 0).max())
        if noise > _NOISE:
            warn(
                f"`Perturb`: rounding errors may be {noise:.2g} of the gradient, since the loss depends most on very "
                f"improbable states. Raise `multiplier`, or use `FixedPoint`, `KKT` or `Unroll`.",
                AdjointWarning,
            )
        return runs.mu

    def _tolerance(self, tol: float | None, eps: float, size: Tensor, reach: Tensor) -> float:
        if self.tol is not None or tol is None:  # None: exact inference, which has nothing to stop
            return self.tol or 0.0
        # An error of tol * reach in mu is one of tol relative to the difference. Below their rounding, marginals do not
        # settle any more.
        floor = _ROUNDING * eps * float(size.max())
        return min(tol, max(tol * float(reach.min()), floor))


def _largest(x: Tensor, factor: Tensor | None = None) -> Tensor:
    """The largest absolute value of x, or of x times a factor, along the last axis, which it keeps."""
    # Piece by piece: reading what has left the cache costs more than all else, and so does new memory.
    pieces: Iterable[Tensor] = x.split(_PIECE, -1)
    if factor is not None:
        pieces = (a * b for a, b in zip(pieces, factor.split(_PIECE, -1), strict=True))
    # Much faster than the infinity norm, or both at once.
    found = [torch.maximum(piece.amax(-1, keepdim=True), -piece.amin(-1, keepdim=True)) for piece in pieces]
    return torch.cat(found, -1).amax(-1, keepdim=True)
