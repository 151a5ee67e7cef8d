r"""Linear fixed points v = A v + b, where A is known only by its action: a plain iteration, and GMRES.

Rows of v and b are independent systems, solved side by side. The residual of a row is |b + A v - v| / (|v| + floor):
what is far smaller than `floor` counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]

_RESTART = 30  # vectors GMRES holds at most
_LOOK_BACK = 4  # steps over which the contraction is measured
_PATIENCE = 40  # plain steps left to go beyond which GMRES takes over


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """What was found, and how well it solves the system."""

    value: Tensor  # (row, unknown)
    residual: float  # of the worst row
    steps: int  # how often A was applied
    accelerated: bool


def solve_fixed_point(
    operator: Operator, b: Tensor, floor: Tensor, tol: float, max_steps: int, accelerate: bool | None
) -> LinearSolution:
    """Solve v = A v + b by plain iteration, by GMRES, or (None) by GMRES once plain iteration proves slow.

    `floor` has a number for each row.
    """
    v, steps = b, 0
    history: list[float] = []
    while steps < max_steps and accelerate is not True:
        new = operator(v) + b
        steps += 1
        history.append(_worst(new - v, new, floor))
        v = new
        if history[-1] <= tol:
            return LinearSolution(v, history[-1], steps, False)
        if accelerate is None and _is_slow(history, tol):
            break
        if not history[-1] < float("inf"):
            return LinearSolution(v, history[-1], steps, False)
    if accelerate is False or steps == max_steps:
        return LinearSolution(v, history[-1] if history else float("inf"), steps, False)
    # Where plain iteration diverges it leads away from the solution.
    if history and history[-1] > history[0]:
        v = b
    return _gmres(operator, b, v, floor, tol, steps, max_steps)


def _is_slow(history: list[float], tol: float) -> bool:
    if len(history) <= 2 * _LOOK_BACK:
        return False
    last, earlier = history[-1], history[-1 - _LOOK_BACK]
    # How much further the last few steps came, against how much further there is to go.
    return not last < earlier or last * (last / earlier) ** (_PATIENCE / _LOOK_BACK) > tol


def _gmres(
    operator: Operator, b: Tensor, v: Tensor, floor: Tensor, tol: float, steps: int, max_steps: int
) -> LinearSolution:
    """Restarted GMRES on (I - A) v = b, the rows side by side (Saad & Schultz 1986)."""
    while True:
        defect = operator(v) + b - v
        steps += 1
        residual = _worst(defect, v, floor)
        if residual <= tol or steps >= max_steps or not residual < float("inf"):
            return LinearSolution(v, residual, steps, True)
        size = min(_RESTART, max_steps - steps, v.shape[1])
        length = defect.norm(dim=1)
        basis = defect.new_zeros(size + 1, *v.shape)
        basis[0] = _divided(defect, length)
        hessenberg = defect.new_zeros(len(v), size + 1, size)
        target = defect.new_zeros(len(v), size + 1, 1)
        target[:, 0, 0] = length
        goal = tol * (v.norm(dim=1) + floor)
        for k in range(size):
            w = basis[k] - operator(basis[k])
            steps += 1
            # Twice is enough: the second pass takes away what rounding left of the first.
            for _ in range(2):
                overlap = torch.einsum("krn,rn->rk", basis[: k + 1], w)
                w = w - torch.einsum("krn,rk->rn", basis[: k + 1], overlap)
                hessenberg[:, : k + 1, k] += overlap
            hessenberg[:, k + 1, k] = w.norm(dim=1)
            basis[k + 1] = _divided(w, hessenberg[:, k + 1, k])
            system = hessenberg[:, : k + 2, : k + 1]
            # The pseudo-inverse stands the rank that is lost once a row is solved.
            weights = torch.linalg.pinv(system) @ target[:, : k + 2]
            missed = (target[:, : k + 2] - system @ weights).flatten(1).norm(dim=1)
            if (missed <= 0.5 * goal).all():
                break
        v = v + torch.einsum("krn,rk->rn", basis[: weights.shape[1]], weights[..., 0])


def _worst(defect: Tensor, v: Tensor, floor: Tensor) -> float:
    """The largest |defect| / (|v| + floor) over the rows; a row of zeros is solved."""
    ratio = _divided(defect.norm(dim=1)[:, None], v.norm(dim=1) + floor)
    return float(ratio.max()) if ratio.numel() else 0.0


def _divided(rows: Tensor, length: Tensor) -> Tensor:
    return torch.where(length[:, None] == 0, rows, rows / torch.where(length == 0, 1, length)[:, None])
