"""The backward pass: from cotangents of marginals through recorded sweeps to the gradient of theta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from riskfield.entropy import Counting
from riskfield.graph._scopes import index_tensor
from riskfield.kernels.gpu.buffers import Buffers, State, on_device
from riskfield.kernels.gpu.canonical import odds_table_cotangent
from riskfield.kernels.gpu.cotangents import (
    belief_cotangent,
    counting_cotangent,
    message_cotangent,
    table_cotangent,
)
from riskfield.kernels.gpu.ends import factor_marginal_cotangent, node_marginal_cotangent
from riskfield.kernels.gpu.engine import Engine
from riskfield.kernels.gpu.incidences import Kind
from riskfield.kernels.gpu.packing import gather, other_tables, rows, turn
from riskfield.kernels.gpu.plan import Block, Part
from riskfield.kernels.gpu.storage import NODES, norms, power_of_two, programs
from riskfield.kernels.gpu.two_colours import go_back, two_coloured

LOOK_EVERY = 4  # backward sweeps at a fixed point between two looks at their size
# Relative to mu g, cotangents of messages that need not be known to the tolerance, as in `adjoints.fixed_point`.
NEGLIGIBLE = 1e-8


@dataclass(frozen=True, eq=False)
class Segment:
    """Sweeps `first` to `first + sweeps` of a run. They are on the tape, or are run again from a checkpoint."""

    first: int
    sweeps: int
    checkpoint: State | None = None


def backward(engine: Engine, buffers: Buffers, sweeps: Tensor, grad_mu: Tensor, segments: list[Segment]) -> Tensor:
    """d(grad_mu . mu) / dtheta through the first `sweeps` sweeps of each item, of shape (batch, theta).

    The state in `buffers` is the one these sweeps ended in. The segments are all sweeps of the run.
    """
    ran = segments[-1].first + segments[-1].sweeps if segments else 0
    going = _passes(engine, buffers, max((segment.sweeps for segment in segments), default=0))
    turn(grad_mu, going.grad_mu)
    going.ended.copy_(sweeps)
    if len(segments) == 1 and segments[0].checkpoint is None and bool((sweeps == ran).all()):
        key = "backward", ran, buffers.current
        buffers.replay(key, lambda: going.run(segments, {ran}, buffers.state(), together=True))
    elif any(segment.checkpoint is not None for segment in segments):
        with on_device(engine.device), _put_back(buffers) as final:
            going.run(segments, set(sweeps.tolist()), final, together=False)
    else:
        with on_device(engine.device):
            going.run(segments, set(sweeps.tolist()), buffers.state(), together=False)
    return rows(engine.plan.ties.collapse(going.gradient))


def backward_counting(
    engine: Engine,
    buffers: Buffers,
    sweeps: Tensor,
    grad_mu: Tensor,
    segments: list[Segment],
    theta: Tensor,
    counting: Counting,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and d(grad_mu . mu) / dc_c of every factor and / dc^_i of every variable.

    These are summed over the batch, in float64 on the CPU. The tape has the messages, too. An update computes
    log b_i = (theta_i + sum_c c_c log m_ci) / c^_i, with tables divided by c_c. The gradients of theta_i and of the c_c
    in this sum, which are sums over all updates, give that of c^_i: it is -1 / c^_i times their products with both.
    """
    going = _passes(engine, buffers, max((segment.sweeps for segment in segments), default=0))
    turn(grad_mu, going.grad_mu)
    going.ended.copy_(sweeps)
    going.counting = torch.zeros(engine.size_size, dtype=engine.dtype, device=engine.device)
    try:
        with on_device(engine.device):
            going.run(segments, set(sweeps.tolist()), buffers.state(), together=False)
        terms = {kind: _of_slots(engine, going.counting, kind) for kind in engine.plan.kinds}
    finally:
        going.counting = None  # of an interrupted pass, too
    graph, plan = engine.graph, engine.plan
    gradient = rows(going.gradient)
    products = torch.where(torch.isfinite(expanded := graph.expand(theta)), expanded, 0.0) * gradient
    numbers, totals = (own.detach().to(engine.device) for own in (counting.factor, counting.node_total))
    of_factors, of_variables = torch.zeros_like(numbers), torch.zeros_like(totals)
    for kind, own in plan.kinds.items():  # each factor where its first variable sees it, then the others
        if own.mu.count:
            primary = own.primary.long()
            total = terms[kind][primary]
            for o, other in enumerate(own.other_kinds):
                total = total + terms[other][own.cavities[o, primary].long()]
            of_factors[own.slot_factor[primary]] = total
    for group, view in zip(graph.factor_groups, graph.factor_views(products), strict=True):
        factors = index_tensor(group.factors, engine.device)
        of_factors[factors] -= view.flatten(2).double().sum((0, 2)) / numbers[factors]
    for nodes, view in zip(graph.node_groups, graph.node_views(products), strict=True):
        of_variables[index_tensor(nodes.variables, engine.device)] = view.double().sum((0, 2))
    for block, part in plan.parts():
        slots = slice(part.first, part.first + part.degree * block.count)
        received = numbers[plan.kinds[part.kind].slot_factor[slots]] * terms[part.kind][slots]
        variables = plan.variables[block.states][block.first : block.first + block.count]
        of_variables[variables] += received.reshape(part.degree, block.count).sum(0)
    return rows(plan.ties.collapse(going.gradient)), of_factors.cpu(), (-of_variables / totals).cpu()


