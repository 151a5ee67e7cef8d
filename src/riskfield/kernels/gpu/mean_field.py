"""Mean field on a GPU, in the storage of message passing: see `mean_field_updates` for the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from riskfield.entropy import Bethe
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Coloured
from riskfield.kernels.convergence import ROUNDING, Gap
from riskfield.kernels.gpu.backward import LOOK_EVERY, NEGLIGIBLE, begin_at_nodes
from riskfield.kernels.gpu.buffers import Buffers, on_device
from riskfield.kernels.gpu.engine import Engine
from riskfield.kernels.gpu.mean_field_updates import (
    copy_nodes,
    expectation_cotangent,
    marginal_cotangent,
    product_cotangent,
    product_marginals,
    update_marginals,
)
from riskfield.kernels.gpu.packing import gather, other_tables, pack_members, rows, turn, unpack_nodes
from riskfield.kernels.gpu.plan import Block, Plan, make_plan
from riskfield.kernels.gpu.run import GpuRun, residuals
from riskfield.kernels.gpu.sharing import Sharing
from riskfield.kernels.gpu.storage import NODES, factor_tile, norms, power_of_two, programs
from riskfield.kernels.initial_state import starting_marginals
from riskfield.kernels.logspace import expected
from riskfield.kernels.problem import LAST_SWEEP, MeanFieldProblem, MessagePassingProblem, mean_field_levels


def _plan(
    graph: FactorGraph, order: tuple[int, ...] | None, device: torch.device
) -> tuple[Plan, tuple[tuple[Block, ...], ...]]:
    """The storage, and the blocks of each level."""
    levels = mean_field_levels(graph, order)
    plan = make_plan(graph, levels, False, device)
    return plan, tuple(tuple(block for block in plan.blocks if block.level == k) for k in range(levels.count))


class MeanFieldRun(GpuRun):
    """Coordinate ascent on a product distribution. See `inference.mean_field` for the update.

    A tape holds the marginals of variables after every sweep, which is little, so that there are no checkpoints.
    """

    def __init__(self, problem: MeanFieldProblem, theta: Tensor, messages: Tensor | None, *, record: int | None = None):
        graph, device = problem.graph, theta.device
        # All counting numbers are 1: tables are stored as they are.
        plain = MessagePassingProblem(graph, Bethe().counting(graph), Coloured())
        order = None if problem.order is None else tuple(problem.order)
        plan, self._stages = graph.derived(("gpu mean field", order, device), lambda: _plan(graph, order, device))
        sharing = Sharing(factors=True, variables=True, tables=True)
        engine = graph.derived(
            ("gpu mean field engine", order, device, len(theta), theta.dtype),
            lambda: Engine(plain, plan, sharing, len(theta), theta.dtype, device),
        )
        super().__init__(engine, theta, 0.0, record)
        self._graph = graph
        engine.start(self._buffers, plain, self._theta, None)
        columns = starting_marginals(graph, self._theta, messages).t().contiguous()
        with on_device(device):
            for states, nodes in plan.nodes.items():
                pack_members(engine, columns, self._buffers.beliefs[0][engine.node_start[states] :], nodes)
        if self._recording:
            self._reserve(0)
            self._buffers.tape[: engine.node_size] = self._buffers.beliefs[0]

    @property
    def _recording(self) -> bool:
        return self._record is not None and self._record != LAST_SWEEP

    def _reserve(self, sweeps: int) -> None:
        """Make room on the tape for so many sweeps, and the state before them."""
        buffers, size = self._buffers, self._engine.node_size
        if len(buffers.tape) < (sweeps + 1) * size:
            longer = buffers.tape.new_empty((sweeps + 1 + sweeps // 2) * size)
            longer[: len(buffers.tape)] = buffers.tape
            buffers.tape, buffers.graphs, buffers.backward = longer, {}, None

    def _sweep(self, sweeps: int, live: Tensor | None = None) -> Tensor:
        buffers = self._buffers
        if live is not None:
            buffers.live.copy_(live)
            buffers.settled = True
        first = -1
        if self._recording:
            first = buffers.recorded
            self._reserve(first + sweeps)
            buffers.recorded += sweeps
        settled = buffers.settled
        buffers.replay(("sweep", sweeps, first, settled), lambda: self._run(sweeps, first, settled))
        return residuals(buffers.residual)

    def _run(self, sweeps: int, first: int, settled: bool) -> None:
        buffers, size = self._buffers, self._engine.node_size
        for k in range(sweeps):
            if k == sweeps - 1:
                buffers.residual.zero_()
            for stage in self._stages:
                for block in stage:
                    self._update(block, measure=k == sweeps - 1, settled=settled)
            if first >= 0:
                buffers.tape[(first + k + 1) * size : (first + k + 2) * size].copy_(buffers.beliefs[0])

    def _update(self, block: Block, measure: bool, settled: bool) -> None:
        engine, buffers = self._engine, self._buffers
        start, places = engine.node_start[block.states], block.count * engine.batch
        if not block.parts:  # the kernel reads nothing of its factors
            shape, unused = factor_tile((block.states,), places, engine.wide), engine.plan.nodes[block.states].order
            update_marginals[programs(places, shape["BN"])](
                buffers.node_theta, buffers.beliefs[0], buffers.node_theta[start:], buffers.accumulator[start:], unused,
                unused, unused, buffers.residual, buffers.live, 0, 0, 0, block.first, block.count, engine.batch, start,
                int(measure), SHARED=False, FIRST=True, LAST=True, SETTLED=settled, **shape,
            )  # fmt: skip
        for k, part in enumerate(block.parts):
            own, shape = engine.plan.kinds[part.kind], factor_tile(part.kind, places, engine.wide)
            update_marginals[programs(places, shape["BN"])](
                buffers.tables[part.kind], buffers.beliefs[0], buffers.node_theta[start:], buffers.accumulator[start:],
                own.neighbours, own.tables, engine.starts[part.kind], buffers.residual, buffers.live, part.first,
                part.degree, own.slots, block.first, block.count, engine.batch, start, int(measure),
                SHARED=own.shared, FIRST=k == 0, LAST=k == len(block.parts) - 1, SETTLED=settled, **shape,
            )  # fmt: skip

    def _gap(self) -> Gap:
        """The change of the last sweep, or 0 if it is below rounding."""
        change, mu, graph = self._buffers.residual.clone(), self.marginals(), self._graph
        size = torch.zeros_like(change)
        tables = graph.factor_views(graph.expand(self._theta))
        for weights, table in zip(graph.factor_views(mu), tables, strict=True):
            size = torch.maximum(size, expected(weights.flatten(2).log(), table.flatten(2).abs()).amax(1))
        rounding = ROUNDING * torch.finfo(size.dtype).eps * (1 + size)
        return Gap(torch.where(change > rounding, change, 0.0), torch.zeros_like(change))

    def messages(self) -> Tensor:
        """Log node marginals."""
        engine = self._engine
        out = torch.empty(self._graph.node_size, engine.batch, dtype=engine.dtype, device=engine.device)
        with on_device(engine.device):
            unpack_nodes(engine, self._buffers, self._buffers.beliefs[0], out)
        return rows(out)

    def marginals(self) -> Tensor:
        """Node marginals and their products; NaN for an impossible model."""
        self._buffers.replay(("marginals",), self._marginals)
        return rows(self._buffers.mu)

    def _marginals(self) -> None:
        engine, buffers = self._engine, self._buffers
        unpack_nodes(engine, buffers, buffers.beliefs[0], buffers.mu, exp=True)
        for kind, own in engine.plan.kinds.items():
            shape = factor_tile(kind, own.mu.count * engine.batch, engine.wide)
            if own.mu.count:
                product_marginals[programs(own.mu.count * engine.batch, shape["BN"])](
                    buffers.beliefs[0], buffers.mu, own.primary, own.nodes, own.mu.start, own.mu.order, own.mu.offsets,
                    own.neighbours, engine.starts[kind], own.slots, engine.node_start[kind[0]], own.mu.count,
                    engine.batch, **shape,
                )  # fmt: skip

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta, of shape (batch, theta), through the recorded sweeps."""
        engine, buffers, ran = self._engine, self._buffers, self._buffers.recorded
        going = self._backward(grad_mu)
        going.ended.copy_(self._sweeps)
        ends = set(self._sweeps.tolist())
        if ends == {ran}:
            buffers.replay(("backward", ran), lambda: going.run(ran, ends))
        else:
            with on_device(engine.device):
                going.run(ran, ends)
        return rows(engine.plan.ties.collapse(going.gradient))

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as if the last sweep had run for ever. See `kernels.protocols.RecordingRun`."""
        mu = self.marginals()
        floor = NEGLIGIBLE * torch.linalg.vector_norm(torch.where(mu > 0, mu * grad_mu, 0.0), dim=1)
        going = self._backward(grad_mu)
        going.ended.fill_(1)
        with on_device(self._engine.device):
            share, ran = going.run_at_fixed_point(steps, tol, floor.double())
        return rows(self._engine.plan.ties.collapse(going.gradient)), share, ran

    def _backward(self, grad_mu: Tensor) -> _Backward:
        if self._buffers.backward is None:
            self._buffers.backward = _Backward(self._engine, self._buffers, self._stages)
        going: _Backward = self._buffers.backward
        turn(grad_mu, going.grad_mu)
        return going


class _Backward:
    """The backward pass through sweeps of mean field, and its buffers."""

    def __init__(self, engine: Engine, buffers: Buffers, stages: tuple[tuple[Block, ...], ...]):
        self.engine, self.buffers, self.stages = engine, buffers, stages

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=engine.dtype, device=engine.device)

        self.grad_mu = empty(engine.graph.mu_size, engine.batch)
        self.ended = torch.empty(engine.batch, dtype=torch.int32, device=engine.device)
        self.state = empty(engine.node_size)  # log-marginals at the time of an update
        self.slots = empty(engine.message_size)  # cotangents of log-marginals, factor by factor
        self.belief, self.direct, self.theta = (empty(engine.node_size) for _ in range(3))
        self.tables = empty(engine.table_size)
        self.gradient = empty(engine.graph.mu_size, engine.batch)
        self.table_starts = other_tables(engine)

    def run(self, sweeps: int, ends: set[int]) -> None:
        """Through all sweeps; `ends` are the numbers of sweeps after which some item ended."""
        size, tape = self.engine.node_size, self.buffers.tape
        self._begin()
        for k in range(sweeps, 0, -1):
            if k in ends:
                self._marginals(k)
            self._sweep(k - 1, tape[k * size : (k + 1) * size], tape[(k - 1) * size : k * size])
        self._finish()

    def run_at_fixed_point(self, steps: int, tol: float, floor: Tensor) -> tuple[Tensor, Tensor]:
        """Through one sweep at the final state, up to `steps` times; the last share of each item, and how many."""
        engine, final = self.engine, self.buffers.beliefs[0]
        pieces = [(engine.node_start[s], s, nodes.count) for s, nodes in engine.plan.nodes.items()]
        self._begin()
        self.belief.zero_()
        self._marginals(1)
        ran, share = 0, torch.full((engine.batch,), torch.inf, dtype=torch.float64)
        while ran < steps and not bool((share <= tol).all()):
            for _ in range(min(LOOK_EVERY, steps - ran)):
                self._sweep(0, final, final)
                ran += 1
            size = torch.maximum(norms(self.theta, pieces, engine.batch), floor)
            share = torch.where(size > 0, norms(self.belief, pieces, engine.batch) / size, 0.0).cpu()
        self._finish()
        return share, torch.full((engine.batch,), ran)

    def _begin(self) -> None:
        for zeroed in (self.slots, self.direct, self.theta, self.tables):
            zeroed.zero_()

    def _finish(self) -> None:
        gather(self.engine, self.buffers, self.theta, self.tables, self.table_starts, self.gradient)

    def _marginals(self, sweep: int) -> None:
        """Cotangents of the final state, of items that ended after so many sweeps."""
        engine, beliefs = self.engine, self.buffers.beliefs[0]
        begin_at_nodes(engine, beliefs, self.grad_mu, self.direct, self.ended, sweep)
        for kind, own in engine.plan.kinds.items():
            shape = factor_tile(kind, own.mu.count * engine.batch, engine.wide)
            if own.mu.count:
                product_cotangent[programs(own.mu.count * engine.batch, shape["BN"])](
                    beliefs, self.grad_mu, self.slots, self.ended, own.primary, own.nodes, own.mu.start, own.mu.order,
                    own.mu.offsets, own.neighbours, own.cavities, engine.starts[kind], own.slots,
                    engine.node_start[kind[0]], engine.message_start[kind], sweep, own.mu.count, engine.batch, **shape,
                )  # fmt: skip

    def _sweep(self, number: int, after: Tensor, before: Tensor) -> None:
        """Back through sweep `number`, which led from log-marginals `before` to `after`."""
        self.state.copy_(after)
        for stage in reversed(self.stages):
            for block in stage:
                self._nodes(block, number)
            for block in stage:
                self._factors(block, number)
            for block in stage:
                start = self.engine.node_start[block.states]
                self._launch_nodes(
                    copy_nodes, block, before[start:], self.state[start:], block.first, block.count, self.engine.batch
                )

    def _nodes(self, block: Block, sweep: int) -> None:
        engine, start = self.engine, self.engine.node_start[block.states]
        slots = [(part.first, part.degree, engine.message_start[part.kind]) for part in block.parts] or [(0, 0, 0)]
        for k, (first, degree, own) in enumerate(slots):
            self._launch_nodes(
                marginal_cotangent, block, self.state, self.slots, self.belief[start:], self.direct[start:],
                self.theta[start:], self.ended, first, degree, block.first, block.count, engine.batch, start, own,
                sweep, FIRST=k == 0, LAST=k == len(slots) - 1,
            )  # fmt: skip

    def _factors(self, block: Block, sweep: int) -> None:
        engine, buffers = self.engine, self.buffers
        for part in block.parts:
            places = part.degree * block.count * engine.batch
            own, shape = engine.plan.kinds[part.kind], factor_tile(part.kind, places, engine.wide)
            expectation_cotangent[programs(places, shape["BN"])](
                buffers.tables[part.kind], self.state, self.belief[engine.node_start[block.states] :], self.slots,
                self.tables, self.ended, own.neighbours, own.cavities, own.tables, engine.starts[part.kind], part.first,
                part.degree, own.slots, block.first, block.count, engine.batch, engine.table_start[part.kind], sweep,
                SHARED=own.shared, **shape,
            )  # fmt: skip

    def _launch_nodes(self, kernel: Any, block: Block, *arguments: Any, **options: bool) -> None:
        kernel[programs(block.count * self.engine.batch, NODES)](
            *arguments, S=block.states, SX=power_of_two(block.states), BN=NODES, WIDE=self.engine.wide, **options
        )
