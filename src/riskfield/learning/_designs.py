"""What an estimator makes of one example: a structure, and features of its variables and factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from riskfield.graph.builders import chain, grid
from riskfield.graph.factor_graph import FactorGraph

Floats = npt.NDArray[np.float64]


class Structure(Protocol):
    """Which variables and factors there are. Examples of equal structures share one graph."""

    def graph(self, num_states: int) -> FactorGraph:
        """The graph, of variables with `num_states` states each."""
        ...


@dataclass(frozen=True)
class Chain:
    """Variables one after the other; all pairs share a table."""

    length: int

    def graph(self, num_states: int) -> FactorGraph:
        """A tied chain."""
        return chain(self.length, num_states, tied=True)


@dataclass(frozen=True)
class Grid:
    """Pixels and their neighbours."""

    rows: int
    columns: int
    connectivity: int
    tied: bool

    def graph(self, num_states: int) -> FactorGraph:
        """A grid, with a table for every factor or for every direction."""
        return grid(self.rows, self.columns, num_states, connectivity=self.connectivity, tied=self.tied)


@dataclass(frozen=True)
class Listed:
    """Any factors of one arity."""

    num_variables: int
    factors: bytes  # int64 (factor, arity), so that structures can be compared
    arity: int
    tied: bool

    def graph(self, num_states: int) -> FactorGraph:
        """The factors as listed, with a table each or one for all."""
        factors = np.frombuffer(self.factors, np.int64).reshape(-1, self.arity)
        tables = np.zeros(len(factors), np.int64) if self.tied else None
        return FactorGraph(np.full(self.num_variables, num_states), factors, tables=tables)


@dataclass(frozen=True, eq=False)
class Design:
    """One example, ready for a `LinearModel`."""

    structure: Structure
    shape: tuple[int, ...]  # of its labels
    nodes: Floats  # (variable, feature)  the last one is 1
    factors: Floats  # (table, feature)
    arity: int = 2

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of features of a variable, without the 1, and of a factor, and of variables of a factor."""
        return self.nodes.shape[1] - 1, self.factors.shape[1], self.arity


def sequence(features: Floats) -> Design:
    """Features of shape (variable, feature), joined into a chain."""
    length = len(features)
    return Design(Chain(length), (length,), with_constant(features), np.ones((min(length - 1, 1), 1)))


def listed(features: Floats, factors: npt.NDArray[np.int64], factor_features: Floats | None) -> Design:
    """Features of shape (variable, feature) on given factors; their own features may be None, a constant."""
    count, arity = factors.shape
    structure = Listed(len(features), factors.tobytes(), arity, factor_features is None)
    own = np.ones((min(count, 1), 1)) if factor_features is None else with_constant(factor_features)
    return Design(structure, (len(features),), with_constant(features), own, arity)


def picture(features: Floats, connectivity: int, differences: bool) -> Design:
    """Features of shape (row, column, feature) on a grid.

    Every direction of edges has parameters of its own: the features of an edge stand in the columns of its direction.
    They are a constant, and with `differences` the absolute differences of the features of its two pixels.
    """
    rows, columns = features.shape[:2]
    pairs = [(features[:, :-1], features[:, 1:]), (features[:-1], features[1:])]
    if connectivity == 8:
        pairs += [(features[:-1, :-1], features[1:, 1:]), (features[:-1, 1:], features[1:, :-1])]
    nodes = with_constant(features.reshape(rows * columns, -1))
    if differences:
        blocks = [with_constant(np.abs(a - b).reshape(-1, features.shape[-1])) for a, b in pairs]
    else:
        blocks = [np.ones((min(a[..., 0].size, 1), 1)) for a, _ in pairs]
    return Design(Grid(rows, columns, connectivity, not differences), (rows, columns), nodes, _block_diagonal(blocks))


def with_constant(features: Floats) -> Floats:
    """With a last feature of 1."""
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def _block_diagonal(blocks: Sequence[Floats]) -> Floats:
    width = blocks[0].shape[1]
    out = np.zeros((sum(map(len, blocks)), width * len(blocks)))
    start = 0
    for k, block in enumerate(blocks):
        out[start : start + len(block), k * width : (k + 1) * width] = block
        start += len(block)
    return out