def _of_slots(engine: Engine, numbers: Tensor, kind: Kind) -> Tensor:
    """The numbers of all slots of a kind, summed over the batch, in float64."""
    start, count = engine.size_start[kind], engine.plan.kinds[kind].slots
    return numbers[start : start + count * engine.batch].double().reshape(count, engine.batch).sum(1)


def backward_fixed_point(
    engine: Engine, buffers: Buffers, grad_mu: Tensor, mu: Tensor, steps: int, tol: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as if the state in `buffers`, a fixed point, had been reached by infinitely many sweeps.

    One more sweep is recorded, and the pass goes back through it again and again. Cotangents of messages of all these
    times add up. See `kernels.protocols.RecordingRun` for what is returned.
    """
    with on_device(engine.device), _put_back(buffers):
        buffers.settled, buffers.recorded = False, 0
        engine.sweep(buffers, 1, record=True)
        going = _passes(engine, buffers, 1)
        turn(grad_mu, going.grad_mu)
        going.ended.fill_(1)
        floor = NEGLIGIBLE * torch.linalg.vector_norm(torch.where(mu > 0, mu * grad_mu, 0.0), dim=1)
        share, ran = going.run_at_fixed_point(buffers.state(), steps, tol, floor.double())
    return rows(engine.plan.ties.collapse(going.gradient)), share, ran


@contextmanager
def _put_back(buffers: Buffers) -> Iterator[State]:
    """Put the state back after sweeps from another one, even if they are interrupted. Nothing is on the tape then."""
    final, settled = buffers.state().copy(), buffers.settled
    try:
        yield final
    finally:
        buffers.restore(final)
        buffers.settled, buffers.recorded = settled, 0


def _passes(engine: Engine, buffers: Buffers, sweeps: int) -> _Backward:
    """The buffers of backward passes through so many sweeps on the tape, kept with those of the run."""
    found: _Backward | None = buffers.backward
    if found is None or found.tape is not buffers.tape or found.recorded < sweeps:
        found = buffers.backward = _Backward(engine, buffers, sweeps)
        buffers.graphs = {key: graph for key, graph in buffers.graphs.items() if key[0] != "backward"}
    return found


class _Backward:
    """One pass back through recorded sweeps, and its buffers.

    The cotangent of a belief is the sum of those of its cavities. These are kept message by message and summed when the
    pass comes to the update of the belief, so that no two programs add to the same number: results do not depend on
    the order in which programs run.
    """

    def __init__(self, engine: Engine, buffers: Buffers, sweeps: int):
        self.engine, self.buffers, self.tape, self.recorded = engine, buffers, buffers.tape, sweeps
        plan = engine.plan
        updates = [
            (part.fresh[direction] == (0, part.degree) and not part.masked[direction], len(part.kind))
            for stage in plan.stages
            for block, direction in stage
            for part in block.parts
        ]
        # Between two visits of a node by two colours of a pairwise graph, each of its cavities is used exactly once.
        self.colours = not plan.at_once and len(plan.stages) == 2 and all(whole and n == 2 for whole, n in updates)
        self.whole = not engine.damped and two_coloured(plan)  # a launch for all that a block needs
        # Whether messages outlive a visit of their receiver, so that their cotangents do.
        self.keep = engine.damped or not all(whole for whole, _ in updates)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=engine.dtype, device=engine.device)

        self.grad_mu = empty(engine.graph.mu_size, engine.batch)
        self.ended = torch.empty(engine.batch, dtype=torch.int32, device=engine.device)
        self.cavities = [empty(engine.message_size) for _ in range(2 if plan.at_once else 1)]
        self.message = empty(engine.message_size if self.keep else 0)
        self.belief = empty(engine.node_size)  # scaled to the cotangent of the messages into the belief
        self.direct = empty(engine.node_size)
        self.theta = empty(engine.node_size)
        self.tables = empty(engine.table_size)
        self.grads = empty(sweeps * engine.grad_size)
        self.gradient = empty(engine.graph.mu_size, engine.batch)
        sizes = [engine.tape_size, engine.grad_size]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=engine.device)
        self.table_starts = other_tables(engine)
        self.counting: Tensor | None = None  # cotangents of counting numbers, one for each slot and item, if wanted

    def run(self, segments: list[Segment], ends: set[int], final: State, together: bool) -> None:
        """Through all sweeps; `ends` are the numbers of sweeps after which some item ended, in the state `final`."""
        self._begin(final, alternate=self.colours and together)
        last = segments[-1].first + segments[-1].sweeps if segments else 0
        for segment in reversed(segments):
            if segment.checkpoint is not None:
                self.engine.repeat(self.buffers, segment.checkpoint, segment.sweeps)
            for k in range(segment.first + segment.sweeps, segment.first, -1):
                if k in ends:
                    self._marginals(k)
                self._sweep(k - 1, k - 1 - segment.first, last=k == last)
            self._table_sums(segment.first, segment.sweeps)
        if 0 in ends:
            self._marginals(0)
        self._finish()

    def run_at_fixed_point(self, final: State, steps: int, tol: float, floor: Tensor) -> tuple[Tensor, Tensor]:
        """Through the one recorded sweep, up to `steps` times; the last share of each item, and how many times."""
        self._begin(final, alternate=False)
        self._marginals(1)
        self.grads.zero_()  # empty slots, too, since sizes are measured
        launches = zip(self.engine.launches(), self.engine.tape, strict=True)
        pieces = [
            (start, self.engine.numbers(part.kind[0]), part.degree * block.count)
            for (block, part), (_, start) in launches
        ]
        total, ran = torch.zeros_like(self.grads), 0
        share = torch.full((self.engine.batch,), torch.inf, dtype=torch.float64)
        while ran < steps and not bool((share <= tol).all()):
            for _ in range(min(LOOK_EVERY, steps - ran)):
                self._sweep(0, 0, last=False)
                total += self.grads
                ran += 1
            size = torch.maximum(norms(total, pieces, self.engine.batch), floor)
            share = torch.where(size > 0, norms(self.grads, pieces, self.engine.batch) / size, 0.0).cpu()
        self.grads.copy_(total)
        self._table_sums(0, 1)
        self._finish()
        return share, torch.full((self.engine.batch,), ran)

    def _begin(self, final: State, alternate: bool) -> None:
        for zeroed in (*self.cavities, self.message, self.direct, self.theta, self.tables):
            zeroed.zero_()
        self.alternate, self.final = alternate, final
        self.pending: set[Block] = set()  # nodes whose direct cotangents are not yet used
        self.now = 0

    def _marginals(self, sweep: int) -> None:
        """Cotangents of the state, of items that ended after so many sweeps."""
        engine, buffers = self.engine, self.buffers
        messages, beliefs = self.final.messages, self.final.beliefs
        begin_at_nodes(engine, beliefs, self.grad_mu, self.direct, self.ended, sweep)
        for kind, own in engine.plan.kinds.items():
            shape = engine.state_tile(kind, own.mu.count * engine.batch)
            if own.mu.count:
                factor_marginal_cotangent[programs(own.mu.count * engine.batch, shape["BN"])](
                    buffers.tables[kind], messages, beliefs, self.grad_mu, self.cavities[self.now], self.tables,
                    self.ended, own.primary, own.nodes, own.mu.start, own.mu.order, own.mu.offsets, own.neighbours,
                    own.cavities, own.tables, engine.starts[kind], own.slots, engine.node_start[kind[0]],
                    engine.message_start[kind], engine.table_start[kind], sweep, own.mu.count, engine.batch,
                    SHARED=own.shared, **shape,
                )  # fmt: skip
        self.pending = set(engine.plan.blocks)

    def _sweep(self, number: int, place: int, last: bool) -> None:
        """Back through sweep `number`, which is at `place` on the tape."""
        engine, stages, at_once = self.engine, self.engine.plan.stages, self.engine.plan.at_once
        launch = len(engine.tape)
        for k in range(len(stages) - 1, -1, -1):
            # What one of two alternating colours wrote, the other has used, except at both ends.
            add = not self.alternate or (last and k == len(stages) - 1)
            clear = not at_once and (not self.alternate or (number == 0 and k == 0))
            first = launch - sum(len(block.parts) for block, _ in stages[k])
            if self.whole and self.counting is None:
                for block, _ in reversed(stages[k]):
                    launch -= 1
                    go_back(self, block, sweep=number, place=place, tape=engine.tape[launch], add=add, clear=clear)
                continue
            for block, _ in stages[k]:
                self._beliefs(block, number)
                if self.counting is not None:
                    self._counting(block, number, place, first)
                first += len(block.parts)
            if at_once:
                self.cavities[1 - self.now].zero_()
            for block, direction in reversed(stages[k]):
                launch -= len(block.parts)
                for j, part in enumerate(block.parts):
                    self._messages(block, part, direction, number, place, engine.tape[launch + j], add, clear)
            if at_once:
                self.now = 1 - self.now

    def _beliefs(self, block: Block, sweep: int) -> None:
        engine, start, numbers = self.engine, self.engine.node_start[block.states], self.engine.numbers(block.states)
        parts: list[Part | None] = list(block.parts) or [None]
        for k, part in enumerate(parts):
            first, degree, own = 0, 0, 0  # nodes without factors
            if part is not None:
                first, degree, own = part.first, part.degree, engine.message_start[part.kind]
            belief_cotangent[programs(block.count * engine.batch, NODES)](
                self.cavities[self.now], self.belief[start:], self.direct[start:], self.theta[start:],
                self.buffers.rates[block.states], self.ended, first, degree, block.first, block.count, engine.batch,
                own, engine.rate_step, sweep, int(k == 0 and block in self.pending),
                S=numbers, SX=power_of_two(numbers), BN=NODES, WIDE=engine.wide,
                FIRST=k == 0, LAST=k == len(parts) - 1,
            )  # fmt: skip
        self.pending.discard(block)

    def _counting(self, block: Block, sweep: int, place: int, launch: int) -> None:
        engine = self.engine
        for part, (to, start, _) in zip(block.parts, engine.received[launch:], strict=False):
            moved = place * engine.received_size + to - start  # by so much from where they were
            counting_cotangent[programs(part.degree * block.count * engine.batch, NODES)](
                self.buffers.received, self.belief[engine.node_start[block.states] :], self.counting,
                engine.plan.kinds[part.kind].updated, self.ended, part.first, part.degree, block.first, block.count,
                engine.batch, engine.message_start[part.kind] + moved, engine.size_start[part.kind], sweep,
                S=block.states, SX=power_of_two(block.states), BN=NODES, WIDE=engine.wide,
            )  # fmt: skip

    def _messages(
        self,
        block: Block,
        part: Part,
        direction: int,
        number: int,
        place: int,
        tape: tuple[int, int],
        add: bool,
        clear: bool,
    ) -> None:
        engine, buffers = self.engine, self.buffers
        members = part.degree * block.count * engine.batch
        medium = (32, 1) if part.kind in engine.canonical else (16, 1)  # fewer exponentials leave more registers
        own, shape = engine.plan.kinds[part.kind], engine.tile(part.kind, members, medium)
        after = self.cavities[1 - self.now] if engine.plan.at_once else self.cavities[0]
        split = engine.plan.at_once and len(part.kind) > 2
        for slot in range(len(part.kind) if split else 1):
            message_cotangent[programs(members, shape["BN"])](
                buffers.tables[part.kind], self.cavities[self.now], after, self.message,
                self.belief[engine.node_start[block.states]:], self.grads, buffers.counting[part.kind],
                own.cavities, own.tables, own.updated, engine.starts[part.kind], buffers.tape,
                buffers.damping, self.ended, part.first, part.degree, *part.fresh[direction], own.slots, block.first,
                block.count, engine.batch, place * engine.tape_size + tape[0], place * engine.grad_size + tape[1],
                1 << direction, slot, engine.message_start[part.kind], engine.counting_step, number, int(add),
                int(clear),
                SHARED=own.shared, MASKED=part.masked[direction], DAMPED=engine.damped, KEEP=self.keep, SPLIT=split,
                STREAM=engine.streams(part, block), **shape,
            )  # fmt: skip

    def _table_sums(self, first: int, sweeps: int) -> None:
        """Add what the messages of the sweeps on the tape, from number `first` on, passed on to their tables."""
        engine, buffers = self.engine, self.buffers
        for (block, part), tape in zip(engine.launches(), engine.tape, strict=True):
            members, own = part.degree * block.count, engine.plan.kinds[part.kind]
            medium = (8, 1) if part.kind in engine.canonical else (8, 2)
            shape, tables = engine.tile(part.kind, members * engine.batch, medium), buffers.tables[part.kind]
            to, grid = self.tables[engine.table_start[part.kind] :], programs(members * engine.batch, shape["BN"])
            given = buffers.tape, self.grads, self.sizes, self.ended
            numbers = part.first, members, engine.batch, first, sweeps, *tape
            if shape.pop("ODDS"):
                tile = {name: shape[name] for name in ("BN", "WIDE", "num_warps")}
                odds_table_cotangent[grid](tables, to, own.neighbours, *given, *numbers, **tile)
            else:
                table_cotangent[grid](
                    tables, to, own.neighbours, own.tables, *given, *numbers, SHARED=own.shared, **shape
                )

    def _finish(self) -> None:
        """The gradient, factor by factor, in the layout of mu."""
        engine, buffers = self.engine, self.buffers
        for block in engine.plan.blocks:  # the beliefs before the first sweep depend on theta too
            self._beliefs(block, -1)
        gather(engine, buffers, self.theta, self.tables, self.table_starts, self.gradient)


def begin_at_nodes(engine: Engine, beliefs: Tensor, grad_mu: Tensor, direct: Tensor, ended: Tensor, sweep: int) -> None:
    """From cotangents of node marginals to those of log-beliefs, of items that ended after so many sweeps."""
    for states, nodes in engine.plan.nodes.items():
        first = engine.node_start[states]
        node_marginal_cotangent[programs(nodes.count * engine.batch, NODES)](
            beliefs[first:], grad_mu, direct[first:], ended, nodes.start, sweep, nodes.count, engine.batch,
            S=states, SX=power_of_two(states), BN=NODES, WIDE=engine.wide, ODDS=engine.odds,
        )  # fmt: skip
