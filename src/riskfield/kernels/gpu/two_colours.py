"""The backward pass of sweeps in two colours over small pairwise tables: one launch does all that a block needs.

All messages into nodes of one colour are updated together, and their cavities are used by the other colour only. So a
program sums the cotangents of a node's belief and at once goes back through the messages to it. `cotangents` has the
kernels for other sweeps, which take two launches for this. A tile has the slots of BN nodes side by side: K for each
node, its degree padded to a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from riskfield.kernels.gpu.cotangents import _recorded, _shares
from riskfield.kernels.gpu.plan import Block, Part, Plan
from riskfield.kernels.gpu.storage import LANES, factor_tile, power_of_two, programs, tile_size
from riskfield.kernels.gpu.tiles import NEG, _at, _lse, _others, _pass_on, _places, _table

if TYPE_CHECKING:
    from riskfield.kernels.gpu.backward import _Backward

_LARGEST_TILE = 16  # entries of a table; with larger ones, two launches are faster: they need fewer registers
_LARGEST_DEGREE = 8


def two_coloured(plan: Plan) -> bool:
    """Whether `go_back` can do the sweeps of a plan."""
    if plan.at_once or len(plan.stages) != 2:
        return False
    blocks = [entry for stage in plan.stages for entry in stage]
    return all(len(block.parts) == 1 and _fits(block.parts[0], direction) for block, direction in blocks)


def _fits(part: Part, direction: int) -> bool:
    """Whether all messages from the factors of a part are updated, and a tile has room for those to a node."""
    whole = part.fresh[direction] == (0, part.degree) and not part.masked[direction]
    return whole and len(part.kind) == 2 and tile_size(part.kind) <= _LARGEST_TILE and part.degree <= _LARGEST_DEGREE


def go_back(
    going: _Backward, block: Block, *, sweep: int, place: int, tape: tuple[int, int], add: bool, clear: bool
) -> None:
    """From the cotangents of what the nodes of a block received in a sweep to those of theta and of their neighbours.

    `place`: of the sweep on the tape; `tape`: where the block begins there; `add` and `clear`: see `message_cotangent`.
    """
    (part,) = block.parts
    engine, buffers, slots = going.engine, going.buffers, power_of_two(part.degree)
    own, start = engine.plan.kinds[part.kind], engine.node_start[block.states]
    tile, nodes = factor_tile(part.kind, 0, engine.wide), LANES if slots <= 4 else LANES // 2
    node_cotangent[programs(block.count * engine.batch, nodes)](
        buffers.tables[part.kind], going.cavities[0], going.direct[start:], going.theta[start:],
        buffers.rates[block.states], going.grads, buffers.counting[part.kind], own.neighbours, own.cavities,
        own.tables, engine.starts[part.kind], buffers.tape, going.ended, part.first, part.degree, own.slots,
        block.first, block.count, engine.batch, place * engine.tape_size + tape[0],
        place * engine.grad_size + tape[1], engine.message_start[part.kind], engine.counting_step, engine.rate_step,
        sweep, int(block in going.pending), int(add), int(clear),
        **{name: tile[name] for name in ("S", "SX", "D1", "Q1", "WIDE")}, K=slots, BN=nodes, SHARED=own.shared,
        STREAM=engine.streams(part, block), num_warps=max(1, slots * nodes // LANES),
    )  # fmt: skip
    going.pending.discard(block)


@triton.jit(
    do_not_specialize=[
        *["first_slot", "degree", "slots", "first_node", "count", "batch", "tape_start", "grad_start", "own_messages"],
        *["counting_step", "rate_step", "sweep", "direct", "add", "clear"],
    ]
)
def node_cotangent(
    table, cavity_grad, direct_grad, theta_grad, rate, grad_tape, counting, neighbours, cavities, tables, starts, tape,
    ended,
    first_slot, degree, slots, first_node, count, batch, tape_start, grad_start, own_messages, counting_step,
    rate_step, sweep, direct, add, clear,
    S: tl.constexpr, SX: tl.constexpr, D1: tl.constexpr, Q1: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr, SHARED: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """`belief_cotangent`, then `message_cotangent` of the nodes of a block."""
    _, local, item, exists = _places(count, batch, BN, WIDE)
    node = first_node + local
    d, node_of_slot, item_of_slot, inside = _slots(degree, count, batch, K, BN, WIDE)
    within = d * count + node_of_slot
    e, place = first_slot + within, within * batch + item_of_slot
    r = e * batch + item_of_slot
    # Loads do not wait for what tells which slots and items there are; stores do.
    live = exists & (tl.load(ended + item, mask=exists, other=-1) > sweep)
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    valid = valid & (tl.load(ended + item_of_slot, mask=inside, other=-1) > sweep)
    x = tl.arange(0, SX)
    mine = (x < S)[:, None] & valid[None]
    message_at = own_messages + _at(r[None], x[:, None], S)
    taken = tl.load(cavity_grad + message_at, mask=(x < S)[:, None] & inside[None], other=0.0)
    total = tl.sum(tl.reshape(taken, [SX, K, BN]), axis=1)  # cotangents of empty slots are 0
    node_at = _at((node * batch + item)[None], x[:, None], S)
    own, stored = (x < S)[:, None] & exists[None], (x < S)[:, None] & live[None]
    if direct != 0:
        total += tl.load(direct_grad + node_at, mask=own, other=0.0)
        tl.store(direct_grad + node_at, tl.zeros([SX, BN], total.dtype), mask=stored)
    total *= tl.load(rate + node * rate_step, mask=exists, other=1.0)[None]
    tl.store(theta_grad + node_at, tl.load(theta_grad + node_at, mask=own, other=0.0) + total, mask=stored)
    of_slots = tl.reshape(tl.broadcast_to(total[:, None, :], [SX, K, BN]), [SX, K * BN])
    g = tl.load(counting + e * counting_step, mask=inside, other=0.0)[None] * of_slots - taken
    if clear != 0:
        tl.store(cavity_grad + message_at, tl.zeros([SX, K * BN], g.dtype), mask=mine)
    y, y2, y3, there, joint = _others(D1, 1, 1, Q1, 1, 1)
    read = inside[None] & there[:, None]
    v = _recorded(tape + tape_start, place, y, y2, y3, read, 1, D1, 1, 1, Q1, K * BN)
    full = _table(table, tables, e, r, item_of_slot, batch, x, joint, there, inside, S, D1, SHARED, STREAM) + v[None]
    u, share = _shares(full)
    # As in `message_cotangent`: rounding must not let the cotangents of a message sum to other than 0.
    g -= tl.where(u > NEG, tl.exp(u - _lse(u, 0)[None]), 0.0) * tl.sum(g, axis=0)[None]
    tl.store(grad_tape + grad_start + _at(place[None], x[:, None], S), g, mask=mine)
    passed = tl.sum(share * tl.where(valid[None], g, 0.0)[:, None, :], axis=0)
    _pass_on(cavity_grad, cavities, starts, 0, slots, e, item_of_slot, batch, valid, passed, D1, Q1, add)


@triton.jit
def _slots(degree, count, batch, K: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr):
    """The slots of this program's nodes: which of its node's, the node, the batch item, and whether it exists."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    q = tl.arange(0, K * BN)
    d, k = q // BN, pid * BN + q % BN
    local, item = k // batch, k % batch
    return d, local, item, (local < count) & (d < degree)
