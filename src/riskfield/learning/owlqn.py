r"""OWL-QN: L-BFGS for objectives with an L1 penalty, F(x) = f(x) + C |x|_1 (Andrew & Gao 2007).

F is smooth inside an orthant, where the signs of all parameters are fixed. An iteration chooses the orthant that F
decreases into, moves along an L-BFGS direction of f in it, and sets parameters that would leave it to 0. So many
parameters end at exactly 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from riskfield.learning.curvature import Curvature
from riskfield.learning.lbfgs import Point, converged, dump_point, load_point
from riskfield.learning.objective import Diverged, Objective, assign, flat
from riskfield.learning.optimiser import Step, reseed

if TYPE_CHECKING:
    from riskfield.learning.lbfgs import LBFGS

_SUFFICIENT = 1e-4  # the decrease of F relative to that of its linear model


class OrthantRun:
    """A run of OWL-QN. The gradient of the points it returns is the pseudo-gradient, which is 0 at the minimum."""

    def __init__(self, settings: LBFGS, objective: Objective, seed: int):
        self.settings, self.objective, self.seed = settings, objective, seed
        self.parameters, self.weight = objective.parameters, objective.lasso
        self.here: Point | None = None  # where the last step ended, with the gradient of f
        self.curvature = Curvature(settings.memory)
        self._fresh = True

    def step(self, iteration: int) -> Step:
        """Move in one orthant."""
        before = self.here or self._evaluate(flat(self.parameters).detach())
        pseudo = self._pseudo_gradient(before)
        restarted = False
        if float(pseudo.abs().max()) > self.settings.gradient_tol:
            after = self._search(before, pseudo)
            if after is None and not self._fresh:
                restarted = self._fresh = True
                self.curvature.clear()
                after = self._search(before, pseudo)
            if after is None:
                self.here = before
                assign(self.parameters, before.gamma)
                return Step(self._seen(before).at, restarted, stalled=True)
            self.curvature.add(after.gamma - before.gamma, after.at.gradient - before.at.gradient)
            self._fresh = False
            self.here = after
        else:
            self.here = before
        assign(self.parameters, self.here.gamma)
        seen = self._seen(self.here).at
        return Step(seen, restarted, converged=converged(self.settings, before.at, seen))

    def _search(self, before: Point, pseudo: Tensor) -> Point | None:
        """Halve the step along one direction until F decreases enough; None if it does not."""
        direction = self.curvature.direction(pseudo)
        direction = torch.where(direction * pseudo < 0, direction, 0.0)  # downhill in every coordinate
        orthant = torch.where(before.gamma != 0, before.gamma.sign(), -pseudo.sign())
        step = min(1.0, 1.0 / float(pseudo.abs().sum())) if self._fresh else 1.0
        failure: Diverged | None = None
        last: Tensor | None = None
        for _ in range(self.settings.line_search):
            gamma = before.gamma.add(direction, alpha=step)
            gamma = torch.where(gamma * orthant > 0, gamma, 0.0)
            step /= 2
            if torch.equal(gamma, before.gamma):
                break  # the step is lost in rounding, and so are all shorter ones
            if last is not None and torch.equal(gamma, last):
                continue  # all that moved has reached 0, and this point was not good enough
            last = gamma
            try:
                point = self._evaluate(gamma)
            except Diverged as error:
                failure = error
                continue
            decrease = float(pseudo.dot(gamma - before.gamma))
            if decrease < 0 and point.at.value <= before.at.value + _SUFFICIENT * decrease:
                return point
        if failure is not None and self._fresh:
            assign(self.parameters, before.gamma)
            raise failure
        return None

    def _pseudo_gradient(self, point: Point) -> Tensor:
        """The derivative of F where it exists; where a parameter is 0, its derivative downhill, or 0."""
        gradient, gamma = point.at.gradient, point.gamma
        right, left = gradient + self.weight, gradient - self.weight
        at_zero = torch.where(right < 0, right, torch.where(left > 0, left, 0.0))
        return torch.where(gamma > 0, right, torch.where(gamma < 0, left, at_zero))

    def _seen(self, point: Point) -> Point:
        return replace(point, at=replace(point.at, gradient=self._pseudo_gradient(point)))

    def _evaluate(self, gamma: Tensor) -> Point:
        assign(self.parameters, gamma)
        reseed(self.seed, gamma)  # makes an objective with random numbers deterministic
        return Point(gamma, self.objective())

    def state(self) -> dict[str, Any]:
        """What `load` restores."""
        return {"curvature": self.curvature.state(), "fresh": self._fresh, "here": dump_point(self.here)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""
        gamma = flat(self.parameters).detach()
        self.curvature.load(state["curvature"], gamma)
        self._fresh = bool(state["fresh"])
        self.here = load_point(state["here"], gamma)
