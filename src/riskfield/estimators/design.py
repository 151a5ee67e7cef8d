"""What an estimator makes of one example: a structure, and the inputs of a `LinearModel` on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.graph.builders import chain
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.grids import grid
from riskfield.models.sparse import SparseRows

Floats: TypeAlias = npt.NDArray[np.float64]
Codes: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowRange:
    """Rows `start` to `stop` of a sparse matrix that several examples share."""

    matrix: Any  # scipy.sparse.csr_array
    start: int
    stop: int

    def __len__(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return len(self), self.matrix.shape[1]


Features: TypeAlias = Floats | RowRange

# The types of edges of a grid, in the order in which its graph lists them. Each has parameters of its own.
DIRECTIONS = ("horizontal", "vertical", "diagonal", "antidiagonal")


class Structure(Protocol):
    """Which variables and factors there are. Examples of equal structures share one graph."""

    def graph(self, num_states: int) -> FactorGraph:
        """The graph, of variables with `num_states` states each."""
        ...


class Sizes(NamedTuple):
    """How many numbers describe a variable and a factor, and how many variables a factor joins."""

    features: int
    edge_features: int
    arity: int


class Design(Protocol):
    """One example as the estimators use it. The labels that users see may have another shape than the variables."""

    @property
    def structure(self) -> Structure:
        """Which graph it is on."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its labels."""
        ...

    @property
    def sizes(self) -> Sizes:
        """The sizes that all examples of an estimator share."""
        ...

    def inputs(self) -> Mapping[str, Tensor | RowRange]:
        """The inputs of a `LinearModel`, each of shape (variable or table, feature)."""
        ...

    def reduce(self, codes: Codes) -> Codes:
        """The codes of the variables, of shape (variable,), from those of the labels, of shape `shape`."""
        ...

    def expand(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """States (variable,) or marginals (variable, state) of the variables, in the shape of the labels."""
        ...


@dataclass(frozen=True)
class Chain:
    """Variables one after the other. All pairs of neighbours share a table."""

    length: int

    def graph(self, num_states: int) -> FactorGraph:
        """A tied chain."""
        return chain(self.length, num_states, tied=True)


@dataclass(frozen=True)
class Grid:
    """Pixels and their neighbours."""

    rows: int
    columns: int
    connectivity: int = 4
    tied: bool = False

    def graph(self, num_states: int) -> FactorGraph:
        """A grid, with a table for every edge or for every direction."""
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
class ArrayDesign:
    """An example that is given by arrays of features."""

    structure: Structure
    shape: tuple[int, ...]
    arrays: Mapping[str, Features]  # "nodes" (variable, feature), and (table, feature) per type of factor
    constants: int  # how many features of 1 were added to those of the variables, as the last ones
    arity: int = 2

    @property
    def sizes(self) -> Sizes:
        """Without the constant of the variables, which is not a feature that the user gave."""
        nodes, first = self.arrays["nodes"], next(name for name in self.arrays if name != "nodes")
        return Sizes(nodes.shape[1] - self.constants, self.arrays[first].shape[1], self.arity)

    def inputs(self) -> dict[str, Tensor | RowRange]:
        """The arrays as tensors, and sparse rows as they are."""
        return {
            name: torch.from_numpy(array) if isinstance(array, np.ndarray) else array
            for name, array in self.arrays.items()
        }

    def reduce(self, codes: Codes) -> Codes:
        """Every variable has one label."""
        return codes.reshape(-1)

    def expand(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every variable has one label."""
        return values.reshape(*self.shape, *values.shape[1:])


def sequence(features: Features, constants: int) -> ArrayDesign:
    """Features of shape (variable, feature), with this many constants among them, joined into a chain."""
    length = len(features)
    return ArrayDesign(
        Chain(length), (length,), {"nodes": features, "factors": np.ones((min(length - 1, 1), 1))}, constants
    )


def listed(
    features: Features, constants: int, factors: npt.NDArray[np.int64], factor_features: Floats | None
) -> ArrayDesign:
    """Features of shape (variable, feature) on given factors, which have a constant if they have no features."""
    count, arity = factors.shape
    structure = Listed(len(features), factors.tobytes(), arity, factor_features is None)
    own = np.ones((min(count, 1), 1)) if factor_features is None else with_constant(factor_features)
    return ArrayDesign(structure, (len(features),), {"nodes": features, "factors": own}, constants, arity)


def pixels(features: Floats, connectivity: int, differences: bool) -> ArrayDesign:
    """Features of shape (row, column, feature) on a grid.

    The features of an edge are a constant and, with `differences`, the absolute differences of the features of its two
    pixels.
    """
    rows, columns = features.shape[:2]
    ends = [(features[:, :-1], features[:, 1:]), (features[:-1], features[1:])]
    if connectivity == 8:
        ends += [(features[:-1, :-1], features[1:, 1:]), (features[:-1, 1:], features[1:, :-1])]
    arrays = {"nodes": with_constant(features.reshape(rows * columns, -1))}
    for direction, (first, second) in zip(DIRECTIONS, ends, strict=False):
        if differences:
            arrays[direction] = with_constant(np.abs(first - second).reshape(-1, features.shape[-1]))
        else:
            arrays[direction] = np.ones((min(first[..., 0].size, 1), 1))
    return ArrayDesign(Grid(rows, columns, connectivity, not differences), (rows, columns), arrays, 1)


def with_constant_column(matrix: Any) -> Any:
    """A sparse matrix with a last column of 1."""
    from scipy.sparse import csr_array, hstack

    return hstack([matrix, csr_array(np.ones((matrix.shape[0], 1)))], format="csr")


def with_constant(features: Floats) -> Floats:
    """The features with a last one of 1."""
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def stacked(inputs: Sequence[Mapping[str, Tensor | RowRange]], dtype: torch.dtype) -> dict[str, Tensor | SparseRows]:
    """The inputs of several examples of one structure, with the example as the first axis."""
    return {name: _stack([own[name] for own in inputs], dtype) for name in inputs[0]}


def _stack(parts: Sequence[Tensor | RowRange], dtype: torch.dtype) -> Tensor | SparseRows:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack([own for own in parts if isinstance(own, Tensor)]).to(dtype)
    rows = np.concatenate([np.arange(own.start, own.stop) for own in parts if isinstance(own, RowRange)])
    return SparseRows(first.matrix[rows], len(parts))


def check_sizes(designs: Sequence[Design], sizes: Sizes | None = None) -> None:
    """Raise unless all examples have the given sizes, or else those of the first one."""
    names = ("features per variable", "features per edge (a constant among them)", "variables per edge")
    for k, design in enumerate(designs):
        sizes = design.sizes if sizes is None else sizes
        for name, expected, got in zip(names, sizes, design.sizes, strict=True):
            if got != expected:
                raise ValueError(f"`X[{k}]` must have {expected} {name}, as the others in `fit`. Got {got}.")


def as_features(values: Any, dims: int, name: str) -> Floats:
    """`values` as finite numbers with `dims` axes, the last one of features; `name` is their name in errors."""
    array = np.asarray(values)
    axes = "(variables, features)" if dims == 2 else "(rows, columns, features)"
    if array.ndim != dims or 0 in array.shape[: dims - 1]:
        one = " If `X` is one example, pass [X]." if array.ndim == dims - 1 else ""
        raise ValueError(f"`{name}` must have shape {axes}. Got {array.shape}.{one}")
    if array.dtype.kind == "c":
        raise ValueError(f"`{name}` must hold real numbers. Complex data not supported. Got {array.dtype}.")
    if array.dtype.kind == "O":  # numbers, perhaps, as they come from tables of several types
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}` must hold numbers. Got objects: {error}.") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` must hold numbers. Got {array.dtype}.")
    features = array.astype(np.float64, copy=False)
    if not np.isfinite(features).all():
        raise ValueError(f"`{name}` must hold finite numbers. Got NaN or infinity.")
    return features
