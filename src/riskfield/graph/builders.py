"""Builders of common graphs: chains, graphs from edge lists and from networkx, and disjoint unions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.graph._scopes import check_positive
from riskfield.graph.factor_graph import FactorGraph


def chain(length: int, num_states: int, *, tied: bool = False) -> FactorGraph:
    """Build a chain of `length` variables with pairwise factors. With `tied=True` all factors share one table.

    >>> chain(5, num_states=3)
    FactorGraph(5 variables, 4 factors, theta 51, states 3, arity 2)
    """
    check_positive("length", length)
    check_positive("num_states", num_states)
    edges = np.stack([np.arange(length - 1), np.arange(1, length)], axis=1)
    return FactorGraph(np.full(length, num_states), edges, tables=np.zeros(length - 1, np.int64) if tied else None)


def from_edges(
    num_states: Sequence[int] | npt.ArrayLike,
    edges: npt.ArrayLike,
    *,
    num_variables: int | None = None,
    tied: bool = False,
    names: Sequence[str] | None = None,
) -> FactorGraph:
    """Build a pairwise graph from an edge list of shape (edges, 2).

    Arguments:
        num_states: one number per variable, or one number for all of `num_variables` variables.
        edges: the two variables of each edge. Their order is the order of the axes of its table.
        num_variables: how many variables there are, if `num_states` is one number.
        tied: whether all edges share a table. Then their first ends must have equally many states, and so must their
            second ends.
        names: a name for each variable.

    >>> from_edges(2, [(0, 1), (1, 2), (2, 0)], num_variables=4)
    FactorGraph(4 variables, 3 factors, theta 20, states 2, arity 2)
    >>> from_edges(2, [(0, 1), (1, 2), (2, 0)], num_variables=4, tied=True).theta_size
    12
    """
    array = np.asarray(edges)
    if array.size and (array.ndim != 2 or array.shape[1] != 2):
        raise ValueError(f"`edges` must have shape (edges, 2). Got {array.shape}.")
    states = np.asarray(num_states)
    if states.ndim == 0:
        if num_variables is None:
            raise ValueError("`num_variables` is needed when `num_states` is one number for all variables.")
        states = np.full(num_variables, num_states)
    elif num_variables is not None and num_variables != len(states):
        raise ValueError(f"`num_variables` must be {len(states)}, the length of `num_states`. Got {num_variables}.")
    array = array.reshape(-1, 2)
    return FactorGraph(states, array, tables=np.zeros(len(array), np.int64) if tied else None, names=names)


def from_networkx(network: Any, num_states: int | str | Mapping[Any, int], *, tied: bool = False) -> FactorGraph:
    """Build a pairwise graph from a networkx graph: a variable for each node, a factor for each edge.

    Arguments:
        network: any networkx graph. In a directed one, the tail of an edge is the first axis of its table.
        num_states: the number of states: one number for all nodes, the name of a node attribute that holds it, or a
            mapping from nodes to numbers.
        tied: whether all edges share a table.

    The variables are in the order of `network.nodes`. Their names are the nodes' as strings: `graph.names`.

    >>> import networkx
    >>> graph = from_networkx(networkx.path_graph(["rain", "road", "crash"]), num_states=2)
    >>> graph, graph.variable("road")
    (FactorGraph(3 variables, 2 factors, theta 14, states 2, arity 2), 1)
    """
    if not hasattr(network, "nodes"):
        raise TypeError(f"`network` must be a networkx graph. Got {type(network).__name__}.")
    nodes = list(network.nodes)
    if isinstance(num_states, str):
        num_states = dict(network.nodes(data=num_states))
    if isinstance(num_states, Mapping):
        unknown = [node for node in nodes if num_states.get(node) is None]
        if unknown:
            raise ValueError(f"`num_states` must give a number of states for every node. Node {unknown[0]!r} has none.")
        states: Any = [num_states[node] for node in nodes]
    else:
        states = np.full(len(nodes), check_positive("num_states", num_states))
    number = {node: k for k, node in enumerate(nodes)}
    loops = [node for node in nodes if network.has_edge(node, node)]
    if loops:
        raise ValueError(f"`network` must not join a node with itself. Node {loops[0]!r} has such an edge.")
    edges = np.array([(number[first], number[second]) for first, second in network.edges()], np.int64)
    return from_edges(states, edges, tied=tied, names=[str(node) for node in nodes])


@dataclass(frozen=True, eq=False)
class Union:
    """The disjoint union of several graphs, for batches of graphs of different structure.

    Variables and factors are numbered part by part. `join` combines one theta per part into a theta of `graph`; `split`
    separates a theta or mu of `graph` again.

    >>> both = Union([chain(3, 2), chain(4, 2)])
    >>> both.graph
    FactorGraph(7 variables, 5 factors, theta 34, states 2, arity 2)
    >>> [part.shape[-1] for part in both.split(both.graph.zeros())]
    [14, 20]
    """

    parts: tuple[FactorGraph, ...]
    graph: FactorGraph

    def __init__(self, parts: Sequence[FactorGraph]):
        # Factors keep their order, so that numbers per factor can simply be concatenated.
        blocks, tables = [], []
        first_variable = first_table = 0
        for part in parts:
            part_tables = np.empty(part.num_factors, np.int64)
            for group in part.factor_groups:
                part_tables[group.factors] = group.tables + first_table
                first_table += group.num_tables
            tables.append(part_tables)
            blocks += [variables + first_variable for variables in _runs_of_equal_arity(part)]
            first_variable += part.num_variables
        states = np.concatenate([part.num_states for part in parts]) if parts else np.empty(0, np.int64)
        joined = np.concatenate(tables) if tables else None
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "graph", FactorGraph(states, blocks, tables=joined))

    def join(self, thetas: Sequence[Tensor]) -> Tensor:
        """Combine one theta per part into a theta of `graph`. Differentiable."""
        if len(thetas) != len(self.parts):
            raise ValueError(f"`thetas` must hold {len(self.parts)} tensors, one per part. Got {len(thetas)}.")
        nodes: dict[int, list[Tensor]] = {}
        factors: dict[tuple[int, ...], list[Tensor]] = {}
        for part, theta in zip(self.parts, thetas, strict=True):
            part.check_theta(theta)
            for node_group, view in zip(part.node_groups, part.node_views(theta), strict=True):
                nodes.setdefault(node_group.num_states, []).append(view)
            for group, view in zip(part.factor_groups, part.factor_views(theta), strict=True):
                factors.setdefault(group.shape, []).append(view)
        return self.graph.assemble(
            [torch.cat(nodes[g.num_states], dim=-2) for g in self.graph.node_groups],
            [torch.cat(factors[g.shape], dim=-1 - g.arity) for g in self.graph.factor_groups],
        )

    def split(self, vector: Tensor) -> list[Tensor]:
        """Separate a theta (or mu) of `graph` into one per part. Differentiable."""
        is_mu = vector.shape[-1] == self.graph.mu_size
        nodes = {g.num_states: v for g, v in zip(self.graph.node_groups, self.graph.node_views(vector), strict=True)}
        factors = {g.shape: v for g, v in zip(self.graph.factor_groups, self.graph.factor_views(vector), strict=True)}
        node_taken = dict.fromkeys(nodes, 0)
        factor_taken = dict.fromkeys(factors, 0)
        out = []
        for part in self.parts:
            pieces = []
            for node_group in part.node_groups:
                key, count = node_group.num_states, len(node_group.variables)
                pieces.append(nodes[key].narrow(-2, node_taken[key], count).flatten(-2))
                node_taken[key] += count
            for group in part.factor_groups:
                count = group.num_factors if is_mu else group.num_tables
                axis = -1 - group.arity
                pieces.append(factors[group.shape].narrow(axis, factor_taken[group.shape], count).flatten(axis))
                factor_taken[group.shape] += count
            out.append(torch.cat(pieces, dim=-1) if pieces else vector[..., :0])
        return out


def _runs_of_equal_arity(graph: FactorGraph) -> list[npt.NDArray[np.int64]]:
    """Return the variables of all factors in order, as arrays of shape (factors, arity)."""
    arity = np.empty(graph.num_factors, np.int64)
    widest = max((group.arity for group in graph.factor_groups), default=0)
    variables = np.empty((graph.num_factors, widest), np.int64)
    for group in graph.factor_groups:
        arity[group.factors] = group.arity
        variables[group.factors, : group.arity] = group.variables
    starts = [0, *(np.flatnonzero(np.diff(arity)) + 1).tolist(), graph.num_factors]
    return [variables[a:b, : arity[a]] for a, b in itertools.pairwise(starts) if a < b]
