"""Features of pixels and of edges, one class for each kind. `ImageFeatures` puts them together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riskfield.features.hog import NUM_FEATURES as _HOG_FEATURES
from riskfield.features.hog import dense_hog
from riskfield.features.window import Place

Floats = npt.NDArray[np.float64]

# In photographs the median colour difference of neighbours is about 0.02, and one in a thousand is above 0.6.
THRESHOLDS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6)
_MAX_CELL = 1024  # the image is padded by a cell on every side


def check_parts(name: str, parts: object, kind: type) -> None:
    """Raise a `TypeError` unless `parts` is a tuple of objects of one kind."""
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, kind) for part in parts):
        raise TypeError(f"`{name}` must be a tuple of objects of type {kind.__name__}. Got {parts!r}.")


class AbstractPixelFeature(ABC):
    """One or more features of every pixel.

    `reach` is the largest distance, in pixels, at which the image influences the features of a pixel. If it is known,
    large images can be processed in parts. None means that the features may depend on the whole image.
    """

    reach: int | None = None

    @property
    @abstractmethod
    def num_features(self) -> int:
        """The number of features per pixel."""

    @abstractmethod
    def map(self, image: Floats) -> Floats:
        """Compute the features (row, column, feature) of an image of shape (row, column, 1) or (row, column, 3)."""

    def map_part(self, image: Floats, place: Place) -> Floats:
        """Compute the features of a part of an image. Override this if they depend on the position of the part.

        Arguments:
            image: the part, of shape (row, column, 1) or (row, column, 3).
            place: where the part begins, and the size of the whole image.
        """
        return self.map(image)


class AbstractEdgeFeature(ABC):
    """One or more features of every pair of neighbouring pixels."""

    reach: int | None = None  # as for `AbstractPixelFeature`

    @property
    @abstractmethod
    def num_edge_features(self) -> int:
        """The number of features per edge."""

    @abstractmethod
    def map(self, image: Floats) -> Floats:
        """Compute what `compare` needs to know of every pixel, of shape (row, column, channel)."""

    @abstractmethod
    def compare(self, first: Floats, second: Floats) -> Floats:
        """Compute the features (..., feature) of pairs of pixels from their entries (..., channel) in the map."""


def largest_reach(features: Iterable[AbstractPixelFeature | AbstractEdgeFeature]) -> int | None:
    """The largest reach of several features, None if it is None for one of them."""
    largest = 0
    for feature in features:
        if feature.reach is None:
            return None
        largest = max(largest, feature.reach)
    return largest


@dataclass(frozen=True)
class Constant(AbstractPixelFeature, AbstractEdgeFeature):
    """The constant 1, for pixels and for edges."""

    num_features = 1
    num_edge_features = 1
    reach = 0

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
    reach = 0

    def map(self, image: Floats) -> Floats:
        """Return the three channels."""
        return image if image.shape[-1] == 3 else np.repeat(image, 3, axis=-1)


@dataclass(frozen=True)
class Intensity(AbstractPixelFeature):
    """The value of a grey image, or the luminance of a coloured one."""

    num_features = 1
    reach = 0

    def map(self, image: Floats) -> Floats:
        """Return the one channel."""
        if image.shape[-1] == 1:
            return image
        from skimage.color import rgb2gray

        grey: Floats = rgb2gray(image)[..., None]
        return grey


@dataclass(frozen=True)
class Position(AbstractPixelFeature):
    """The row and the column of the centre of a pixel, scaled to [0, 1]."""

    num_features = 2
    reach = 0

    def map(self, image: Floats) -> Floats:
        """Return the coordinates of the pixel centres."""
        return self.map_part(image, Place(0, 0, *image.shape[:2]))

    def map_part(self, image: Floats, place: Place) -> Floats:
        """Return the coordinates of the pixel centres in the whole image."""
        down = (place.top + np.arange(image.shape[0]) + 0.5) / place.rows
        right = (place.left + np.arange(image.shape[1]) + 0.5) / place.columns
        return np.stack(np.broadcast_arrays(down[:, None], right), axis=-1)


@dataclass(frozen=True)
class Fourier(AbstractPixelFeature):
    """The sinusoidal expansion of other features s: sin(c . s) and cos(c . s) for all binary vectors c.

    k features become 2 * 2**k features: first the sines, then the cosines, with c in the order of binary numbers. The
    first sine is the constant 0 and the first cosine the constant 1.

    Arguments:
        of: the features s, which have from 1 to 12 entries; by default `Colour()` and `Position()`, five entries.
    """

    of: tuple[AbstractPixelFeature, ...] = (Colour(), Position())

    def __post_init__(self) -> None:
        check_parts("of", self.of, AbstractPixelFeature)
        if not 1 <= self._num_inputs <= 12:
            raise ValueError(f"`of` must have between 1 and 12 features (12 expand to 2**13). Got {self._num_inputs}.")

    @property
    def num_features(self) -> int:
        """Two per binary vector."""
        return int(2 ** (self._num_inputs + 1))

    @property
    def reach(self) -> int | None:  # type: ignore[override]
        """The reach of the features that are expanded."""
        return largest_reach(self.of)

    def map(self, image: Floats) -> Floats:
        """Compute the sines and the cosines."""
        return self.map_part(image, Place(0, 0, *image.shape[:2]))

    def map_part(self, image: Floats, place: Place) -> Floats:
        """Compute the sines and the cosines, of a part of an image."""
        inputs = np.concatenate([feature.map_part(image, place) for feature in self.of], axis=-1)
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
        cell: the side of a cell in pixels of the image, by default 8. The features of a pixel depend on the pixels up
            to cell + 1 rows and columns away.
    """

    cell: int = 8
    num_features = _HOG_FEATURES

    def __post_init__(self) -> None:
        if not isinstance(self.cell, int | np.integer) or not 1 <= self.cell <= _MAX_CELL:
            raise ValueError(f"`cell` must be an integer from 1 to {_MAX_CELL}. Got {self.cell!r}.")

    @property
    def reach(self) -> int:  # type: ignore[override]
        """The cells that meet at a pixel, and the gradients at their borders."""
        return self.cell + 1

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
    """Whether the l2 distance between the colours of two pixels is above each of several thresholds.

    Arguments:
        thresholds: a tuple of numbers; by default ten from 0.01 to 0.6. Colours are from 0 to 1.
    """

    reach = 0

    def map(self, image: Floats) -> Floats:
        """Return the colours."""
        return Colour().map(image)

    def compare(self, first: Floats, second: Floats) -> Floats:
        """Return zeros and ones."""
        return self._above(np.linalg.norm(first - second, axis=-1))


@dataclass(frozen=True)
class SobelResponse(_Thresholded):
    """Whether the larger of the Sobel responses at two pixels is above each of several thresholds.

    Arguments:
        thresholds: a tuple of numbers; by default ten from 0.01 to 0.6. The response is computed from the luminance.
    """

    reach = 1

    def map(self, image: Floats) -> Floats:
        """Compute the Sobel response of the luminance."""
        from skimage.filters import sobel

        response: Floats = sobel(Intensity().map(image)[..., 0])[..., None]
        return response

    def compare(self, first: Floats, second: Floats) -> Floats:
        """Return zeros and ones."""
        return self._above(np.maximum(first, second)[..., 0])
