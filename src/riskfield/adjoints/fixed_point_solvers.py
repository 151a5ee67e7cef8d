r"""Solvers for `FixedPoint`: linear fixed points v = A v + b, where A is known only by its action.

The rows of v and b are independent systems, solved side by side. The residual of a row is
|b + A v - v| / (|v| + floor), so that a solution far smaller than `floor` counts as zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]

_LOOK_BACK = 4  # steps over which the contraction is measured
_PATIENCE = 40  # more plain steps than this still to go, and GMRES takes over
_STALLED = 0.5  # a restart of GMRES has to reduce the residual at least to this share of what it was


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """What was found, and how well it solves the system."""

    value: Tensor  # (row, unknown)
    residual: float  # of the worst row
    steps: int  # how often A was applied


class AbstractLinearSolver(ABC):
    """How the linear system of `FixedPoint` is solved."""

    @abstractmethod
    def solve(self, operator: Operator, b: Tensor, floor: Tensor, tol: float, max_steps: int) -> LinearSolution:
        """Solve v = A v + b to the residual `tol` with at most `max_steps` products; `floor` has one entry per row.

        It stops early where no further step can be expected to help. The solution says how far it came.
        """


@dataclass(frozen=True)
class GMRES(AbstractLinearSolver):
    """Restarted GMRES on (I - A) v = b (Saad & Schultz 1986). It also converges where plain iteration diverges.

    Arguments:
        restart: how many vectors it keeps before it starts again from the best solution so far.

    >>> from riskfield import FixedPoint
    >>> from riskfield.adjoints import GMRES
    >>> FixedPoint(solver=GMRES(restart=20))
    FixedPoint(tol=1e-10, max_steps=1000, solver=GMRES(restart=20))
    """

    restart: int = 30

    def __post_init__(self) -> None:
        if not isinstance(self.restart, int | np.integer) or self.restart < 1:
            raise ValueError(f"`restart` must be a positive integer. Got {self.restart!r}.")

    def solve(self, operator: Operator, b: Tensor, floor: Tensor, tol: float, max_steps: int) -> LinearSolution:
        """Start from v = b."""
        return self.improve(operator, b, b, floor, tol, max_steps)

    def improve(
        self, operator: Operator, b: Tensor, v: Tensor, floor: Tensor, tol: float, max_steps: int
    ) -> LinearSolution:
        """Start from any v. Restarts that hardly reduce the residual end it: the system may have no solution."""
        steps, previous = 0, float("inf")
        best = LinearSolution(v, float("inf"), 0)
        while True:
            defect = operator(v) + b - v
            steps += 1
            residual = _worst(defect, v, floor)
            if residual <= best.residual:
                best = LinearSolution(v, residual, steps)
            stalled = not residual < _STALLED * previous
            if residual <= tol or steps >= max_steps or stalled:
                return LinearSolution(best.value, best.residual, steps)
            previous = residual
            size = min(self.restart, max_steps - steps, v.shape[1])
            correction, products = _arnoldi(operator, defect, 0.5 * tol * (v.norm(dim=1) + floor), size)
            v, steps = v + correction, steps + products


@dataclass(frozen=True)
class Iterate(AbstractLinearSolver):
    """Plain iteration v <- A v + b: backward sweeps until v converges.

    Arguments:
        fallback: the solver to switch to if the iteration is slow or diverges, as it may if inference needed damping.
            With None it continues to the end.

    >>> from riskfield import FixedPoint
    >>> from riskfield.adjoints import Iterate
    >>> FixedPoint(solver=Iterate(fallback=None))
    FixedPoint(tol=1e-10, max_steps=1000, solver=Iterate(fallback=None))
    """

    fallback: GMRES | None = field(default_factory=GMRES)

    def __post_init__(self) -> None:
        if self.fallback is not None and not isinstance(self.fallback, GMRES):
            raise TypeError(f"`fallback` must be an object such as `GMRES()`, or None. Got {self.fallback!r}.")

    def solve(self, operator: Operator, b: Tensor, floor: Tensor, tol: float, max_steps: int) -> LinearSolution:
        """Iterate, and leave the rest to the fallback once the iteration turns out slow."""
        v, history = b, [float("inf")]
        while len(history) <= max_steps:
            new = operator(v) + b
            history.append(_worst(new - v, new, floor))
            v = new
            if history[-1] <= tol or not history[-1] < float("inf"):
                break
            if self.fallback is not None and _is_slow(history, tol):
                break
        residual, steps = history[-1], len(history) - 1
        if residual <= tol or self.fallback is None or steps >= max_steps:
            return LinearSolution(v, residual, steps)
        # Where plain iteration diverges it leads away from the solution.
        start = v if residual <= history[1] else b
        found = self.fallback.improve(operator, b, start, floor, tol, max_steps - steps)
        return LinearSolution(found.value, found.residual, steps + found.steps)


def _is_slow(history: list[float], tol: float) -> bool:
    if len(history) <= 1 + 2 * _LOOK_BACK:
        return False
    last, earlier = history[-1], history[-1 - _LOOK_BACK]
    # The contraction over the last few steps, extrapolated to as many more as we are willing to wait.
    return not last < earlier or last * (last / earlier) ** (_PATIENCE / _LOOK_BACK) > tol


def _arnoldi(operator: Operator, defect: Tensor, goal: Tensor, size: int) -> tuple[Tensor, int]:
    """Minimise |defect - (I - A) x| over a Krylov space of up to `size` vectors; x, and how many products it took."""
    length = defect.norm(dim=1)
    basis = defect.new_zeros(size + 1, *defect.shape)
    basis[0] = _divided(defect, length)
    hessenberg = defect.new_zeros(len(defect), size + 1, size)
    target = defect.new_zeros(len(defect), size + 1, 1)
    target[:, 0, 0] = length
    weights = target[:, :0]
    for k in range(size):
        w = basis[k] - operator(basis[k])
        # The second pass removes what rounding left of the first.
        for _ in range(2):
            overlap = torch.einsum("krn,rn->rk", basis[: k + 1], w)
            w = w - torch.einsum("krn,rk->rn", basis[: k + 1], overlap)
            hessenberg[:, : k + 1, k] += overlap
        hessenberg[:, k + 1, k] = w.norm(dim=1)
        basis[k + 1] = _divided(w, hessenberg[:, k + 1, k])
        system = hessenberg[:, : k + 2, : k + 1]
        if not torch.isfinite(system).all():
            return torch.einsum("krn,rk->rn", basis[: weights.shape[1]], weights[..., 0]), k + 1
        # The pseudo-inverse copes with the rank that is lost once a row is solved.
        weights = torch.linalg.pinv(system) @ target[:, : k + 2]
        missed = (target[:, : k + 2] - system @ weights).flatten(1).norm(dim=1)
        if (missed <= goal).all():
            break
    return torch.einsum("krn,rk->rn", basis[: weights.shape[1]], weights[..., 0]), weights.shape[1]


def _worst(defect: Tensor, v: Tensor, floor: Tensor) -> float:
    """The largest |defect| / (|v| + floor) over the rows; a row of zeros is solved."""
    ratio = _divided(defect.norm(dim=1)[:, None], v.norm(dim=1) + floor)
    return float(ratio.max()) if ratio.numel() else 0.0


def _divided(rows: Tensor, length: Tensor) -> Tensor:
    return torch.where(length[:, None] == 0, rows, rows / torch.where(length == 0, 1, length)[:, None])
