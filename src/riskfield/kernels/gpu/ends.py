"""Triton kernels for the two ends of a run: packing theta and messages, marginals, and the cotangents of all of these.

The caller's numbers lie in *columns*: entry k of batch item b at k * batch + b, the transpose of the caller's layout.
Where the entries of a node, message or table lie there is given by a start and one of a few lists of offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.tiles import (
    NEG,
    _at,
    _cavity,
    _log_states,
    _lse,
    _others,
    _places,
    _stored,
    _table,
    _to_others,
    _weights,
)


@triton.jit
def _load_columns(columns, at, there, TURN: tl.constexpr):
    """Load a tile (entry, place) from columns. TURN: neighbouring threads take neighbouring entries, not places."""
    if TURN:
        turned = tl.max_contiguous(tl.trans(at), [1, at.shape[0]])
        return tl.trans(tl.load(columns + turned, mask=tl.trans(there), other=0.0))
    else:
        return tl.load(columns + at, mask=there, other=0.0)


@triton.jit
def _store_columns(columns, at, v, there, TURN: tl.constexpr):
    """Store a tile (entry, place) to columns, likewise."""
    if TURN:
        turned = tl.max_contiguous(tl.trans(at), [1, at.shape[0]])
        tl.store(columns + turned, tl.trans(v), mask=tl.trans(there))
    else:
        tl.store(columns + at, v, mask=there)


@triton.jit(do_not_specialize=["height", "width", "stride"])
def transpose(source, target, height, width, stride, H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr):
    """Rows -> columns, H by W numbers at a time."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    across = tl.cdiv(width, W)
    i, j = pid // across * H + tl.arange(0, H), pid % across * W + tl.arange(0, W)
    there = (i < height)[:, None] & (j < width)[None]
    v = tl.load(source + i[:, None] * stride + j[None], mask=there, other=0.0)
    tl.store(target + j[:, None] * height + i[None], tl.trans(v), mask=tl.trans(there))


