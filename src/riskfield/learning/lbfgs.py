r"""`LBFGS`: limited-memory BFGS on the whole data set, with a strong-Wolfe line search.

Its iterations are those of `torch.optim.LBFGS`. Inexact gradients can give a search direction along which the objective
does not decrease. The memory is then discarded, and the search restarts with the gradient (Domke 2013, section 8.4).

An objective with an L1 penalty, F(x) = f(x) + C |x|_1, is minimised by OWL-QN (Andrew & Gao 2007). F is smooth inside
an orthant, where the signs of all parameters are fixed. An iteration chooses the orthant that F decreases into, moves
along an L-BFGS direction of f in it, and sets parameters that would leave it to 0. So many parameters end at exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from riskfield.learning.curvature import Curvature
from riskfield.learning.line_search import Trial, strong_wolfe
from riskfield.learning.objective import Diverged, Evaluation, Objective, assign, flat
from riskfield.learning.optimiser import (
    AbstractOptimiser,
    OptimiserRun,
    Step,
    check_counts,
    check_positive,
    check_saved,
    reseed,
)

_SUFFICIENT = 1e-4  # for OWL-QN: the decrease of F relative to that of its linear model


@dataclass(frozen=True)
class LBFGS(AbstractOptimiser):
    """L-BFGS with a strong-Wolfe line search. The best choice if every iteration can use all examples.

    Arguments:
        iterations: the maximum number of iterations, by default 1000.
        memory: the number of past steps that determine the search direction, by default 20.
        gradient_tol: training has converged if no entry of the gradient is larger in absolute value; by default 1e-6.
        change_tol: training has converged if an iteration lowers the objective J by no more than this times
            max(|J|, 1); by default 1e-9.
        line_search: the maximum number of points to try along a direction, by default 25.

    >>> LBFGS(iterations=200)
    LBFGS(iterations=200, memory=20, gradient_tol=1e-06, change_tol=1e-09, line_search=25)
    """

    iterations: int = 1000
    memory: int = 20
    gradient_tol: float = 1e-6
    change_tol: float = 1e-9
    line_search: int = 25

    def __post_init__(self) -> None:
        check_counts(iterations=self.iterations, memory=self.memory, line_search=self.line_search)
        check_positive(gradient_tol=self.gradient_tol, change_tol=self.change_tol)

    @property
    def max_iterations(self) -> int:
        """The setting `iterations`."""
        return self.iterations

    def start(self, objective: Objective, seed: int) -> OptimiserRun:
        """Start with an empty memory. An objective with an L1 penalty is minimised by OWL-QN."""
        if not objective.loss.comparable:
            raise ValueError(
                f"`optimiser` must not be `LBFGS` for the loss {type(objective.loss).__name__}: its values cannot be "
                "compared, only its gradient is meaningful. Use `Torch(...)`."
            )
        if objective.lasso > 0:
            return _OrthantRun(self, objective, seed)
        return _Run(self, objective, seed)


@dataclass(frozen=True, eq=False)
class _Point:
    """Parameters at which the objective is known."""

    gamma: Tensor
    at: Evaluation


class _Run:
    def __init__(self, settings: LBFGS, objective: Objective, seed: int):
        self.settings, self.objective, self.seed = settings, objective, seed
        self.parameters = objective.parameters
        self.here: _Point | None = None  # where the last step ended
        self.tried: list[_Point] = []  # in the present step
        self.curvature = Curvature(settings.memory)
        self.last: tuple[Tensor, Tensor] | None = None  # the last step, and the gradient where it began

    def step(self, iteration: int) -> Step:
        self.tried = [] if self.here is None else [self.here]
        before = self._evaluate(flat(self.parameters).detach())
        restarted = False
        if before.at.gradient_norm > self.settings.gradient_tol:
            fresh = self.last is None
            moved = self._search(before, last_resort=fresh)
            if not moved and not fresh:
                restarted = True
                self._forget()
                moved = self._search(before, last_resort=True)
            restarted = restarted or self.last is None
            if not moved:
                self.here = before
                return Step(before.at, restarted, stalled=True)
        self.here = self._evaluate(flat(self.parameters).detach())
        return Step(self.here.at, restarted, converged=_converged(self.settings, before.at, self.here.at))

    def _search(self, before: _Point, last_resort: bool) -> bool:
        """Search along one direction. Return whether the parameters moved to a lower objective.

        If the objective diverges during the search, the search ends at the lowest point tried. If that is the starting
        point and this is the last resort, the error is raised again.
        """
        gradient = before.at.gradient
        if self.last is not None:
            moved_by, earlier = self.last
            self.curvature.add(moved_by, gradient - earlier)
        direction = self.curvature.direction(gradient)
        first = 1.0 if self.last is not None else min(1.0, 1.0 / float(gradient.abs().sum()))
        slope, smallest = float(gradient.dot(direction)), torch.finfo(gradient.dtype).eps

        def evaluate(step: float) -> Trial:
            at = self._evaluate(before.gamma.add(direction, alpha=step)).at
            return Trial(step, at.value, float(at.gradient.dot(direction)), at.gradient)

        try:
            end = Trial(0.0, before.at.value, slope, gradient)
            if slope <= -smallest:
                width = smallest / float(direction.abs().max())
                end = strong_wolfe(evaluate, end, first, self.settings.line_search, width)
        except Diverged:
            lowest = min(self.tried, key=lambda point: point.at.value)
            assign(self.parameters, lowest.gamma)
            self._forget()
            if lowest is before and last_resort:
                raise
            return lowest is not before
        self.last = direction * end.step, gradient
        assign(self.parameters, before.gamma.add(direction, alpha=end.step))
        return not torch.equal(flat(self.parameters), before.gamma)

    def _forget(self) -> None:
        self.curvature.clear()
        self.last = None

    def _evaluate(self, gamma: Tensor) -> _Point:
        """Evaluate the objective at `gamma`, if it is not known there."""
        for point in reversed(self.tried):
            if torch.equal(point.gamma, gamma):
                return point
        point = _evaluate(self.objective, gamma, self.seed)
        self.tried.append(point)
        return point

    def state(self) -> dict[str, Any]:
        return {
            "curvature": self.curvature.state(),
            "last": None if self.last is None else list(self.last),
            "here": _dump_point(self.here),
        }

    def load(self, state: dict[str, Any]) -> None:
        gamma = flat(self.parameters).detach()
        self.curvature.load(state["curvature"], gamma)
        check_saved(state["last"], "last", gamma.numel())
        if state["last"] is not None:
            moved_by, gradient = (own.to(gamma).view_as(gamma) for own in state["last"])
            self.last = moved_by, gradient
        self.here = _load_point(state["here"], gamma)


def _evaluate(objective: Objective, gamma: Tensor, seed: int) -> _Point:
    """Evaluate the objective at `gamma`, where the parameters stay."""
    assign(objective.parameters, gamma)
    reseed(seed, gamma)  # makes an objective with random numbers deterministic
    return _Point(gamma, objective())


def _converged(settings: LBFGS, before: Evaluation, after: Evaluation) -> str | None:
    """Why an iteration was the last one that is needed; None if it was not."""
    if after.gradient_norm <= settings.gradient_tol:
        return f"the largest entry of the gradient is {after.gradient_norm:.2g}"
    change = before.value - after.value
    if change <= settings.change_tol * max(abs(after.value), 1.0):
        return f"the last iteration lowered the objective by only {change:.2g}"
    return None


def _dump_point(point: _Point | None) -> list[Any] | None:
    """What `_load_point` restores, without the parameters."""
    return None if point is None else [point.at.value, point.at.risk, point.at.gradient]


def _load_point(saved: list[Any] | None, gamma: Tensor) -> _Point | None:
    """The point with parameters `gamma` that was saved."""
    if saved is None:
        return None
    value, risk, gradient = saved
    check_saved(gradient, "here", gamma.numel())
    return _Point(gamma, Evaluation(float(value), float(risk), gradient.to(gamma).view_as(gamma)))


class _OrthantRun:
    """A run of OWL-QN. The gradient of the points it returns is the pseudo-gradient, which is 0 at the minimum."""

    def __init__(self, settings: LBFGS, objective: Objective, seed: int):
        self.settings, self.objective, self.seed = settings, objective, seed
        self.parameters, self.weight = objective.parameters, objective.lasso
        self.here: _Point | None = None  # where the last step ended, with the gradient of f
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
        return Step(seen, restarted, converged=_converged(self.settings, before.at, seen))

    def _search(self, before: _Point, pseudo: Tensor) -> _Point | None:
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

    def _pseudo_gradient(self, point: _Point) -> Tensor:
        """The derivative of F where it exists; where a parameter is 0, its derivative downhill, or 0."""
        gradient, gamma = point.at.gradient, point.gamma
        right, left = gradient + self.weight, gradient - self.weight
        at_zero = torch.where(right < 0, right, torch.where(left > 0, left, 0.0))
        return torch.where(gamma > 0, right, torch.where(gamma < 0, left, at_zero))

    def _seen(self, point: _Point) -> _Point:
        return replace(point, at=replace(point.at, gradient=self._pseudo_gradient(point)))

    def _evaluate(self, gamma: Tensor) -> _Point:
        return _evaluate(self.objective, gamma, self.seed)

    def state(self) -> dict[str, Any]:
        """What `load` restores."""
        return {"curvature": self.curvature.state(), "fresh": self._fresh, "here": _dump_point(self.here)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""
        gamma = flat(self.parameters).detach()
        self.curvature.load(state["curvature"], gamma)
        self._fresh = bool(state["fresh"])
        self.here = _load_point(state["here"], gamma)
