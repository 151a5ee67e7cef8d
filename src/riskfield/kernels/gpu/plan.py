"""A schedule compiled for the GPU: where everything is stored, and which updates one launch makes.

Nodes with the same number of states are stored level by level, so that the nodes one launch updates are neighbours in
memory. Incoming messages are stored by kind (see `incidences`) in the order of their receivers: for the d-th factor of
that kind, all nodes of a launch side by side. Batch items are the innermost axis of everything.

Not every node of a launch has a d-th factor; then its slot stays empty, without a neighbour, and with a uniform message
(0 in a kind with canonical tables). Nodes of a level are split by the powers of two of their degrees, so that at most
half of the slots are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Levels
from riskfield.kernels.gpu.incidences import EntryOrder, Incidences, Kind, find_incidences


@dataclass(frozen=True, eq=False)
class Places:
    """Where the entries of some members (nodes, messages or tables) lie in the caller's layout: start + offset."""

    start: Tensor  # int64 (member,): -1 for a member that does not exist
    order: Tensor  # int32 (member,): which list of offsets
    offsets: Tensor  # int32 (order, entry)

    @property
    def count(self) -> int:
        """How many members."""
        return len(self.start)

    @property
    def entries(self) -> int:
        """How many entries a member has."""
        return self.offsets.shape[1]


@dataclass(frozen=True, eq=False)
class KindStorage:
    """All factors of one kind, one slot for each message into a variable of that kind."""

    kind: Kind
    slots: int
    neighbours: Tensor  # int32 (others, slot): packed node of each other variable, or -1 in an empty slot
    cavities: Tensor  # int32 (others, slot): slot of the message to that variable, among those of its own kind, or -1
    other_kinds: tuple[Kind, ...]
    tables: Tensor  # int32 (slot,): which packed table
    updated: Tensor  # int8 (slot,): bit 0, updated in the forward direction; bit 1, backward; then its slot in the
    # factor; -1 for an empty slot
    shared: bool  # whether some factors share a table; else every slot has its own, at its place
    slot_factor: Tensor  # int64 (slot,): number of the factor, 0 in an empty slot
    table_factor: Tensor  # int64 (table,): number of a factor that uses the table
    theta: Places  # of the packed tables, in theta
    messages: Places  # of the slots, in the caller's messages
    # Every factor is seen by each of its variables; the marginal is computed where the first one sees it.
    primary: Tensor  # int32 (factor,): slots of such factors
    nodes: Tensor  # int32 (factor,): packed node of the first variable
    mu: Places  # of such factors, in mu
    maps: Tensor  # int32 (others, order, entry): the entry of the table as that other variable sees it


@dataclass(frozen=True)
class Part:
    """The factors of one kind around the nodes of a block: `degree` slots for each node, from slot `first` on."""

    kind: Kind
    first: int
    degree: int
    fresh: tuple[tuple[int, int], tuple[int, int]]  # forward and backward, the range of factors that send
    masked: tuple[bool, bool]  # whether some factors in that range do not send


@dataclass(frozen=True)
class Block:
    """Nodes `first` to `first + count` among those with so many states, which one launch updates."""

    states: int
    level: int
    first: int
    count: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """All that does not depend on numbers."""

    nodes: dict[int, Places]  # states -> packed nodes
    variables: dict[int, Tensor]  # states -> variable of each packed node, int64
    kinds: dict[Kind, KindStorage]
    stages: tuple[tuple[tuple[Block, int], ...], ...]  # blocks and direction
    blocks: tuple[Block, ...]
    at_once: bool
    ties: Ties

    def parts(self) -> list[tuple[Block, Part]]:
        """All parts, each with its block."""
        return [(block, part) for block in self.blocks for part in block.parts]

    def pairs(self) -> set[Kind]:
        """The kinds of pairwise factors with tables of their own, between variables of two states or more."""
        return {kind for kind, found in self.kinds.items() if len(kind) == 2 and min(kind) > 1 and not found.shared}


