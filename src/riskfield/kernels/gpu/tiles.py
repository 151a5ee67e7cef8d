"""What the Triton kernels share: addresses, tiles of a table, cavities, and sums over them.

A number of item b of node or slot k lies at place r = k * batch + b of its kind; entry x of place r at
(r // 32 * entries + x) * 32 + r % 32, so that all entries of 32 neighbouring places are together. The last axis of a
tile is BN neighbouring places. The others are the states of the receiving variable, padded to a power of two, and the
joint states of the other variables of a factor, each padded likewise.

`canonical` explains CANONICAL tables, and ODDS: binary variables as one number. Kernels of sweeps compute with these
numbers, in tiles with a single state; others make the probabilities of both states from them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEG = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))


@triton.jit
def _at(r, entry, entries: tl.constexpr):
    """Address of `entry` of place r; both broadcast.

    The hint makes neighbouring threads take neighbouring places. It says nothing about alignment, so loads stay single.
    """
    at = r + entry  # entry 0
    if entries > 1:
        at = (r // 32) * (32 * entries) + entry * 32 + r % 32
    if len(at.shape) == 2:
        return tl.max_contiguous(at, [1, at.shape[1]])
    else:
        return tl.max_contiguous(at, [1, 1, at.shape[2]])


@triton.jit
def _places(count, batch, BN: tl.constexpr, WIDE: tl.constexpr):
    """The places of this program: place, member, batch item, and whether there is such a member."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    q = pid * BN + tl.arange(0, BN)
    k, item = q // batch, q % batch
    return q, k, item, k < count


@triton.jit
def _lse(v, axis: tl.constexpr):
    top = tl.max(v, axis=axis)
    shift = tl.where(top > NEG, top, 0.0)
    return shift + tl.log(tl.sum(tl.exp(v - tl.expand_dims(shift, axis)), axis=axis))


@triton.jit
def _weights(v):
    """exp(v) along axis 0, with maximum 1; 0 if all is impossible."""
    top = tl.max(v, axis=0)
    return tl.exp(v - tl.where(top > NEG, top, 0.0)[None])


@triton.jit
def _others(D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr):
    """States of up to three others at all padded joint states, whether they exist, and their place in a table."""
    p = tl.arange(0, Q1 * Q2 * Q3)
    y1, y2, y3 = p // (Q2 * Q3), (p // Q3) % Q2, p % Q3
    exists = (y1 < D1) & (y2 < D2) & (y3 < D3)
    y1, y2, y3 = tl.minimum(y1, D1 - 1), tl.minimum(y2, D2 - 1), tl.minimum(y3, D3 - 1)
    return y1, y2, y3, exists, (y1 * D2 + y2) * D3 + y3


@triton.jit
def _table(
    table, tables, e, r, item, batch, x, joint, exists, valid, S: tl.constexpr, P: tl.constexpr, SHARED: tl.constexpr,
    STREAM: tl.constexpr = False, CANONICAL: tl.constexpr = False,
):  # fmt: skip
    """Entries of a factor's table: (own state, joint state, place).

    They are logarithms; those of CANONICAL tables are not, and are 0 where there are no such states. STREAM: the tables
    would push everything else out of the cache, where the next launch could find it.
    """
    at = r
    if SHARED:
        at = tl.load(tables + e, mask=valid, other=0).to(e.dtype) * batch + item
    states = (x < S)[:, None] & exists[None]
    there = states[:, :, None] & valid[None, None]
    if CANONICAL and S > 1:
        first = (x == 0)[:, None] | (joint == 0)[None]  # not stored
        there = there & (first == 0)[:, :, None]
        entry = (x - 1)[:, None] * (P - 1) + (joint - 1)[None]
        address = table + _at(at[None, None], entry[:, :, None], (S - 1) * (P - 1))
    else:
        entry = x[:, None] * P + joint[None]
        address = table + _at(at[None, None], entry[:, :, None], S * P)
    nothing: tl.constexpr = 0.0 if CANONICAL else NEG
    if STREAM:
        t = tl.load(address, mask=there, other=nothing, eviction_policy="evict_first")
    else:
        t = tl.load(address, mask=there, other=nothing)
    if CANONICAL and S > 1:
        t = tl.where((first & states)[:, :, None], 1.0, t)
    return t


@triton.jit
def _log_states(numbers, r, x, valid, S: tl.constexpr, ODDS: tl.constexpr, other):
    """Log-probabilities at places r: (state, place), and `other` where there are none. ODDS: made from log-odds."""
    there = (x < S)[:, None] & valid[None]
    if ODDS and S > 1:
        odds = tl.load(numbers + r, mask=valid, other=0.0)[None]
        odds = tl.where((x == 1)[:, None], odds, -odds)
        return tl.where(there, tl.minimum(odds, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(odds))), other)
    else:
        return tl.load(numbers + _at(r[None], x[:, None], S), mask=there, other=other)


