"""`LBFGS`: limited-memory BFGS on the whole data set, by `torch.optim.LBFGS` with its strong-Wolfe line search.

Inexact gradients can give a search direction along which the objective does not decrease. The memory is then discarded,
and the search restarts with the gradient (Domke 2013, section 8.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from riskfield.learning.objective import Diverged, Evaluation, Objective, assign, flat, unflatten
from riskfield.learning.optimiser import AbstractOptimiser, Step, check_counts, check_positive, check_saved


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

    def start(self, objective: Objective, seed: int) -> _Run:
        """Start with an empty memory."""
        if not objective.loss.comparable:
            raise ValueError(
                f"`optimiser` must not compare values of {type(objective.loss).__name__}: only its gradient is "
                "meaningful. Use `Torch(...)`."
            )
        return _Run(self, objective, seed)


# The state that torch keeps between steps.
_KEPT = {"func_evals", "n_iter", "d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss"}


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
        # One call of its `step` is one iteration. This class decides when to stop.
        self.torch = torch.optim.LBFGS(
            self.parameters,
            max_iter=1,
            max_eval=1 + settings.line_search,
            history_size=settings.memory,
            tolerance_grad=0,
            tolerance_change=torch.finfo(self.parameters[0].dtype).eps,
            line_search_fn="strong_wolfe",
        )

    def step(self, iteration: int) -> Step:
        self.tried = [] if self.here is None else [self.here]
        before = self._evaluate()
        restarted = False
        if before.at.gradient_norm > self.settings.gradient_tol:
            fresh = not self.torch.state
            moved = self._search(before, last_resort=fresh)
            if not moved and not fresh:
                restarted = True
                self.torch.state.clear()
                moved = self._search(before, last_resort=True)
            restarted = restarted or not self.torch.state
            if not moved:
                self.here = before
                return Step(before.at, restarted, stalled=True)
        self.here = self._evaluate()
        return Step(self.here.at, restarted, converged=self._converged(before.at, self.here.at))

    def _search(self, before: _Point, last_resort: bool) -> bool:
        """Run one iteration of torch's optimiser. Return whether the parameters moved to a lower objective.

        If the objective diverges during the search, the search ends at the lowest point tried. If that is the starting
        point and this is the last resort, the error is raised again.
        """
        try:
            self.torch.step(self._closure)
        except Diverged:
            lowest = min(self.tried, key=lambda point: point.at.value)
            assign(self.parameters, lowest.gamma)
            self.torch.state.clear()
            if lowest is before and last_resort:
                raise
            return lowest is not before
        return not torch.equal(flat(self.parameters), before.gamma)

    def _closure(self) -> float:
        at = self._evaluate().at
        for parameter, gradient in zip(self.parameters, unflatten(at.gradient, self.parameters), strict=True):
            parameter.grad = gradient
        return at.value

    def _evaluate(self) -> _Point:
        """Evaluate the objective here. Torch evaluates the end of its line search again, which is known already."""
        gamma = flat(self.parameters).detach()
        for point in reversed(self.tried):
            if torch.equal(point.gamma, gamma):
                return point
        torch.manual_seed(self.seed)  # makes an objective with random numbers deterministic
        point = _Point(gamma, self.objective())
        self.tried.append(point)
        return point

    def _converged(self, before: Evaluation, after: Evaluation) -> str | None:
        settings = self.settings
        if after.gradient_norm <= settings.gradient_tol:
            return f"the largest entry of the gradient is {after.gradient_norm:.2g}"
        change = before.value - after.value
        if change <= settings.change_tol * max(abs(after.value), 1.0):
            return f"the last iteration lowered the objective by only {change:.2g}"
        return None

    def state(self) -> dict[str, Any]:
        at = None if self.here is None else self.here.at
        return {
            "torch": self.torch.state_dict()["state"],
            "here": None if at is None else [at.value, at.risk, at.gradient],
        }

    def load(self, state: dict[str, Any]) -> None:
        gamma, kept = flat(self.parameters).detach(), state["torch"]
        check_saved(kept, "torch", gamma.numel())
        if kept and (set(kept) != {0} or not kept[0].keys() >= _KEPT):
            raise ValueError(f"`torch` must hold {', '.join(sorted(_KEPT))} of parameter 0.")
        self.torch.load_state_dict({**self.torch.state_dict(), "state": kept})
        if state["here"] is not None:
            value, risk, gradient = state["here"]
            check_saved(gradient, "here", gamma.numel())
            self.here = _Point(gamma, Evaluation(float(value), float(risk), gradient.to(gamma).view_as(gamma)))