@dataclass(frozen=True, eq=False)
class Ties:
    """Which rows of mu add up to each row of theta, and how many do; None where no tables are tied."""

    sums: tuple[tuple[Tensor, Tensor | int], ...] | None

    def collapse(self, gradient: Tensor) -> Tensor:
        """Columns in the layout of mu -> columns in the layout of theta: sums over factors, in a fixed order."""
        if self.sums is None:
            return gradient
        parts = []
        for rows, counts in self.sums:
            found = gradient[rows]
            if isinstance(counts, int):
                parts.append(found.unflatten(0, (-1, counts)).sum(1) if counts > 1 else found)
            else:
                parts.append(torch.segment_reduce(found, "sum", lengths=counts, axis=0, unsafe=True))
        return torch.cat(parts)


def ties_of(graph: FactorGraph, device: torch.device) -> Ties:
    """The ties of a graph, kept with it."""
    tied = graph.theta_size != graph.mu_size
    return graph.derived(("gpu ties", device), lambda: Ties(_tied(graph, device) if tied else None))


def make_plan(
    graph: FactorGraph, levels: Levels, at_once: bool, device: torch.device, *, share_tables: bool = True
) -> Plan:
    """Compile a schedule: forwards and backwards through `levels`, or all at once.

    Tables are stored divided by the counting numbers of their factors. Without `share_tables` every factor has its own.
    """
    kinds, orders = find_incidences(graph, share_tables)
    position, nodes, blocks, block_of = _order_nodes(graph, levels, kinds)
    parts: list[list[Part]] = [[] for _ in blocks]
    slot_of, total = {}, {}
    first_node = np.array([block[2] for block in blocks], np.int64)
    counts = np.array([block[3] for block in blocks], np.int64)
    flags = {}
    for kind, found in kinds.items():
        flags[kind] = _updated(levels, found, at_once)
        depth = _depth(found.variable, flags[kind])
        block = block_of[found.variable]
        degree = np.zeros(len(blocks), np.int64)
        np.maximum.at(degree, block, depth + 1)
        starts = np.concatenate([[0], np.cumsum(degree * counts)])
        slot_of[kind] = starts[block] + depth * counts[block] + position[found.variable] - first_node[block]
        total[kind] = int(starts[-1])
        sends = [(flags[kind] >> direction & 1).astype(bool) for direction in range(2)]
        fresh = [_ranges(block, depth, chosen, len(blocks)) for chosen in sends]
        masked = np.zeros((2, len(blocks)), bool)
        for direction in range(2):
            low, high = fresh[direction]
            silent = ~sends[direction] & (depth >= low[block]) & (depth < high[block])
            masked[direction, block[silent]] = True
        for b in np.flatnonzero(degree):
            forward, back = ((int(low[b]), int(high[b])) for low, high in fresh)
            parts[b].append(
                Part(kind, int(starts[b]), int(degree[b]), (forward, back), (bool(masked[0, b]), bool(masked[1, b])))
            )
    storage = {
        kind: _store(kind, found, orders, slot_of, total[kind], position, flags[kind], device)
        for kind, found in kinds.items()
    }
    made = tuple(Block(*block, tuple(own)) for block, own in zip(blocks, parts, strict=True))
    return Plan(
        {s: _places(graph.node_start[own], np.zeros(len(own)), np.arange(s)[None], device) for s, own in nodes.items()},
        {s: _tensor(own, np.int64, device) for s, own in nodes.items()},
        storage,
        _stages(made, levels.count, at_once, kinds, block_of, flags),
        made,
        at_once,
        ties_of(graph, device),
    )


def _tensor(numbers: np.ndarray, dtype: type[np.integer], device: torch.device) -> Tensor:
    if numbers.size and numbers.max() > np.iinfo(dtype).max:
        raise ValueError(f"A graph on a GPU must have fewer than 2^31 nodes and messages. Got {numbers.max()}.")
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype)).to(device)


