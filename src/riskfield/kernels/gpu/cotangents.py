"""Triton kernels that go back through the updates of `sweeps`, block by block. Storage and tiles are the same."""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.sweeps import _SIZES
from riskfield.kernels.gpu.tiles import NEG, _at, _lse, _others, _pass_on, _places, _slope, _table, _to_others, _weights


@triton.jit
def _shares(table, v, S: tl.constexpr, CANONICAL: tl.constexpr, ODDS: tl.constexpr):
    """The normalised message from log-cavities v, and the share of each joint state of the others in it.

    The shares are 0 where the sum is. If S is 1, ODDS makes them the derivative of one number by the other.
    """
    if ODDS and S == 1:
        return v, _slope(tl.sum(table, axis=1), v)[None]
    else:
        if CANONICAL:
            e = table * _weights(v)[None]
            total = tl.sum(e, axis=1)
            whole = tl.sum(total, axis=0)
            message = total * tl.where(whole > 0, 1.0 / whole, 0.0)[None]
        else:
            full = table + v[None]
            top = tl.max(full, axis=1)
            shift = tl.where(top > NEG, top, 0.0)
            e = tl.exp(full - shift[:, None, :])
            total = tl.sum(e, axis=1)
            u = shift + tl.log(total)
            message = tl.where(u > NEG, tl.exp(u - _lse(u, 0)[None]), 0.0)
        return message, e * tl.where(total > 0, 1.0 / total, 0.0)[:, None, :]


