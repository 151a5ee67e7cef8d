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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.features.hog import NUM_FEATURES as _HOG_FEATURES
from riskfield.features.hog import dense_hog
from riskfield.features.resample import resize

Floats = npt.NDArray[np.float64]

# In photographs the median colour difference of neighbours is about 0.02, and one in a thousand is above 0.6.
THRESHOLDS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6)
# At the resolution of the image: float64, with two copies while they are computed.
_BYTES_PER_FEATURE = 24
_MAX_CELL = 1024  # the image is padded by a cell on every side


def _check_parts(name: str, parts: object, kind: type) -> None:
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, kind) for part in parts):
        raise TypeError(f"`{name}` must be a tuple of objects of type {kind.__name__}. Got {parts!r}.")


class AbstractPixelFeature(ABC):
    """One or more features of every pixel."""

    @property
    @abstractmethod
    def num_features(self) -> int:
        """The number of features per pixel."""

    @abstractmethod
    def map(self, image: Floats) -> Floats:
        """Compute the features (row, column, feature) of an image of shape (row, column, 1) or (row, column, 3)."""


class AbstractEdgeFeature(ABC):
    """One or more features of every pair of neighbouring pixels."""

    @property
    @abstractmethod
    def num_edge_features(self) -> int:
        """The number of features per edge."""

    @abstractmethod
    def map(self, image: Floats) -> Floats:
        """Compute what `compare` needs of every pixel, (row, column, channel)."""

    @abstractmethod
    def compare(self, first: Floats, second: Floats) -> Floats:
        """Compute the features (..., feature) of pairs of pixels from their entries (..., channel) in the map."""


@dataclass(frozen=True)
class Constant(AbstractPixelFeature, AbstractEdgeFeature):
    """The constant 1, for pixels and for edges."""

    num_features = 1
    num_edge_features = 1

    def map(self, image: Floats) -> Floats:
        """Return ones."""
        return np.ones((*image.shape[:2], 1))

    def compare(self, first: Floats, second: Floats) -> Floats:
        """Return ones."""
        return np.ones((*first.shape[:-1], 1))


@dataclass(frozen=True)
class Colour(AbstractPixelFeature):
    """Red, green and blue, from 0 to 1. In a grey image all three are equal."""

    num_features = 3

    def map(self, image: Floats) -> Floats:
        """Return the three channels."""
        return image if image.shape[-1] == 3 else np.repeat(image, 3, axis=-1)


@dataclass(frozen=True)
class Intensity(AbstractPixelFeature):
    """The value of a grey image, or the luminance of a coloured one."""

    num_features = 1

    def map(self, image: Floats) -> Floats:
        """Return the one channel."""
        if image.shape[-1] == 1:
            return image
        from skimage.color import rgb2gray

        grey: Floats = rgb2gray(image)[..., None]
        return grey


@dataclass(frozen=True)
class Position(AbstractPixelFeature):
    """The row and the column of a pixel, scaled to [0, 1]."""

    num_features = 2

    def map(self, image: Floats) -> Floats:
        """Return the coordinates of the pixel centres."""
        rows, columns = image.shape[:2]
        down, right = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
        return np.stack(np.broadcast_arrays(down[:, None], right), axis=-1)


@dataclass(frozen=True)
class Fourier(AbstractPixelFeature):
    """The sinusoidal expansion of other features s: sin(c . s) and cos(c . s) for all binary vectors c.

    k features become 2 * 2**k features: first the sines, then the cosines, with c in the order of binary numbers. The
    first sine is the constant 0 and the first cosine the constant 1.
    """

    of: tuple[AbstractPixelFeature, ...] = (Colour(), Position())

    def __post_init__(self) -> None:
        _check_parts("of", self.of, AbstractPixelFeature)
        if not 1 <= self._num_inputs <= 12:
            raise ValueError(f"`of` must have between 1 and 12 features (12 expand to 2**13). Got {self._num_inputs}.")

    @property
    def num_features(self) -> int:
        """Two per binary vector."""
        return int(2 ** (self._num_inputs + 1))

    def map(self, image: Floats) -> Floats:
        """Compute the sines and the cosines."""
        inputs = np.concatenate([feature.map(image) for feature in self.of], axis=-1)
        # exp(i c . s) is the product of exp(i s_k) over all k with c_k = 1, so k exponentials suffice instead of 2**k.
        turns = np.exp(1j * inputs)
        expanded = np.ones((*image.shape[:2], 1), np.complex128)
        for k in reversed(range(self._num_inputs)):
            expanded = np.concatenate([expanded, expanded * turns[..., k : k + 1]], axis=-1)
        return np.concatenate([expanded.imag, expanded.real], axis=-1)

    @property
    def _num_inputs(self) -> int:
        return sum(feature.num_features for feature in self.of)