def _places(start: np.ndarray, order: np.ndarray, offsets: np.ndarray, device: torch.device) -> Places:
    return Places(
        _tensor(start, np.int64, device), _tensor(order, np.int32, device), _tensor(offsets, np.int32, device)
    )


def _tied(graph: FactorGraph, device: torch.device) -> tuple[tuple[Tensor, Tensor | int], ...]:
    """For the nodes and each group of factors, the rows of mu that add up to each row of theta, and how many do."""
    found: list[tuple[Tensor, Tensor | int]] = [(torch.arange(graph.node_size, device=device), 1)]
    for group in graph.factor_groups:
        entries = np.arange(group.table_size)
        counts = np.bincount(group.tables, minlength=group.num_tables)
        members = np.argsort(group.tables, kind="stable")  # factors, table by table
        rows = group.mu_start + members * group.table_size
        if (counts == counts[0]).all():
            rows = rows.reshape(group.num_tables, 1, -1) + entries[:, None]  # (table, entry, factor)
            found.append((_tensor(rows.reshape(-1), np.int64, device), int(counts[0])))
        else:
            first = np.cumsum(counts) - counts
            lists = [rows[f : f + c] + entries[:, None] for f, c in zip(first, counts, strict=True)]
            rows = np.concatenate([own.reshape(-1) for own in lists])
            found.append((_tensor(rows, np.int64, device), _tensor(np.repeat(counts, len(entries)), np.int64, device)))
    return tuple(found)


def _order_nodes(
    graph: FactorGraph, levels: Levels, kinds: dict[Kind, Incidences]
) -> tuple[np.ndarray, dict[int, np.ndarray], list[tuple[int, int, int, int]], np.ndarray]:
    """Where each variable is packed, the packed variables by states, blocks without parts, the block of each."""
    n = graph.num_variables
    classes = np.zeros((len(kinds) + 1, n), np.int64)
    for k, found in enumerate(kinds.values()):
        degree = np.bincount(found.variable, minlength=n)
        classes[k] = np.ceil(np.log2(np.maximum(degree, 1))).astype(np.int64) + (degree > 0)
    classes[-1] = levels.level
    if _padding(levels, kinds, n) <= 1.3:
        classes[:-1] = 0
    position, block_of = np.empty(n, np.int64), np.empty(n, np.int64)
    nodes: dict[int, np.ndarray] = {}
    blocks: list[tuple[int, int, int, int]] = []
    for group in graph.node_groups:
        own = group.variables[np.lexsort((group.variables, *classes[:, group.variables]))]
        s = group.num_states
        position[own] = np.arange(len(own))
        nodes[s] = own
        keys = classes[:, own]
        cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        for first, last in zip([0, *cuts], [*cuts, len(own)], strict=True):
            block_of[own[first:last]] = len(blocks)
            blocks.append((s, int(keys[-1, first]), int(first), int(last - first)))
    return position, nodes, blocks, block_of


def _padding(levels: Levels, kinds: dict[Kind, Incidences], n: int) -> float:
    """Slots over incidences, if all nodes of a level had as many slots as the one with most factors."""
    slots = incidences = 0
    for found in kinds.values():
        degree = np.bincount(found.variable, minlength=n)
        most = np.zeros(levels.count, np.int64)
        np.maximum.at(most, levels.level, degree)
        slots += int(most[levels.level].sum())
        incidences += len(found.variable)
    return slots / max(incidences, 1)