@triton.jit
def _cavity(
    beliefs, messages, neighbours, cavities, starts, o: tl.constexpr, slots, e, item, batch, y, D: tl.constexpr, valid,
    inside, ODDS: tl.constexpr = False,
):  # fmt: skip
    """log b_j / m_cj at states y of other o: shape (joint state, place). 0 / 0 is 0."""
    # The cavity does not wait for `valid`; the loads from there do.
    slot = tl.load(cavities + o * slots + e, mask=inside, other=0).to(e.dtype)
    node = tl.load(neighbours + o * slots + e, mask=valid, other=0).to(e.dtype)
    b = _log_states(beliefs + tl.load(starts + 2 * o), node * batch + item, y, valid, D, ODDS, 0.0)
    m = _log_states(messages + tl.load(starts + 2 * o + 1), slot * batch + item, y, valid, D, ODDS, 0.0)
    return tl.where(m == NEG, NEG, b - m)


@triton.jit
def _odds(t, cavity):
    """The weights of state 1 of the other given state 1 and given state 0 of one's own, then that of its state 0.

    `t` is the entry of a canonical table, `cavity` the log-odds of the other. The last two have maximum 1.
    """
    small = tl.exp(-tl.abs(cavity))  # log-odds may be infinite
    above, below = tl.where(cavity > 0, 1.0, small), tl.where(cavity > 0, small, 1.0)
    return above * t, above, below


@triton.jit
def _slope(t, cavity):
    """The derivative of the log-odds of a message by those of the cavity of the other."""
    coupled, above, below = _odds(t, cavity)
    return coupled / (coupled + below) - above / (above + below)


@triton.jit
def _largest(numbers, found, item, batch, inside):
    """Raise the number of each item to the largest one found. Of one item, only one of each program goes there."""
    if batch == 1:
        tl.atomic_max(numbers, tl.max(tl.where(inside, found, 0.0), axis=0))
    else:
        tl.atomic_max(numbers + item, found, mask=inside)


@triton.jit
def _stored(r, x, valid, S: tl.constexpr, ODDS: tl.constexpr):
    """Where the numbers of states x at places r lie, and whether they are stored. ODDS: that of state 1 alone is."""
    if ODDS and S > 1:
        return r[None] + x[:, None] * 0, (x == 1)[:, None] & valid[None]
    else:
        return _at(r[None], x[:, None], S), (x < S)[:, None] & valid[None]


@triton.jit
def _pass_on(
    cavity_out, starts, o: tl.constexpr, slot, item, batch, fresh, grad, D: tl.constexpr, Q: tl.constexpr, add,
    ODDS: tl.constexpr = False,
):  # fmt: skip
    """Store the cotangent of a cavity, or add it to what is there."""
    y = tl.arange(0, Q)
    at, there = _stored(slot.to(item.dtype) * batch + item, y, fresh, D, ODDS)
    at += tl.load(starts + 2 * o + 1)
    if add != 0:
        grad += tl.load(cavity_out + at, mask=there, other=0.0)
    tl.store(cavity_out + at, grad, mask=there)


@triton.jit
def _to_others(
    slot_grad, cavities, starts, slots, e, item, batch, valid, grad, add,
    OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, ODDS: tl.constexpr = False,
):  # fmt: skip
    """Pass cotangents of the joint state of the others (joint state, place) on to each of them."""
    slot = tl.load(cavities + e, mask=valid, other=0)
    if OTHERS == 1:
        _pass_on(slot_grad, starts, 0, slot, item, batch, valid, grad, D1, Q1, add, ODDS)
    if OTHERS > 1:
        cube = tl.reshape(grad, [Q1, Q2, Q3, BN])
        first = tl.sum(tl.sum(cube, axis=2), axis=1)
        _pass_on(slot_grad, starts, 0, slot, item, batch, valid, first, D1, Q1, add)
        second = tl.sum(tl.sum(cube, axis=2), axis=0)
        slot = tl.load(cavities + slots + e, mask=valid, other=0)
        _pass_on(slot_grad, starts, 1, slot, item, batch, valid, second, D2, Q2, add)
        if OTHERS > 2:
            third = tl.sum(tl.sum(cube, axis=1), axis=0)
            slot = tl.load(cavities + 2 * slots + e, mask=valid, other=0)
            _pass_on(slot_grad, starts, 2, slot, item, batch, valid, third, D3, Q3, add)
