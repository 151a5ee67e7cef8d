r"""A primal-dual interior-point method for separable convex functions on the local polytope.

Minimises F(b) = sum_k F_k(b_k) subject to B b = d, b >= 0, following the central path

    F'(b) - B^T lambda - z = 0,        B b = d,        b z = nu        as nu falls to 0

by Newton steps with a predictor and a corrector (Mehrotra 1992), all batch items at once. The multipliers lambda need
not be kept: a step finds them anew. Where F' falls to -infinity at 0 the bound cannot be active; close to the solution
its multiplier z is let go there, and a step down is taken in log b, in which b log b is linear. So beliefs come out
right in the relative sense, however small.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.convex.newton import Newton
from riskfield.inference.convex.polytope import polytope

# The mean of b z below which multipliers of bounds that cannot be active are let go.
_CLOSE = 1e-10
# A step stops short of the boundary by this share of the way to it.
_MARGIN = 0.01
# A warm start whose first step moves a belief by more is given up for a cold one, as is one whose steps grow while
# they are larger than the second number; b and z of a bound start above the third.
_FAR, _NEAR, _INWARD = 0.3, 1e-3, 1e-3
# Not before beliefs above the second number are right to this share of themselves has a run converged.
_LOG_CHANGE, _SMALL = 0.1, 1e-8
_TINY = 1e-100  # a warm start begins with beliefs no smaller, which can still be followed upwards
_ZERO = 1e-150  # beliefs that fall below it count as 0: the square of an inverse is still finite there


class Energy(Protocol):
    """A separable convex function F of the beliefs of a batch."""

    possible: Tensor  # (batch, mu)  states that may have a belief above 0
    steep: Tensor  # (batch, mu)  where F' falls to -infinity at 0

    def derivatives(self, b: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """F' and F'' at b > 0 of shape (len(items), mu)."""
        ...