@dataclass(frozen=True)
class HOG(AbstractPixelFeature):
    """A histogram of oriented gradients around every pixel: 9 orientations in four cells, normalised together.

    Arguments:
        cell: the side of a cell in pixels of the image. The features of a pixel depend on 2 * cell pixels each way.
    """

    cell: int = 8
    num_features = _HOG_FEATURES

    def __post_init__(self) -> None:
        if not isinstance(self.cell, int) or not 1 <= self.cell <= _MAX_CELL:
            raise ValueError(f"`cell` must be an integer from 1 to {_MAX_CELL}. Got {self.cell!r}.")

    def map(self, image: Floats) -> Floats:
        """Compute the 36 features."""
        return dense_hog(image, self.cell)


@dataclass(frozen=True)
class _Thresholded(AbstractEdgeFeature):
    """Whether a value is above each of several thresholds."""

    thresholds: tuple[float, ...] = THRESHOLDS

    def __post_init__(self) -> None:
        given = self.thresholds
        if not isinstance(given, tuple) or not given or not all(map(math.isfinite, given)):
            raise ValueError(f"`thresholds` must be a tuple of finite numbers. Got {given!r}.")

    @property
    def num_edge_features(self) -> int:
        """One per threshold."""
        return len(self.thresholds)

    def _above(self, values: Floats) -> Floats:
        """Return zeros and ones, (..., threshold)."""
        return (values[..., None] > np.array(self.thresholds)).astype(np.float64)


@dataclass(frozen=True)
class ColourDifference(_Thresholded):
    """Whether the l2 distance between the colours of two pixels is above each of several thresholds."""

    def map(self, image: Floats) -> Floats:
        """Return the colours."""
        return Colour().map(image)

    def compare(self, first: Floats, second: Floats) -> Floats:
        """Return zeros and ones."""
        return self._above(np.linalg.norm(first - second, axis=-1))


@dataclass(frozen=True)
class SobelResponse(_Thresholded):
    """Whether the larger of the Sobel responses at two pixels is above each of several thresholds."""

    def map(self, image: Floats) -> Floats:
        """Compute the Sobel response of the luminance."""
        from skimage.filters import sobel

        response: Floats = sobel(Intensity().map(image)[..., 0])[..., None]
        return response

    def compare(self, first: Floats, second: Floats) -> Floats:
        """Return zeros and ones."""
        return self._above(np.maximum(first, second)[..., 0])


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
        _check_parts("pixels", self.pixels, AbstractPixelFeature)
        _check_parts("edges", self.edges, AbstractEdgeFeature)
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

    def __call__(self, image: npt.ArrayLike) -> FeatureMaps:
        """Compute the features of `image`."""
        self.check_memory(np.shape(image))
        values = as_floats(image)
        shape = self.shape(*values.shape[:2])
        pixels = torch.cat([_coarse(feature.map(values), shape) for feature in self.pixels], dim=-1)
        horizontal, vertical = [], []
        for feature in self.edges:
            values_at = _coarse(feature.map(values), shape).numpy()
            horizontal.append(feature.compare(values_at[:, :-1], values_at[:, 1:]))
            vertical.append(feature.compare(values_at[:-1], values_at[1:]))
        return FeatureMaps(pixels.float(), _joined(horizontal), _joined(vertical))

    def check_memory(self, shape: tuple[int, ...]) -> None:
        """Raise a `MemoryError` if the features of an image of this shape would not fit into memory."""
        needed, available = math.prod(shape[:2]) * self.num_pixel_features * _BYTES_PER_FEATURE, physical_memory()
        if needed > available:
            raise MemoryError(
                f"Features of an image of {shape[1]} x {shape[0]} pixels would take about "
                f"{needed / 1e9:.3g} GB; this machine has {available / 1e9:.3g} GB. Scale the image down first."
            )


def as_floats(image: npt.ArrayLike, name: str = "image") -> Floats:
    """Convert an image to float64 of shape (row, column, 1) or (row, column, 3), with integers scaled to [0, 1]."""
    array: npt.NDArray[Any] = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.size == 0:
        raise ValueError(
            f"`{name}` must have shape (row, column), (row, column, 1) or (row, column, 3). Got {np.shape(image)}."
        )
    if array.dtype in (np.uint8, np.uint16):
        return array / np.iinfo(array.dtype).max
    if array.dtype.kind not in "fb":
        raise ValueError(f"`{name}` must be of type uint8, uint16, bool or floating. Got {array.dtype}.")
    floats = array.astype(np.float64)
    if not np.isfinite(floats).all():
        raise ValueError(f"`{name}` must be finite.")
    return floats


def physical_memory() -> int:
    """The memory of this machine, or of the container it is, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [2**36]
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found)


def _coarse(values: Floats, shape: tuple[int, int]) -> Tensor:
    return resize(torch.from_numpy(np.ascontiguousarray(values)), shape)


def _joined(parts: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, axis=-1)).float()
