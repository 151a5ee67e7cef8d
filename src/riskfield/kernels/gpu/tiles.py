"""What the Triton kernels share: addresses, tiles of a table, cavities, and sums over them.

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
    STREAM: tl.constexpr = False,
):  # fmt: skip
    """Entries of a factor's table: (own state, joint state, place).

    STREAM: the tables would push everything else out of the cache, where the next launch could find it.
    """
    at = r
    if SHARED:
        at = tl.load(tables + e, mask=valid, other=0).to(e.dtype) * batch + item
    entry = x[:, None] * P + joint[None]
    there = ((x < S)[:, None] & exists[None])[:, :, None] & valid[None, None]
    address = table + _at(at[None, None], entry[:, :, None], S * P)
    if STREAM:
        return tl.load(address, mask=there, other=NEG, eviction_policy="evict_first")
    else:
        return tl.load(address, mask=there, other=NEG)


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
def _largest(numbers, found, item, batch, inside):
    """Raise the number of each item to the largest one found. Of one item, only one of each program goes there."""
    if batch == 1:
        tl.atomic_max(numbers, tl.max(tl.where(inside, found, 0.0), axis=0))
    else:
        tl.atomic_max(numbers + item, found, mask=inside)


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


@triton.jit
def _to_others(
    slot_grad, cavities, starts, slots, e, item, batch, valid, grad, add,
    OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Pass cotangents of the joint state of the others (joint state, place) on to each of them."""
    if OTHERS == 1:
        _pass_on(slot_grad, cavities, starts, 0, slots, e, item, batch, valid, grad, D1, Q1, add)
    if OTHERS > 1:
        cube = tl.reshape(grad, [Q1, Q2, Q3, BN])
        first = tl.sum(tl.sum(cube, axis=2), axis=1)
        _pass_on(slot_grad, cavities, starts, 0, slots, e, item, batch, valid, first, D1, Q1, add)
        second = tl.sum(tl.sum(cube, axis=2), axis=0)
        _pass_on(slot_grad, cavities, starts, 1, slots, e, item, batch, valid, second, D2, Q2, add)
        if OTHERS > 2:
            third = tl.sum(tl.sum(cube, axis=1), axis=0)
            _pass_on(slot_grad, cavities, starts, 2, slots, e, item, batch, valid, third, D3, Q3, add)
