r"""Features of images, following Domke (2013), section 8.

`ImageFeatures` lists the features of pixels and of edges, and sets the resolution of inference. The defaults are:

    u(y, i):     sin(c . s_i) and cos(c . s_i) for all binary c, with s = (red, green, blue, row, column): 64 features;
                 a histogram of oriented gradients around i: 36 features
    v(y, i, j):  21 features: 1; whether |rgb_i - rgb_j| is above each of 10 thresholds; whether the larger Sobel
                 response of i and j is above each of 10 thresholds

Horizontal and vertical edges have separate parameters. All feature maps are computed at the resolution of the image
and then averaged by area to the resolution of inference. Edge features compare these averages.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.features.kinds import (
    HOG,
    AbstractEdgeFeature,
    AbstractPixelFeature,
    ColourDifference,
    Constant,
    Floats,
    Fourier,
    SobelResponse,
    check_parts,
)
from riskfield.features.resample import area_weights
from riskfield.features.window import Place, Window

# At the resolution of the image: float64, with two copies while they are computed.
_BYTES_PER_FEATURE = 24
_PIXELS_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class FeatureMaps:
    """The features of one image at the resolution of inference, in single precision."""

    pixels: Tensor  # (row, column, feature)
    horizontal: Tensor  # (row, column - 1, feature)  edges between a pixel and its right neighbour
    vertical: Tensor  # (row - 1, column, feature)  edges between a pixel and the one below

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the inference grid."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def edges(self) -> Tensor:
        """The features of all edges of `grid(*shape)`, (edge, 2 * feature).

        Horizontal edges use the first half of the columns and vertical edges the second; the other half is 0. This
        gives the directions separate parameters. `inputs` has the same effect without storing the zeros.
        """
        joined: Tensor = torch.block_diag(self.horizontal.flatten(0, 1), self.vertical.flatten(0, 1))
        return joined

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return the inputs of a `LinearModel` with factor types "horizontal" and "vertical"."""
        parts = {"nodes": self.pixels, "horizontal": self.horizontal, "vertical": self.vertical}
        return {name: part.flatten(0, 1).to(dtype) for name, part in parts.items()}