@triton.jit(do_not_specialize=["count", "batch"])
def pack(
    columns, storage, start, order, offsets, scale, count, batch,
    E: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Columns -> storage, each member times its scale; members without a start get 0."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    first = tl.load(start + k, mask=inside, other=-1)
    row = offsets + tl.load(order + k, mask=inside, other=0) * E
    for x0 in range(0, E, BX):
        x = x0 + tl.arange(0, BX)
        own = (x < E)[:, None] & inside[None]
        there = own & (first >= 0)[None]
        at = (first[None] + tl.load(row[None] + x[:, None], mask=there, other=0)) * batch + item[None]
        v = _load_columns(columns, at, there, TURN)
        if SCALED:
            v *= tl.load(scale + k, mask=inside, other=1.0)[None]
        tl.store(storage + _at(q[None], x[:, None], E), v, mask=own)


@triton.jit(do_not_specialize=["count", "batch"])
def unpack(
    storage, columns, start, order, offsets, count, batch,
    E: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Storage -> columns, or its exponential; members without a start are left out."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    first = tl.load(start + k, mask=inside, other=-1)
    row = offsets + tl.load(order + k, mask=inside, other=0) * E
    for x0 in range(0, E, BX):
        x = x0 + tl.arange(0, BX)
        there = (x < E)[:, None] & (inside & (first >= 0))[None]
        v = tl.load(storage + _at(q[None], x[:, None], E), mask=there, other=0.0)
        if EXP:
            v = tl.exp(v)
        at = (first[None] + tl.load(row[None] + x[:, None], mask=there, other=0)) * batch + item[None]
        _store_columns(columns, at, v, there, TURN)


@triton.jit(do_not_specialize=["count", "batch", "rate_step"])
def uniform_beliefs(
    node_theta, rate, beliefs, count, batch, rate_step,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Log-beliefs where all messages are uniform."""
    q, k, _, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    at = _at(q[None], x[:, None], S)
    b = tl.load(node_theta + at, mask=own, other=NEG) * tl.load(rate + k * rate_step, mask=inside, other=1.0)[None]
    if not ODDS:
        b = b - _lse(b, 0)[None]
    tl.store(beliefs + at, b, mask=own)


@triton.jit
def _joint(
    table, messages, beliefs, nodes, neighbours, cavities, tables, starts, slots, own_nodes, own_messages,
    k, e, item, inside, batch, x, y1, y2, y3, exists, joint,
    S: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, SHARED: tl.constexpr,
    CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Factor marginals: (own state, joint state of the others, place). NaN where all states are impossible."""
    r = e * batch + item
    node = tl.load(nodes + k, mask=inside, other=0).to(e.dtype)
    b = _log_states(beliefs + own_nodes, node * batch + item, x, inside, S, ODDS, NEG)
    m = _log_states(messages + own_messages, r, x, inside, S, ODDS, NEG)
    cavity = tl.where(m == NEG, NEG, b - m)
    full = _table(table, tables, e, r, item, batch, x, joint, exists, inside, S, D1 * D2 * D3, SHARED, False, CANONICAL)
    if CANONICAL:
        other = _cavity(
            beliefs, messages, neighbours, cavities, starts, 0, slots, e, item, batch, y1, D1, inside, inside, ODDS
        )
        # One after the other, not their product: see `packing._LARGEST`.
        full = (full * _weights(cavity)[:, None, :]) * _weights(other)[None]
        return full * (1.0 / tl.sum(tl.sum(full, axis=1), axis=0))[None, None]
    full += cavity[:, None, :]
    if OTHERS > 0:
        full += _cavity(
            beliefs, messages, neighbours, cavities, starts, 0, slots, e, item, batch, y1, D1, inside, inside
        )[None]
    if OTHERS > 1:
        full += _cavity(
            beliefs, messages, neighbours, cavities, starts, 1, slots, e, item, batch, y2, D2, inside, inside
        )[None]
    if OTHERS > 2:
        full += _cavity(
            beliefs, messages, neighbours, cavities, starts, 2, slots, e, item, batch, y3, D3, inside, inside
        )[None]
    total = _lse(_lse(full, 1), 0)
    return tl.exp(full - total[None, None, :])


@triton.jit(do_not_specialize=["slots", "own_nodes", "own_messages", "count", "batch"])
def factor_marginals(
    table, messages, beliefs, mu, primary, nodes, mu_start, order, offsets,
    neighbours, cavities, tables, starts, slots, own_nodes, own_messages, count, batch,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr,
    CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Marginals of the factors whose first variable sees them as this kind, in columns."""
    _, k, item, inside = _places(count, batch, BN, WIDE)
    e = tl.load(primary + k, mask=inside, other=0).to(k.dtype)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    p = _joint(
        table, messages, beliefs, nodes, neighbours, cavities, tables, starts, slots, own_nodes, own_messages,
        k, e, item, inside, batch, x, y1, y2, y3, exists, joint, S, OTHERS, D1, D2, D3, SHARED, CANONICAL, ODDS,
    )  # fmt: skip
    at = _in_columns(mu_start, order, offsets, k, item, inside, batch, x, joint, S, D1 * D2 * D3)
    tl.store(mu + at, p, mask=((x < S)[:, None] & exists[None])[:, :, None] & inside[None, None])


@triton.jit
def _in_columns(start, order, offsets, k, item, inside, batch, x, joint, S: tl.constexpr, P: tl.constexpr):
    """Addresses (own state, joint state, place) of the entries of factors in columns."""
    entry = tl.minimum(x, S - 1)[:, None] * P + joint[None]
    row = tl.load(order + k, mask=inside, other=0) * (S * P)
    offset = tl.load(offsets + row[None, None, :] + entry[:, :, None])
    return (tl.load(start + k, mask=inside, other=0)[None, None] + offset) * batch + item[None, None]


@triton.jit(do_not_specialize=["count", "batch", "sweep"])
def node_marginal_cotangent(
    beliefs, grad_mu, direct_grad, ended, start, sweep, count, batch,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """From cotangents of node marginals to those of log-beliefs before normalisation, of items that ended here."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    inside = inside & (tl.load(ended + item, mask=inside, other=-1) == sweep)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    p = tl.exp(_log_states(beliefs, q, x, inside, S, ODDS, NEG))
    first = tl.load(start + k, mask=inside, other=0)
    g = tl.load(grad_mu + (first[None] + x[:, None]) * batch + item[None], mask=own, other=0.0)
    at, kept = _stored(q, x, inside, S, ODDS)
    tl.store(direct_grad + at, p * (g - tl.sum(p * g, axis=0)[None]), mask=kept)


@triton.jit(do_not_specialize=["slots", "own_nodes", "own_messages", "own_tables", "count", "batch", "sweep"])
def factor_marginal_cotangent(
    table, messages, beliefs, grad_mu, cavity_grad, table_grad, ended, primary, nodes, mu_start, order, offsets,
    neighbours, cavities, tables, starts, slots, own_nodes, own_messages, own_tables, sweep, count, batch,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr,
    CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """From cotangents of factor marginals to those of cavities and tables, of items that ended here.

    Every cavity and every table of a factor has one program that writes it: nothing is added up.
    """
    _, k, item, inside = _places(count, batch, BN, WIDE)
    inside = inside & (tl.load(ended + item, mask=inside, other=-1) == sweep)
    e = tl.load(primary + k, mask=inside, other=0).to(k.dtype)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    p = _joint(
        table, messages, beliefs, nodes, neighbours, cavities, tables, starts, slots, own_nodes, own_messages,
        k, e, item, inside, batch, x, y1, y2, y3, exists, joint, S, OTHERS, D1, D2, D3, SHARED, CANONICAL, ODDS,
    )  # fmt: skip
    there = ((x < S)[:, None] & exists[None])[:, :, None] & inside[None, None]
    at = _in_columns(mu_start, order, offsets, k, item, inside, batch, x, joint, S, D1 * D2 * D3)
    p = tl.where(there, p, 0.0)
    g = tl.load(grad_mu + at, mask=there, other=0.0)
    mean = tl.sum(tl.sum(p * g, axis=1), axis=0)
    g = p * (g - mean[None, None, :])
    r = e * batch + item
    entry = x[:, None] * (D1 * D2 * D3) + joint[None]
    tl.store(table_grad + own_tables + _at(r[None, None], entry[:, :, None], S * D1 * D2 * D3), g, mask=there)
    at, kept = _stored(r, x, inside, S, ODDS)
    tl.store(cavity_grad + own_messages + at, tl.sum(g, axis=1), mask=kept)
    if OTHERS > 0:
        _to_others(
            cavity_grad, cavities, starts, slots, e, item, batch, inside, tl.sum(g, axis=0), 0,
            OTHERS, D1, D2, D3, Q1, Q2, Q3, BN, ODDS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "own_tables", "orders", "count", "batch", "counting_step"])
def factor_gradient(
    table_grad, gradient, counting, primary, mu_start, order, offsets, cavities, maps, table_starts,
    slots, own_tables, orders, count, batch, counting_step,
    E: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The cotangent of each factor's table: the sum of what the messages to its variables passed on, in columns."""
    _, k, item, inside = _places(count, batch, BN, WIDE)
    e = tl.load(primary + k, mask=inside, other=0).to(k.dtype)
    which = tl.load(order + k, mask=inside, other=0)
    first = tl.load(mu_start + k, mask=inside, other=0)
    rate = 1.0 / tl.load(counting + e * counting_step, mask=inside, other=1.0)
    r = e * batch + item
    for x0 in range(0, E, BX):
        x = x0 + tl.arange(0, BX)
        there = (x < E)[:, None] & inside[None]
        total = tl.load(table_grad + own_tables + _at(r[None], x[:, None], E), mask=there, other=0.0)
        for o in tl.static_range(OTHERS):
            slot = tl.load(cavities + o * slots + e, mask=inside, other=0).to(e.dtype)
            entry = tl.load(maps + (o * orders + which)[None] * E + x[:, None], mask=there, other=0)
            begin = tl.load(table_starts + o)
            total += tl.load(table_grad + begin + _at((slot * batch + item)[None], entry, E), mask=there, other=0.0)
        offset = tl.load(offsets + which[None] * E + x[:, None], mask=there, other=0)
        _store_columns(gradient, (first[None] + offset) * batch + item[None], total * rate[None], there, TURN)
