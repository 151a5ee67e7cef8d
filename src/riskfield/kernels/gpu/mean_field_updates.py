"""Triton kernels of mean field. Storage is that of message passing (see `plan` and `tiles`), without messages.

A cotangent of a log-marginal is kept factor by factor, where message passing has the message to that variable, until
the backward pass comes to the update of the variable and adds them up: no two programs add to the same number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.ends import _in_columns
from riskfield.kernels.gpu.tiles import NEG, _at, _largest, _lse, _others, _places, _table, _to_others

_SIZES = ["first_slot", "degree", "slots", "first_node", "count", "batch", "own_nodes", "own_messages", "own_tables"]


@triton.jit
def _weight(
    beliefs, neighbours, starts, slots, e, item, batch, y1, y2, y3, exists, valid,
    OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The probability of each joint state of the others: (joint state, place)."""
    v = tl.zeros([P, BN], beliefs.dtype.element_ty)
    if OTHERS > 0:
        node = tl.load(neighbours + e, mask=valid, other=0).to(e.dtype)
        at = tl.load(starts) + _at((node * batch + item)[None], y1[:, None], D1)
        v += tl.load(beliefs + at, mask=valid[None], other=0.0)
    if OTHERS > 1:
        node = tl.load(neighbours + slots + e, mask=valid, other=0).to(e.dtype)
        at = tl.load(starts + 2) + _at((node * batch + item)[None], y2[:, None], D2)
        v += tl.load(beliefs + at, mask=valid[None], other=0.0)
    if OTHERS > 2:
        node = tl.load(neighbours + 2 * slots + e, mask=valid, other=0).to(e.dtype)
        at = tl.load(starts + 4) + _at((node * batch + item)[None], y3[:, None], D3)
        v += tl.load(beliefs + at, mask=valid[None], other=0.0)
    return tl.where(exists[:, None], tl.exp(v), 0.0)


