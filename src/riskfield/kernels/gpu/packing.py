"""Moves numbers between columns, in the caller's order, and the storage of an engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from riskfield.kernels.gpu.buffers import Buffers, on_device
from riskfield.kernels.gpu.canonical import pack_canonical, pack_states, shift_nodes, unpack_messages, unpack_odds
from riskfield.kernels.gpu.ends import factor_gradient, pack, transpose, uniform_beliefs, unpack
from riskfield.kernels.gpu.incidences import Kind
from riskfield.kernels.gpu.plan import Places
from riskfield.kernels.gpu.sharing import least_of, sharing_of
from riskfield.kernels.gpu.storage import LANES, NODES, column_tile, padded, power_of_two, programs
from riskfield.kernels.problem import MessagePassingProblem

if TYPE_CHECKING:
    from riskfield.kernels.gpu.engine import Engine

# The largest |t|. Then |t'| is at most four times as large, and so is the difference of two entries of t' in one row or
# column. What underflows in a sum of exp(t') times the other variable's cavity, whose largest entry is 1, is less than
# 1e-10 of the sum. The same holds for the marginal of a factor only if exp(t') is multiplied by one cavity after the
# other: two entries in different rows and columns may differ by six times this, and a product of both cavities may
# underflow where exp(t') makes up for it.
_LARGEST = {torch.float32: 16.0, torch.float64: 128.0}
# The largest entry of a table, not divided by counting numbers, times the largest degree. Theta of a variable gains
# what its messages lose, in all at most twice this number. What is left may be small, but its rounding errors are
# relative to that number: about 1e-4 in float32, and 1e-9 in float64.
_LARGEST_SUM = {torch.float32: 1e3, torch.float64: 5e6}


def is_bounded(problem: MessagePassingProblem, theta: Tensor) -> bool:
    """Whether there are pairwise tables that could be canonical, and the entries of all of them are small enough.

    The host waits for the answer.
    """
    if len(theta) == 0:
        return False
    found, shared = [], sharing_of(problem.graph, problem.counting).tables
    for group in problem.graph.factor_groups:
        if group.arity == 2 and not (group.tied and shared):
            entries = theta[:, group.theta_start : group.theta_start + group.num_tables * group.table_size]
            found.append(torch.linalg.vector_norm(entries, torch.inf, (0, 1)))
    if not found:
        return False
    largest = found[0] if len(found) == 1 else torch.stack(found).amax()
    limit = _LARGEST[theta.dtype] * least_of(problem.counting)
    return float(largest) <= min(limit, _LARGEST_SUM[theta.dtype] / problem.graph.max_degree)  # not if it is NaN


def turn(source: Tensor, target: Tensor) -> None:
    """Rows -> columns, or columns -> rows: the target becomes the transpose."""
    height, width = source.shape
    if min(height, width) < 2 or source.stride(1) != 1:
        target.copy_(source.t())
        return
    short = min(LANES, power_of_two(min(height, width)))
    h, w = (short, 2048 // short) if height < width else (2048 // short, short)
    # Rows of the source may overlap, as those of an expanded tensor do; those of the target do not.
    wide = height * max(source.stride(0), width) + 2**20 >= 2**31
    with on_device(source.device):
        transpose[(-(-height // h) * -(-width // w),)](
            source, target, height, width, source.stride(0), H=h, W=w, WIDE=wide
        )


def rows(columns: Tensor) -> Tensor:
    """A copy with the batch first; of one item, too, whose columns are rows already and belong to a buffer."""
    found = columns.new_empty(columns.shape[::-1])
    turn(columns, found)
    return found


def pack_members(engine: Engine, columns: Tensor, storage: Tensor, places: Places, scale: Tensor | None = None) -> None:
    """Columns -> storage, entry by entry."""
    tile = column_tile(places.entries, engine.batch)
    pack[programs(places.count * engine.batch, tile["BN"])](
        columns, storage, places.start, places.order, places.offsets, columns if scale is None else scale,
        places.count, engine.batch, WIDE=engine.wide, SCALED=scale is not None, **tile,
    )  # fmt: skip


def unpack_members(engine: Engine, storage: Tensor, columns: Tensor, places: Places, exp: bool = False) -> None:
    """Storage -> columns, entry by entry."""
    tile = column_tile(places.entries, engine.batch)
    unpack[programs(places.count * engine.batch, tile["BN"])](
        storage, columns, places.start, places.order, places.offsets, places.count, engine.batch, WIDE=engine.wide,
        EXP=exp, **tile,
    )  # fmt: skip


def pack_theta(engine: Engine, buffers: Buffers) -> None:
    """Theta in columns -> tables and nodes, and the state with uniform messages."""
    for kind in engine.plan.kinds:
        _pack_tables(engine, buffers, kind)
    for states, nodes in engine.plan.nodes.items():
        theta = buffers.node_theta[engine.node_start[states] :]
        if engine.odds:
            _pack_states(engine, buffers.theta, theta, nodes, states, None)
        else:
            pack_members(engine, buffers.theta, theta, nodes)
        numbers = engine.numbers(states)
        uniform_beliefs[programs(nodes.count * engine.batch, NODES)](
            theta, buffers.rates[states], buffers.beliefs[0][engine.node_start[states] :], nodes.count, engine.batch,
            engine.rate_step, S=numbers, SX=power_of_two(numbers), BN=NODES, WIDE=engine.wide, ODDS=engine.odds,
        )  # fmt: skip
    for block, part in engine.plan.parts():
        if part.kind in engine.canonical:
            numbers = engine.numbers(block.states)
            shift_nodes[programs(block.count * engine.batch, NODES)](
                buffers.node_theta[engine.node_start[block.states] :], buffers.shifts, buffers.counting[part.kind],
                part.first, part.degree, block.first, block.count, engine.batch, engine.message_start[part.kind],
                engine.counting_step, S=numbers, SX=power_of_two(numbers), BN=NODES, WIDE=engine.wide,
            )  # fmt: skip


def _pack_tables(engine: Engine, buffers: Buffers, kind: Kind) -> None:
    own, batch, first = engine.plan.kinds[kind], engine.batch, engine.message_start[kind]
    if kind not in engine.canonical:
        pack_members(engine, buffers.theta, buffers.tables[kind], own.theta, buffers.table_rates[kind])
        size = kind[0] * padded(own.slots * batch)
        buffers.messages[0][first : first + size].fill_(-math.log(kind[0]))
        return
    width = power_of_two(kind[1])
    places = 4 * LANES if width <= 4 else max(1, min(LANES, 2048 // width))
    pack_canonical[programs(own.slots * batch, places)](
        buffers.theta, buffers.tables[kind], buffers.shifts[first:], buffers.messages[0][first:], own.theta.start,
        own.theta.order, own.theta.offsets, buffers.table_rates[kind], own.slots, batch, S=kind[0], D=kind[1], Q=width,
        BN=places, TURN=batch < 8 and width > 2, WIDE=engine.wide, ODDS=engine.odds,
    )  # fmt: skip


def pack_messages(engine: Engine, buffers: Buffers, columns: Tensor) -> None:
    """Log-messages in columns -> storage."""
    for kind, own in engine.plan.kinds.items():
        first = engine.message_start[kind]
        if kind in engine.canonical:
            _pack_states(engine, columns, buffers.messages[0][first:], own.messages, kind[0], buffers.shifts[first:])
        else:
            pack_members(engine, columns, buffers.messages[0][first:], own.messages)


def _pack_states(
    engine: Engine, columns: Tensor, storage: Tensor, places: Places, states: int, shifts: Tensor | None
) -> None:
    each = _places_with(states)
    pack_states[programs(places.count * engine.batch, each)](
        columns, storage if shifts is None else shifts, storage, places.start, places.count, engine.batch,
        S=states, SX=power_of_two(states), BN=each, WIDE=engine.wide, ODDS=engine.odds, SHIFTED=shifts is not None,
    )  # fmt: skip


def unpack_nodes(engine: Engine, buffers: Buffers, storage: Tensor, columns: Tensor, exp: bool = False) -> None:
    """Numbers of nodes, or their exponentials -> columns. Log-odds become probabilities; their cotangents do not."""
    for states, nodes in engine.plan.nodes.items():
        first = engine.node_start[states]
        if engine.odds:
            unpack_odds[programs(nodes.count * engine.batch, NODES)](
                storage[first:], buffers.node_theta[first:], columns, nodes.start, nodes.count, engine.batch, BN=NODES,
                WIDE=engine.wide, EXP=exp,
            )  # fmt: skip
        else:
            unpack_members(engine, storage[first:], columns, nodes, exp)


def unpack_all_messages(engine: Engine, buffers: Buffers) -> None:
    """Normalised log-messages -> columns."""
    for kind, own in engine.plan.kinds.items():
        first = engine.message_start[kind]
        messages = buffers.messages[buffers.current][first:]
        if kind in engine.canonical:
            each = _places_with(kind[0])
            unpack_messages[programs(own.slots * engine.batch, each)](
                messages, buffers.shifts[first:], buffers.columns, own.messages.start, own.slots, engine.batch,
                S=kind[0], SX=power_of_two(kind[0]), BN=each, WIDE=engine.wide, ODDS=engine.odds,
            )  # fmt: skip
        else:
            unpack_members(engine, messages, buffers.columns, own.messages)


def other_tables(engine: Engine) -> dict[Kind, Tensor]:
    """For each kind, where the tables begin as the other variables of its factors see them."""
    return {
        kind: torch.tensor([engine.table_start[k] for k in own.other_kinds] or [0], device=engine.device)
        for kind, own in engine.plan.kinds.items()
    }


def gather(
    engine: Engine, buffers: Buffers, theta: Tensor, tables: Tensor, table_starts: dict[Kind, Tensor], gradient: Tensor
) -> None:
    """Cotangents of nodes, and of the tables of all slots, in storage -> the gradient in columns of mu."""
    unpack_nodes(engine, buffers, theta, gradient)
    for kind, own in engine.plan.kinds.items():
        if own.mu.count:
            tile = column_tile(own.mu.entries, engine.batch)
            factor_gradient[programs(own.mu.count * engine.batch, tile["BN"])](
                tables, gradient, buffers.counting[kind], own.primary, own.mu.start, own.mu.order,
                own.mu.offsets, own.cavities, own.maps, table_starts[kind], own.slots,
                engine.table_start[kind], len(own.mu.offsets), own.mu.count, engine.batch, engine.counting_step,
                OTHERS=len(kind) - 1, WIDE=engine.wide, **tile,
            )  # fmt: skip


def _places_with(states: int) -> int:
    """Places of a program that holds so many states of each."""
    return max(1, min(NODES, 4096 // power_of_two(states)))