@dataclass(frozen=True)
class ImageFeatures:
    """The choice of the features of an image and of the resolution of inference.

    An image is an array of shape (row, column), (row, column, 1) or (row, column, 3). Its dtype is uint8 or uint16,
    which are scaled to [0, 1], bool, or floating, which is used as is.

    Arguments:
        pixels: features of pixels. By default the 100 features of Domke (2013): `Fourier()` and `HOG()`.
        edges: features of edges. By default the 21 features of Domke (2013). The paper has 42, because it lists them
            separately for horizontal and vertical edges.
        scale: the resolution of inference relative to that of the image.

    >>> import numpy as np
    >>> features = ImageFeatures(scale=0.2)
    >>> features.num_pixel_features, features.num_edge_features
    (100, 21)
    >>> of_image = features(np.zeros((240, 320, 3), np.uint8))
    >>> of_image.pixels.shape, of_image.horizontal.shape
    (torch.Size([48, 64, 100]), torch.Size([48, 63, 21]))
    """

    pixels: tuple[AbstractPixelFeature, ...] = (Fourier(), HOG())
    edges: tuple[AbstractEdgeFeature, ...] = (Constant(), ColourDifference(), SobelResponse())
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_parts("pixels", self.pixels, AbstractPixelFeature)
        check_parts("edges", self.edges, AbstractEdgeFeature)
        if not 0 < self.scale <= 1:
            raise ValueError(f"`scale` must be above 0 and at most 1. Got {self.scale}.")

    @property
    def num_pixel_features(self) -> int:
        """The number of features of a pixel."""
        return sum(feature.num_features for feature in self.pixels)

    @property
    def num_edge_features(self) -> int:
        """The number of features of an edge, which is the same for both directions."""
        return sum(feature.num_edge_features for feature in self.edges)

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of the inference grid for an image of `rows` by `columns`."""
        return max(1, round(rows * self.scale)), max(1, round(columns * self.scale))

    @property
    def reach(self) -> int:
        """How far from a pixel the image may influence its features, in pixels of the image."""
        return max(*(feature.reach for feature in self.pixels), *(feature.reach for feature in self.edges))

    def __call__(self, image: npt.ArrayLike, window: Window | None = None) -> FeatureMaps:
        """Compute the features of `image`, or of a window of its inference grid.

        The features of a window are those of the whole image in the window, to rounding.
        """
        whole = as_channels(image, "image")
        rows, columns = whole.shape[:2]
        grid = self.shape(rows, columns)
        if window is None and rows > 1 and rows * columns > _PIXELS_AT_ONCE:
            self.check_memory(whole.shape)
            return self._in_bands(whole, grid)
        window = Window(0, grid[0], 0, grid[1]) if window is None else window
        down = _Axis.of(rows, grid[0], window.top, window.bottom, self.reach)
        across = _Axis.of(columns, grid[1], window.left, window.right, self.reach)
        part = whole[down.needed, across.needed]
        self.check_memory(part.shape)
        values, place = _scaled(part), Place(down.needed.start, across.needed.start, rows, columns)

        def coarse(fine: Floats) -> Tensor:
            return across.average(down.average(torch.from_numpy(np.ascontiguousarray(fine)), 0), 1).contiguous()

        pixels = torch.cat([coarse(feature.map_part(values, place)) for feature in self.pixels], dim=-1)
        horizontal, vertical = [], []
        for feature in self.edges:
            values_at = coarse(feature.map(values)).numpy()
            horizontal.append(feature.compare(values_at[:, :-1], values_at[:, 1:]))
            vertical.append(feature.compare(values_at[:-1], values_at[1:]))
        return FeatureMaps(pixels.float(), _joined(horizontal), _joined(vertical))

    def _in_bands(self, image: npt.NDArray[Any], grid: tuple[int, int]) -> FeatureMaps:
        """The features of an image, computed band by band, because they take much memory while they are computed."""
        bands = min(grid[0], -(-math.prod(image.shape[:2]) // _PIXELS_AT_ONCE))
        bounds = [grid[0] * k // bands for k in range(bands + 1)]
        pixels, horizontal, vertical = [], [], []
        for top, bottom in pairwise(bounds):
            # The row below a band is needed for the edges to it.
            part = self(image, Window(top, min(bottom + 1, grid[0]), 0, grid[1]))
            pixels.append(part.pixels[: bottom - top])
            horizontal.append(part.horizontal[: bottom - top])
            vertical.append(part.vertical)
        return FeatureMaps(torch.cat(pixels), torch.cat(horizontal), torch.cat(vertical))

    def check_memory(self, shape: tuple[int, ...]) -> None:
        """Raise a `MemoryError` if the features of an image of this shape would not fit into memory."""
        needed, available = self._bytes(shape), physical_memory()
        if needed > available:
            raise MemoryError(
                f"Features of an image of {shape[1]} x {shape[0]} pixels would take about "
                f"{needed / 1e9:.3g} GB; this machine has {available / 1e9:.3g} GB. Scale the image down first."
            )

    def memory_share(self, shape: tuple[int, ...], num_classes: int) -> float:
        """Estimate which share of the memory the prediction of an image of this shape takes."""
        rows, columns = self.shape(shape[0], shape[1])
        kept = 12 * (self.num_pixel_features + 2 * self.num_edge_features)  # two copies, in float32 and float64
        return (self._bytes(shape) + rows * columns * (kept + graph_bytes(num_classes))) / physical_memory()

    def _bytes(self, shape: tuple[int, ...]) -> int:
        """How much memory features take while they are computed, at most so many pixels at once."""
        at_once = min(math.prod(shape[:2]), _PIXELS_AT_ONCE) * self.num_pixel_features * _BYTES_PER_FEATURE
        kept = math.prod(self.shape(shape[0], shape[1])) * (self.num_pixel_features + 2 * self.num_edge_features)
        return at_once + 4 * kept


def graph_bytes(num_classes: int) -> int:
    """Roughly how much memory a grid takes per pixel, with potentials, messages and what the kernels keep with it."""
    return 600 + 50 * num_classes**2


class _Axis(NamedTuple):
    """Which pixels the features of some cells of the inference grid depend on, along one axis of the image."""

    needed: slice  # pixels of the image
    covered: slice  # those that the cells cover, among the needed ones
    weights: Tensor | None  # (cell, covered pixel)  averages by area; None if cells are pixels

    @classmethod
    def of(cls, pixels: int, cells: int, first: int, end: int, reach: int) -> _Axis:
        """Cells `first` to `end` of `cells`, which together cover all `pixels`."""
        start, stop = first * pixels // cells, -(-end * pixels // cells)
        needed = slice(max(0, start - reach), min(pixels, stop + reach))
        covered = slice(start - needed.start, stop - needed.start)
        if pixels == cells:
            return cls(needed, covered, None)
        return cls(needed, covered, area_weights(pixels, cells, slice(first, end), slice(start, stop)))

    def average(self, values: Tensor, axis: int) -> Tensor:
        """From values at the needed pixels to values at the cells."""
        values = values.narrow(axis, self.covered.start, self.covered.stop - self.covered.start)
        if self.weights is None:
            return values
        averaged: Tensor = torch.tensordot(values, self.weights, dims=([axis], [1])).movedim(-1, axis)
        return averaged


def as_floats(image: npt.ArrayLike, name: str = "image") -> Floats:
    """Convert an image to float64 of shape (row, column, 1) or (row, column, 3), with integers scaled to [0, 1]."""
    return _scaled(as_channels(image, name))


def as_channels(image: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """An image with its channels as the last axis, checked to be one. It is not copied."""
    array: npt.NDArray[Any] = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.size == 0:
        raise ValueError(
            f"`{name}` must have shape (row, column), (row, column, 1) or (row, column, 3). Got {np.shape(image)}."
        )
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind not in "fb":
        raise ValueError(f"`{name}` must be of type uint8, uint16, bool or floating. Got {array.dtype}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite.")
    return array


def _scaled(array: npt.NDArray[Any]) -> Floats:
    """Integers scaled to [0, 1], and other numbers as they are, as float64."""
    if array.dtype in (np.uint8, np.uint16):
        return array / np.iinfo(array.dtype).max
    return array.astype(np.float64)


def physical_memory() -> int:
    """The memory of this machine, or of the container it is, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [2**36]
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found)


def _joined(parts: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, axis=-1)).float()
