r"""Forward-backward on many chains that share one table, as matrix products over all chains at once.

The chains lie side by side in order of falling length, so that those with a t-th variable are the first n_t of them.
With P_t = exp(theta_t) of shape (state, n_t) and E = exp(table), and each column of alpha_t divided by its sum z_t:

    alpha_t = P_t * (E^T alpha_{t-1}) / z_t,        c_t = P_t * beta_t / z_t,        beta_{t-1} = E c_t,
    mu_t = alpha_t * beta_t,        sum of the pair marginals = E * sum_t alpha_{t-1} c_t^T,        A = sum of log z_t

(Rabiner 1989, section V.A). Pair marginals are summed by one matrix product and never stored, which is what a gradient
with respect to a shared table needs. The numbers are probabilities. Potentials so large that one could underflow are
left to the message-passing kernels, which also compute with logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph

# A step over the chains takes about as long as the message-passing kernels take for this many table entries.
_ENTRIES_PER_STEP = 2000
# The largest range of finite log-potentials, and the smallest probability. One step from it cannot underflow.
_LIMITS = {torch.float64: (200.0, 1e-200), torch.float32: (40.0, 1e-20)}


@dataclass(frozen=True, eq=False)
class Chains:
    """The variables of a graph that consists of chains, step by step."""

    order: Tensor  # (variable,)  the first variables of all chains, then the second ones, ...
    place: Tensor  # (variable,)  where in `order` each variable is
    counts: list[int]  # how many chains have a t-th variable


@dataclass(frozen=True, eq=False)
class Expectations:
    """The log-partition function of all chains together, and its gradient."""

    log_partition: Tensor  # ()
    statistics: Tensor  # (theta,)


def chains_of(graph: FactorGraph) -> Chains | None:
    """The chains of a graph whose factors are all pairs with one shared table; None for any other graph.

    It is None, too, for chains so few and long that the message-passing kernels are faster.
    """
    return graph.derived("chains", lambda: _chains(graph))


def _chains(graph: FactorGraph) -> Chains | None:
    if len(graph.factor_groups) != 1 or len(graph.node_groups) != 1:
        return None
    (group,), num_variables = graph.factor_groups, graph.num_variables
    if group.arity != 2 or group.num_tables != 1:
        return None
    following = np.full(num_variables, -1)
    following[group.variables[:, 0]] = group.variables[:, 1]
    is_first = np.ones(num_variables, np.bool_)
    is_first[group.variables[:, 1]] = False
    # Every variable has at most one factor on either side.
    if (following >= 0).sum() < group.num_factors or (~is_first).sum() < group.num_factors:
        return None
    first = np.flatnonzero(is_first)
    steps = _walk(first, following)
    if sum(map(len, steps)) < num_variables:  # the rest is in cycles
        return None
    if num_variables * group.table_size < _ENTRIES_PER_STEP * len(steps):
        return None
    position = np.empty(num_variables, np.int64)
    position[first] = np.arange(len(first))
    length = np.zeros(len(first), np.int64)
    for step in steps:
        chain = position[step]
        length[chain] += 1
        after = following[step]
        position[after[after >= 0]] = chain[after >= 0]
    steps = _walk(first[np.argsort(-length, kind="stable")], following)
    order = np.concatenate(steps)
    place = np.empty_like(order)
    place[order] = np.arange(num_variables)
    return Chains(index_tensor(order), index_tensor(place), [len(step) for step in steps])


def _walk(first: np.ndarray, following: np.ndarray) -> list[np.ndarray]:
    """The variables of chains, step by step. Chains keep their order."""
    steps = []
    while len(first):
        steps.append(first)
        after = following[first]
        first = after[after >= 0]
    return steps


@torch.no_grad()
def expectations(graph: FactorGraph, chains: Chains, theta: Tensor) -> Expectations | None:
    """A(theta) and dA/dtheta for theta of shape (theta,); None where a probability could underflow."""
    (nodes,), (tables,) = graph.node_views(theta), graph.factor_views(theta)
    order, place = (index.to(theta.device) for index in (chains.order, chains.place))
    weights = nodes.index_select(0, order).T.contiguous()  # (state, variable)
    top, top_pair = weights.amax(0), tables.amax()
    finite = weights.isneginf().sum() + tables.isneginf().sum()
    weights.sub_(top).exp_()
    pair = (tables[0] - top_pair).exp_()
    spread = _spread(weights) + _spread(pair)
    zeros = (weights == 0).sum() + (pair == 0).sum()
    most_spread, smallest = _LIMITS[theta.dtype]
    if not spread <= most_spread or zeros != finite:  # also NaN, or a variable without a possible state
        return None
    alpha, beta = torch.empty_like(weights), torch.ones_like(weights)
    total = weights.new_empty(weights.shape[1])
    parts = (part.split(chains.counts, -1) for part in (weights, alpha, beta, total))
    steps = list(zip(*parts, strict=True))
    transposed = pair.T.contiguous()
    last: Tensor | None = None
    for own, forward, _, scale in steps:
        if last is None:
            forward.copy_(own)
        else:
            torch.mm(transposed, last[:, : own.shape[1]], out=forward)
            forward.mul_(own)
        torch.sum(forward, 0, out=scale)
        forward.div_(scale)
        last = forward
    weights.div_(total)
    sums = torch.zeros_like(pair)
    for (own, _, backward, _), (_, before, earlier, _) in zip(steps[:0:-1], steps[-2::-1], strict=True):
        count = own.shape[1]
        torch.mm(pair, own.mul_(backward), out=earlier[:, :count])
        sums.addmm_(before[:, :count], own.T)
    value = total.log().sum() + top.sum() + top_pair * (len(order) - chains.counts[0])
    if not torch.isfinite(value) or (zeros > 0 and not (_is_safe(alpha, smallest) and _is_safe(beta, smallest))):
        return None
    statistics = torch.empty_like(theta)
    marginals = alpha.mul_(beta).T.contiguous()
    torch.index_select(marginals, 0, place, out=graph.node_views(statistics)[0])
    graph.factor_views(statistics)[0][0] = sums.mul_(pair)
    return Expectations(value, statistics)


def _spread(probabilities: Tensor) -> float:
    """The range of the logarithms of all positive entries."""
    lowest = probabilities.min()
    if lowest == 0:
        lowest = torch.where(probabilities > 0, probabilities, 1.0).min()
    return float(-lowest.log())


def _is_safe(numbers: Tensor, smallest: float) -> bool:
    positive = torch.where(numbers > 0, numbers, 1.0)
    return bool(positive.min() >= smallest) and bool(positive.max() <= 1 / smallest)
