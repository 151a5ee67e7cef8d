"""Triton kernels: one launch updates a block of nodes, or goes back through that update.

A number of item b of node or slot k lies at place r = k * batch + b of its kind; entry x of place r at
(r // 32 * entries + x) * 32 + r % 32, so that all entries of 32 neighbouring places are together. The last axis of a
tile is BN neighbouring places. The others are the states of the receiving variable, padded to a power of two, and the
joint states of the other variables of a factor, each padded likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEG = tl.constexpr(float("-inf"))


@triton.jit
def _at(r, entry, entries: tl.constexpr):
    """Address of `entry` of place r; both broadcast.

    The hint makes neighbouring threads take neighbouring places. It says nothing about alignment, so loads stay single.
    """
    at = (r // 32) * (32 * entries) + entry * 32 + r % 32
    if len(at.shape) == 2:
        return tl.max_contiguous(at, [1, at.shape[1]])
    else:
        return tl.max_contiguous(at, [1, 1, at.shape[2]])


@triton.jit
def _lse(v, axis: tl.constexpr):
    top = tl.max(v, axis=axis)
    shift = tl.where(top > NEG, top, 0.0)
    return shift + tl.log(tl.sum(tl.exp(v - tl.expand_dims(shift, axis)), axis=axis))


@triton.jit
def _others(p, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr):
    """States of up to three others at padded joint states p, whether they exist, and their place in a table."""
    y1, y2, y3 = p // (Q2 * Q3), (p // Q3) % Q2, p % Q3
    exists = (y1 < D1) & (y2 < D2) & (y3 < D3)
    y1, y2, y3 = tl.minimum(y1, D1 - 1), tl.minimum(y2, D2 - 1), tl.minimum(y3, D3 - 1)
    return y1, y2, y3, exists, (y1 * D2 + y2) * D3 + y3


@triton.jit
def _cavity(
    beliefs, messages, neighbours, cavities, starts, o: tl.constexpr, slots, e, item, batch, y, D: tl.constexpr, valid,
    inside,
):  # fmt: skip
    """log b_j / m_cj at states y of other o: shape (joint state, place). 0 / 0 is 0."""
    # An empty slot has cavity 0, so that this address need not wait for `valid`.
    slot = tl.load(cavities + o * slots + e, mask=inside, other=0).to(e.dtype)
    node = tl.load(neighbours + o * slots + e, mask=valid, other=0).to(e.dtype)
    b = tl.load(
        beliefs + tl.load(starts + 2 * o) + _at((node * batch + item)[None], y[:, None], D), mask=valid[None], other=0.0
    )
    m = tl.load(
        messages + tl.load(starts + 2 * o + 1) + _at((slot * batch + item)[None], y[:, None], D),
        mask=valid[None],
        other=0.0,
    )
    return tl.where(m == NEG, NEG, b - m)


@triton.jit
def _table(
    table, tables, e, r, item, batch, x, joint, exists, valid, S: tl.constexpr, P: tl.constexpr, SHARED: tl.constexpr
):
    """Entries of a factor's table: (own state, joint state, place)."""
    at = r
    if SHARED:
        at = tl.load(tables + e, mask=valid, other=0).to(e.dtype) * batch + item
    entry = x[:, None] * P + joint[None]
    there = ((x < S)[:, None] & exists[None])[:, :, None] & valid[None, None]
    return tl.load(table + _at(at[None, None], entry[:, :, None], S * P), mask=there, other=NEG)


@triton.jit
def _incoming(messages, counting, step, neighbours, own_messages, e, item, batch, x, inside, S: tl.constexpr):
    """Log-messages into a block that are not updated, each times its counting number."""
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    at = own_messages + _at((e * batch + item)[None], x[:, None], S)
    u = tl.load(messages + at, mask=(x < S)[:, None] & valid[None], other=0.0)
    return tl.load(counting + e * step, mask=valid, other=0.0)[None] * u


