"""Schedules: the order in which messages are sent, compiled into levels of independent updates.

A sequential schedule visits the variables in an order, first forwards and then backwards. In the forward half, a
variable receives messages from every factor in which it is not the first variable of the order; in the backward half,
from every factor in which it is not the last. Two variables that share no factor do not affect each other's updates, so
the order is compiled into *levels*: the level of a variable is one more than the highest level among its earlier
neighbours. Updating all variables of a level at once, level by level, gives exactly the sequential result. The backward
half uses the same levels in reverse. On a grid numbered row by row, the levels are the anti-diagonals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riskfield.graph._scopes import IntArray, frozen, integers
from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True, eq=False)
class Levels:
    """A node order and the levels it compiles into."""

    rank: IntArray  # (variable,)  position of each variable in the order
    level: IntArray  # (variable,)
    count: int


@dataclass(frozen=True)
class Sequential:
    """Update the messages one variable after the other, forwards and then backwards (Gauss-Seidel).

    Arguments:
        order: the order of the variables, a permutation. By default a forest is visited from the leaves to the roots,
            so that one sweep of belief propagation is exact. Any other graph is visited in the order of its variables'
            numbers. On a grid numbered row by row, this order makes tree-reweighted message passing with rho = 1/2
            convergent (every row and column is a monotonic chain).
    """

    order: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", as_order(self.order))


@dataclass(frozen=True)
class Parallel:
    """Update all messages at once, from the messages of the previous sweep (flooding, Jacobi)."""


@dataclass(frozen=True)
class Coloured:
    """Update the messages one colour after the other: a `Sequential` order with few, wide levels, for GPUs.

    Variables that share a factor have different colours. A bipartite graph, such as a grid, a chain or a pairwise tree,
    has two colours; other graphs get a greedy colouring (`colour_order`). With fewer levels, more variables are updated
    at once, which makes a sweep faster. But information travels less far in each sweep, so more sweeps are needed.

    >>> from riskfield import MessagePassing, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> infer(graph, graph.zeros(), MessagePassing(schedule=Coloured())).node_marginals[0][0]
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """


def as_order(order: Sequence[int] | None) -> tuple[int, ...] | None:
    """An order of variables as Python numbers, checked to be integers."""
    if order is None:
        return None
    array = integers(order, "order")
    if array.ndim != 1:
        raise ValueError(f"`order` must be one-dimensional. Got shape {array.shape}.")
    return tuple(array.tolist())


Schedule = Sequential | Coloured | Parallel

_PAIRS_AT_ONCE = 1 << 16  # as Python numbers, which take more memory than arrays


def compile_levels(graph: FactorGraph, order: npt.ArrayLike | None = None) -> Levels:
    """The levels of a sequential order (by default that of `Sequential()`)."""
    n = graph.num_variables
    if order is None:
        order = _leaf_order(graph)
    rank = np.arange(n)
    if order is not None:
        order = integers(order, "order")
        if order.shape != (n,) or not np.array_equal(np.sort(order), rank):
            found = f"shape {order.shape}" if order.shape != (n,) else f"no variable {np.setdiff1d(rank, order)[0]}"
            raise ValueError(f"`order` must be a permutation of the {n} variables. Got {found}.")
        rank = np.empty(n, np.int64)
        rank[order] = np.arange(n)
    level = _longest_paths(n, rank, graph.neighbour_pairs())
    return Levels(frozen(rank), frozen(level), int(level.max()) + 1 if n else 0)


def _leaf_order(graph: FactorGraph) -> IntArray | None:
    """An order of a forest in which every variable comes after its subtree; None to use the order of the numbers."""
    if not graph.is_forest:
        return None
    n = graph.num_variables
    waiting = np.zeros(n, np.int64)  # the number of factors in which a variable is not the last one
    for group in graph.factor_groups:
        earlier = group.variables < group.variables.max(axis=1, keepdims=True)
        waiting += np.bincount(group.variables[earlier], minlength=n)
    # With at most one such factor per variable (its parent), the numbers already go from the leaves to the roots.
    return None if (waiting <= 1).all() else breadth_first_order(graph)[::-1]


def _longest_paths(n: int, rank: IntArray, pairs: IntArray) -> IntArray:
    """The length of the longest path of earlier neighbours that ends at each variable."""
    earlier, later = np.where(rank[pairs[:, :1]] < rank[pairs[:, 1:]], pairs, pairs[:, ::-1]).T
    # Variables that have at most two of them, as on a grid, one after the other: `sources` has the positions in the
    # order, counted from 1; 0 stands for none.
    source, target = rank[earlier] + 1, rank[later]
    sources = np.zeros((2, n), np.int64)
    sources[0, target] = source
    others = sources[0, target] != source
    sources[1, target[others]] = source[others]
    if (sources[1, target[others]] == source[others]).all():
        lengths = [-1]
        for start in range(0, n, _PAIRS_AT_ONCE):
            for a, b in zip(*sources[:, start : start + _PAIRS_AT_ONCE].tolist(), strict=True):
                x, y = lengths[a], lengths[b]
                lengths.append((x if x > y else y) + 1)
        return np.array(lengths, np.int64)[rank + 1]
    in_order = np.argsort(rank[earlier], kind="stable")  # then the level of `earlier` is known when its pair comes
    level = [0] * n
    for start in range(0, len(in_order), _PAIRS_AT_ONCE):
        block = in_order[start : start + _PAIRS_AT_ONCE]
        for a, b in zip(earlier[block].tolist(), later[block].tolist(), strict=True):
            if level[b] <= level[a]:
                level[b] = level[a] + 1
    return np.array(level, np.int64)


def colour_order(graph: FactorGraph) -> tuple[int, ...]:
    """An order that compiles into few levels: the variables sorted by the colours of a greedy colouring.

    >>> from riskfield import grid
    >>> compile_levels(grid(30, 40, 2), colour_order(grid(30, 40, 2))).count
    2
    """
    return tuple(int(v) for v in np.argsort(colours(graph), kind="stable"))


def breadth_first_order(graph: FactorGraph) -> IntArray:
    """An order in which, on a forest, each variable shares at most one factor with the earlier variables.

    It visits the factor graph breadth first, from the first variable of every component.

    >>> breadth_first_order(FactorGraph([2] * 4, [(2, 0), (3, 2)])).tolist()
    [0, 1, 2, 3]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order as search
    from scipy.sparse.csgraph import connected_components

    edges = graph.factor_graph_edges()
    num_nodes = graph.num_variables + graph.num_factors
    links = coo_array((np.ones(len(edges)), edges.T), (num_nodes + 1, num_nodes + 1))
    _, component = connected_components(links, directed=False)
    # One more node is connected to the first variable of every component. Variables have the lowest numbers, so the
    # first node of a component is a variable.
    roots = np.unique(component[:num_nodes], return_index=True)[1]
    rows, columns = np.append(edges[:, 0], np.full(len(roots), num_nodes)), np.append(edges[:, 1], roots)
    joined = coo_array((np.ones(len(rows)), (rows, columns)), (num_nodes + 1, num_nodes + 1))
    found = search(joined.tocsr(), num_nodes, directed=False, return_predecessors=False)
    order: IntArray = found[found < graph.num_variables].astype(np.int64)
    return order


