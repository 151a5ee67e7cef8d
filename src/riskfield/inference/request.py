"""`Request`: one call of `infer`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from riskfield import kernels as kernel_choice
from riskfield.errors import ConvergenceWarning, ImpossibleEvidenceError, KernelError, TreewidthError, warn
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.solution import Deferred, Lazy, Solution
from riskfield.inference.stop import Stop, advance
from riskfield.kernels import ExactRun, Problem, RecordingRun, Run, SteppedRun

_QUICK = 1 << 25  # table entries that native sweeps go through in a moment
_FIRST = 1 << 20  # table entries that any kernels go through in a moment


@dataclass(eq=False)
class Request:
    """One call of `infer`, checked and with its evidence clamped: what an adjoint may run, and run again."""

    graph: FactorGraph
    theta: Tensor  # (*batch, theta)
    algorithm: AbstractAlgorithm
    stop: Stop
    messages: Tensor | None
    kernels: str | None
    progress: bool
    throw: bool = True

    def run(self, started: Run | None = None) -> Solution:
        """Run inference, or finish a run that was `started`.

        If theta requires a gradient it flows through the sweeps, on the torch kernels.
        """
        graph, theta, batch = self.graph, self.theta, self.theta.shape[:-1]
        run, items = started, batch.numel()
        if run is None:
            run = self.algorithm.start(graph, self.flat_theta(), self.flat_messages(), self.kernels)
        first = max(1, _FIRST // max(1, items * graph.mu_size))
        if self.stop.tol is None and kernel_choice.runs_at_once(theta):
            first = self.stop.sweeps
        sweeps, residual, settled = advance(run, self.stop, items, self.progress, first, throw=self.throw)
        # An exact run computes its results when they are asked for. Its residual tells impossible items.
        exact = run if isinstance(run, ExactRun) and self.stop.sweeps > 0 else None
        mu: Lazy
        messages: Lazy | None
        if exact is None:
            rows = run.marginals()
            impossible = _impossible(rows)
            mu = in_batch(rows, batch)
            state = run.messages()
            messages = None if state is None else _deferred(state.detach, batch)
        else:
            impossible = None if settled else _impossible(residual)
            mu = _deferred(exact.marginals, batch)
            messages = _deferred(exact.messages, batch) if exact.has_messages else None
        if impossible is not None:
            self._check_impossible(impossible)
            residual = torch.where(impossible.to(residual.device), float("nan"), residual)
        if self.stop.tol is not None and not settled:
            _warn_unless_converged(residual, self.stop, self.algorithm)
        return Solution(
            graph,
            theta,
            mu,
            sweeps,
            residual,
            messages,
            self._value(run),
            self.algorithm,
            self.stop.tol,
            None if exact is None else _deferred(exact.node_marginals, batch),
            None if exact is None else lambda: in_batch(exact.statistics(), batch),  # not kept: callers may change it
        )

    def _value(self, run: Run) -> Lazy | Callable[[FactorGraph, Tensor, Tensor], Tensor]:
        """The log-partition value of the run, or how to compute it."""
        value, batch = self.algorithm.value(run) if self.stop.sweeps > 0 else None, self.theta.shape[:-1]
        if value is None:
            return self.algorithm.log_partition
        return value.reshape(batch) if isinstance(value, Tensor) else Deferred(lambda: value().reshape(batch))

    def flat_theta(self) -> Tensor:
        """Theta with one batch axis."""
        return _rows(self.theta)

    def flat_messages(self) -> Tensor | None:
        """The messages to start from with one batch axis, checked."""
        return _flat_messages(self.messages, self.theta.shape[:-1])

    def solve(self, started: Run | None = None, **changes: Any) -> Solution:
        """Run inference, or finish a run, without gradients and with some fields (theta, stop, ...) replaced."""
        with torch.no_grad():
            theta: Tensor = changes.pop("theta", self.theta)
            return replace(self, theta=theta.detach(), **changes).run(started)

    def solve_steps(self, direction: Tensor, steps: Tensor, weights: Tensor) -> Steps:
        """Run theta + step direction for all steps, of shape (step, *batch), from one state, without gradients.

        Returns the sum over the steps of `weights`, of the shape of `steps`, times the marginals.
        """
        with torch.no_grad():
            batch, num_steps = self.theta.shape[:-1], len(steps)
            along = direction.reshape(batch.numel(), -1), steps.reshape(num_steps, -1)
            run: SteppedRun | None = self._start_kernels(along=along)
            if run is not None:
                # In few slices: one run after the other, each pushes what the last one worked on out of the cache.
                first = max(1, _QUICK // max(1, steps.numel() * self.graph.mu_size))
                _, residual, _ = advance(run, self.stop, steps.numel(), self.progress, first, throw=self.throw)
                mu = run.marginals(weights.reshape(num_steps, -1))
                impossible = _impossible(mu) if self.throw else None
                if impossible is not None:
                    self._check_impossible(impossible)
                return Steps(mu.reshape(*batch, mu.shape[-1]), residual)
            messages = None if self.messages is None else self.messages.expand(num_steps, *self.messages.shape)
            stepped = torch.addcmul(self.theta, steps.unsqueeze(-1), direction)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                solution = replace(self, theta=stepped, messages=messages).run()
            return Steps((weights.unsqueeze(-1).to(solution.mu) * solution.mu).sum(0), solution.residual)

    def start_recording(self, record: int, tangent: Tensor | None = None) -> RecordingRun | None:
        """Start a run with a tape (see `kernels.start`); None if no kernels can record this."""
        run: RecordingRun | None = self._start_kernels(record=record, tangent=tangent)
        return run

    def _check_impossible(self, nan: Tensor) -> None:
        """Raise if an item whose numbers are NaN is possible after all, or, with `throw`, if any is impossible."""
        name, batch = type(self.algorithm).__name__, self.theta.shape[:-1]
        for item in nan.nonzero().flatten().tolist() if self._problem is None else ():
            if not _contradicts(self.graph, self.flat_theta()[item].detach()):
                which = f" for batch item {item}" if batch else ""
                raise ValueError(
                    f"`{name}` returned NaN{which}, but the model has possible joint states. Check how the algorithm "
                    "treats entries of `theta` that are -inf, and whether its numbers overflow."
                )
        if self.throw:
            which = f" (batch item {int(nan.nonzero()[0])})" if batch else ""
            raise ImpossibleEvidenceError(
                f"Every joint state has probability zero{which}: the evidence or the -inf entries of `theta` "
                f"contradict.{self.algorithm.impossible_caveat}"
            )

    def sweeps_on_tape(self, max_bytes: int | None) -> float:
        """How many sweeps fit on a tape of `max_bytes` (see `kernels.sweeps_that_fit`)."""
        problem = self._problem
        return math.inf if problem is None else kernel_choice.sweeps_that_fit(problem, self.theta, max_bytes)

    @cached_property
    def _problem(self) -> Problem | None:
        """What the kernels solve; None for an algorithm with runs of its own."""
        return self.algorithm.problem(self.graph)

    def _start_kernels(self, **options: Any) -> Any:
        """Start a run of the algorithm's problem; None if it has none, or if the kernels lack one of the options."""
        problem = self._problem
        if problem is None:
            return None
        theta, messages = _rows(self.theta.detach()), self.flat_messages()
        try:
            return kernel_choice.start(problem, theta, messages, kernels=self.kernels, **options)
        except KernelError:
            return None


