r"""Potentials too large for their floating-point type.

Inference adds potentials and compares the sums. A sum of size S has a rounding error of about eps S, so differences
between joint states are lost once S reaches 1 / eps. What matters is not the size of theta but the size of *conflicts*.
A constant added to a whole table changes no marginal. So tables are first shifted to a maximum of 0. Then every entry
is a penalty, and only the penalties that probable states pay enter sums that matter: a mask of -1e9 that no probable
state touches does no harm, even in float32.

If all potentials are small, inference runs on theta as it is. Otherwise it runs on the shifted tables. Afterwards the
expected penalty of each variable, with all its factors, must be at most 0.001 / eps: 4.5e12 in float64, 8.4e3 in
float32. Rounding then changes log-probabilities by a few thousandths at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from riskfield.errors import PrecisionError
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.request import Request
from riskfield.inference.solution import Deferred, Solution, sum_of_maxima

NEG_INF = float("-inf")
_RESOLUTION = 1e-3  # of a log-probability


@cache
def largest_conflict(dtype: torch.dtype) -> float:
    """The largest sum of penalties that `dtype` resolves to a thousandth."""
    return _RESOLUTION / torch.finfo(dtype).eps


def is_resolved(graph: FactorGraph, theta: Tensor, low: float, high: float) -> bool:
    """Whether all finite potentials, all from `low` to `high`, are so small that no sum exceeds `largest_conflict`."""
    if low == NEG_INF:
        low = theta.detach().masked_fill(theta.detach() == NEG_INF, 0.0).amin().item()
    size = max(high, -low)
    # Shifted to a maximum of 0, an entry can be twice as large.
    return 2 * size * (1 + graph.max_degree) <= largest_conflict(theta.dtype)


def recentred(request: Request, solve: Callable[[Request], Solution]) -> Solution:
    """Solve with every table shifted to a maximum of 0, and refuse if what is left does not fit the precision."""
    graph, theta = request.graph, request.theta
    shift, total = _shift(graph, theta.detach()), sum_of_maxima(graph, theta.detach())
    penalties = theta - shift
    solution = solve(replace(request, theta=penalties))
    _check_conflicts(graph, penalties.detach(), solution.mu.detach())
    value = solution._value
    if isinstance(value, Tensor | Deferred):
        value = solution.log_partition
        return solution.replaced(theta=theta, _value=value + total.to(value))
    return solution.replaced(theta=theta, _value=partial(_shifted_value, value, shift, total))


def _shifted_value(
    value: Callable[[FactorGraph, Tensor, Tensor], Tensor],
    shift: Tensor,
    total: Tensor,
    graph: FactorGraph,
    theta: Tensor,
    mu: Tensor,
) -> Tensor:
    return value(graph, theta - shift, mu) + total.to(theta)


def _shift(graph: FactorGraph, theta: Tensor) -> Tensor:
    """The maximum of each table, at all its entries."""
    parts, dim = [], theta.ndim - 1
    for view in graph.node_views(theta):
        top = view.amax(-1, keepdim=True)
        top = torch.where(top == NEG_INF, 0.0, top)
        parts.append(top.expand_as(view).flatten(dim))
    for group, view in zip(graph.factor_groups, graph.factor_views(theta), strict=True):
        top = view.flatten(dim + 1).amax(-1)
        top = torch.where(top == NEG_INF, 0.0, top)
        parts.append(top.unsqueeze(-1).expand(*top.shape, group.table_size).flatten(dim))
    return torch.cat(parts, dim=-1)


def _check_conflicts(graph: FactorGraph, penalties: Tensor, mu: Tensor) -> None:
    batch, dim = penalties.shape[:-1], penalties.ndim - 1
    expected = torch.where(mu > 0, -graph.expand(penalties) * mu, 0.0)
    of_variable = expected.new_zeros(*batch, graph.num_variables)
    for nodes, view in zip(graph.node_groups, graph.node_views(expected), strict=True):
        of_variable[..., index_tensor(nodes.variables, mu.device)] = view.sum(-1)
    for group, view in zip(graph.factor_groups, graph.factor_views(expected), strict=True):
        of_factor = view.flatten(dim + 1).sum(-1)
        for slot in range(group.arity):
            of_variable.index_add_(dim, index_tensor(group.variables[:, slot], mu.device), of_factor)
    limit = largest_conflict(penalties.dtype)
    if (of_variable > limit).any():
        where = tuple(int(k) for k in (of_variable > limit).nonzero()[0])
        item = f" (batch item {where[:-1]})" if batch else ""
        raise PrecisionError(
            f"`theta` is too large for {penalties.dtype}: in the tables of variable {where[-1]} and its factors{item}, "
            f"the entries of probable states are {float(of_variable[where]):.2g} below the maxima, added over the "
            f"tables. Beyond {limit:.2g}, differences between states are lost in rounding. Use smaller potentials"
            + (", or float64." if penalties.dtype == torch.float32 else ".")
        )