def _ranges(block: np.ndarray, depth: np.ndarray, chosen: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block, the range of depths of the chosen incidences."""
    low, high = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(low, block[chosen], depth[chosen])
    np.maximum.at(high, block[chosen], depth[chosen] + 1)
    return np.minimum(low, high), high


def _depth(variable: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """The place of each incidence among those of its variable: first those updated forward only, last backward only."""
    order = np.lexsort((np.array([3, 0, 2, 1])[flags], variable))
    counts = np.bincount(variable)
    depth = np.empty_like(variable)
    depth[order] = np.arange(len(variable)) - np.repeat(np.cumsum(counts) - counts, counts)
    return depth


def _updated(levels: Levels, found: Incidences, at_once: bool) -> np.ndarray:
    if at_once or found.others.shape[1] == 0:
        return np.full(len(found.variable), 1 if found.others.shape[1] == 0 and not at_once else 3, np.int8)
    own, others = levels.rank[found.variable], levels.rank[found.others]
    not_first, not_last = own > others.min(axis=1), own < others.max(axis=1)
    flags: np.ndarray = (not_first + 2 * not_last).astype(np.int8)
    return flags


def _store(
    kind: Kind,
    found: Incidences,
    orders: list[EntryOrder],
    slot_of: dict[Kind, np.ndarray],
    slots: int,
    position: np.ndarray,
    flags: np.ndarray,
    device: torch.device,
) -> KindStorage:
    own, num_others = slot_of[kind], len(kind) - 1
    used, order = np.unique(found.entries, return_inverse=True)
    order = order.reshape(-1)
    offsets = np.stack([orders[k][0] for k in used])
    shared = int(found.table.max()) + 1 < len(own)
    table = found.table if shared else own  # of each incidence

    def placed(values: np.ndarray, at: np.ndarray, size: int, empty: int = 0) -> np.ndarray:
        out = np.full(size, empty, np.int64)
        out[at] = values
        return out

    num_tables = int(found.table.max()) + 1 if shared else slots
    first = np.flatnonzero(found.mu >= 0)
    # A factor of one variable has no neighbour; then row 0 only says whether a slot is empty.
    neighbours = np.full((max(num_others, 1), slots), -1, np.int64)
    neighbours[0, own] = 0
    cavities = np.full((max(num_others, 1), slots), -1, np.int64)
    for o in range(num_others):
        neighbours[o, own] = position[found.others[:, o]]
        cavities[o, own] = slot_of[found.mate_kinds[o]][found.mates[o]]
    maps = np.stack([np.stack([orders[k][1][o] for k in used]) for o in range(num_others)] or [offsets])
    return KindStorage(
        kind,
        slots,
        _tensor(neighbours, np.int32, device),
        _tensor(cavities, np.int32, device),
        found.mate_kinds,
        _tensor(placed(table, own, slots), np.int32, device),
        _tensor(placed(flags + 4 * np.array([orders[k][2] for k in used])[order], own, slots, -1), np.int8, device),
        shared,
        _tensor(placed(found.factor, own, slots), np.int64, device),
        _tensor(placed(found.factor, table, num_tables), np.int64, device),
        _places(placed(found.base, table, num_tables, -1), placed(order, table, num_tables), offsets, device),
        _places(placed(found.message, own, slots, -1), np.zeros(slots), np.arange(kind[0])[None], device),
        _tensor(own[first], np.int32, device),
        _tensor(position[found.variable[first]], np.int32, device),
        _places(found.mu[first], order[first], offsets, device),
        _tensor(maps, np.int32, device),
    )


def _stages(
    blocks: tuple[Block, ...],
    count: int,
    at_once: bool,
    kinds: dict[Kind, Incidences],
    block_of: np.ndarray,
    flags: dict[Kind, np.ndarray],
) -> tuple[tuple[tuple[Block, int], ...], ...]:
    if at_once:
        return (tuple((block, 0) for block in blocks),)
    has = np.zeros((2, len(blocks)), bool)
    for kind, found in kinds.items():
        for direction in range(2):
            has[direction][block_of[found.variable[(flags[kind] >> direction & 1) == 1]]] = True
    by_level: list[list[int]] = [[] for _ in range(count)]
    for k, block in enumerate(blocks):
        by_level[block.level].append(k)
    stages = []
    for direction, order in ((0, by_level), (1, by_level[::-1])):
        for members in order:
            stage = tuple((blocks[k], direction) for k in members if has[direction, k])
            if stage:
                stages.append(stage)
    return tuple(stages)
