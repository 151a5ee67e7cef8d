"""The backward pass: from cotangents of marginals through recorded sweeps to the gradient of theta."""

from __future__ import annotations

import torch
from torch import Tensor

from riskfield.kernels.gpu.ends import factor_gradient, factor_marginal_cotangent, node_marginal_cotangent
from riskfield.kernels.gpu.engine import NODES, Buffers, Engine, rows
from riskfield.kernels.gpu.plan import Block, Part
from riskfield.kernels.gpu.storage import power_of_two, programs
from riskfield.kernels.gpu.sweeps import belief_cotangent, message_cotangent, table_cotangent


def backward(engine: Engine, buffers: Buffers, sweeps: Tensor, grad_mu: Tensor) -> Tensor:
    """d(grad_mu . mu) / dtheta through the first `sweeps` recorded sweeps of each item, of shape (batch, theta).

    The state in `buffers` is the one these sweeps ended in.
    """
    together = bool((sweeps == buffers.recorded).all())
    found: _Backward | None = buffers.backward
    if found is None or found.tape is not buffers.tape or found.recorded < buffers.recorded:
        found = buffers.backward = _Backward(engine, buffers)
        buffers.graphs = {key: graph for key, graph in buffers.graphs.items() if key[0] != "backward"}
    going = found
    going.grad_mu.copy_(grad_mu.t())
    going.ended.copy_(sweeps)
    counts = [buffers.recorded] if together else sorted(set(sweeps.tolist()))

    def work() -> None:
        going.run(set(counts), together)

    if together:
        engine.replay(buffers, ("backward", buffers.recorded, buffers.current), work)
    else:
        work()
    return rows(engine.plan.collapse(going.gradient))