@triton.jit
def _update(
    table, messages, beliefs, neighbours, cavities, tables, updated, starts, damping, bit, slots, batch, own_messages,
    e, item, x, y1, y2, y3, exists, joint, inside,
    S: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, MAXIMISE: tl.constexpr, DAMPED: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """The new log-messages from slots e, the cavities that they are made of, and which slots are not empty.

    TOTAL returns the logarithm of the sum of each message, before it was normalised, in place of the first cavity.
    """
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    mine = (x < S)[:, None] & valid[None]
    full = _table(table, tables, e, r, item, batch, x, joint, exists, inside, S, D1 * D2 * D3, SHARED)
    c1 = full
    c2 = full
    c3 = full
    if OTHERS > 0:
        c1 = _cavity(beliefs, messages, neighbours, cavities, starts, 0, slots, e, item, batch, y1, D1, valid, inside)
        full += c1[None]
    if OTHERS > 1:
        c2 = _cavity(beliefs, messages, neighbours, cavities, starts, 1, slots, e, item, batch, y2, D2, valid, inside)
        full += c2[None]
    if OTHERS > 2:
        c3 = _cavity(beliefs, messages, neighbours, cavities, starts, 2, slots, e, item, batch, y3, D3, valid, inside)
        full += c3[None]
    if DAMPED or MASKED:
        old = tl.load(messages + own_messages + _at(r[None], x[:, None], S), mask=mine, other=NEG)
    if MAXIMISE:  # noqa: SIM108 (Triton compiles one of the two)
        u = tl.max(full, axis=1)
    else:
        u = _lse(full, 1)
    total = _lse(u, 0)
    if TOTAL:
        c1 = total
    u = u - total[None]
    if DAMPED:
        kept = tl.load(damping)
        mixed = (1 - kept) * u + kept * tl.where(old == NEG, -1e30, old)
        u = tl.where(u == NEG, NEG, mixed)
        u = u - _lse(u, 0)[None]
    u = tl.where(mine, u, NEG)
    if MASKED:
        fresh = (tl.load(updated + e, mask=valid, other=0) & bit) != 0
        u = tl.where(fresh[None], u, old)
    return u, c1, c2, c3, valid


@triton.jit
def _receive(
    messages, tape, counting, step, own_messages, u, c1, c2, c3, valid, e, item, place, batch, x, y1, y2, y3, exists,
    S: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Store new messages, with their cavities on the tape, and return their share in the beliefs."""
    if RECORD:
        rows: tl.constexpr = D1 + (D2 if OTHERS > 1 else 0) + (D3 if OTHERS > 2 else 0)
        if OTHERS > 0:
            there = (exists & (y2 == 0) & (y3 == 0))[:, None] & valid[None]
            tl.store(tape + _at(place[None], y1[:, None], rows), c1, mask=there)
        if OTHERS > 1:
            there = (exists & (y1 == 0) & (y3 == 0))[:, None] & valid[None]
            tl.store(tape + _at(place[None], (D1 + y2)[:, None], rows), c2, mask=there)
        if OTHERS > 2:
            there = (exists & (y1 == 0) & (y2 == 0))[:, None] & valid[None]
            tl.store(tape + _at(place[None], (D1 + D2 + y3)[:, None], rows), c3, mask=there)
    at = own_messages + _at((e * batch + item)[None], x[:, None], S)
    tl.store(messages + at, u, mask=(x < S)[:, None] & valid[None])
    return tl.where(valid[None], tl.load(counting + e * step, mask=valid, other=0.0)[None] * u, 0.0)


_SIZES = [
    "first_slot",
    "degree",
    "fresh_first",
    "fresh_last",
    "slots",
    "first_node",
    "count",
    "batch",
    "tape_start",
    "bit",
    "own_nodes",
    "own_messages",
    "counting_step",
    "rate_step",
]


@triton.jit(do_not_specialize=[*_SIZES, "measure"])
def update_block(
    table, messages_in, messages_out, beliefs_in, beliefs_out, node_theta, accumulator, rate, counting,
    neighbours, cavities, tables, updated, starts, tape, residual, damping, live,
    first_slot, degree, fresh_first, fresh_last, slots, first_node, count, batch, tape_start, bit,
    own_nodes, own_messages, counting_step, rate_step, measure,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, MAXIMISE: tl.constexpr, DAMPED: tl.constexpr, RECORD: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """Messages to the nodes of a block from factors of one kind, then, after the last kind, beliefs.

    SETTLED: some items are not `live`; they stay as they are. AHEAD messages to a node (1, 2 or 4) are computed before
    the first of them is stored, so that the operands of all of them are on their way at the same time.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    q = pid * BN + tl.arange(0, BN)
    local, item = q // batch, q % batch
    inside = local < count
    if SETTLED:
        inside = inside & (tl.load(live + item, mask=inside, other=0) != 0)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    total = tl.load((node_theta if FIRST else accumulator) + node_at, mask=own, other=NEG)
    p = tl.arange(0, Q1 * Q2 * Q3)
    y1, y2, y3, exists, joint = _others(p, D1, D2, D3, Q2, Q3)
    tape += tape_start
    end = first_slot + fresh_last * count
    for d in range(fresh_first):
        e = first_slot + d * count + local
        total += _incoming(messages_in, counting, counting_step, neighbours, own_messages, e, item, batch, x, inside, S)
    for d in range(fresh_first, fresh_last, AHEAD):
        e = first_slot + d * count + local
        place = (d * count + local) * batch + item
        u, c1, c2, c3, valid = _update(
            table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots, batch,
            own_messages, e, item, x, y1, y2, y3, exists, joint, inside,
            S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False,
        )  # fmt: skip
        if AHEAD > 1:
            e_b, place_b = e + count, place + count * batch
            u_b, c1_b, c2_b, c3_b, valid_b = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_b, item, x, y1, y2, y3, exists, joint, inside & (e_b < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False,
            )  # fmt: skip
        if AHEAD > 2:
            e_c, place_c = e + 2 * count, place + 2 * count * batch
            u_c, c1_c, c2_c, c3_c, valid_c = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_c, item, x, y1, y2, y3, exists, joint, inside & (e_c < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False,
            )  # fmt: skip
            e_d, place_d = e + 3 * count, place + 3 * count * batch
            u_d, c1_d, c2_d, c3_d, valid_d = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_d, item, x, y1, y2, y3, exists, joint, inside & (e_d < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False,
            )  # fmt: skip
        total += _receive(
            messages_out, tape, counting, counting_step, own_messages, u, c1, c2, c3, valid, e, item, place, batch, x,
            y1, y2, y3, exists, S, OTHERS, D1, D2, D3, RECORD,
        )  # fmt: skip
        if AHEAD > 1:
            total += _receive(
                messages_out, tape, counting, counting_step, own_messages, u_b, c1_b, c2_b, c3_b, valid_b, e_b, item,
                place_b, batch, x, y1, y2, y3, exists, S, OTHERS, D1, D2, D3, RECORD,
            )  # fmt: skip
        if AHEAD > 2:
            total += _receive(
                messages_out, tape, counting, counting_step, own_messages, u_c, c1_c, c2_c, c3_c, valid_c, e_c, item,
                place_c, batch, x, y1, y2, y3, exists, S, OTHERS, D1, D2, D3, RECORD,
            )  # fmt: skip
            total += _receive(
                messages_out, tape, counting, counting_step, own_messages, u_d, c1_d, c2_d, c3_d, valid_d, e_d, item,
                place_d, batch, x, y1, y2, y3, exists, S, OTHERS, D1, D2, D3, RECORD,
            )  # fmt: skip
    for d in range(fresh_last, degree):
        e = first_slot + d * count + local
        total += _incoming(messages_in, counting, counting_step, neighbours, own_messages, e, item, batch, x, inside, S)
    if LAST:
        b = total * tl.load(rate + (first_node + local) * rate_step, mask=inside, other=1.0)[None]
        b = b - _lse(b, 0)[None]
        if measure != 0:
            before = tl.load(beliefs_in + own_nodes + node_at, mask=own, other=NEG)
            whole = b
            if DAMPED:  # damping shortens the step of a log-belief by one factor
                whole = tl.where(b == NEG, NEG, before + (b - before) / (1 - tl.load(damping)))
                whole = whole - _lse(whole, 0)[None]
            step = tl.where(b != b, 2.0, tl.abs(tl.exp(whole) - tl.exp(before)))  # NaN: the model is impossible
            tl.atomic_max(residual + item, tl.max(tl.where(own, step, 0.0), axis=0), mask=inside)
        tl.store(beliefs_out + own_nodes + node_at, b, mask=own)
    else:
        tl.store(accumulator + node_at, total, mask=own)


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
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    q = pid * BN + tl.arange(0, BN)
    local, item = q // batch, q % batch
    inside = local < count
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
):  # fmt: skip
    """From the cotangents of the messages a block received to those of the cavities and tables behind them.

    `add` adds to the cotangents of cavities that are there; `clear` removes those that have been used. Where several
    variables of a factor receive at once, SPLIT takes those in one slot of their factors, so that no two messages of a
    launch pass cotangents on to the same cavity. Items that ended before this sweep take no part.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    place = pid * BN + tl.arange(0, BN)
    within, item = place // batch, place % batch
    inside = within < degree * count
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
    p = tl.arange(0, Q1 * Q2 * Q3)
    y1, y2, y3, exists, joint = _others(p, D1, D2, D3, Q2, Q3)
    v = tl.zeros([Q1 * Q2 * Q3, BN], table.dtype.element_ty)
    rows: tl.constexpr = D1 + (D2 if OTHERS > 1 else 0) + (D3 if OTHERS > 2 else 0)
    read = sent[None] & exists[:, None]
    if OTHERS > 0:
        v += tl.load(tape + tape_start + _at(place[None], y1[:, None], rows), mask=read, other=NEG)
    if OTHERS > 1:
        v += tl.load(tape + tape_start + _at(place[None], (D1 + y2)[:, None], rows), mask=read, other=NEG)
    if OTHERS > 2:
        v += tl.load(tape + tape_start + _at(place[None], (D1 + D2 + y3)[:, None], rows), mask=read, other=NEG)
    full = _table(table, tables, e, r, item, batch, x, joint, exists, sent, S, D1 * D2 * D3, SHARED) + v[None]
    u = _lse(full, 1)
    share = full - u[:, None, :]
    if clear != 0:
        tl.store(cavity_in + message_at, tl.zeros([SX, BN], g.dtype), mask=mine)
    # Messages are normalised, so their cotangents sum to zero over states. Rounding breaks that, and the error would
    # grow with every sweep.
    g -= tl.where(u > NEG, tl.exp(u - _lse(u, 0)[None]), 0.0) * tl.sum(g, axis=0)[None]
    kept = 0.0
    if DAMPED:
        kept = tl.load(damping)
    if KEEP:
        tl.store(message_grad + message_at, tl.where(fresh[None], kept * g, g), mask=mine)
    g = tl.where(fresh[None], (1 - kept) * g, 0.0)
    gv = tl.where(share > NEG, tl.exp(share) * g[:, None, :], 0.0)
    tl.store(grad_tape + grad_start + _at(place[None], x[:, None], S), g, mask=mine)
    if OTHERS > 0:
        gc = tl.sum(gv, axis=0)
        if OTHERS == 1:
            _pass_on(cavity_out, cavities, starts, 0, slots, e, item, batch, fresh, gc, D1, Q1, add)
        else:
            cube = tl.reshape(gc, [Q1, Q2, Q3, BN])
            first = tl.sum(tl.sum(cube, axis=2), axis=1)
            _pass_on(cavity_out, cavities, starts, 0, slots, e, item, batch, fresh, first, D1, Q1, add)
            second = tl.sum(tl.sum(cube, axis=2), axis=0)
            _pass_on(cavity_out, cavities, starts, 1, slots, e, item, batch, fresh, second, D2, Q2, add)
            if OTHERS > 2:
                third = tl.sum(tl.sum(cube, axis=1), axis=0)
                _pass_on(cavity_out, cavities, starts, 2, slots, e, item, batch, fresh, third, D3, Q3, add)


@triton.jit
def _pass_on(
    cavity_out,
    cavities,
    starts,
    o: tl.constexpr,
    slots,
    e,
    item,
    batch,
    fresh,
    grad,
    D: tl.constexpr,
    Q: tl.constexpr,
    add,
):
    """Store the cotangent of a cavity, or add it to what is there."""
    y = tl.arange(0, Q)
    slot = tl.load(cavities + o * slots + e, mask=fresh, other=0).to(e.dtype)
    at = tl.load(starts + 2 * o + 1) + _at((slot * batch + item)[None], y[:, None], D)
    there = (y < D)[:, None] & fresh[None]
    if add != 0:
        grad += tl.load(cavity_out + at, mask=there, other=0.0)
    tl.store(cavity_out + at, grad, mask=there)


@triton.jit(do_not_specialize=["first_slot", "members", "batch", "first", "sweeps", "tape_start", "grad_start"])
def table_cotangent(
    table, table_grad, neighbours, tables, tape, grad_tape, sizes, ended,
    first_slot, members, batch, first, sweeps, tape_start, grad_start,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Add to the cotangent of each factor's table what its messages of all sweeps on the tape passed on.

    These are `sweeps` sweeps from number `first` on. `sizes` are those of the two tapes per sweep, as int64: a product
    with a number of sweeps may exceed 32 bits.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    place = pid * BN + tl.arange(0, BN)
    inside = place // batch < members
    e, item = first_slot + place // batch, place % batch
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    x = tl.arange(0, SX)
    p = tl.arange(0, Q1 * Q2 * Q3)
    y1, y2, y3, exists, joint = _others(p, D1, D2, D3, Q2, Q3)
    rows: tl.constexpr = D1 + (D2 if OTHERS > 1 else 0) + (D3 if OTHERS > 2 else 0)
    t = _table(table, tables, e, r, item, batch, x, joint, exists, valid, S, D1 * D2 * D3, SHARED)
    entry = x[:, None] * (D1 * D2 * D3) + joint[None]
    there = ((x < S)[:, None] & exists[None])[:, :, None] & valid[None, None]
    table_at = _at(r[None, None], entry[:, :, None], S * D1 * D2 * D3)
    total = tl.load(table_grad + table_at, mask=there, other=0.0)
    tape_size, grad_size = tl.load(sizes), tl.load(sizes + 1)
    last = tl.load(ended + item, mask=inside, other=0) - first
    for k in range(sweeps):
        ran = valid & (k < last)
        read = ran[None] & exists[:, None]
        at = tape + tape_start + tape_size * k
        v = tl.zeros([Q1 * Q2 * Q3, BN], table.dtype.element_ty)
        if OTHERS > 0:
            v += tl.load(at + _at(place[None], y1[:, None], rows), mask=read, other=NEG)
        if OTHERS > 1:
            v += tl.load(at + _at(place[None], (D1 + y2)[:, None], rows), mask=read, other=NEG)
        if OTHERS > 2:
            v += tl.load(at + _at(place[None], (D1 + D2 + y3)[:, None], rows), mask=read, other=NEG)
        g = tl.load(
            grad_tape + grad_start + grad_size * k + _at(place[None], x[:, None], S),
            mask=(x < S)[:, None] & ran[None],
            other=0.0,
        )
        full = t + v[None]
        share = full - _lse(full, 1)[:, None, :]
        total += tl.where((share > NEG) & (g[:, None, :] != 0), tl.exp(share) * g[:, None, :], 0.0)
    tl.store(table_grad + table_at, total, mask=there)
