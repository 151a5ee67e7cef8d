"""`Curvature`: the inverse Hessian of an objective, approximated from the last steps (L-BFGS)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from riskfield.learning.optimiser import check_saved

_LEAST = 1e-10  # curvature along a step that is kept


class Curvature:
    """The last steps and changes of the gradient along them (Nocedal & Wright 2006, algorithm 7.4).

    Arguments:
        length: how many steps are kept.
    """

    def __init__(self, length: int):
        self.length = length
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._inverses: list[float] = []  # 1 / (step . change)
        self._scale = 1.0  # of the initial inverse Hessian

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a step, unless the objective has no positive curvature along it."""
        along = float(change.dot(step))
        if not along > _LEAST:
            return
        if len(self._steps) == self.length:
            del self._steps[0], self._changes[0], self._inverses[0]
        self._steps.append(step)
        self._changes.append(change)
        self._inverses.append(1.0 / along)
        self._scale = along / float(change.dot(change))

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian times the gradient."""
        direction, weights = gradient.neg(), [0.0] * len(self._steps)
        for k in range(len(self._steps) - 1, -1, -1):
            weights[k] = float(self._steps[k].dot(direction)) * self._inverses[k]
            direction.add_(self._changes[k], alpha=-weights[k])
        direction.mul_(self._scale)
        for k, weight in enumerate(weights):
            direction.add_(self._steps[k], alpha=weight - float(self._changes[k].dot(direction)) * self._inverses[k])
        return direction

    def state(self) -> dict[str, Any]:
        """What `load` restores."""
        return {
            "steps": list(self._steps),
            "changes": list(self._changes),
            "inverses": list(self._inverses),
            "scale": self._scale,
        }

    def load(self, state: dict[str, Any], like: Tensor) -> None:
        """Restore a `state` for parameters such as `like`."""
        check_saved(state, "curvature", like.numel())
        steps, changes = ([own.to(like).view_as(like) for own in state[name]] for name in ("steps", "changes"))
        inverses = [float(own) for own in state["inverses"]]
        if not len(steps) == len(changes) == len(inverses):
            raise ValueError("`curvature` must hold as many changes of the gradient as steps.")
        newest = slice(-self.length, None)  # a run may be resumed with a shorter memory
        self._steps, self._changes, self._inverses = steps[newest], changes[newest], inverses[newest]
        self._scale = float(state["scale"])
