"""Triton kernels of message passing: one launch updates a block of nodes. `cotangents` has the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.tiles import INF, NEG, _at, _cavity, _largest, _lse, _odds, _others, _places, _table


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
    STREAM: tl.constexpr, CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """The new log-messages from slots e, the cavities that they are made of, and which slots are not empty.

    TOTAL returns the logarithm of the sum of each message, before it was normalised, in place of the first cavity.
    If S is 1, ODDS makes the message one number, too, which needs no normalisation.
    """
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    mine = (x < S)[:, None] & valid[None]
    full = _table(
        table, tables, e, r, item, batch, x, joint, exists, inside, S, D1 * D2 * D3, SHARED, STREAM, CANONICAL
    )
    c1 = full
    c2 = full
    c3 = full
    if OTHERS > 0:
        c1 = _cavity(
            beliefs, messages, neighbours, cavities, starts, 0, slots, e, item, batch, y1, D1, valid, inside, ODDS
        )
        if not CANONICAL:
            full += c1[None]
    if OTHERS > 1:
        c2 = _cavity(beliefs, messages, neighbours, cavities, starts, 1, slots, e, item, batch, y2, D2, valid, inside)
        full += c2[None]
    if OTHERS > 2:
        c3 = _cavity(beliefs, messages, neighbours, cavities, starts, 2, slots, e, item, batch, y3, D3, valid, inside)
        full += c3[None]
    if DAMPED or MASKED:
        old = tl.load(messages + own_messages + _at(r[None], x[:, None], S), mask=mine, other=NEG)
    if ODDS and S == 1:
        coupled, above, below = _odds(tl.sum(full, axis=1), c1)
        if MAXIMISE:  # noqa: SIM108 (Triton compiles one of the two)
            u = tl.log(tl.maximum(coupled, below))
        else:
            u = tl.log((coupled + below) / (above + below))
    elif CANONICAL:
        top = tl.max(c1, axis=0)
        shift = tl.where(top > NEG, top, 0.0)[None]
        full *= tl.exp(c1 - shift)[None]
        u = shift + tl.log(tl.max(full, axis=1) if MAXIMISE else tl.sum(full, axis=1))
    elif MAXIMISE:
        u = tl.max(full, axis=1)
    else:
        u = _lse(full, 1)
    if not (ODDS and S == 1):
        total = _lse(u, 0)
        if TOTAL:
            c1 = total
        u = u - total[None]
    if DAMPED:
        kept = tl.load(damping)
        mixed = (1 - kept) * u + kept * tl.where(old == NEG, -1e30, old)
        u = tl.where(u == NEG, NEG, mixed)
        if not (ODDS and S == 1):
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
    FIRST: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr, SETTLED: tl.constexpr, STREAM: tl.constexpr,
    CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Messages to the nodes of a block from factors of one kind, then, after the last kind, beliefs.

    SETTLED: some items are not `live`; they stay as they are. STREAM: see `_table`. AHEAD messages to a node (1, 2 or
    4) are computed before the first of them is stored, so that the operands of all of them are on their way at the
    same time.
    """
    _, local, item, inside = _places(count, batch, BN, WIDE)
    if SETTLED:
        inside = inside & (tl.load(live + item, mask=inside, other=0) != 0)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    total = tl.load((node_theta if FIRST else accumulator) + node_at, mask=own, other=NEG)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
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
            S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False, STREAM, CANONICAL, ODDS,
        )  # fmt: skip
        if AHEAD > 1:
            e_b, place_b = e + count, place + count * batch
            u_b, c1_b, c2_b, c3_b, valid_b = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_b, item, x, y1, y2, y3, exists, joint, inside & (e_b < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False, STREAM, CANONICAL, ODDS,
            )  # fmt: skip
        if AHEAD > 2:
            e_c, place_c = e + 2 * count, place + 2 * count * batch
            u_c, c1_c, c2_c, c3_c, valid_c = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_c, item, x, y1, y2, y3, exists, joint, inside & (e_c < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False, STREAM, CANONICAL, ODDS,
            )  # fmt: skip
            e_d, place_d = e + 3 * count, place + 3 * count * batch
            u_d, c1_d, c2_d, c3_d, valid_d = _update(
                table, messages_in, beliefs_in, neighbours, cavities, tables, updated, starts, damping, bit, slots,
                batch, own_messages, e_d, item, x, y1, y2, y3, exists, joint, inside & (e_d < end),
                S, OTHERS, D1, D2, D3, SHARED, MASKED, MAXIMISE, DAMPED, False, STREAM, CANONICAL, ODDS,
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
        if not ODDS:
            b = b - _lse(b, 0)[None]
        if measure != 0:
            before = tl.load(beliefs_in + own_nodes + node_at, mask=own, other=NEG)
            whole = b
            if DAMPED:  # damping shortens the step of a log-belief by one factor
                whole = tl.where(tl.abs(b) == INF, b, before + (b - before) / (1 - tl.load(damping)))
            if ODDS:
                step = 1.0 / (1.0 + tl.exp(-whole)) - 1.0 / (1.0 + tl.exp(-before))
            else:
                if DAMPED:
                    whole = whole - _lse(whole, 0)[None]
                step = tl.exp(whole) - tl.exp(before)
            step = tl.where(b != b, 2.0, tl.abs(step))  # NaN: the model is impossible
            _largest(residual, tl.max(tl.where(own, step, 0.0), axis=0), item, batch, inside)
        tl.store(beliefs_out + own_nodes + node_at, b, mask=own)
    else:
        tl.store(accumulator + node_at, total, mask=own)
