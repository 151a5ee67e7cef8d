"""Launches the kernels over the storage of a plan, for one batch size and precision."""

from __future__ import annotations

import weakref
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from riskfield.entropy import Counting
from riskfield.graph.schedule import Parallel
from riskfield.kernels.convergence import ROUNDING, Gap
from riskfield.kernels.gpu.buffers import Buffers, State, current_stream, on_device, reuse
from riskfield.kernels.gpu.ends import factor_marginals
from riskfield.kernels.gpu.gap import gap_block, operand_sizes
from riskfield.kernels.gpu.incidences import Kind
from riskfield.kernels.gpu.packing import pack_messages, pack_theta, rows, turn, unpack_all_messages, unpack_nodes
from riskfield.kernels.gpu.plan import Block, KindStorage, Part, Plan, make_plan
from riskfield.kernels.gpu.sharing import Sharing, sharing_of
from riskfield.kernels.gpu.storage import (
    LANES,
    MANY_PLACES,
    NODES,
    factor_tile,
    longer,
    padded,
    power_of_two,
    programs,
    tile_size,
)
from riskfield.kernels.gpu.sweeps import update_block
from riskfield.kernels.initial_state import starting_messages
from riskfield.kernels.problem import MessagePassingProblem, schedule_levels


class Engine:
    """A plan with the addresses of a batch of so many items."""

    def __init__(
        self,
        problem: MessagePassingProblem,
        plan: Plan,
        sharing: Sharing,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        canonical: bool = False,
    ):
        self.graph, self.plan, self.batch, self.dtype, self.device = problem.graph, plan, batch, dtype, device
        self.maximise, self.damped = problem.maximise, bool(problem.damping > 0)
        # How far apart counting numbers lie: where all are equal there is only one.
        self.counting_step, self.rate_step = int(not sharing.factors), int(not sharing.variables)
        # Kinds with canonical tables, and whether all messages and beliefs are log-odds: see `canonical`.
        self.canonical: set[Kind] = plan.pairs() if canonical else set()
        self.odds = self.canonical == {(2, 2)} == set(plan.kinds) and set(plan.nodes) == {2}
        nodes = {s: self.numbers(s) * padded(own.count * batch) for s, own in plan.nodes.items()}
        self.node_start, self.node_size = _starts(nodes)
        sizes = {kind: padded(own.slots * batch) for kind, own in plan.kinds.items()}
        self.message_start, self.message_size = _starts({kind: self.numbers(kind[0]) * sizes[kind] for kind in sizes})
        self.table_start, self.table_size = _starts({kind: prod(kind) * sizes[kind] for kind in sizes})
        self.starts = {kind: self._operand_starts(own) for kind, own in plan.kinds.items()}
        self.size_start, self.size_size = _starts(sizes)  # one number for each message
        self.size_starts = {
            kind: torch.tensor([self.size_start[other] for other in own.other_kinds] or [0], device=device)
            for kind, own in plan.kinds.items()
        }
        self.tape: list[tuple[int, int]] = []  # per launch of a sweep: where its cavities begin, and its cotangents
        # Per launch, the messages into its nodes in whole groups of lanes: where they are kept, where they were, size.
        self.received: list[tuple[int, int, int]] = []
        self.tape_size = self.grad_size = self.received_size = longest = 0
        for block, part in self.launches():
            self.tape.append((self.tape_size, self.grad_size))
            first = part.first * batch // LANES * LANES
            own = self.numbers(part.kind[0])
            size = own * (padded((part.first + part.degree * block.count) * batch) - first)
            self.received.append((self.received_size, self.message_start[part.kind] + own * first, size))
            self.received_size += size
            places = padded(part.degree * block.count * batch)
            self.tape_size += sum(map(self.numbers, part.kind[1:])) * places
            self.grad_size += own * places
            longest = max(longest, sum(part.kind[1:]) * places)
        # Whether addresses need 64 bits; programs may look a little beyond the end.
        self.wide = max(self.node_size, self.message_size, self.table_size, longest) + 2**20 >= 2**31

    def numbers(self, states: int) -> int:
        """How many numbers stand for the states of a variable."""
        return 1 if self.odds else states

    def tile(self, kind: Kind, places: int, medium: tuple[int, int] = (32, 1)) -> dict[str, Any]:
        """The tile of a kernel that sweeps. If all is log-odds, it has one state, and a thread up to two places."""
        form = {"CANONICAL": kind in self.canonical, "ODDS": self.odds}
        if not self.odds:
            return factor_tile(kind, places, self.wide, medium) | form
        tile = factor_tile((1, 1), places, self.wide)
        return tile | form | {"num_warps": max(1, tile["num_warps"] // 2)}

    def state_tile(self, kind: Kind, places: int) -> dict[str, Any]:
        """The tile of a kernel that needs all states."""
        return factor_tile(kind, places, self.wide) | {"CANONICAL": kind in self.canonical, "ODDS": self.odds}

    def launches(self) -> list[tuple[Block, Part]]:
        """Block and part of each launch of a sweep."""
        return [(block, part) for stage in self.plan.stages for block, _ in stage for part in block.parts]

    def _operand_starts(self, own: KindStorage) -> Tensor:
        """For each other variable of a factor, where nodes and messages of its kind begin."""
        starts = [
            start
            for states, other in zip(own.kind[1:], own.other_kinds, strict=True)
            for start in (self.node_start[states], self.message_start[other])
        ]
        return torch.tensor(starts or [0], dtype=torch.int64, device=self.device)

    # Buffers --------------------------------------------------------------------------------------------------------

    def take(self) -> Buffers:
        """Buffers for a run; `buffers.release` them when it is over."""
        if (spare := reuse(self)) is not None:
            return spare
        plan, batch, copies = self.plan, self.batch, 2 if self.plan.at_once else 1

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        return Buffers(
            empty(self.graph.theta_size, batch),
            {kind: empty(self._entries(kind) * padded(own.theta.count * batch)) for kind, own in plan.kinds.items()},
            empty(self.node_size),
            {kind: empty(own.slots if self.counting_step else 1) for kind, own in plan.kinds.items()},
            {kind: empty(own.theta.count) for kind, own in plan.kinds.items()},
            {states: empty(nodes.count if self.rate_step else 1) for states, nodes in plan.nodes.items()},
            empty(1),
            empty(self.message_size if self.canonical else 0),
            [empty(self.message_size) for _ in range(copies)],
            [empty(self.node_size) for _ in range(copies)],
            empty(self.node_size),
            empty(batch),
            empty(batch, dtype=torch.int8),
            empty(self.graph.mu_size, batch),
            empty(self.graph.message_size, batch),
            empty(self.size_size),
            empty(2, batch),
            empty(0),
            empty(0),
            current_stream(self.device),
        )

    def _entries(self, kind: Kind) -> int:
        """How many entries of a table are stored."""
        return prod(states - 1 for states in kind) if kind in self.canonical else prod(kind)

    # Start ----------------------------------------------------------------------------------------------------------

    def start(self, buffers: Buffers, problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None) -> None:
        """Pack theta of shape (batch, theta), and begin from uniform messages or from these."""
        self._set_counting(buffers, problem.counting)
        buffers.settled = False
        buffers.damping.fill_(float(problem.damping))
        turn(theta, buffers.theta)
        buffers.replay(("start",), lambda: self._start(buffers))
        if messages is not None:
            with on_device(self.device):
                self._start_from(buffers, starting_messages(self.graph, theta, messages).t().contiguous())

    def _set_counting(self, buffers: Buffers, counting: Counting) -> None:
        if counting.constant and buffers.given is not None and buffers.given() is counting:
            return
        buffers.given = None
        factor = counting.factor.detach().to(self.device, self.dtype)
        total = counting.node_total.detach().to(self.device, self.dtype)
        for kind, own in self.plan.kinds.items():
            buffers.counting[kind].copy_(factor[own.slot_factor] if self.counting_step else factor[0])
            buffers.table_rates[kind].copy_(1 / factor[own.table_factor])
        for states, variables in self.plan.variables.items():
            buffers.rates[states].copy_(1 / (total[variables] if self.rate_step else total[0]))
        buffers.given = weakref.ref(counting)  # now that all numbers are there

    def _start(self, buffers: Buffers) -> None:
        pack_theta(self, buffers)
        if self.plan.at_once:
            buffers.messages[1].copy_(buffers.messages[0])
            buffers.beliefs[1].copy_(buffers.beliefs[0])

    def _start_from(self, buffers: Buffers, columns: Tensor) -> None:
        pack_messages(self, buffers, columns)
        for block in self.plan.blocks:
            self._update(buffers, block, 0, send=False)
        if self.plan.at_once:
            buffers.messages[1].copy_(buffers.messages[0])
            buffers.beliefs[0].copy_(buffers.beliefs[1])

    # Forward --------------------------------------------------------------------------------------------------------

    def sweep(
        self, buffers: Buffers, sweeps: int, record: bool, live: Tensor | None = None, *, keep: bool = False
    ) -> Tensor:
        """Sweep all items, or those that are `live`; an item that once was not must never be again.

        A tape can `keep` the messages, too. Returns the largest undamped change of a belief in the last sweep, of shape
        (batch,): 2 if one is NaN.
        """
        if record:
            self._reserve(buffers, buffers.recorded + sweeps, keep)
        if live is not None:
            buffers.live.copy_(live)
            if self.plan.at_once:  # what is not swept any more is the same in both
                buffers.messages[1 - buffers.current].copy_(buffers.messages[buffers.current])
                buffers.beliefs[1 - buffers.current].copy_(buffers.beliefs[buffers.current])
            buffers.settled = True
        settled = buffers.settled
        key = "sweep", sweeps, record, buffers.recorded if record else 0, buffers.current, settled, keep
        buffers.replay(key, lambda: self._sweep(buffers, sweeps, record, settled, keep))
        buffers.recorded += sweeps if record else 0
        if self.plan.at_once:
            buffers.current = (buffers.current + sweeps) % 2
        return buffers.residual

    def repeat(self, buffers: Buffers, checkpoint: State, sweeps: int) -> None:
        """Run sweeps from a checkpoint once more, and record them at the beginning of the tape."""
        buffers.settled = False  # those that are, go on; the backward pass does not look at that
        buffers.current = buffers.recorded = 0
        buffers.restore(checkpoint)
        self.sweep(buffers, sweeps, record=True)
        buffers.recorded = 0

    def _reserve(self, buffers: Buffers, sweeps: int, keep: bool) -> None:
        """Make room on the tape for so many sweeps."""
        short = len(buffers.tape) < sweeps * self.tape_size
        if short or (keep and len(buffers.received) < sweeps * self.received_size):
            if buffers.recorded:
                sweeps += sweeps // 2  # a run to a tolerance, whose end is not known
            buffers.tape = longer(buffers.tape, sweeps * self.tape_size)
            if keep:
                buffers.received = longer(buffers.received, sweeps * self.received_size)
            buffers.graphs = {}

    def _sweep(self, buffers: Buffers, sweeps: int, record: bool, settled: bool, keep: bool) -> None:
        now = buffers.current
        for k in range(sweeps):
            last = k == sweeps - 1
            if last:
                buffers.residual.zero_()
            tape, received = iter(self.tape), iter(self.received)
            kept = buffers.received[(buffers.recorded + k) * self.received_size :]
            offset = (buffers.recorded + k) * self.tape_size
            for stage in self.plan.stages:
                for block, direction in stage:
                    places = [offset + next(tape)[0] for _ in block.parts] if record else None
                    self._update(buffers, block, direction, now=now, measure=last, tape=places, settled=settled)
                if self.plan.at_once:
                    now = 1 - now
                if keep:
                    for to, start, size in islice(received, sum(len(block.parts) for block, _ in stage)):
                        kept[to : to + size].copy_(buffers.messages[now][start : start + size])

    def _update(
        self,
        buffers: Buffers,
        block: Block,
        direction: int,
        *,
        send: bool = True,
        now: int = 0,
        measure: bool = False,
        tape: list[int] | None = None,
        settled: bool = False,
    ) -> None:
        """Send messages to the nodes of a block, or none, and compute their beliefs."""
        then = 1 - now if self.plan.at_once else now
        start = self.node_start[block.states]
        for k, part in enumerate(block.parts):
            own, shape = self.plan.kinds[part.kind], self.tile(part.kind, block.count * self.batch, (32, 2))
            fresh = part.fresh[direction] if send else (part.degree, part.degree)
            update_block[programs(block.count * self.batch, shape["BN"])](
                buffers.tables[part.kind], buffers.messages[now], buffers.messages[then], buffers.beliefs[now],
                buffers.beliefs[then], buffers.node_theta[start:], buffers.accumulator[start:],
                buffers.rates[block.states], buffers.counting[part.kind], own.neighbours, own.cavities, own.tables,
                own.updated, self.starts[part.kind], buffers.tape, buffers.residual, buffers.damping, buffers.live,
                part.first, part.degree, *fresh, own.slots, block.first, block.count, self.batch,
                tape[k] if tape else 0, 1 << direction, start, self.message_start[part.kind], self.counting_step,
                self.rate_step, int(measure),
                SHARED=own.shared, MASKED=part.masked[direction], MAXIMISE=self.maximise, DAMPED=self.damped,
                RECORD=tape is not None, FIRST=k == 0, LAST=k == len(block.parts) - 1,
                AHEAD=self._ahead(part, block), SETTLED=settled, STREAM=self.streams(part, block), **shape,
            )  # fmt: skip

    def _ahead(self, part: Part, block: Block) -> int:
        """How many messages to a node are computed at the same time: several if there is little else to do."""
        few = tile_size(part.kind) <= 4 and block.count * self.batch < MANY_PLACES
        return min(4, power_of_two(part.degree)) if few else 1

    def streams(self, part: Part, block: Block) -> bool:
        """Whether messages and beliefs stay in the cache from one launch to the next if the tables do not."""
        return not self.plan.kinds[part.kind].shared and block.count * self.batch < MANY_PLACES

    # End ------------------------------------------------------------------------------------------------------------

    def marginals(self, buffers: Buffers) -> Tensor:
        """Mu of shape (batch, mu)."""
        buffers.replay(("marginals", buffers.current), lambda: self._marginals(buffers))
        return rows(buffers.mu)

    def node_marginals(self, buffers: Buffers) -> Tensor:
        """The node part of mu, of shape (batch, node_size)."""
        buffers.replay(("node marginals", buffers.current), lambda: self._node_marginals(buffers))
        return rows(buffers.mu[: self.graph.node_size])

    def _node_marginals(self, buffers: Buffers) -> None:
        unpack_nodes(self, buffers, buffers.beliefs[buffers.current], buffers.mu, exp=True)

    def _marginals(self, buffers: Buffers) -> None:
        now = buffers.current
        self._node_marginals(buffers)
        for kind, own in self.plan.kinds.items():
            shape = self.state_tile(kind, own.mu.count * self.batch)
            if own.mu.count:
                factor_marginals[programs(own.mu.count * self.batch, shape["BN"])](
                    buffers.tables[kind], buffers.messages[now], buffers.beliefs[now], buffers.mu, own.primary,
                    own.nodes, own.mu.start, own.mu.order, own.mu.offsets, own.neighbours, own.cavities, own.tables,
                    self.starts[kind], own.slots, self.node_start[kind[0]], self.message_start[kind], own.mu.count,
                    self.batch, SHARED=own.shared, **shape,
                )  # fmt: skip

    def messages(self, buffers: Buffers) -> Tensor:
        """Log-messages in the caller's layout."""
        buffers.replay(("messages", buffers.current), lambda: unpack_all_messages(self, buffers))
        return rows(buffers.columns)

    def gap(self, buffers: Buffers) -> Gap:
        """How far the state is from a fixed point."""
        buffers.replay(("gap", buffers.current), lambda: self._gap(buffers))
        return Gap(*buffers.gap)

    def _gap(self, buffers: Buffers) -> None:
        buffers.gap.zero_()
        messages, beliefs = buffers.messages[buffers.current], buffers.beliefs[buffers.current]
        for block, part in self.plan.parts():
            own, start, members = self.plan.kinds[part.kind], self.node_start[block.states], part.degree * block.count
            operand_sizes[programs(members * self.batch, NODES)](
                messages, beliefs, buffers.node_theta[start:], buffers.rates[block.states], own.updated, buffers.sizes,
                part.first, part.degree, block.first, block.count, self.batch, start, self.message_start[part.kind],
                self.size_start[part.kind], self.rate_step, S=block.states, SX=power_of_two(block.states), BN=NODES,
                WIDE=self.wide, ODDS=self.odds,
            )  # fmt: skip
        for block, part in self.plan.parts():
            own, members = self.plan.kinds[part.kind], part.degree * block.count * self.batch
            shape = self.state_tile(part.kind, members)
            gap_block[programs(members, shape["BN"])](
                buffers.tables[part.kind], messages, buffers.shifts, beliefs, buffers.counting[part.kind],
                own.neighbours, own.cavities, own.tables, own.updated, self.starts[part.kind], buffers.sizes,
                self.size_starts[part.kind], buffers.damping, buffers.gap[0], buffers.gap[1], part.first, part.degree,
                own.slots, block.first, block.count, self.batch, self.node_start[block.states],
                self.message_start[part.kind], self.size_start[part.kind], self.counting_step, SHARED=own.shared,
                MAXIMISE=self.maximise, ROUNDING=ROUNDING * torch.finfo(self.dtype).eps, **shape,
            )  # fmt: skip


def _starts(sizes: dict[Any, int]) -> tuple[dict[Any, int], int]:
    """Where pieces of these sizes begin, one after the other, and where the last one ends."""
    starts, end = {}, 0
    for key, size in sizes.items():
        starts[key] = end
        end += size
    return starts, end


def engine_of(problem: MessagePassingProblem, theta: Tensor, *, canonical: bool = False) -> Engine:
    """The engine for such problems, with tables in this form where they can be. It is kept with the graph."""
    graph, schedule, device = problem.graph, problem.schedule, theta.device
    at_once = isinstance(schedule, Parallel)
    sharing = sharing_of(graph, problem.counting)
    plan = graph.derived(
        ("gpu plan", schedule, device, sharing.tables),
        lambda: make_plan(graph, schedule_levels(graph, schedule), at_once, device, share_tables=sharing.tables),
    )
    canonical = canonical and bool(plan.pairs())
    key = "gpu engine", schedule, device, sharing, len(theta), theta.dtype, problem.maximise, bool(problem.damping > 0)
    return graph.derived(
        (*key, canonical), lambda: Engine(problem, plan, sharing, len(theta), theta.dtype, device, canonical=canonical)
    )
