"""Message passing on a GPU: theta is packed into the storage of a plan; sweeps and marginals are computed there.

On a forest, one sweep of it is exact inference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from riskfield.kernels.convergence import Convergence, Gap
from riskfield.kernels.gpu.backward import Segment, backward, backward_counting, backward_fixed_point
from riskfield.kernels.gpu.buffers import Buffers, release
from riskfield.kernels.gpu.chains import OneSweepRun
from riskfield.kernels.gpu.engine import Engine, engine_of
from riskfield.kernels.gpu.gap import log_partition_block
from riskfield.kernels.gpu.packing import is_bounded, rows
from riskfield.kernels.gpu.storage import factor_tile, programs, sums
from riskfield.kernels.problem import EVERY_SWEEP, LAST_SWEEP, MessagePassingProblem, is_differentiated
from riskfield.kernels.protocols import Run

_FEW_SWEEPS = 8  # before a run with a tolerance looks whether it has converged
# A schedule is deep if it has more stages in a sweep than this, and they update fewer nodes than this on average.
_MANY_STAGES, _FEW_NODES = 100, 10_000


class GpuRun(ABC):
    """What runs of message passing and of mean field share. A run gives back its buffers when it is deleted."""

    def __init__(self, engine: Engine, theta: Tensor, damping: float, record: int | None):
        self._engine, self._theta, self._record = engine, theta.detach(), record
        self._buffers = engine.take()
        self._convergence = Convergence(len(theta), damping)
        self._sweeps = torch.zeros(len(theta), dtype=torch.int64)

    def __del__(self) -> None:
        if hasattr(self, "_buffers"):
            release(self._engine, self._buffers)

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep; items that reached `tol` are left as they are."""
        ran = torch.zeros(len(self._theta), dtype=torch.int64)
        if tol < 0 and sweeps > 0:
            self._convergence.residual = self._sweep(sweeps)
            ran += sweeps
            sweeps = 0
        while sweeps > 0 and not (done := self._convergence.done(tol)).all():
            count = min(_FEW_SWEEPS, sweeps)
            live = (~done).to(torch.int8) if done.any() else None
            change = self._sweep(count, live)
            possible = ~torch.isnan(change)
            self._convergence.judge(~done & possible, change, count, tol, self._gap)
            self._convergence.residual[~done & ~possible] = torch.nan
            ran[~done] += count
            sweeps -= count
        self._sweeps += ran
        return self._convergence.residual.clone(), ran

    @abstractmethod
    def _sweep(self, sweeps: int, live: Tensor | None = None) -> Tensor:
        """Sweep, and record. Returns the change that the last sweep made."""

    @abstractmethod
    def _gap(self) -> Gap:
        """How far the state is from a fixed point."""


