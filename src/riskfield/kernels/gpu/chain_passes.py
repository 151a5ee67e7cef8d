"""Triton kernels for exact inference on chains: each program walks along a few chains with its frontier in registers.

Chain by chain, `begin` is the position of its first variable and `length` how many there are. Position by position,
`node_at` is where the variable begins in theta, `table_at` and `mu_at` where the table between it and the variable
before begins in theta and in mu, and `flipped` whether the variable's own states are the first axis of that table.

A walk is one chain of one batch item. Tiles have the axes (walk, state x of the earlier variable, state y of the later
one), and vectors of messages lie at (position * batch + item) * S + state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riskfield.kernels.gpu.tiles import NEG, _lse


@triton.jit
def _walks(begin, length, chains, batch, C: tl.constexpr):
    """The walks of this program: whether they exist, chain, item, first position, and length (else 0)."""
    q = tl.program_id(0) * C + tl.arange(0, C)
    inside = q < chains * batch
    chain, item = q // batch, q % batch
    start = tl.load(begin + chain, mask=inside, other=0)
    return inside, chain, item.to(tl.int64), start, tl.load(length + chain, mask=inside, other=0)


@triton.jit
def _nodes(numbers, size, node_at, position, item, here, x, S: tl.constexpr, other: tl.constexpr):
    """Numbers of a variable in the caller's layout, whose rows have `size` entries: (walk, state)."""
    first = item * size + tl.load(node_at + position, mask=here, other=0)
    return tl.load(numbers + first[:, None] + x[None], mask=here[:, None] & (x < S)[None], other=other)


@triton.jit
def _messages(position, item, batch, x, S: tl.constexpr):
    """Where the messages to these variables lie."""
    return ((position.to(tl.int64) * batch + item) * S)[:, None] + x[None]


@triton.jit
def _entries(size, table_at, flipped, position, item, here, x, S: tl.constexpr, LATER: tl.constexpr):
    """Where the entries of the table before a variable lie, and whether they exist: (walk, x, y).

    LATER turns the last two axes round. Sums over the last axis are faster than over the one before.
    """
    first = item * size + tl.load(table_at + position, mask=here, other=0)
    turned = tl.load(flipped + position, mask=here, other=0) == (0 if LATER else 1)
    across, along = tl.where(turned, 1, S), tl.where(turned, S, 1)
    at = first[:, None, None] + across[:, None, None] * x[None, :, None] + along[:, None, None] * x[None, None, :]
    return at, here[:, None, None] & (x < S)[None, :, None] & (x < S)[None, None, :]


@triton.jit
def _normalised(v):
    """Log-probabilities (walk, state) and the logarithm of their sum; all -inf stays so."""
    total = _lse(v, 1)
    return v - tl.where(total > NEG, total, 0.0)[:, None], total