class _Backward:
    """One pass back through recorded sweeps, and its buffers.

    The cotangent of a belief is the sum of those of its cavities. These are kept message by message and summed when the
    pass comes to the update of the belief, so that no two programs add to the same number: results do not depend on
    the order in which programs run.
    """

    def __init__(self, engine: Engine, buffers: Buffers):
        self.engine, self.buffers, self.tape, self.recorded = engine, buffers, buffers.tape, buffers.recorded
        plan = engine.plan
        updates = [
            (part.fresh[direction] == (0, part.degree) and not part.masked[direction], len(part.kind))
            for stage in plan.stages
            for block, direction in stage
            for part in block.parts
        ]
        # Between two visits of a node by two colours of a pairwise graph, each of its cavities is used exactly once.
        self.colours = not plan.at_once and len(plan.stages) == 2 and all(whole and n == 2 for whole, n in updates)
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
        self.grads = empty(buffers.recorded * engine.grad_size)
        self.gradient = empty(engine.graph.mu_size, engine.batch)
        sizes = [engine.tape_size, engine.grad_size]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=engine.device)
        self.table_starts = {
            kind: torch.tensor([engine.table_start[k] for k in own.other_kinds] or [0], device=engine.device)
            for kind, own in plan.kinds.items()
        }

    def run(self, ends: set[int], together: bool) -> None:
        """Through all sweeps; `ends` are the numbers of sweeps after which some item ended."""
        for zeroed in (*self.cavities, self.message, self.direct, self.theta, self.tables):
            zeroed.zero_()
        self.alternate = self.colours and together
        self.pending: set[Block] = set()  # nodes whose direct cotangents are not yet used
        self.now = 0
        sweeps = self.buffers.recorded
        for k in range(sweeps, -1, -1):
            if k in ends:
                self._marginals(k)
            if k:
                self._sweep(k - 1, last=k == sweeps)
        for block in self.engine.plan.blocks:  # the beliefs before the first sweep depend on theta too
            self._beliefs(block)
        self._tables()

    def _marginals(self, sweep: int) -> None:
        """Cotangents of the state, of items that ended after so many sweeps."""
        engine, buffers = self.engine, self.buffers
        beliefs, messages = buffers.beliefs[buffers.current], buffers.messages[buffers.current]
        for states, nodes in engine.plan.nodes.items():
            first = engine.node_start[states]
            node_marginal_cotangent[programs(nodes.count * engine.batch, NODES)](
                beliefs[first:], self.grad_mu, self.direct[first:], self.ended, nodes.start, sweep, nodes.count,
                engine.batch, S=states, SX=power_of_two(states), BN=NODES, WIDE=engine.wide,
            )  # fmt: skip
        for kind, own in engine.plan.kinds.items():
            shape = engine.shape(kind)
            if own.mu.count:
                factor_marginal_cotangent[programs(own.mu.count * engine.batch, shape["BN"])](
                    buffers.tables[kind], messages, beliefs, self.grad_mu, self.cavities[self.now], self.tables,
                    self.ended, own.primary, own.nodes, own.mu.start, own.mu.order, own.mu.offsets, own.neighbours,
                    own.cavities, own.tables, engine.starts[kind], own.slots, engine.node_start[kind[0]],
                    engine.message_start[kind], engine.table_start[kind], sweep, own.mu.count, engine.batch,
                    SHARED=own.shared, **shape,
                )  # fmt: skip
        self.pending = set(engine.plan.blocks)

    def _sweep(self, number: int, last: bool) -> None:
        """Back through one sweep."""
        engine, stages, at_once = self.engine, self.engine.plan.stages, self.engine.plan.at_once
        launch = len(engine.tape)
        for k in range(len(stages) - 1, -1, -1):
            # What one of two alternating colours wrote, the other has used, except at both ends.
            add = not self.alternate or (last and k == len(stages) - 1)
            clear = not at_once and (not self.alternate or (number == 0 and k == 0))
            for block, _ in stages[k]:
                self._beliefs(block)
            if at_once:
                self.cavities[1 - self.now].zero_()
            for block, direction in reversed(stages[k]):
                launch -= len(block.parts)
                for j, part in enumerate(block.parts):
                    self._messages(block, part, direction, number, engine.tape[launch + j], add, clear)
            if at_once:
                self.now = 1 - self.now

    def _beliefs(self, block: Block) -> None:
        engine, start = self.engine, self.engine.node_start[block.states]
        parts: list[Part | None] = list(block.parts) or [None]
        for k, part in enumerate(parts):
            if part is None:  # nodes without factors
                neighbours, first, degree, own = engine.plan.nodes[block.states].order, 0, 0, 0
            else:
                neighbours, first, degree = engine.plan.kinds[part.kind].neighbours, part.first, part.degree
                own = engine.message_start[part.kind]
            belief_cotangent[programs(block.count * engine.batch, NODES)](
                self.cavities[self.now], self.belief[start:], self.direct[start:], self.theta[start:],
                self.buffers.rates[block.states], neighbours, first, degree, block.first, block.count, engine.batch,
                own, S=block.states, SX=power_of_two(block.states), BN=NODES, WIDE=engine.wide,
                DIRECT=k == 0 and block in self.pending, FIRST=k == 0, LAST=k == len(parts) - 1,
            )  # fmt: skip
        self.pending.discard(block)

    def _messages(
        self, block: Block, part: Part, direction: int, sweep: int, tape: tuple[int, int], add: bool, clear: bool
    ) -> None:
        engine, buffers = self.engine, self.buffers
        own, shape = engine.plan.kinds[part.kind], engine.shape(part.kind)
        after = self.cavities[1 - self.now] if engine.plan.at_once else self.cavities[0]
        split = engine.plan.at_once and len(part.kind) > 2
        for slot in range(len(part.kind) if split else 1):
            message_cotangent[programs(part.degree * block.count * engine.batch, shape["BN"])](
                buffers.tables[part.kind], self.cavities[self.now], after, self.message,
                self.belief[engine.node_start[block.states]:], self.grads, buffers.counting[part.kind],
                own.neighbours, own.cavities, own.tables, own.updated, engine.starts[part.kind], buffers.tape,
                buffers.damping, part.first, part.degree, *part.fresh[direction], own.slots, block.first, block.count,
                engine.batch, sweep * engine.tape_size + tape[0], sweep * engine.grad_size + tape[1], 1 << direction,
                slot, engine.message_start[part.kind],
                SHARED=own.shared, MASKED=part.masked[direction], DAMPED=engine.damped, KEEP=self.keep, ADD=add,
                CLEAR=clear, SPLIT=split, **shape,
            )  # fmt: skip

    def _tables(self) -> None:
        """The gradient, factor by factor, in the layout of mu."""
        engine, buffers, plan = self.engine, self.buffers, self.engine.plan
        for (block, part), tape in zip(engine.launches(), engine.tape, strict=True):
            own, shape = plan.kinds[part.kind], engine.shape(part.kind)
            members = part.degree * block.count
            table_cotangent[programs(members * engine.batch, shape["BN"])](
                buffers.tables[part.kind], self.tables[engine.table_start[part.kind] :], own.neighbours, own.tables,
                buffers.tape, self.grads, self.sizes, part.first, members, engine.batch, buffers.recorded, *tape,
                SHARED=own.shared, **shape,
            )  # fmt: skip
        for states, nodes in plan.nodes.items():
            engine.unpack(self.theta[engine.node_start[states] :], self.gradient, nodes)
        for kind, own in plan.kinds.items():
            if own.mu.count:
                factor_gradient[programs(own.mu.count * engine.batch, NODES)](
                    self.tables, self.gradient, buffers.counting[kind], own.primary, own.mu.start, own.mu.order,
                    own.mu.offsets, own.cavities, own.maps, self.table_starts[kind], own.slots,
                    engine.table_start[kind], len(own.mu.offsets), own.mu.count, engine.batch,
                    E=own.mu.entries, OTHERS=len(kind) - 1, BN=NODES, WIDE=engine.wide,
                )  # fmt: skip
