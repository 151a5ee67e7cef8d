"""Graphs of images and volumes: grids of any dimension, and the adjacent regions of a label image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from riskfield.graph._scopes import check_positive, integers
from riskfield.graph.builders import from_edges
from riskfield.graph.factor_graph import FactorGraph

Slices = tuple[slice, ...]


@overload
def grid(
    shape: int, columns: int, num_states: int, *, connectivity: int | None = ..., tied: bool = ...
) -> FactorGraph: ...


@overload
def grid(shape: Sequence[int], *, num_states: int, connectivity: int | None = ..., tied: bool = ...) -> FactorGraph: ...


def grid(
    shape: int | Sequence[int],
    columns: int | None = None,
    num_states: int | None = None,
    *,
    connectivity: int | None = None,
    tied: bool = False,
) -> FactorGraph:
    """Build a pairwise grid: `grid(rows, columns, num_states)`, or `grid((depth, rows, columns), num_states=...)`.

    Variables are numbered in the order of a flattened array: in two dimensions, row by row.

    Arguments:
        shape: the number of rows, or a tuple with the length of every axis.
        columns: the number of columns, if `shape` is a number.
        num_states: the number of states of every variable.
        connectivity: how many neighbours an inner variable has: the nearest ones along each axis (the default: 4 in two
            dimensions, 6 in three), or all that touch it (8 in two dimensions, 26 in three).
        tied: whether all factors of one direction share a table.

    The factors are ordered by direction, and in each direction by their first variable. In two dimensions: horizontal
    (left, right), vertical (upper, lower), then falling (upper left, lower right) and rising (upper right, lower left)
    diagonals. In general: along the axes from the last to the first, then the diagonals.

    >>> grid(3, 4, num_states=2)
    FactorGraph(12 variables, 17 factors, theta 92, states 2, arity 2)
    >>> grid(3, 4, num_states=2, tied=True).theta_size
    32
    >>> grid((2, 3, 4), num_states=2, connectivity=26)
    FactorGraph(24 variables, 128 factors, theta 560, states 2, arity 2)
    """
    if isinstance(shape, int | np.integer):
        lengths: tuple[int, ...] = _checked_lengths(rows=shape, columns=columns)
    elif columns is not None:
        raise ValueError(f"`columns` must not be given when `shape` is a tuple. Got {columns!r}.")
    else:
        lengths = _checked_lengths(**{f"shape[{axis}]": length for axis, length in enumerate(shape)})
    states = check_positive("num_states", num_states)
    index = np.arange(np.prod(lengths, dtype=np.int64)).reshape(lengths)
    blocks = [
        np.stack([index[first].ravel(), index[second].ravel()], axis=1)
        for first, second in directions(len(lengths), connectivity)
    ]
    tables = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks]) if tied else None
    return FactorGraph(np.full(index.size, states), np.concatenate(blocks), tables=tables)


def directions(num_axes: int, connectivity: int | None = None) -> list[tuple[Slices, Slices]]:
    """The directions of the edges of a grid: for each, where the first and the second ends of its edges lie.

    >>> horizontal, vertical = directions(2)
    >>> import numpy as np
    >>> image = np.arange(6).reshape(2, 3)
    >>> image[horizontal[0]].tolist(), image[horizontal[1]].tolist()
    ([[0, 1], [3, 4]], [[1, 2], [4, 5]])
    """
    if num_axes < 1:
        raise ValueError("`shape` must have at least one axis. Got none.")
    nearest, touching = 2 * num_axes, 3**num_axes - 1
    if connectivity not in (None, nearest, touching):
        raise ValueError(f"`connectivity` must be {nearest} or {touching}. Got {connectivity!r}.")
    offsets = [tuple(int(a == axis) for a in range(num_axes)) for axis in reversed(range(num_axes))]
    if connectivity == touching != nearest:
        half = [offset for offset in itertools.product((1, 0, -1), repeat=num_axes) if offset > (0,) * num_axes]
        offsets += [offset for offset in half if np.count_nonzero(offset) > 1]
    everything, but_last, but_first = slice(None), slice(None, -1), slice(1, None)
    shifts = {0: (everything, everything), 1: (but_last, but_first), -1: (but_first, but_last)}
    return [
        (tuple(shifts[step][0] for step in offset), tuple(shifts[step][1] for step in offset)) for offset in offsets
    ]


def from_superpixels(
    labels: npt.ArrayLike, num_states: int, *, connectivity: int | None = None, tied: bool = False
) -> FactorGraph:
    """Build the graph of the regions of a label image: a variable for each region, a factor for each adjacent pair.

    Arguments:
        labels: the number of each pixel's region, from 0 on without gaps, as `skimage.segmentation.slic` with
            `start_label=0` returns them: of any dimension.
        num_states: the number of states of every variable.
        connectivity: which pixels are neighbours, as in `grid`.
        tied: whether all factors share a table.

    The pairs are sorted, each with the smaller number first: `graph.factor_groups[0].variables`.

    >>> import numpy as np
    >>> graph = from_superpixels(np.array([[0, 0, 1], [2, 2, 1]]), num_states=2)
    >>> graph.factor_groups[0].variables.tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    array = integers(labels, "labels")
    if array.size == 0:
        raise ValueError(f"`labels` must hold at least one pixel. Got shape {array.shape}.")
    present = np.unique(array)
    if (present != np.arange(len(present))).any():
        missing = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise ValueError(f"`labels` must number the regions 0, 1, 2, ... without gaps. Got no region {missing}.")
    found = [np.empty((0, 2), np.int64)]
    for first, second in directions(array.ndim, connectivity):
        ends = np.stack([array[first].ravel(), array[second].ravel()], axis=1)
        found.append(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return from_edges(num_states, pairs, num_variables=len(present), tied=tied)


def _checked_lengths(**lengths: int | None) -> tuple[int, ...]:
    return tuple(check_positive(name, length) for name, length in lengths.items())
