"""`LBFGS`: limited-memory BFGS on the whole data set, with a strong-Wolfe line search.

Its iterations are those of `torch.optim.LBFGS`. With an L1 penalty it is OWL-QN. Inexact gradients can give a search
direction along which the objective does not decrease. The memory is then discarded, and the search restarts with the
gradient (Domke 2013, section 8.4).
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class LBFGS(AbstractOptimiser):
    """L-BFGS with a strong-Wolfe line search. The best choice if every iteration can use all examples.

    Arguments:
        iterations: the maximum number of iterations.
        memory: the number of past steps that determine the search direction.
        gradient_tol: converged if no entry of the gradient is larger.
        change_tol: converged if an iteration lowers the objective J by no more than this times max(|J|, 1).
        line_search: the maximum number of points to try along a direction.

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
                f"`optimiser` must not compare values of {type(objective.loss).__name__}: only its gradient is "
                "meaningful. Use `Torch(...)`."
            )
        if objective.lasso > 0:
            from riskfield.learning.owlqn import OrthantRun

            return OrthantRun(self, objective, seed)
        return _Run(self, objective, seed)


@dataclass(frozen=True, eq=False)
class Point:
    """Parameters at which the objective is known."""

    gamma: Tensor
    at: Evaluation


class _Run:
    def __init__(self, settings: LBFGS, objective: Objective, seed: int):
        self.settings, self.objective, self.seed = settings, objective, seed
        self.parameters = objective.parameters
        self.here: Point | None = None  # where the last step ended
        self.tried: list[Point] = []  # in the present step
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
        return Step(self.here.at, restarted, converged=converged(self.settings, before.at, self.here.at))

    def _search(self, before: Point, last_resort: bool) -> bool:
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

    def _evaluate(self, gamma: Tensor) -> Point:
        """Evaluate the objective at `gamma`, if it is not known there."""
        for point in reversed(self.tried):
            if torch.equal(point.gamma, gamma):
                return point
        assign(self.parameters, gamma)
        reseed(self.seed, gamma)  # makes an objective with random numbers deterministic
        point = Point(gamma, self.objective())
        self.tried.append(point)
        return point

    def state(self) -> dict[str, Any]:
        return {
            "curvature": self.curvature.state(),
            "last": None if self.last is None else list(self.last),
            "here": dump_point(self.here),
        }

    def load(self, state: dict[str, Any]) -> None:
        gamma = flat(self.parameters).detach()
        self.curvature.load(state["curvature"], gamma)
        check_saved(state["last"], "last", gamma.numel())
        if state["last"] is not None:
            moved_by, gradient = (own.to(gamma).view_as(gamma) for own in state["last"])
            self.last = moved_by, gradient
        self.here = load_point(state["here"], gamma)


def converged(settings: LBFGS, before: Evaluation, after: Evaluation) -> str | None:
    """Why an iteration was the last one that is needed; None if it was not."""
    if after.gradient_norm <= settings.gradient_tol:
        return f"the largest entry of the gradient is {after.gradient_norm:.2g}"
    change = before.value - after.value
    if change <= settings.change_tol * max(abs(after.value), 1.0):
        return f"the last iteration lowered the objective by only {change:.2g}"
    return None


def dump_point(point: Point | None) -> list[Any] | None:
    """What `load_point` restores, without the parameters."""
    return None if point is None else [point.at.value, point.at.risk, point.at.gradient]


def load_point(saved: list[Any] | None, gamma: Tensor) -> Point | None:
    """The point with parameters `gamma` that was saved."""
    if saved is None:
        return None
    value, risk, gradient = saved
    check_saved(gradient, "here", gamma.numel())
    return Point(gamma, Evaluation(float(value), float(risk), gradient.to(gamma).view_as(gamma)))
