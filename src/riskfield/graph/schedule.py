"""Schedules: in which order messages are sent, compiled into levels of mutually independent updates.

A sequential schedule visits the variables in an order, first forwards and then backwards. Forwards, a variable receives
the messages of every factor in which it is not the first to be visited; backwards, of every factor in which it is not
the last. Two variables that share no factor do not see each other's updates, so the order is compiled into *levels*:
a variable's level is one more than the highest level among its earlier neighbours. Visiting level by level, all
variables of a level at once, gives exactly the sequential result; backwards the same levels serve in reverse. On a grid
numbered row by row the levels are the anti-diagonals.
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
    """Update messages one variable after the other, forwards then backwards (Gauss-Seidel).

    Arguments:
        order: the order of the variables, a permutation. By default a forest is visited from the leaves to the roots,
            so that one sweep of belief propagation is exact, and any other graph in the numbering of its variables. On
            a grid the numbering makes tree-reweighted message passing with rho = 1/2 convergent (every row and column
            is a monotonic chain).
    """

    order: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.order is not None:
            object.__setattr__(self, "order", tuple(int(v) for v in self.order))


@dataclass(frozen=True)
class Parallel:
    """Update all messages at once from the previous ones (flooding, Jacobi)."""


@dataclass(frozen=True)
class Coloured:
    """Update messages one colour after the other: a `Sequential` order with few, wide levels, which GPUs need.

    Variables that share a factor have different colours: two colours where the graph is bipartite, as grids, chains and
    all pairwise trees are, else those of a greedy colouring (`colour_order`). Fewer levels make a sweep faster where
    many variables are updated at once; information travels less far in each sweep, so more sweeps are needed.

    >>> from riskfield import MessagePassing, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> infer(graph, graph.zeros(), MessagePassing(schedule=Coloured())).node_marginals[0][0]
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """


Schedule = Sequential | Coloured | Parallel


def compile_levels(graph: FactorGraph, order: npt.ArrayLike | None = None) -> Levels:
    """The levels of a sequential order (by default that of `Sequential()`)."""
    n = graph.num_variables
    if order is None:
        order = _leaf_order(graph)
    rank = np.arange(n)
    if order is not None:
        order = integers(order, "order")
        if order.shape != (n,) or not np.array_equal(np.sort(order), rank):
            raise ValueError(f"`order` must be a permutation of the {n} variables. Got shape {order.shape}.")
        rank = np.empty(n, np.int64)
        rank[order] = np.arange(n)
    level = _longest_paths(n, rank, graph.neighbour_pairs())
    return Levels(frozen(rank), frozen(level), int(level.max()) + 1 if n else 0)


def _leaf_order(graph: FactorGraph) -> IntArray | None:
    """An order of a forest in which every variable comes after its subtree; None where the numbering serves."""
    n = graph.num_variables
    waiting = np.zeros(n, np.int64)  # in how many factors a variable is not the last one
    for group in graph.factor_groups:
        earlier = group.variables < group.variables.max(axis=1, keepdims=True)
        waiting += np.bincount(group.variables[earlier], minlength=n)
    # With at most one such factor per variable, its parent, the numbering goes from the leaves to the roots.
    if (waiting <= 1).all() or not graph.is_forest:
        return None
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    # Nodes: the variables, the factors, and one that joins a variable of every tree.
    size = n + graph.num_factors + 1
    ends = np.concatenate([group.variables.ravel() for group in graph.factor_groups])
    factors = np.concatenate([np.repeat(group.factors, group.arity) for group in graph.factor_groups])
    edges = coo_array((np.ones(len(ends)), (ends, n + factors)), (size, size))
    _, tree = connected_components(edges, directed=False)
    roots = np.unique(tree[:n], return_index=True)[1]
    ends, others = np.concatenate([ends, roots]), np.concatenate([n + factors, np.full(len(roots), size - 1)])
    edges = coo_array((np.ones(len(ends)), (ends, others)), (size, size)).tocsr()
    visited = breadth_first_order(edges, size - 1, directed=False, return_predecessors=False)[::-1]
    order: IntArray = visited[visited < n].astype(np.int64)
    return order


def _longest_paths(n: int, rank: IntArray, pairs: IntArray) -> IntArray:
    """Length of the longest path of earlier neighbours before each variable."""
    earlier, later = np.where(rank[pairs[:, :1]] < rank[pairs[:, 1:]], pairs, pairs[:, ::-1]).T
    starts, targets = _adjacency(n, earlier, later)
    level = np.zeros(n, np.int64)
    waiting = np.bincount(targets, minlength=n)
    front = np.flatnonzero(waiting == 0)
    depth = 0
    # Peel the graph front by front: a variable's last earlier neighbour is peeled one front before it.
    while len(front):
        level[front] = depth
        depth += 1
        _, reached = _neighbours(starts, targets, front)
        np.subtract.at(waiting, reached, 1)
        front = np.unique(reached[waiting[reached] == 0])
    return level


def colour_order(graph: FactorGraph) -> tuple[int, ...]:
    """An order of the variables that compiles into few levels: colour by colour of a greedy colouring.

    >>> from riskfield import grid
    >>> compile_levels(grid(30, 40, 2), colour_order(grid(30, 40, 2))).count
    2
    """
    return tuple(int(v) for v in np.argsort(colours(graph), kind="stable"))


def breadth_first_order(graph: FactorGraph) -> IntArray:
    """An order of the variables in which, on a forest, a variable has one factor in common with all earlier ones.

    It goes breadth first through the factor graph, from the first variable of every component.

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
    # One more node joins the first variables of all components; variables come first, so they open every component.
    roots = np.unique(component[:num_nodes], return_index=True)[1]
    rows, columns = np.append(edges[:, 0], np.full(len(roots), num_nodes)), np.append(edges[:, 1], roots)
    joined = coo_array((np.ones(len(rows)), (rows, columns)), (num_nodes + 1, num_nodes + 1))
    found = search(joined.tocsr(), num_nodes, directed=False, return_predecessors=False)
    order: IntArray = found[found < graph.num_variables].astype(np.int64)
    return order


