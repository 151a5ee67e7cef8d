"""Builders of common graphs: grids, chains, graphs from edge lists, and disjoint unions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph


def grid(rows: int, columns: int, num_states: int, *, connectivity: int = 4, tied: bool = False) -> FactorGraph:
    """Build a pairwise grid of `rows` x `columns` variables, numbered row by row.

    The factors are ordered by direction: horizontal (left, right), vertical (upper, lower) and, with `connectivity=8`,
    falling (upper left, lower right) and rising (upper right, lower left) diagonals. With `tied=True` all factors of
    one direction share a table.

    >>> grid(3, 4, num_states=2)
    FactorGraph(12 variables, 17 factors, theta 92, states 2, arity 2)
    >>> grid(3, 4, num_states=2, tied=True).theta_size
    32
    """
    for name, value in (("rows", rows), ("columns", columns), ("num_states", num_states)):
        _check_positive(name, value)
    if connectivity not in (4, 8):
        raise ValueError(f"`connectivity` must be 4 or 8. Got {connectivity}.")
    index = np.arange(rows * columns).reshape(rows, columns)
    directions = [(index[:, :-1], index[:, 1:]), (index[:-1], index[1:])]
    if connectivity == 8:
        directions += [(index[:-1, :-1], index[1:, 1:]), (index[:-1, 1:], index[1:, :-1])]
    blocks = [np.stack([first.ravel(), second.ravel()], axis=1) for first, second in directions]
    tables = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks]) if tied else None
    return FactorGraph(np.full(rows * columns, num_states), np.concatenate(blocks), tables=tables)


def chain(length: int, num_states: int, *, tied: bool = False) -> FactorGraph:
    """Build a chain of `length` variables with pairwise factors. With `tied=True` all factors share one table.

    >>> chain(5, num_states=3)
    FactorGraph(5 variables, 4 factors, theta 51, states 3, arity 2)
    """
    _check_positive("length", length)
    _check_positive("num_states", num_states)
    edges = np.stack([np.arange(length - 1), np.arange(1, length)], axis=1)
    return FactorGraph(np.full(length, num_states), edges, tables=np.zeros(length - 1, np.int64) if tied else None)


def from_edges(
    num_states: Sequence[int] | int, edges: npt.ArrayLike, *, num_variables: int | None = None
) -> FactorGraph:
    """Build a pairwise graph from an edge list of shape (edges, 2).

    `num_states` is one number per variable, or one number for all of `num_variables` variables.

    >>> from_edges(2, [(0, 1), (1, 2), (2, 0)], num_variables=4)
    FactorGraph(4 variables, 3 factors, theta 20, states 2, arity 2)
    """
    array = np.asarray(edges)
    if array.size and (array.ndim != 2 or array.shape[1] != 2):
        raise ValueError(f"`edges` must have shape (edges, 2). Got {array.shape}.")
    if isinstance(num_states, int | np.integer):
        if num_variables is None:
            raise ValueError("`num_variables` is needed when `num_states` is one number for all variables.")
        num_states = np.full(num_variables, num_states)  # type: ignore[assignment]
    elif num_variables is not None and num_variables != len(num_states):
        raise ValueError(f"`num_variables` must be {len(num_states)}, the length of `num_states`. Got {num_variables}.")
    return FactorGraph(num_states, array.reshape(-1, 2))


@dataclass(frozen=True, eq=False)
class Union:
    """The disjoint union of several graphs, for batches of graphs of different structure.

    Variables and factors are numbered part by part. `join` combines one theta per part into a theta of `graph`; `split`
    separates a theta or mu of `graph` again.

    >>> both = Union([chain(3, 2), grid(2, 2, 2)])
    >>> both.graph
    FactorGraph(7 variables, 6 factors, theta 38, states 2, arity 2)
    >>> [part.shape[-1] for part in both.split(both.graph.zeros())]
    [14, 24]
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


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer. Got {value!r}.")