class MessagePassingRun(GpuRun):
    """Sum-product (or max-product) sweeps over a batch of thetas. See `kernels.start` for what it can record."""

    def __init__(
        self, problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None, *, record: int | None = None
    ):
        numbers = problem.counting.factor, problem.counting.node_total
        # Whether to keep messages: gradients of counting numbers need those that belong to the tables of theta.
        self._keep = record == EVERY_SWEEP and any(map(is_differentiated, numbers))
        canonical = not self._keep and not problem.exact and is_bounded(problem, theta.detach())
        super().__init__(engine_of(problem, theta, canonical=canonical), theta, float(problem.damping), record)
        self._problem = problem
        self._segments: list[Segment] = []
        self._engine.start(self._buffers, problem, self._theta, messages)

    @property
    def deep(self) -> bool:
        """Whether launches take longer than the work in them, on a graph with loops.

        On a tree, few sweeps of a deep schedule do what takes many sweeps of a wide one.
        """
        graph, stages = self._problem.graph, len(self._engine.plan.stages)
        ends = sum(group.variables.size for group in graph.factor_groups)
        if stages <= _MANY_STAGES or ends < graph.num_variables + graph.num_factors:
            return False
        return 2 * graph.num_variables * len(self._theta) < _FEW_NODES * stages

    def _sweep(self, sweeps: int, live: Tensor | None = None) -> Tensor:
        """Sweep, and record. Returns the change that the last sweep made."""
        engine, buffers, every = self._engine, self._buffers, self._record
        if every is None or every == LAST_SWEEP:
            return residuals(engine.sweep(buffers, sweeps, False, live))
        if every == EVERY_SWEEP:
            change = engine.sweep(buffers, sweeps, True, live, keep=self._keep)
            self._segments = [Segment(0, buffers.recorded)]
            return residuals(change)
        while sweeps > 0:
            last = self._segments[-1] if self._segments else None
            if last is None or last.sweeps == every:
                last = Segment(0 if last is None else last.first + every, 0, buffers.state().copy())
                self._segments.append(last)
            count = min(sweeps, every - last.sweeps)
            change = engine.sweep(buffers, count, False, live)
            self._segments[-1] = replace(last, sweeps=last.sweeps + count)
            sweeps, live = sweeps - count, None
        return residuals(change)

    def _gap(self) -> Gap:
        return self._engine.gap(self._buffers)

    def messages(self) -> Tensor:
        """Normalised log-messages."""
        return self._engine.messages(self._buffers)

    def marginals(self) -> Tensor:
        """Mu; NaN for an impossible model."""
        return self._engine.marginals(self._buffers)

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta, of shape (batch, theta), through the recorded sweeps."""
        return backward(self._engine, self._buffers, self._sweeps, grad_mu, self._segments)

    def backward_counting(self, grad_mu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and d(grad_mu . mu) / dc_c of every factor and / dc^_i of every variable, summed over the batch."""
        engine, counting = self._engine, self._problem.counting
        return backward_counting(engine, self._buffers, self._sweeps, grad_mu, self._segments, self._theta, counting)

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as if the last sweep had run for ever. See `kernels.protocols.RecordingRun`."""
        return backward_fixed_point(self._engine, self._buffers, grad_mu, self.marginals(), steps, tol)


class ForestRun(OneSweepRun):
    """Exact inference on a forest, by one sweep of belief propagation from the leaves to the roots and back."""

    def __init__(
        self,
        problem: MessagePassingProblem,
        theta: Tensor,
        messages: Tensor | None,
        unswept: Callable[[], Run] | None,
        *,
        record: int | None = None,
    ):
        super().__init__(problem.graph, theta, messages, unswept)
        self._run = MessagePassingRun(problem, theta, None, record=None if record is None else EVERY_SWEEP)
        self._run.advance(1, -1.0)
        self._engine, self._buffers = self._run._engine, self._run._buffers

    def log_partition(self) -> Tensor:
        """log Z, of shape (batch,). Its terms are added in float64."""
        engine, buffers = self._engine, self._buffers
        buffers.replay(("log partition",), lambda: _log_partition_terms(engine, buffers))
        p, given = buffers.beliefs[0].exp(), buffers.node_theta - buffers.beliefs[0]
        nodes = [(engine.node_start[states], states, own.count) for states, own in engine.plan.nodes.items()]
        slots = [(engine.size_start[kind], 1, own.slots) for kind, own in engine.plan.kinds.items()]
        batch = engine.batch
        found = sums(torch.where(p > 0, p * given, p), nodes, batch) + sums(buffers.sizes, slots, batch)
        return found.masked_fill_(self._impossible.to(found.device), -torch.inf).to(engine.dtype)

    def statistics(self) -> Tensor:
        """d log Z / dtheta, of shape (batch, theta)."""
        self._marginals()
        return self._possible(rows(self._engine.plan.ties.collapse(self._buffers.mu)))

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta; `grad_mu` may hold the node part alone."""
        factors = self._graph.mu_size - grad_mu.shape[-1]
        return self._run.backward(torch.nn.functional.pad(grad_mu, (0, factors)))

    def _find_impossible(self) -> Tensor:
        return self._node_marginals().sum(1).isnan()

    def _node_marginals(self) -> Tensor:
        return self._engine.node_marginals(self._buffers)

    def _marginals(self) -> Tensor:
        return self._run.marginals()

    def _messages(self) -> Tensor:
        return self._run.messages()


def _log_partition_terms(engine: Engine, buffers: Buffers) -> None:
    """The shares of messages and factors in log Z, one for each slot and item."""
    for block, part in engine.plan.parts():
        own, members = engine.plan.kinds[part.kind], part.degree * block.count * engine.batch
        shape = factor_tile(part.kind, members, engine.wide)
        log_partition_block[programs(members, shape["BN"])](
            buffers.tables[part.kind], buffers.messages[0], buffers.beliefs[0], own.neighbours, own.cavities,
            own.tables, own.updated, engine.starts[part.kind], buffers.sizes, part.first, part.degree, own.slots,
            block.first, block.count, engine.batch, engine.node_start[block.states], engine.message_start[part.kind],
            engine.size_start[part.kind], SHARED=own.shared, **shape,
        )  # fmt: skip


def residuals(changes: Tensor) -> Tensor:
    """Changes on the CPU, NaN for impossible models: no probability changes by more than 1."""
    found = changes.to("cpu", torch.float64)
    found[found > 1.5] = torch.nan
    return found