def coloured_levels(graph: FactorGraph) -> Levels:
    """The levels of `Coloured()`: one for each colour, and two if the graph is bipartite.

    In either colouring a variable of colour c has a neighbour of colour c - 1, so these are the levels into which the
    order by colours compiles.
    """
    colour = _two_colours(graph)
    if colour is None:
        colour = colours(graph)
    rank = np.empty_like(colour)
    rank[np.argsort(colour, kind="stable")] = np.arange(len(colour))
    return Levels(frozen(rank), frozen(colour), int(colour.max(initial=-1)) + 1)


def _two_colours(graph: FactorGraph) -> IntArray | None:
    """A colour, 0 or 1, for each variable, so that variables that share a factor differ; None if this is impossible."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Two copies of every variable, and an edge from each copy to the other copy of a neighbour: a component of the
    # graph is bipartite if and only if the two copies of its variables are not connected.
    n = graph.num_variables
    first, second = graph.neighbour_pairs().T
    ends = np.concatenate([first, first + n]), np.concatenate([second + n, second])
    _, part = connected_components(coo_array((np.ones(2 * len(first), bool), ends), (2 * n, 2 * n)), directed=False)
    if (part[:n] == part[n:]).any():
        return None
    colour: IntArray = (part[:n] > part[n:]).astype(np.int64)
    return colour


def colours(graph: FactorGraph) -> IntArray:
    """A colour for each variable, so that variables that share a factor differ (greedy, in the order of numbers)."""
    n = graph.num_variables
    pairs = graph.neighbour_pairs()
    starts, targets = _adjacency(n, *np.concatenate([pairs, pairs[:, ::-1]]).T)
    colour = np.full(n, -1, np.int64)
    level = _longest_paths(n, np.arange(n), pairs)
    # Variables of one level are not neighbours: each takes the lowest colour that none of its neighbours has.
    for members in np.split(np.argsort(level, kind="stable"), np.cumsum(np.bincount(level, minlength=1))[:-1]):
        owner, neighbour = _neighbours(starts, targets, members)
        used = np.unique(np.stack([owner, colour[neighbour]], axis=1), axis=0)
        used = used[used[:, 1] >= 0]
        first = np.searchsorted(used[:, 0], np.arange(len(members)))
        # The sorted used colours are 0, 1, 2, ... up to the first free one.
        unbroken = used[:, 1] == np.arange(len(used)) - first[used[:, 0]]
        colour[members] = np.bincount(used[unbroken, 0], minlength=len(members))
    return colour


def _adjacency(n: int, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """Compressed lists of targets: those of `v` are `targets[starts[v]:starts[v + 1]]`."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=n))])
    return starts, target[np.argsort(source, kind="stable")]


def _neighbours(starts: IntArray, targets: IntArray, members: IntArray) -> tuple[IntArray, IntArray]:
    """All targets of `members`, each with the position of its member."""
    counts = starts[members + 1] - starts[members]
    owner = np.repeat(np.arange(len(members)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, targets[np.repeat(starts[members], counts) + within]