@dataclass(frozen=True, eq=False)
class Steps:
    """What runs of theta at several steps along a direction gave."""

    mu: Tensor  # weighted sum over the steps, (*batch, mu)
    residual: Tensor  # of all runs


def _flat_messages(messages: Tensor | None, batch: torch.Size) -> Tensor | None:
    if messages is None:
        return None
    if messages.ndim == 0 or messages.shape[:-1] != batch:
        raise ValueError(f"`messages` must have the batch shape {tuple(batch)} of theta. Got {tuple(messages.shape)}.")
    if not messages.sum() < float("inf"):  # one pass; -inf may be among them
        raise ValueError("`messages` must not hold NaN or +inf.")
    return messages.reshape(batch.numel(), messages.shape[-1])


def _impossible(rows: Tensor) -> Tensor | None:
    """Which items, of shape (batch,), have no possible joint state: their numbers are NaN. None if all have one."""
    if not math.isnan(rows.sum().item()):
        return None
    return rows.detach().reshape(len(rows), -1).sum(-1).isnan()


def _rows(vectors: Tensor) -> Tensor:
    """Vectors with one batch axis."""
    if vectors.ndim == 1:
        return vectors.unsqueeze(0)
    return vectors.reshape(vectors.shape[:-1].numel(), vectors.shape[-1])


def in_batch(rows: Tensor, batch: torch.Size) -> Tensor:
    """The rows of a flat batch in its own shape."""
    if not batch:
        return rows.squeeze(0)
    return rows.reshape(*batch, rows.shape[-1])


def _deferred(compute: Callable[[], Tensor], batch: torch.Size) -> Deferred:
    """A result of a run in the shape of the batch."""
    return Deferred(lambda: in_batch(compute(), batch))


def _contradicts(graph: FactorGraph, theta: Tensor) -> bool:
    """Whether the model of one theta is impossible: exactly where that fits into memory, else by belief propagation."""
    from riskfield.inference.exact import Exact
    from riskfield.inference.message_passing import MessagePassing

    if not torch.isneginf(theta).any():
        return False
    try:
        run = Exact().start(graph, theta.unsqueeze(0), None, None)
    except TreewidthError:
        run = MessagePassing().start(graph, theta.unsqueeze(0), None, None)
    return bool(run.advance(20, -1.0)[0].isnan().any() or run.marginals().isnan().any())


def _warn_unless_converged(residual: Tensor, stop: Stop, algorithm: AbstractAlgorithm) -> None:
    """Warn if a residual is above the tolerance. That of an impossible item is NaN and does not count."""
    assert stop.tol is not None
    unsettled = [change for change in residual.tolist() if change > stop.tol]
    if not unsettled:
        return
    which = "" if len(residual) == 1 else f" for {len(unsettled)} of {len(residual)} batch items"
    warn(
        f"Marginals still change by {max(unsettled):.2g} after {stop.sweeps} sweeps{which}; the tolerance is "
        f"{stop.tol:g}. {algorithm.convergence_advice}",
        ConvergenceWarning,
    )
