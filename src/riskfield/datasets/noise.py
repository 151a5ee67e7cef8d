"""Binary images, and the noise that the papers add to them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from riskfield.datasets.images import ImageSet, LabelledImage, Labels
from riskfield.features.image import as_floats
from riskfield.features.kinds import Intensity
from riskfield.features.resample import resize

Floats = npt.NDArray[np.float64]
Mode = tuple[float, float]  # mean and standard deviation


class AbstractNoise(ABC):
    """A distribution of an image y given a binary image x, in which the pixels of y are independent."""

    @abstractmethod
    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Return noisy values of the shape of `labels`, which are 0 and 1."""


@dataclass(frozen=True)
class PowerNoise(AbstractNoise):
    """y = x (1 - t^n) + (1 - x) t^n with t uniform on [0, 1] (Domke 2013, section 8.2).

    Arguments:
        exponent: n, at least 1. A smaller exponent means more noise; at n = 1, y is independent of x.
    """

    exponent: float

    def __post_init__(self) -> None:
        if not self.exponent >= 1:
            raise ValueError(f"`exponent` must be at least 1. Got {self.exponent}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Return values in [0, 1]."""
        t = generator.random(labels.shape) ** self.exponent
        return labels * (1 - t) + (1 - labels) * t


@dataclass(frozen=True)
class GaussianNoise(AbstractNoise):
    """y = x + e, where e is normally distributed with mean 0.

    Arguments:
        deviation: the standard deviation of e. The papers do not give it; the default, 0.3, is probably the value of
            Kumar and Hebert.
    """

    deviation: float = 0.3

    def __post_init__(self) -> None:
        if not self.deviation >= 0:
            raise ValueError(f"`deviation` must not be negative. Got {self.deviation}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Return values around 0 and 1."""
        return labels + self.deviation * generator.standard_normal(labels.shape)


@dataclass(frozen=True)
class BimodalNoise(AbstractNoise):
    """y is drawn from an equal mixture of two normal distributions, which depend on x.

    The papers implemented here do not give the parameters. The defaults follow the pattern of Kumar and Hebert: a mode
    of one class lies between the modes of the other, so that no threshold on y separates the classes.

    Arguments:
        zero: (mean, standard deviation) of the two modes for x = 0.
        one: (mean, standard deviation) of the two modes for x = 1.
    """

    zero: tuple[Mode, Mode] = ((0.55, 0.02), (0.42, 0.10))
    one: tuple[Mode, Mode] = ((0.08, 0.03), (0.46, 0.03))

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Return values around four modes."""
        mode = np.array([self.zero, self.one])[labels, generator.integers(0, 2, labels.shape)]
        values: Floats = mode[..., 0] + mode[..., 1] * generator.standard_normal(labels.shape)
        return values


@dataclass(frozen=True)
class ReassignmentNoise(AbstractNoise):
    """With probability `rate`, a pixel is replaced by 0 or 1, each with probability 1/2 (Domke 2008).

    About half of the replaced pixels therefore keep their value.

    Arguments:
        rate: the probability, from 0 to 1.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"`rate` must be from 0 to 1. Got {self.rate}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Return zeros and ones."""
        hit = generator.random(labels.shape) < self.rate
        return np.where(hit, generator.integers(0, 2, labels.shape), labels).astype(np.float64)


def binarise(image: npt.ArrayLike, shape: tuple[int, int] | None = None) -> Labels:
    """Return 1 where an image is brighter than its mean, else 0.

    Arguments:
        image: grey or coloured, as for `ImageFeatures`. Of a coloured image, the luminance is used.
        shape: the numbers of rows and columns to which the image is resized first, such as (200, 300) in the papers; by
            default it keeps its size. An image in portrait format is rotated by 90 degrees if `shape` is in landscape
            format, and vice versa.

    >>> binarise([[0.1, 0.2, 0.9], [0.0, 0.8, 1.0]])
    array([[0, 0, 1],
           [0, 1, 1]])
    """
    grey = Intensity().map(as_floats(image, "image"))
    if shape is not None:
        rows, columns = grey.shape[:2]
        if (rows - columns) * (shape[0] - shape[1]) < 0:
            grey = np.rot90(grey)
        grey = resize(torch.from_numpy(np.ascontiguousarray(grey)), shape).numpy()
    return np.asarray(grey[..., 0] > grey.mean(), np.int64)


def denoising(
    images: ImageSet, noise: AbstractNoise, *, shape: tuple[int, int] | None = (200, 300), seed: int = 0
) -> ImageSet:
    """Return images to restore: the labels come from `binarise`, the images from `noise`.

    The noise of an image depends only on `seed` and on the name of the image, not on the other images of the set.

    Arguments:
        images: the images, with or without labels. Their labels are not used.
        noise: a noise model, such as `GaussianNoise()`.
        shape: the numbers of rows and columns to which images are resized first, by default (200, 300). None keeps
            their sizes.
        seed: the seed of the noise, by default 0.

    >>> from riskfield.datasets import bundled_images
    >>> images = denoising(bundled_images(), GaussianNoise(), shape=(20, 30))
    >>> images[0].image.shape, images.classes
    ((20, 30), ('0', '1'))
    """

    def noisy(image: LabelledImage) -> LabelledImage:
        labels = binarise(image.image, shape)
        generator = np.random.default_rng([seed, zlib.crc32(image.name.encode())])
        return LabelledImage(image.name, noise(labels, generator), labels)

    return images.map(noisy, ("0", "1"))