class InteriorPointRun:
    """Newton steps on a batch. State: log b and log z in the layout of mu, -inf for a z that was let go."""

    def __init__(self, graph: FactorGraph, energy: Energy, state: Tensor | None):
        self.energy, self.polytope = energy, polytope(graph)
        self.possible = self.polytope.consistent(energy.possible)
        self.b = self.polytope.uniform(self.possible)
        items = len(self.b)
        # A region without possible states is a contradiction: NaN, of which `infer` makes an error.
        self.failed = torch.isnan(self.b).any(1)
        self.b = torch.where(self.possible, self.b, 0.0)
        self.z = torch.zeros_like(self.b)
        self.residual = torch.where(self.failed, float("nan"), float("inf")).double()
        self._restart(torch.arange(items))
        # How far the next step of a warm start may move a belief.
        self.allowed = torch.full((items,), float("inf"), dtype=torch.float64)
        self.stuck = torch.zeros(items, dtype=torch.bool)  # no step could be computed; what was reached stays
        if state is not None:
            self._continue(state.to("cpu", torch.float64))

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """A sweep is a Newton step; the residual, the largest change of a belief it asks for before damping.

        While multipliers remain, the residual is no less than what they say is left.
        """
        ran = torch.zeros(len(self.b), dtype=torch.int64)
        for _ in range(sweeps):
            items = torch.nonzero(~self.failed & ~self.stuck & ~(self.residual <= tol)).ravel()
            if not len(items):
                break
            self._step(items)
            ran[items] += 1
        return self.residual.clone(), ran

    def marginals(self) -> Tensor:
        """The beliefs; 0 where the bound b >= 0 is active."""
        b = torch.where((self.z > self.b) | (self.b <= _ZERO), 0.0, self.b)
        return torch.where(self.failed[:, None], float("nan"), b)

    def messages(self) -> Tensor:
        """log b and log z."""
        return torch.cat([self.b, self.z], dim=1).log()

    def _restart(self, items: Tensor) -> None:
        """Cold: uniform beliefs, multipliers of the size of the slopes."""
        if not self.b.shape[1]:
            return
        possible = self.possible[items]
        b = torch.where(possible, self.polytope.uniform(possible), 0.0)
        slope, curvature = self.energy.derivatives(torch.where(possible, b, 1.0), items)
        size = torch.where(possible, slope.abs() + curvature * b, 0.0).amax(1, keepdim=True)
        self.b[items] = b
        self.z[items] = torch.where(possible, size, 0.0)

    def _continue(self, state: Tensor) -> None:
        """Go on from the state of an earlier run; one of zeros, and one of other possible states, is a cold start."""
        b, z = state.exp().chunk(2, dim=1)
        bounded = (z > 0) | self.energy.steep | ~self.possible  # weights may have changed, and what is steep with them
        warm = (state != 0).any(1) & ((b > 0) == self.possible).all(1) & bounded.all(1) & ~self.failed
        b = torch.where(self.possible, b.clamp(min=_TINY), 0.0)
        self.b[warm], self.z[warm] = b[warm], z[warm]
        # A run that was on the way goes on as it was. One at its end may be in a corner that is now the wrong one.
        ended = warm & _is_close(b, z, self.possible)
        self.allowed[ended] = _FAR
        corner = ended[:, None] & (z > 0)
        self.b = torch.where(corner, self.b.clamp(min=_INWARD), self.b)
        self.z = torch.where(corner, self.z.clamp(min=_INWARD), self.z)

    def _step(self, items: Tensor) -> None:
        if not self.b.shape[1]:
            self.residual[items] = 0.0
            return
        b, z, possible = self.b[items], self.z[items], self.possible[items]
        inside = z > 0
        slope, curvature = self.energy.derivatives(torch.where(possible, b, 1.0), items)
        barrier = torch.where(inside, z / b, 0.0)
        newton = Newton(self.polytope, b, torch.where(possible, curvature + barrier, 1.0), possible)
        step, step_z = newton.step(slope), torch.zeros_like(z)
        if inside.any():
            target = _centred(b, z, step, barrier, inside)
            step = newton.step(slope - target)
            step_z = torch.where(inside, target - z - barrier * step, 0.0)
        safe = torch.where(possible, b, 1.0)
        logarithmic = torch.where(possible & ~inside, (b * torch.expm1(step / safe)).clamp(max=1), step)
        change = torch.where(step < 0, logarithmic, step).abs().amax(1)
        # A small step up from a very small belief may be the first of many: a warm start has to know.
        allowed = self.allowed[items]
        warm = allowed < float("inf")
        change = torch.where(warm, torch.maximum(change, logarithmic.amax(1)), change)
        far = warm & ~(change <= allowed)
        lost = ~far & ~torch.isfinite(step + step_z).all(1)
        self.allowed[items] = torch.where(warm & ~far, change.clamp(min=_NEAR), float("inf"))
        self.stuck[items[lost]] = True
        self.residual[items[lost]] = float("inf")
        if far.any():
            self._restart(items[far])
            self._step(items[far])
        keep = ~far & ~lost
        items = items[keep]
        if not len(items):
            return
        b, z, step, step_z, inside, possible, safe, change = (
            x[keep] for x in (b, z, step, step_z, inside, possible, safe, change)
        )
        length = ((1 - _MARGIN) * _reach(b, z, step, step_z, inside)).clamp(max=1)
        move = length * step
        moved = torch.where(possible & ~inside & (move < 0), b * (move / safe).exp(), b + move)
        self.b[items] = torch.where(possible, moved.clamp(min=_ZERO), 0.0)
        self.z[items] = torch.where(inside, (z + length * step_z).clamp(min=_ZERO), 0.0)
        self._settle(items, change, (step / safe).abs(), inside)

    def _settle(self, items: Tensor, change: Tensor, log_change: Tensor, inside: Tensor) -> None:
        """Let go of multipliers close to the solution, and say what is left to do."""
        b, z, steep = self.b[items], self.z[items], self.energy.steep[items]
        close = _is_close(b, z, self.possible[items])
        self.z[items] = torch.where(close[:, None] & steep, 0.0, z)
        unsure = inside & steep | (log_change > _LOG_CHANGE) & (b > _SMALL) & ~inside
        # Of b and z one is 0 at the solution: the smaller of them is an error of one or the other.
        left = torch.maximum(change, torch.minimum(b, z).amax(1))
        self.residual[items] = torch.where(unsure.any(1), left.clamp(min=_LOG_CHANGE), left)


def _is_close(b: Tensor, z: Tensor, possible: Tensor) -> Tensor:
    """Whether the duality gap says that the solution is near, of shape (batch,)."""
    return (b * z).sum(1) <= _CLOSE * possible.sum(1)


def _centred(b: Tensor, z: Tensor, ahead: Tensor, barrier: Tensor, inside: Tensor) -> Tensor:
    """What b z is to be, divided by b. How far `ahead`, the step straight for 0, gets says how much to centre."""
    ahead_z = torch.where(inside, -z - barrier * ahead, 0.0)
    count = inside.sum(1, keepdim=True).clamp(min=1)
    nu = (b * z).sum(1, keepdim=True) / count
    reach = _reach(b, z, ahead, ahead_z, inside).clamp(max=1)
    aimed = ((b + reach * ahead) * (z + reach * ahead_z) * inside).sum(1, keepdim=True) / count
    centre = (aimed / torch.where(nu > 0, nu, 1.0)).clamp(0, 1) ** 3 * nu
    return torch.where(inside, (centre - ahead * ahead_z) / torch.where(inside, b, 1.0), 0.0)


def _reach(b: Tensor, z: Tensor, step: Tensor, step_z: Tensor, inside: Tensor) -> Tensor:
    """The longest step that leaves b and z non-negative where both are kept, of shape (batch, 1)."""
    reach = b.new_full((len(b), 1), float("inf"))
    for x, dx in ((b, step), (z, step_z)):
        share = torch.where(inside & (dx < 0), x / -dx, float("inf"))
        reach = torch.minimum(reach, share.amin(1, keepdim=True))
    return reach
