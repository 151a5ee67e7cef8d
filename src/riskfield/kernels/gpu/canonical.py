"""Triton kernels for canonical tables, and for binary variables as one number.

Sweeps mostly read tables. The table t(x, y) = theta_c(x, y) / c_c of a pairwise factor is equivalent to

    t'(x, y) = t(x, y) - t(x, 0) - t(0, y) + t(0, 0),

the interaction of a canonical potential with reference state 0: (S - 1)^2 of S^2 entries, since row 0 and column 0 are
0. What is left out goes to the variables: theta_i gains c_c s(x) with the *shift* s(x) = t(x, 0) - t(0, 0) of each
factor c, and each log-message to i loses it. Beliefs, damping, and how a message depends on the states of the other
variable stay exactly the same. So do the cotangents of messages, beliefs and theta, since they depend on nothing else.

Stored is exp(t'), so that a message costs one exponential for each state, not for each entry. `packing.is_bounded`
tells whether all entries are moderate enough for that. Where they are not, tables are stored as they are.

If all factors of a model are such pairs of binary variables, messages, beliefs and cotangents are stored as *log-odds*:
log p(1) / p(0), with the cotangent of it. Then a sweep reads and writes one number instead of two, and one of a table
instead of four. Log-odds may be infinite: a state of a variable may be impossible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.ends import _load_columns
from riskfield.kernels.gpu.tiles import INF, NEG, _at, _log_states, _lse, _odds, _places, _stored


@triton.jit
def _row(columns, first, offsets, rate, y, item, batch, there, TURN: tl.constexpr):
    """A row of each table, divided by its counting number: (state of the other, place)."""
    at = (first[None] + tl.load(offsets[None] + y[:, None], mask=there, other=0)) * batch + item[None]
    return _load_columns(columns, at, there, TURN) * rate[None]


@triton.jit(do_not_specialize=["count", "batch"])
def pack_canonical(
    columns, tables, shifts, messages, start, order, offsets, scale, count, batch,
    S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, TURN: tl.constexpr, WIDE: tl.constexpr,
    ODDS: tl.constexpr,
):  # fmt: skip
    """Tables in columns -> canonical tables, their shifts, and messages that stand for uniform ones."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    first = tl.load(start + k, mask=inside, other=-1)
    rate = tl.load(scale + k, mask=inside, other=1.0)
    list_of = offsets + tl.load(order + k, mask=inside, other=0) * (S * D)
    y = tl.arange(0, Q)
    there = (y < D)[:, None] & (inside & (first >= 0))[None]
    inner = ((y > 0) & (y < D))[:, None] & inside[None]
    least: tl.constexpr = 1 if ODDS else 0  # the first state that messages have a number for
    reference = _row(columns, first, list_of, rate, y, item, batch, there, TURN)
    corner = tl.sum(tl.where((y == 0)[:, None], reference, 0.0), axis=0)
    for x in range(least, S):
        row = _row(columns, first, list_of + x * D, rate, y, item, batch, there, TURN)
        shift = tl.sum(tl.where((y == 0)[:, None], row, 0.0), axis=0) - corner
        at = _at(q[None], x - least, S - least)
        tl.store(shifts + at, shift[None], mask=inside[None])
        tl.store(messages + at, -shift[None], mask=inside[None])
        at = _at(q[None], ((x - 1) * (D - 1) + y - 1)[:, None], (S - 1) * (D - 1))
        tl.store(tables + at, tl.exp(row - reference - shift[None]), mask=inner & (x > 0))


