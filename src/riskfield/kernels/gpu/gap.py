"""Triton kernels that measure a state: how far it is from a fixed point, and log Z at an exact one.

`torch_reference` has the formulas of the first, in `gap`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.sweeps import _update
from riskfield.kernels.gpu.tiles import INF, NEG, _largest, _log_states, _lse, _others, _places, _stored

_SIZES = [
    *["first_slot", "degree", "slots", "first_node", "count", "batch", "own_nodes", "own_messages", "own_sizes"],
    *["counting_step", "rate_step"],
]


@triton.jit
def _operands(
    messages, beliefs, updated, first_slot, degree, first_node, count, batch, own_nodes, own_messages, x,
    S: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """Slots of a block, log-beliefs and log-messages. Impossible states are -inf in the belief, 0 in the message."""
    _, within, item, inside = _places(degree * count, batch, BN, WIDE)
    e = first_slot + within
    valid = inside & (tl.load(updated + e, mask=inside, other=-1) >= 0)
    node = (first_node + within % count) * batch + item
    b = _log_states(beliefs + own_nodes, node, x, valid, S, ODDS, NEG)
    m = _log_states(messages + own_messages, e * batch + item, x, valid, S, ODDS, NEG)
    possible = (b > NEG) & (m > NEG)
    return e, within, item, valid, node, possible, tl.where(possible, b, NEG), tl.where(possible, m, 0.0)


@triton.jit(do_not_specialize=_SIZES)
def operand_sizes(
    messages, beliefs, node_theta, rate, updated, sizes, first_slot, degree, first_node, count, batch, own_nodes,
    own_messages, own_sizes, rate_step,
    S: tl.constexpr, SX: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """The expected magnitude of the numbers whose sum a log-cavity is, of each slot."""
    x = tl.arange(0, SX)
    e, within, item, valid, node, possible, b, m = _operands(
        messages, beliefs, updated, first_slot, degree, first_node, count, batch, own_nodes, own_messages, x,
        S, BN, WIDE, ODDS,
    )  # fmt: skip
    at, kept = _stored(node, x, valid, S, ODDS)
    given = tl.load(node_theta + at, mask=kept & possible, other=0.0)
    # Log-odds are infinite where a state is impossible; that number has no rounding error.
    given = tl.where(tl.abs(given) == INF, 0.0, given)
    given *= tl.load(rate + (first_node + within % count) * rate_step, mask=valid, other=0.0)[None]
    numbers = tl.where(possible, tl.exp(b) * (tl.abs(b) + tl.abs(m) + tl.abs(given)), 0.0)
    tl.store(sizes + own_sizes + e * batch + item, tl.sum(numbers, axis=0), mask=valid)


@triton.jit(do_not_specialize=_SIZES)
def gap_block(
    table, messages, shifts, beliefs, counting, neighbours, cavities, tables, updated, starts, sizes, size_starts,
    damping, marginals, steps, first_slot, degree, slots, first_node, count, batch, own_nodes, own_messages, own_sizes,
    counting_step,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    SHARED: tl.constexpr, MAXIMISE: tl.constexpr, ROUNDING: tl.constexpr, CANONICAL: tl.constexpr, ODDS: tl.constexpr,
):  # fmt: skip
    """The largest inconsistency of marginals and the largest undamped step of a message of each item, in a block."""
    x = tl.arange(0, SX)
    e, _, item, valid, _, possible, b, m = _operands(
        messages, beliefs, updated, first_slot, degree, first_node, count, batch, own_nodes, own_messages, x,
        S, BN, WIDE, ODDS,
    )  # fmt: skip
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    size = tl.load(sizes + own_sizes + e * batch + item, mask=valid, other=0.0)
    for o in tl.static_range(OTHERS):
        slot = tl.load(cavities + o * slots + e, mask=valid, other=0).to(e.dtype)
        size += tl.load(sizes + tl.load(size_starts + o) + slot * batch + item, mask=valid, other=0.0)
    update, total, _, _, _ = _update(
        table, messages, beliefs, neighbours, cavities, tables, updated, starts, damping, 0, slots, batch, own_messages,
        e, item, x, y1, y2, y3, exists, joint, valid, S, OTHERS, D1, D2, D3, SHARED, False, MAXIMISE, False,
        True, False, CANONICAL, ODDS,
    )  # fmt: skip
    moved = tl.where(possible, update - m, 0.0)
    step = moved - _lse(b + moved, 0)[None]
    sent = tl.where(update > NEG, tl.abs(update + total[None]), 0.0)
    rounding = ROUNDING * (1.0 + size + tl.sum(tl.where(possible, tl.exp(b) * sent, 0.0), axis=0))
    step = tl.where(possible & (tl.abs(step) > rounding[None]), step, 0.0)
    p = tl.where(possible, tl.exp(b), 0.0)
    violation = tl.where(step < 1, p * tl.minimum(tl.abs(step), 1.0), tl.exp(b + step))
    largest = tl.max(violation, axis=0)
    c = tl.load(counting + e * counting_step, mask=valid, other=0.0)
    if not MAXIMISE:
        if CANONICAL:
            at, kept = _stored(e * batch + item, x, valid, S, ODDS)
            m += tl.load(shifts + own_messages + at, mask=kept, other=0.0)
        cavity = tl.where(possible, b - m, 0.0)
        at_best = tl.max(tl.where(b == tl.max(b, axis=0)[None], cavity, NEG), axis=0)
        weighted = tl.where(violation > 0, tl.abs(cavity - at_best[None]) * violation, 0.0)
        largest = tl.maximum(largest, c * tl.sum(weighted, axis=0))
    _largest(marginals, largest, item, batch, valid)
    _largest(steps, c * tl.max(tl.abs(step), axis=0), item, batch, valid)


@triton.jit(do_not_specialize=_SIZES)
def log_partition_block(
    table, messages, beliefs, neighbours, cavities, tables, updated, starts, terms,
    first_slot, degree, slots, first_node, count, batch, own_nodes, own_messages, own_sizes,
    S: tl.constexpr, SX: tl.constexpr, OTHERS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    Q1: tl.constexpr, Q2: tl.constexpr, Q3: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The share of each slot in log Z, where all counting numbers are 1 and messages m_ci are at a fixed point.

    With beliefs b_i of normalisers Z_i it is the sum of all log Z_i and of log sum exp(theta_c) prod_i b_i / m_ci over
    factors c, which is what the message to any of their variables, here the first one, was normalised by. As a mean,

        log Z_i = sum_x b_i(x) (theta_i(x) - log b_i(x) + sum_c log m_ci(x)).

    The share has the last term. `run.ForestRun` adds the others.
    """
    x = tl.arange(0, SX)
    e, within, item, valid, _, possible, b, m = _operands(
        messages, beliefs, updated, first_slot, degree, first_node, count, batch, own_nodes, own_messages, x,
        S, BN, WIDE, False,
    )  # fmt: skip
    y1, y2, y3, exists, joint = _others(D1, D2, D3, Q1, Q2, Q3)
    first = valid & ((tl.load(updated + e, mask=valid, other=0) >> 2) == 0)
    _, total, _, _, _ = _update(
        table, messages, beliefs, neighbours, cavities, tables, updated, starts, terms, 0, slots, batch, own_messages,
        e, item, x, y1, y2, y3, exists, joint, first, S, OTHERS, D1, D2, D3, SHARED, False, False, False, True, False,
        False, False,
    )  # fmt: skip
    share = tl.sum(tl.where(possible, tl.exp(b) * m, 0.0), axis=0) + tl.where(first, total, 0.0)
    there = within < degree * count  # empty slots, too: their share is 0
    tl.store(terms + own_sizes + e * batch + item, tl.where(valid, share, 0.0), mask=there)