@triton.jit(do_not_specialize=["chains", "batch", "theta_size"])
def collect(
    theta, ahead, log_z, begin, length, node_at, table_at, flipped, chains, batch, theta_size,
    S: tl.constexpr, SX: tl.constexpr, C: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Messages `ahead` from each variable to the next, and log Z of every walk.

    SAME: all factors of a chain have one table. EVEN is the logarithm of a uniform message.
    """
    inside, _, item, start, n = _walks(begin, length, chains, batch, C)
    x = tl.arange(0, SX)
    states = (x < S)[None]
    weight = _nodes(theta, theta_size, node_at, start, item, inside, x, S, NEG)
    even = tl.zeros([C, SX], weight.dtype) + EVEN
    tl.store(ahead + _messages(start, item, batch, x, S), even, mask=inside[:, None] & states)
    scale = tl.zeros([C], tl.float64)
    following = _nodes(theta, theta_size, node_at, start + 1, item, inside & (n > 1), x, S, NEG)
    if SAME:
        table_from, has_table = _entries(theta_size, table_at, flipped, start + 1, item, inside & (n > 1), x, S, True)
        table = tl.load(theta + table_from, mask=has_table, other=NEG)
    for t in range(1, tl.max(n, axis=0)):
        here = inside & (t < n)
        own = following  # loaded one step ahead
        following = _nodes(theta, theta_size, node_at, start + t + 1, item, inside & (t + 1 < n), x, S, NEG)
        if not SAME:
            table_from, has_table = _entries(theta_size, table_at, flipped, start + t, item, here, x, S, True)
            table = tl.load(theta + table_from, mask=has_table, other=NEG)
        message, total = _normalised(_lse(table + weight[:, None, :], 2))
        tl.store(ahead + _messages(start + t, item, batch, x, S), message, mask=here[:, None] & states)
        scale += tl.where(here, total, 0.0).to(tl.float64)
        weight = tl.where(here[:, None], message + own, weight)
    tl.store(log_z + tl.program_id(0) * C + tl.arange(0, C), scale + _lse(weight, 1).to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=["chains", "batch", "theta_size", "out_size"])
def distribute(
    theta, ahead, back, out, sums, begin, length, node_at, table_at, mu_at, flipped,
    chains, batch, theta_size, out_size,
    S: tl.constexpr, SX: tl.constexpr, C: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Messages `back` from each variable to the one before, and marginals, in rows of `out_size` entries.

    PAIRS also writes those of factors; SUM writes their sum along each walk.
    """
    inside, chain, item, start, n = _walks(begin, length, chains, batch, C)
    x = tl.arange(0, SX)
    states = (x < S)[None]
    last = start + n - 1
    weight = _nodes(theta, theta_size, node_at, last, item, inside, x, S, NEG)
    even = tl.zeros([C, SX], weight.dtype) + EVEN
    tl.store(back + _messages(last, item, batch, x, S), even, mask=inside[:, None] & states)
    message = tl.load(ahead + _messages(last, item, batch, x, S), mask=inside[:, None] & states, other=NEG)
    belief = weight + message
    at = item * out_size + tl.load(node_at + last, mask=inside, other=0)
    p = tl.exp(belief - _lse(belief, 1)[:, None])
    tl.store(out + at[:, None] + x[None], p, mask=inside[:, None] & states)
    if SUM:
        total = tl.zeros([C, SX, SX], weight.dtype)
    if SAME:
        table_from, has_table = _entries(theta_size, table_at, flipped, start + 1, item, inside & (n > 1), x, S, False)
        table = tl.load(theta + table_from, mask=has_table, other=NEG)
    most = tl.max(n, axis=0)
    for k in range(1, most):
        t = most - k
        here = inside & (t < n)
        before = _nodes(theta, theta_size, node_at, start + t - 1, item, here, x, S, NEG)
        message_at = _messages(start + t - 1, item, batch, x, S)
        message = tl.load(ahead + message_at, mask=here[:, None] & states, other=NEG)
        if not SAME:
            table_from, has_table = _entries(theta_size, table_at, flipped, start + t, item, here, x, S, False)
            table = tl.load(theta + table_from, mask=has_table, other=NEG)
        full = table + weight[:, None, :]
        top = tl.max(full, axis=2)
        shift = tl.where(top > NEG, top, 0.0)
        joint = tl.exp(full - shift[:, :, None])
        mass = tl.sum(joint, axis=2)
        sent, _ = _normalised(shift + tl.log(mass))
        tl.store(back + message_at, sent, mask=here[:, None] & states)
        belief = before + message + sent
        p = tl.exp(belief - _lse(belief, 1)[:, None])
        at = item * out_size + tl.load(node_at + start + t - 1, mask=here, other=0)
        tl.store(out + at[:, None] + x[None], p, mask=here[:, None] & states)
        if PAIRS or SUM:
            joint *= tl.where(mass > 0, p / mass, 0.0)[:, :, None]
        if PAIRS:
            pair_at, has_pair = _entries(out_size, mu_at, flipped, start + t, item, here, x, S, False)
            tl.store(out + pair_at, joint, mask=has_pair)
        if SUM:
            total += tl.where(here[:, None, None], joint, 0.0)
        weight = tl.where(here[:, None], before + sent, weight)
    if SUM:
        _store_sums(sums, total, start, inside, chain, item, batch, flipped, n, x, S)


@triton.jit
def _store_sums(sums, total, start, inside, chain, item, batch, flipped, n, x, S: tl.constexpr):
    """One table per walk, its axes in the order of its factors."""
    turned = tl.load(flipped + start + 1, mask=inside & (n > 1), other=0) != 0
    across, along = tl.where(turned, 1, S), tl.where(turned, S, 1)
    first = (chain.to(tl.int64) * batch + item) * (S * S)
    at = first[:, None, None] + across[:, None, None] * x[None, :, None] + along[:, None, None] * x[None, None, :]
    there = inside[:, None, None] & (x < S)[None, :, None] & (x < S)[None, None, :]
    tl.store(sums + at, total, mask=there)


@triton.jit
def _centred(values, p):
    """Values minus their mean under p."""
    return values - tl.sum(tl.where(p > 0, p * values, 0.0), axis=1)[:, None]


@triton.jit(do_not_specialize=["chains", "batch", "theta_size", "mu_size", "out_size", "node_size"])
def pull_back(
    theta, ahead, back, nodes, grad_mu, gathered, out, sums, begin, length, node_at, table_at, mu_at, flipped,
    chains, batch, theta_size, mu_size, out_size, node_size,
    S: tl.constexpr, SX: tl.constexpr, C: tl.constexpr, SAME: tl.constexpr, PAIRS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """From cotangents g of marginals to those of theta: the covariance of each statistic with g(X).

    Along a chain E[g(X) | x_t] is a sum of what lies before and after t. `gathered` keeps the first, of each variable,
    minus its mean. PAIRS: there are cotangents of factor marginals, in rows of `mu_size` entries as all are; rows of
    `out` have `out_size` entries, and `nodes`, the node marginals, `node_size`.
    """
    inside, chain, item, start, n = _walks(begin, length, chains, batch, C)
    x = tl.arange(0, SX)
    states = (x < S)[None]
    if SAME:
        table_from, has_table = _entries(theta_size, table_at, flipped, start + 1, item, inside & (n > 1), x, S, True)
        table = tl.load(theta + table_from, mask=has_table, other=NEG)
    most = tl.max(n, axis=0)
    p = _nodes(nodes, node_size, node_at, start, item, inside, x, S, 0.0)
    g = _nodes(grad_mu, mu_size, node_at, start, item, inside, x, S, 0.0)
    before = _centred(g, p)
    tl.store(gathered + _messages(start, item, batch, x, S), before, mask=inside[:, None] & states)
    for t in range(1, most):
        here = inside & (t < n)
        weight = _nodes(theta, theta_size, node_at, start + t - 1, item, here, x, S, NEG)
        ahead_at = _messages(start + t - 1, item, batch, x, S)
        weight += tl.load(ahead + ahead_at, mask=here[:, None] & states, other=NEG)
        if not SAME:
            table_from, has_table = _entries(theta_size, table_at, flipped, start + t, item, here, x, S, True)
            table = tl.load(theta + table_from, mask=has_table, other=NEG)
        full = table + weight[:, None, :]  # (walk, y, x)
        total = _lse(full, 2)
        given = tl.exp(full - tl.where(total > NEG, total, 0.0)[:, :, None])  # of x, given y
        values = tl.broadcast_to(before[:, None, :], [C, SX, SX])
        if PAIRS:
            grad_at, has_grad = _entries(mu_size, mu_at, flipped, start + t, item, here, x, S, True)
            values += tl.load(grad_mu + grad_at, mask=has_grad, other=0.0)
        p = _nodes(nodes, node_size, node_at, start + t, item, here, x, S, 0.0)
        g = _nodes(grad_mu, mu_size, node_at, start + t, item, here, x, S, 0.0)
        g += tl.sum(tl.where(given > 0, given * values, 0.0), axis=2)
        before = tl.where(here[:, None], _centred(g, p), before)
        tl.store(gathered + _messages(start + t, item, batch, x, S), before, mask=here[:, None] & states)
    tl.debug_barrier()
    if SAME:
        table_from, has_table = _entries(theta_size, table_at, flipped, start + 1, item, inside & (n > 1), x, S, False)
        table = tl.load(theta + table_from, mask=has_table, other=NEG)
    last = start + n - 1
    p = _nodes(nodes, node_size, node_at, last, item, inside, x, S, 0.0)
    at = item * out_size + tl.load(node_at + last, mask=inside, other=0)
    tl.store(out + at[:, None] + x[None], tl.where(p > 0, p * before, 0.0), mask=inside[:, None] & states)
    # Of a variable, its own cotangent and what lies after it, minus the mean.
    after = _centred(_nodes(grad_mu, mu_size, node_at, last, item, inside, x, S, 0.0), p)
    if SUM:
        added = tl.zeros([C, SX, SX], p.dtype)
    for k in range(1, most):
        t = most - k
        here = inside & (t < n)
        weight = _nodes(theta, theta_size, node_at, start + t, item, here, x, S, NEG)
        weight += tl.load(back + _messages(start + t, item, batch, x, S), mask=here[:, None] & states, other=NEG)
        if not SAME:
            table_from, has_table = _entries(theta_size, table_at, flipped, start + t, item, here, x, S, False)
            table = tl.load(theta + table_from, mask=has_table, other=NEG)
        full = table + weight[:, None, :]
        total = _lse(full, 2)
        given = tl.exp(full - tl.where(total > NEG, total, 0.0)[:, :, None])  # of y, given x
        values = tl.broadcast_to(after[:, None, :], [C, SX, SX])
        if PAIRS:
            grad_at, has_grad = _entries(mu_size, mu_at, flipped, start + t, item, here, x, S, False)
            values += tl.load(grad_mu + grad_at, mask=has_grad, other=0.0)
        message_at = _messages(start + t - 1, item, batch, x, S)
        before = tl.load(gathered + message_at, mask=here[:, None] & states, other=0.0)
        p = _nodes(nodes, node_size, node_at, start + t - 1, item, here, x, S, 0.0)
        later = tl.sum(tl.where(given > 0, given * values, 0.0), axis=2)
        mean = tl.sum(tl.where(p > 0, p * later, 0.0), axis=1)
        later = later - mean[:, None]
        at = item * out_size + tl.load(node_at + start + t - 1, mask=here, other=0)
        tl.store(out + at[:, None] + x[None], tl.where(p > 0, p * (before + later), 0.0), mask=here[:, None] & states)
        joint = given * p[:, :, None]
        joint = tl.where(joint > 0, joint * (values - mean[:, None, None] + before[:, :, None]), 0.0)
        if SUM:
            added += tl.where(here[:, None, None], joint, 0.0)
        else:
            pair_at, has_pair = _entries(out_size, mu_at, flipped, start + t, item, here, x, S, False)
            tl.store(out + pair_at, joint, mask=has_pair)
        own = _nodes(grad_mu, mu_size, node_at, start + t - 1, item, here, x, S, 0.0)
        after = tl.where(here[:, None], _centred(own + later, p), after)
    if SUM:
        _store_sums(sums, added, start, inside, chain, item, batch, flipped, n, x, S)