@triton.jit(do_not_specialize=["first_slot", "degree", "first_node", "count", "batch", "own_messages", "counting_step"])
def shift_nodes(
    node_theta, shifts, counting, first_slot, degree, first_node, count, batch, own_messages, counting_step,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add to theta of the nodes of a block what the canonical tables of one kind leave to them."""
    _, local, item, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, SX)
    own = (x < S)[:, None] & inside[None]
    node_at = _at(((first_node + local) * batch + item)[None], x[:, None], S)
    total = tl.load(node_theta + node_at, mask=own, other=0.0)
    for d in range(degree):
        e = first_slot + d * count + local  # shifts of empty slots are 0
        shift = tl.load(shifts + own_messages + _at((e * batch + item)[None], x[:, None], S), mask=own, other=0.0)
        total += tl.load(counting + e * counting_step, mask=inside, other=0.0)[None] * shift
    tl.store(node_theta + node_at, total, mask=own)


@triton.jit(do_not_specialize=["count", "batch"])
def pack_states(
    columns, shifts, storage, start, count, batch,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Logarithms for the states of nodes, or of messages, in columns -> storage. SHIFTED: without the shifts."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, SX)
    first = tl.load(start + k, mask=inside, other=-1)
    there = (x < S)[:, None] & (inside & (first >= 0))[None]
    v = tl.load(columns + (first[None] + x[:, None]) * batch + item[None], mask=there, other=0.0)
    if ODDS:
        v -= tl.sum(tl.where((x == 0)[:, None], v, 0.0), axis=0)[None]
    at, kept = _stored(q, x, inside, S, ODDS)
    if SHIFTED:
        v -= tl.load(shifts + at, mask=kept, other=0.0)
    tl.store(storage + at, v, mask=kept)


@triton.jit(do_not_specialize=["count", "batch"])
def unpack_messages(
    messages, shifts, columns, start, count, batch,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Messages, with their shifts and normalised -> columns."""
    q, k, item, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, SX)
    first = tl.load(start + k, mask=inside, other=-1)
    there = (x < S)[:, None] & (inside & (first >= 0))[None]
    at, kept = _stored(q, x, inside, S, ODDS)
    m = tl.load(messages + at, mask=kept, other=0.0) + tl.load(shifts + at, mask=kept, other=0.0)
    m = tl.where((x < S)[:, None], m, NEG)
    m -= _lse(m, 0)[None]
    tl.store(columns + (first[None] + x[:, None]) * batch + item[None], m, mask=there)


@triton.jit(do_not_specialize=["count", "batch"])
def unpack_odds(
    storage, node_theta, columns, start, count, batch, BN: tl.constexpr, WIDE: tl.constexpr, EXP: tl.constexpr
):  # fmt: skip
    """Numbers of binary nodes -> columns: the probabilities that log-odds stand for, or cotangents of both states.

    Where a state is impossible, both cotangents are 0, whatever rounding has left there.
    """
    q, k, item, inside = _places(count, batch, BN, WIDE)
    x = tl.arange(0, 2)
    at = (tl.load(start + k, mask=inside, other=0)[None] + x[:, None]) * batch + item[None]
    if EXP:
        v = tl.exp(_log_states(storage, q, x, inside, 2, True, 0.0))
    else:
        g = tl.load(storage + q, mask=inside, other=0.0)
        g = tl.where(tl.abs(tl.load(node_theta + q, mask=inside, other=0.0)) == INF, 0.0, g)
        v = g[None] * (2 * x - 1)[:, None]
    tl.store(columns + at, v, mask=inside[None] & (x < 2)[:, None])


@triton.jit(do_not_specialize=["first_slot", "members", "batch", "first", "sweeps", "tape_start", "grad_start"])
def odds_table_cotangent(
    table, table_grad, neighbours, tape, grad_tape, sizes, ended,
    first_slot, members, batch, first, sweeps, tape_start, grad_start, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`cotangents.table_cotangent` of binary pairs, for all four entries of a table of log-potentials."""
    place, within, item, inside = _places(members, batch, BN, WIDE)
    e = first_slot + within
    r = e * batch + item
    valid = inside & (tl.load(neighbours + e, mask=inside, other=-1) >= 0)
    t = tl.load(table + r, mask=valid, other=0.0)
    tape_size, grad_size = tl.load(sizes), tl.load(sizes + 1)
    last = tl.minimum(tl.load(ended + item, mask=inside, other=0) - first, sweeps)
    at_one, at_zero, total = tl.zeros_like(t), tl.zeros_like(t), tl.zeros_like(t)
    tape += tape_start + place
    grad_tape += grad_start + place
    ran = valid & (last > 0)
    cavity, g = tl.load(tape, mask=ran, other=0.0), tl.load(grad_tape, mask=ran, other=0.0)
    for k in range(sweeps):
        coupled, above, below = _odds(t, cavity)
        # A message that was not sent has cotangent 0, and nothing on the tape.
        at_one += tl.where(g != 0, g * (coupled / (coupled + below)), 0.0)
        at_zero += tl.where(g != 0, g * (above / (above + below)), 0.0)
        total += g
        ran = valid & (k + 1 < last)  # loaded one sweep ahead
        tape += tape_size
        grad_tape += grad_size
        cavity, g = tl.load(tape, mask=ran, other=0.0), tl.load(grad_tape, mask=ran, other=0.0)
    x = tl.arange(0, 4)[:, None]
    added = tl.where(x > 1, tl.where(x == 3, at_one, total - at_one), tl.where(x == 1, -at_zero, at_zero - total))
    at = table_grad + _at(r[None], x, 4)
    there = valid[None] & (x < 4)
    tl.store(at, tl.load(at, mask=there, other=0.0) + added, mask=there)