def coloured_order(graph: FactorGraph) -> IntArray:
    """The order of `Coloured()`: colour by colour, of two colours where the graph is bipartite."""
    colour = colours(graph)
    if colour.max(initial=0) > 1:
        two = _two_colours(graph)
        colour = colour if two is None else two
    return np.argsort(colour, kind="stable")


def _two_colours(graph: FactorGraph) -> IntArray | None:
    """A colour, 0 or 1, for each variable such that variables sharing a factor differ; None where there is none."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Two copies of every variable, and an edge from each copy to the other copy of a neighbour: a part of the graph is
    # bipartite if and only if the two copies of a variable are not connected.
    n = graph.num_variables
    first, second = graph.neighbour_pairs().T
    ends = np.concatenate([first, first + n]), np.concatenate([second + n, second])
    _, part = connected_components(coo_array((np.ones(2 * len(first), bool), ends), (2 * n, 2 * n)), directed=False)
    if (part[:n] == part[n:]).any():
        return None
    colour: IntArray = (part[:n] > part[n:]).astype(np.int64)
    return colour


def colours(graph: FactorGraph) -> IntArray:
    """A colour for each variable such that variables sharing a factor differ (greedy, in their numbering)."""
    n = graph.num_variables
    pairs = graph.neighbour_pairs()
    starts, targets = _adjacency(n, *np.concatenate([pairs, pairs[:, ::-1]]).T)
    colour = np.full(n, -1, np.int64)
    level = _longest_paths(n, np.arange(n), pairs)
    # Variables of one level are no neighbours: each takes the lowest colour its coloured neighbours leave free.
    for members in np.split(np.argsort(level, kind="stable"), np.cumsum(np.bincount(level, minlength=1))[:-1]):
        owner, neighbour = _neighbours(starts, targets, members)
        used = np.unique(np.stack([owner, colour[neighbour]], axis=1), axis=0)
        used = used[used[:, 1] >= 0]
        first = np.searchsorted(used[:, 0], np.arange(len(members)))
        # The sorted used colours start 0, 1, 2, ... up to the first free one.
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
