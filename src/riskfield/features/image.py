r"""Features of images, following Domke (2013), section 8.

`ImageFeatures` lists the features of pixels and of edges, and sets the resolution of inference. By default, the
features u of pixel i and v of the edge between the neighbours i and j of an image y are:

    u(y, i):     sin(c . s_i) and cos(c . s_i) for all binary vectors c, where s_i = (red, green, blue, row, column) of
                 pixel i: 64 features; a histogram of oriented gradients around i: 36 features
    v(y, i, j):  21 features: 1; whether |rgb_i - rgb_j| is above each of 10 thresholds; whether the larger Sobel
                 response of i and j is above each of 10 thresholds

Horizontal and vertical edges have separate parameters. All feature maps are computed at the resolution of the image
and then averaged by area to the resolution of inference. Edge features compare these averages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.devices import physical_memory
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
    largest_reach,
)
from riskfield.features.resample import area_weights
from riskfield.features.window import Place, Window, parts

# At the resolution of the image: float64, with two copies while they are computed.
_BYTES_PER_FEATURE = 24
# How many pixels are computed at once: the memory for them, as a share of all, and between these numbers.
_SHARE_AT_ONCE = 0.25
_FEWEST_AT_ONCE, _PIXELS_AT_ONCE = 2**16, 2**20
LARGEST_SHARE = 0.6  # of the memory that one image may take in training, without the tape of inference
PART_SIDE = 512  # pixels along the side of a part; far pixels hardly influence each other


@dataclass(frozen=True, eq=False)
class FeatureMaps:
    """The features of one image at the resolution of inference, in single precision.

    Arguments:
        pixels: the features of pixels, of shape (row, column, feature).
        horizontal: those of the edges between a pixel and its right neighbour, of shape (row, column - 1, feature).
        vertical: those of the edges between a pixel and the one below it, of shape (row - 1, column, feature).
    """

    pixels: Tensor
    horizontal: Tensor
    vertical: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the inference grid."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def edges(self) -> Tensor:
        """The features of all edges of `grid(*shape)`, of shape (edge, 2 * feature).

        Horizontal edges use the first half of the columns and vertical edges the second; the other half is 0. The two
        directions therefore have separate parameters. `inputs` has the same effect without storing the zeros.
        """
        joined: Tensor = torch.block_diag(self.horizontal.flatten(0, 1), self.vertical.flatten(0, 1))
        return joined

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return the inputs of a `LinearModel` with factor types "horizontal" and "vertical".

        Arguments:
            dtype: the dtype of the inputs, which must be that of the model; by default float64.
        """
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
        scale: the resolution of inference relative to that of the image, above 0 and at most 1 (the default).

    Raises:
        TypeError: if `pixels` or `edges` is not a tuple of features.
        ValueError: if `scale` is out of range.

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
        """Return the rows and columns of the inference grid for an image of `rows` by `columns` pixels."""
        return max(1, round(rows * self.scale)), max(1, round(columns * self.scale))

    @property
    def reach(self) -> int | None:
        """How far from a pixel the image may influence its features, in pixels of the image; None: any distance."""
        return largest_reach([*self.pixels, *self.edges])

    def __call__(self, image: npt.ArrayLike, window: Window | None = None) -> FeatureMaps:
        """Compute the features of `image`, or of a window of its inference grid.

        Arguments:
            image: as described above.
            window: the rows and columns of the inference grid to compute; by default all. The result equals that part
                of the features of the whole image, up to rounding.

        Raises:
            ValueError: if `image` is not an image as described above, or is not finite.
            MemoryError: if the features would not fit into memory.
        """
        whole = as_channels(image, "image")
        self.check_memory(whole.shape, window)
        *parts, last = (self._of_band(whole, band) for band in self._bands(whole.shape, window))
        if not parts:
            return last
        # Neighbouring bands share a row, for the edges between them.
        return FeatureMaps(
            torch.cat([*(part.pixels[:-1] for part in parts), last.pixels]),
            torch.cat([*(part.horizontal[:-1] for part in parts), last.horizontal]),
            torch.cat([*(part.vertical for part in parts), last.vertical]),
        )

    def _bands(self, shape: tuple[int, ...], window: Window | None) -> list[Window]:
        """Cut a window, or the whole grid, into bands: features take much memory while they are computed."""
        rows, columns = self.shape(shape[0], shape[1])
        window = Window(0, rows, 0, columns) if window is None else window
        height, width = window.shape
        pixels = height * width * math.prod(shape[:2]) / (rows * columns)
        room = _SHARE_AT_ONCE * physical_memory() / (self.num_pixel_features * _BYTES_PER_FEATURE)
        at_once = min(max(room, _FEWEST_AT_ONCE), _PIXELS_AT_ONCE)
        number = 1 if self.reach is None else min(height, math.ceil(pixels / at_once))
        bounds = [window.top + height * k // number for k in range(number + 1)]
        return [window._replace(top=top, bottom=min(end + 1, window.bottom)) for top, end in pairwise(bounds)]

    def _of_band(self, whole: npt.NDArray[Any], band: Window) -> FeatureMaps:
        rows, columns = whole.shape[:2]
        down, across = self._axes(rows, columns, band)
        values = _scaled(whole[down.needed, across.needed])
        place = Place(down.needed.start, across.needed.start, rows, columns)

        def coarse(fine: Floats) -> Tensor:
            return across.average(down.average(torch.from_numpy(np.ascontiguousarray(fine)), 0), 1).contiguous()

        pixels = torch.cat([coarse(feature.map_part(values, place)) for feature in self.pixels], dim=-1)
        horizontal, vertical = [], []
        for feature in self.edges:
            values_at = coarse(feature.map(values)).numpy()
            horizontal.append(feature.compare(values_at[:, :-1], values_at[:, 1:]))
            vertical.append(feature.compare(values_at[:-1], values_at[1:]))
        return FeatureMaps(pixels.float(), _joined(horizontal), _joined(vertical))

    def _axes(self, rows: int, columns: int, band: Window) -> tuple[_Axis, _Axis]:
        """The rows and the columns of the image that a band depends on."""
        grid = self.shape(rows, columns)
        reach = max(rows, columns) if self.reach is None else self.reach
        down = _Axis(rows, grid[0], band.top, band.bottom, reach)
        return down, _Axis(columns, grid[1], band.left, band.right, reach)

    def check_memory(self, shape: tuple[int, ...], window: Window | None = None) -> None:
        """Raise a `MemoryError` if features of an image of this shape, or of a window, would not fit into memory."""
        needed, available = self._bytes(shape, window), physical_memory()
        if needed > available:
            part = "an image" if window is None else f"{window.shape[1]} x {window.shape[0]} cells of an image"
            raise MemoryError(
                f"Features of {part} of {shape[1]} x {shape[0]} pixels would take about "
                f"{needed / 1e9:.3g} GB; this machine has {available / 1e9:.3g} GB. Scale the image down first."
            )

    def training_parts(self, shape: tuple[int, ...], num_classes: int) -> list[Window] | None:
        """The windows of the inference grid that are separate examples in training, or None for the whole image.

        An image is cut only if it would take more than `LARGEST_SHARE` of the memory, and never if `reach` is None.
        """
        if self.reach is None or self.memory_share(shape, num_classes) <= LARGEST_SHARE:
            return None
        found = parts(self.shape(shape[0], shape[1]), max(1, round(PART_SIDE * self.scale)))
        return found if len(found) > 1 else None

    def memory_share(self, shape: tuple[int, ...], num_classes: int, window: Window | None = None) -> float:
        """Estimate the share of the memory that the prediction of an image of this shape, or of a window, takes."""
        rows, columns = self.shape(shape[0], shape[1]) if window is None else window.shape
        kept = 12 * (self.num_pixel_features + 2 * self.num_edge_features)  # two copies, in float32 and float64
        return (self._bytes(shape, window) + rows * columns * (kept + graph_bytes(num_classes))) / physical_memory()

    def _bytes(self, shape: tuple[int, ...], window: Window | None) -> int:
        """How much memory the features of an image, or of a window, take while they are computed."""
        bands = self._bands(shape, window)
        at_once = max(math.prod(axis.length for axis in self._axes(shape[0], shape[1], band)) for band in bands)
        kept = sum(map(math.prod, (band.shape for band in bands)))
        of_cell = 4 * (self.num_pixel_features + 2 * self.num_edge_features)
        return at_once * self.num_pixel_features * _BYTES_PER_FEATURE + kept * of_cell


def graph_bytes(num_classes: int) -> int:
    """Roughly how much memory a grid takes per pixel, with potentials, messages and what the kernels keep with it."""
    return 600 + 50 * num_classes**2


@dataclass(frozen=True)
class _Axis:
    """Cells `first` to `end` of the inference grid along one axis, and the pixels that their features depend on."""

    pixels: int  # of the image
    cells: int  # of the grid; together they cover all pixels
    first: int
    end: int
    reach: int

    @property
    def needed(self) -> slice:
        """The pixels that the features depend on."""
        start, stop = self._covered
        return slice(max(0, start - self.reach), min(self.pixels, stop + self.reach))

    @property
    def length(self) -> int:
        """How many pixels are needed."""
        return int(self.needed.stop - self.needed.start)

    @property
    def _covered(self) -> tuple[int, int]:
        """The first pixel that the cells cover, and the end."""
        return self.first * self.pixels // self.cells, -(-self.end * self.pixels // self.cells)

    def average(self, values: Tensor, axis: int) -> Tensor:
        """From values at the needed pixels to values at the cells, by area."""
        start, stop = self._covered
        values = values.narrow(axis, start - self.needed.start, stop - start)
        if self.pixels == self.cells:
            return values
        averaged: Tensor = torch.tensordot(values, self._weights, dims=([axis], [1])).movedim(-1, axis)
        return averaged

    @cached_property
    def _weights(self) -> Tensor:
        """Averages by area, (cell, covered pixel)."""
        return area_weights(self.pixels, self.cells, slice(self.first, self.end), slice(*self._covered))


def as_floats(image: npt.ArrayLike, name: str = "image") -> Floats:
    """Convert an image to float64 of shape (row, column, 1) or (row, column, 3), with integers scaled to [0, 1]."""
    return _scaled(as_channels(image, name))


def as_channels(image: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """An image with its channels as the last axis, checked to be one. It is not copied."""
    array: npt.NDArray[Any] = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.size == 0:
        remedy = ""
        if array.ndim == 3 and array.shape[-1] == 4:
            remedy = " If the fourth channel is transparency, pass image[..., :3]."
        elif array.ndim == 3 and array.shape[0] in (1, 3):
            remedy = " If the channels come first, pass np.moveaxis(image, 0, -1)."
        raise ValueError(
            f"`{name}` must have shape (row, column), (row, column, 1) or (row, column, 3). Got {np.shape(image)}."
            f"{remedy}"
        )
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind not in "fb":
        raise ValueError(f"`{name}` must be of type uint8, uint16, bool or floating. Got {array.dtype}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"`{name}` must hold finite numbers. Got NaN or infinity.")
    return array


def _scaled(array: npt.NDArray[Any]) -> Floats:
    """Integers scaled to [0, 1], and other numbers as they are, as float64."""
    if array.dtype in (np.uint8, np.uint16):
        return array / np.iinfo(array.dtype).max
    return array.astype(np.float64)


def _joined(parts: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, axis=-1)).float()
