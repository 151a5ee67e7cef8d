"""Parts of an image, for features and inference on one part after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """Rows `top` to `bottom` - 1 and columns `left` to `right` - 1 of a map."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.bottom - self.top, self.right - self.left

    @property
    def slices(self) -> tuple[slice, slice]:
        """The window as an index."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def inside(self, outer: Window) -> Window:
        """The same window, with rows and columns counted from the upper left corner of `outer`."""
        return Window(self.top - outer.top, self.bottom - outer.top, self.left - outer.left, self.right - outer.left)


@dataclass(frozen=True)
class Place:
    """Where a part of an image begins, and the size of the whole image."""

    top: int
    left: int
    rows: int
    columns: int


class Tile(NamedTuple):
    """A window on which inference runs, and the part of it whose marginals are kept."""

    window: Window
    kept: Window


def tiles(shape: tuple[int, int], side: int, margin: int) -> list[Tile]:
    """Cover a map with overlapping windows of `side` x `side`, or of the size of the map where that is smaller.

    All windows have one size. Every pixel is kept in one tile, and is at least `margin` pixels from the border of its
    window, unless that is the border of the map.

    >>> [tile.kept for tile in tiles((10, 16), side=10, margin=2)]
    [Window(top=0, bottom=10, left=0, right=8), Window(top=0, bottom=10, left=8, right=16)]
    """
    if not 0 <= 2 * margin < side:
        raise ValueError(f"`margin` must be less than half of `side`, {side}. Got {margin}.")
    rows, columns = (_along(length, side, margin) for length in shape)
    return [
        Tile(Window(*outer_row, *outer_column), Window(*row, *column))
        for outer_row, row in rows
        for outer_column, column in columns
    ]


def parts(shape: tuple[int, int], side: int) -> list[Window]:
    """Cut a map into windows of nearly equal size, at most `side` x `side`, that do not overlap.

    >>> parts((10, 16), side=10)
    [Window(top=0, bottom=10, left=0, right=8), Window(top=0, bottom=10, left=8, right=16)]
    """
    rows, columns = ([length * k // n for k in range(n + 1)] for length, n in ((own, -(-own // side)) for own in shape))
    return [Window(*row, *column) for row in pairwise(rows) for column in pairwise(columns)]


def _along(length: int, side: int, margin: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The windows along one axis and what is kept of them, each as (first, end)."""
    if length <= side:
        return [((0, length), (0, length))]
    found, kept_to = [], 0
    while kept_to < length:
        start = min(max(kept_to - margin, 0), length - side)
        end = start + side
        upto = length if end == length else min(end - margin, length)
        found.append(((start, end), (kept_to, upto)))
        kept_to = upto
    return found