@triton.jit
def _recorded(
    tape, place, y1, y2, y3, read,
    OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sum of the log-cavities of the others on the tape: (joint state, place)."""
    rows: tl.constexpr = D1 + (D2 if OTHERS > 1 else 0) + (D3 if OTHERS > 2 else 0)
    v = tl.zeros([P, BN], tape.dtype.element_ty)
    if OTHERS > 0:
        v += tl.load(tape + _at(place[None], y1[:, None], rows), mask=read, other=NEG)
    if OTHERS > 1:
        v += tl.load(tape + _at(place[None], (D1 + y2)[:, None], rows), mask=read, other=NEG)
    if OTHERS > 2:
        v += tl.load(tape + _at(place[None], (D1 + D2 + y3)[:, None], rows), mask=read, other=NEG)
    return v


@triton.jit(
    do_not_specialize=[
        *["first_slot", "degree", "first_node", "count", "batch", "own_messages", "rate_step", "sweep", "direct"]
    ]
)
def belief_cotangent(
    cavity_grad, belief_grad, direct_grad, theta_grad, rate, ended,
    first_slot, degree, first_node, count, batch, own_messages, rate_step, sweep, direct,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sum the cotangents of a belief; after the last kind, pass it on to theta, scaled to that of each message.

    `direct`: there are cotangents of the beliefs themselves, too. Items that ended before this sweep take no part.
    """
    _, local, item, inside = _places(count, batch, BN, WIDE)
    live = inside & (tl.load(ended + item, mask=inside, other=-1) > sweep)  # only stores wait for it
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    stored = (x < S)[:, None] & live[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    total = tl.zeros([SX, BN], belief_grad.dtype.element_ty)
    if direct != 0:
        total += tl.load(direct_grad + node_at, mask=own, other=0.0)
        tl.store(direct_grad + node_at, tl.zeros([SX, BN], belief_grad.dtype.element_ty), mask=stored)
    if not FIRST:
        total += tl.load(belief_grad + node_at, mask=own, other=0.0)
    for d in range(degree):
        e = first_slot + d * count + local  # cotangents of empty slots are 0
        at = own_messages + _at((e * batch + item)[None], x[:, None], S)
        total += tl.load(cavity_grad + at, mask=own, other=0.0)
    if LAST:
        total *= tl.load(rate + (first_node + local) * rate_step, mask=inside, other=1.0)[None]
        tl.store(theta_grad + node_at, tl.load(theta_grad + node_at, mask=own, other=0.0) + total, mask=stored)
    tl.store(belief_grad + node_at, total, mask=stored)


@triton.jit(
    do_not_specialize=[
        *(name for name in _SIZES if name not in ("own_nodes", "rate_step")),
        *["grad_start", "slot", "sweep", "add", "clear"],
    ]
)
def message_cotangent(
    table, cavity_in, cavity_out, message_grad, belief_grad, grad_tape, counting,
    cavities, tables, updated, starts, tape, damping, ended,
    first_slot, degree, fresh_first, fresh_last, slots, first_node, count, batch, tape_start, grad_start, bit, slot,
    own_messages, counting_step, sweep, add, clear,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, DAMPED: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """From the cotangents of the messages a block received to those of the cavities and tables behind them.

    `add` adds to the cotangents of cavities that are there; `clear` removes those that have been used. Where several
    variables of a factor receive at once, SPLIT takes those in one slot of their factors, so that no two messages of a
    launch pass cotangents on to the same cavity. Items that ended before this sweep take no part.
    """
    place, within, item, inside = _places(degree * count, batch, BN, WIDE)
    d, local = within // count, within % count
    e = first_slot + within
    r = e * batch + item
    # Loads do not wait for what tells which slots and items there are; stores do.
    flags = tl.load(updated + e, mask=inside, other=-1)
    valid = inside & (flags >= 0) & (tl.load(ended + item, mask=inside, other=-1) > sweep)
    if SPLIT:
        valid = valid & ((flags >> 2) == slot)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    mine = (x < S)[:, None] & valid[None]
    message_at = own_messages + _at(r[None], x[:, None], S)
    g = tl.load(counting + e * counting_step, mask=inside, other=0.0)[None] * tl.load(
        belief_grad + _at(((first_node + local) * batch + item)[None], x[:, None], S), mask=own, other=0.0
    )
    g -= tl.load(cavity_in + message_at, mask=own, other=0.0)
    if KEEP:
        g += tl.load(message_grad + message_at, mask=own, other=0.0)
    sent = inside & (d >= fresh_first) & (d < fresh_last)
    fresh = valid & sent
    if MASKED:
        fresh = fresh & ((flags & bit) != 0)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    read = sent[None] & exists[:, None]
    v = _recorded(tape + tape_start, place, y1, y2, y3, read, OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN)
    t = _table(table, tables, e, r, item, batch, x, joint, exists, sent, S, D1 * D2 * D3, SHARED, STREAM, CANONICAL)
    message, share = _shares(t, v, S, CANONICAL, ODDS)
    tl.debug_barrier()  # several threads may hold the same number, as in `node_cotangent`: all read before one writes
    if clear != 0:
        tl.store(cavity_in + message_at, tl.zeros([SX, BN], g.dtype), mask=mine)
    # Messages are normalised, so their cotangents sum to zero over states. Rounding breaks that, and the error would
    # grow with every sweep. (A log-odds has one cotangent, so there is no sum to keep.)
    if not ODDS:
        g -= message * tl.sum(g, axis=0)[None]
    kept = 0.0
    if DAMPED:
        kept = tl.load(damping)
    if KEEP:
        tl.store(message_grad + message_at, tl.where(fresh[None], kept * g, g), mask=mine)
    g = tl.where(fresh[None], (1 - kept) * g, 0.0)
    gv = share * g[:, None, :]
    tl.store(grad_tape + grad_start + _at(place[None], x[:, None], S), g, mask=mine)
    if OTHERS > 0:
        _to_others(
            cavity_out, cavities, starts, slots, e, item, batch, fresh, tl.sum(gv, axis=0), add,
            OTHERS, D1, D2, D3, Q1, Q2, Q3, BN,
        )  # fmt: skip


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


@triton.jit(
    do_not_specialize=[
        *["first_slot", "degree", "slots", "first_node", "count", "batch", "tape_start", "grad_start", "own_messages"],
        *["counting_step", "rate_step", "sweep", "direct", "add", "clear"],
    ]
)
def node_cotangent(
    table, cavity_grad, direct_grad, theta_grad, rate, grad_tape, counting, cavities, tables, starts, tape, ended,
    first_slot, degree, slots, first_node, count, batch, tape_start, grad_start, own_messages, counting_step,
    rate_step, sweep, direct, add, clear,
    S: tl.constexpr, SX: tl.constexpr, D1: tl.constexpr, Q1: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr, SHARED: tl.constexpr, STREAM: tl.constexpr, CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """`belief_cotangent`, then `message_cotangent`, where other launches update the neighbours of the nodes.

    A tile has the slots of BN nodes side by side: K for each node, its degree padded to a power of two.
    """
    _, local, item, exists = _places(count, batch, BN, WIDE)
    node = first_node + local
    d, node_of_slot, item_of_slot, inside = _slots(degree, count, batch, K, BN, WIDE)
    within = d * count + node_of_slot
    e, place = first_slot + within, within * batch + item_of_slot
    r = e * batch + item_of_slot
    # Loads do not wait for what tells which slots and items there are; stores do.
    live = exists & (tl.load(ended + item, mask=exists, other=-1) > sweep)
    slot = tl.load(cavities + e, mask=inside, other=-1)
    valid = inside & (slot >= 0)
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
        # There are more threads than nodes, so that several hold the same number: all read before one writes.
        tl.debug_barrier()
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
    t = _table(table, tables, e, r, item_of_slot, batch, x, joint, there, inside, S, D1, SHARED, STREAM, CANONICAL)
    message, share = _shares(t, v, S, CANONICAL, ODDS)
    # As in `message_cotangent`: rounding must not let the cotangents of a message sum to other than 0.
    if not ODDS:
        g -= message * tl.sum(g, axis=0)[None]
    tl.store(grad_tape + grad_start + _at(place[None], x[:, None], S), g, mask=mine)
    passed = tl.sum(share * tl.where(valid[None], g, 0.0)[:, None, :], axis=0)
    _pass_on(cavity_grad, starts, 0, slot, item_of_slot, batch, valid, passed, D1, Q1, add)


@triton.jit(
    do_not_specialize=["first_slot", "degree", "first_node", "count", "batch", "own_messages", "own_sizes", "sweep"]
)
def counting_cotangent(
    messages, belief_grad, counting_grad, updated, ended,
    first_slot, degree, first_node, count, batch, own_messages, own_sizes, sweep,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add to the cotangent of each slot's counting number what the beliefs of a block, just updated, pass on to it.

    A belief is a function of the sum of messages times counting numbers. Its cotangents sum to 0 over states.
    """
    _, within, item, inside = _places(degree * count, batch, BN, WIDE)
    e = first_slot + within
    valid = inside & (tl.load(updated + e, mask=inside, other=-1) >= 0)
    valid = valid & (tl.load(ended + item, mask=inside, other=-1) > sweep)
    x = tl.arange(0, SX)
    mine = (x < S)[:, None] & valid[None]
    m = tl.load(messages + own_messages + _at((e * batch + item)[None], x[:, None], S), mask=mine, other=0.0)
    at = _at(((first_node + within % count) * batch + item)[None], x[:, None], S)
    g = tl.load(belief_grad + at, mask=mine, other=0.0)
    found = tl.sum(tl.where(m > NEG, m * g, 0.0), axis=0)
    to = counting_grad + own_sizes + e * batch + item
    tl.store(to, tl.load(to, mask=valid, other=0.0) + found, mask=valid)


@triton.jit(do_not_specialize=["first_slot", "members", "batch", "first", "sweeps", "tape_start", "grad_start"])
def table_cotangent(
    table, table_grad, neighbours, tables, tape, grad_tape, sizes, ended,
    first_slot, members, batch, first, sweeps, tape_start, grad_start,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, CANONICAL: tl.constexpr,
):  # fmt: skip
    """Add to the cotangent of each factor's table what its messages of all sweeps on the tape passed on.

    These are `sweeps` sweeps from number `first` on. `sizes` are those of the two tapes per sweep, as int64: a product
    with a number of sweeps may exceed 32 bits.
    """
    place, within, item, inside = _places(members, batch, BN, WIDE)
    e = first_slot + within
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    t = _table(table, tables, e, r, item, batch, x, joint, exists, valid, S, D1 * D2 * D3, SHARED, False, CANONICAL)
    entry = x[:, None] * (D1 * D2 * D3) + joint[None]
    there = ((x < S)[:, None] & exists[None])[:, :, None] & valid[None, None]
    table_at = _at(r[None, None], entry[:, :, None], S * D1 * D2 * D3)
    total = tl.load(table_grad + table_at, mask=there, other=0.0)
    tape_size, grad_size = tl.load(sizes), tl.load(sizes + 1)
    last = tl.minimum(tl.load(ended + item, mask=inside, other=0) - first, sweeps)
    tape += tape_start
    grads = grad_tape + grad_start + _at(place[None], x[:, None], S)
    own = (x < S)[:, None]
    ran = valid & (last > 0)
    v = _recorded(tape, place, y1, y2, y3, ran[None] & exists[:, None], OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN)
    g = tl.load(grads, mask=own & ran[None], other=0.0)
    for k in range(sweeps):
        _, share = _shares(t, v, S, CANONICAL, False)
        total += tl.where(g[:, None, :] != 0, share * g[:, None, :], 0.0)
        ran = valid & (k + 1 < last)  # loaded one sweep ahead
        tape += tape_size
        grads += grad_size
        v = _recorded(tape, place, y1, y2, y3, ran[None] & exists[:, None], OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN)
        g = tl.load(grads, mask=own & ran[None], other=0.0)
    tl.store(table_grad + table_at, total, mask=there)