@triton.jit(do_not_specialize=[*_SIZES, "measure"])
def update_marginals(
    table, beliefs, node_theta, accumulator, neighbours, tables, starts, residual, live,
    first_slot, degree, slots, first_node, count, batch, own_nodes, measure,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """Add the expectations of factors of one kind at the nodes of a block; after the last kind, update the nodes."""
    _, local, item, inside = _places(count, batch, BN, WIDE)
    if SETTLED:
        inside = inside & (tl.load(live + item, mask=inside, other=0) != 0)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    total = tl.load((node_theta if FIRST else accumulator) + node_at, mask=own, other=NEG)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    for d in range(degree):
        e = first_slot + d * count + local
        valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
        t = _table(table, tables, e, e * batch + item, item, batch, x, joint, exists, valid, S, D1 * D2 * D3, SHARED)
        w = _weight(
            beliefs, neighbours, starts, slots, e, item, batch, y1, y2, y3, exists, valid,
            OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN,
        )  # fmt: skip
        # 0 * -inf is 0 here: a joint state of probability 0 adds nothing.
        term = tl.where(w[None] > 0, t * w[None], tl.where(w[None] == 0, 0.0, w[None]))
        total += tl.where(valid[None], tl.sum(term, axis=1), 0.0)
    if LAST:
        b = total - _lse(total, 0)[None]
        if measure != 0:
            before = tl.load(beliefs + own_nodes + node_at, mask=own, other=NEG)
            step = tl.where(b != b, 2.0, tl.abs(tl.exp(b) - tl.exp(before)))  # NaN: the model is impossible
            _largest(residual, tl.max(tl.where(own, step, 0.0), axis=0), item, batch, inside)
        tl.store(beliefs + own_nodes + node_at, b, mask=own)
    else:
        tl.store(accumulator + node_at, total, mask=own)


@triton.jit
def _product(
    beliefs, nodes, neighbours, starts, slots, own_nodes, k, e, item, inside, batch, x, y1, y2, y3, exists,
    S: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, P: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Factor marginals: (own state, joint state of the others, place)."""
    node = tl.load(nodes + k, mask=inside, other=0).to(e.dtype)
    at = own_nodes + _at((node * batch + item)[None], x[:, None], S)
    b = tl.load(beliefs + at, mask=(x < S)[:, None] & inside[None], other=NEG)
    w = _weight(
        beliefs, neighbours, starts, slots, e, item, batch, y1, y2, y3, exists, inside, OTHERS, D1, D2, D3, P, BN
    )
    return tl.exp(b)[:, None, :] * w[None]


@triton.jit(do_not_specialize=_SIZES)
def product_marginals(
    beliefs, mu, primary, nodes, mu_start, order, offsets, neighbours, starts, slots, own_nodes, count, batch,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Marginals of the factors whose first variable sees them as this kind, in columns."""
    _, k, item, inside = _places(count, batch, BN, WIDE)
    e = tl.load(primary + k, mask=inside, other=0).to(k.dtype)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    p = _product(
        beliefs, nodes, neighbours, starts, slots, own_nodes, k, e, item, inside, batch, x, y1, y2, y3, exists,
        S, OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN,
    )  # fmt: skip
    at = _in_columns(mu_start, order, offsets, k, item, inside, batch, x, joint, S, D1 * D2 * D3)
    tl.store(mu + at, p, mask=((x < S)[:, None] & exists[None])[:, :, None] & inside[None, None])


@triton.jit(do_not_specialize=[*_SIZES, "sweep"])
def product_cotangent(
    beliefs, grad_mu, slot_grad, ended, primary, nodes, mu_start, order, offsets, neighbours, cavities, starts,
    slots, own_nodes, own_messages, sweep, count, batch,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From cotangents of factor marginals to those of log-marginals of nodes, of items that ended here."""
    _, k, item, inside = _places(count, batch, BN, WIDE)
    inside = inside & (tl.load(ended + item, mask=inside, other=-1) == sweep)
    e = tl.load(primary + k, mask=inside, other=0).to(k.dtype)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    p = _product(
        beliefs, nodes, neighbours, starts, slots, own_nodes, k, e, item, inside, batch, x, y1, y2, y3, exists,
        S, OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN,
    )  # fmt: skip
    there = ((x < S)[:, None] & exists[None])[:, :, None] & inside[None, None]
    at = _in_columns(mu_start, order, offsets, k, item, inside, batch, x, joint, S, D1 * D2 * D3)
    g = tl.where(there, p, 0.0) * tl.load(grad_mu + at, mask=there, other=0.0)
    own_at = own_messages + _at((e * batch + item)[None], x[:, None], S)
    tl.store(slot_grad + own_at, tl.sum(g, axis=1), mask=(x < S)[:, None] & inside[None])
    _to_others(
        slot_grad, cavities, starts, slots, e, item, batch, inside, tl.sum(g, axis=0), 0, OTHERS, D1, D2, D3, Q1, Q2,
        Q3, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_SIZES, "sweep"])
def marginal_cotangent(
    beliefs, slot_grad, belief_grad, direct_grad, theta_grad, ended,
    first_slot, degree, first_node, count, batch, own_nodes, own_messages, sweep,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sum and remove the cotangents of a log-marginal; after the last kind, pass them on to theta."""
    _, local, item, inside = _places(count, batch, BN, WIDE)
    inside = inside & (tl.load(ended + item, mask=inside, other=-1) > sweep)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    zero = tl.zeros([SX, BN], belief_grad.dtype.element_ty)
    if FIRST:
        total = tl.load(direct_grad + node_at, mask=own, other=0.0)
        tl.store(direct_grad + node_at, zero, mask=own)
    else:
        total = tl.load(belief_grad + node_at, mask=own, other=0.0)
    for d in range(degree):
        at = own_messages + _at(((first_slot + d * count + local) * batch + item)[None], x[:, None], S)
        total += tl.load(slot_grad + at, mask=own, other=0.0)  # of empty slots: 0
        tl.store(slot_grad + at, zero, mask=own)
    if LAST:
        p = tl.exp(tl.load(beliefs + own_nodes + node_at, mask=own, other=NEG))
        total -= p * tl.sum(total, axis=0)[None]
        tl.store(theta_grad + node_at, tl.load(theta_grad + node_at, mask=own, other=0.0) + total, mask=own)
    tl.store(belief_grad + node_at, total, mask=own)


@triton.jit(do_not_specialize=[*_SIZES, "sweep"])
def expectation_cotangent(
    table, beliefs, belief_grad, slot_grad, table_grad, ended, neighbours, cavities, tables, starts,
    first_slot, degree, slots, first_node, count, batch, own_tables, sweep,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """From the cotangents of updated nodes to those of the tables and the marginals that their expectations used."""
    _, within, item, inside = _places(degree * count, batch, BN, WIDE)
    inside = inside & (tl.load(ended + item, mask=inside, other=-1) > sweep)
    e = first_slot + within
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    x = tl.arange(0, SX)
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    node_at = _at(((first_node + within % count) * batch + item)[None], x[:, None], S)
    h = tl.load(belief_grad + node_at, mask=(x < S)[:, None] & valid[None], other=0.0)
    t = _table(table, tables, e, r, item, batch, x, joint, exists, valid, S, D1 * D2 * D3, SHARED)
    w = _weight(
        beliefs, neighbours, starts, slots, e, item, batch, y1, y2, y3, exists, valid,
        OTHERS, D1, D2, D3, Q1 * Q2 * Q3, BN,
    )  # fmt: skip
    # Where a table is -inf and the state reached, the node has probability 0 there, and no cotangent.
    g = tl.where(t > NEG, h[:, None, :] * w[None], 0.0)
    there = ((x < S)[:, None] & exists[None])[:, :, None] & valid[None, None]
    entry = x[:, None] * (D1 * D2 * D3) + joint[None]
    at = own_tables + _at(r[None, None], entry[:, :, None], S * D1 * D2 * D3)
    tl.store(table_grad + at, tl.load(table_grad + at, mask=there, other=0.0) + g, mask=there)
    passed = tl.sum(tl.where(g != 0, g * t, 0.0), axis=0)
    _to_others(slot_grad, cavities, starts, slots, e, item, batch, valid, passed, 1, OTHERS, D1, D2, D3, Q1, Q2, Q3, BN)


@triton.jit(do_not_specialize=["first_node", "count", "batch"])
def copy_nodes(
    source, target, first_node, count, batch, S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr
):
    """Copy the numbers of the nodes of a block."""
    _, local, item, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, SX)
    at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    own = (x < S)[:, None] & inside[None]
    tl.store(target + at, tl.load(source + at, mask=own, other=0.0), mask=own)
