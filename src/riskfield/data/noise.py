"""Binary pictures and what the papers do to them before they are to be restored."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from riskfield.data.pictures import Labels, Picture, PictureSet
from riskfield.features.image import Intensity, as_floats
from riskfield.features.resample import resize

Floats = npt.NDArray[np.float64]
Mode = tuple[float, float]  # mean and standard deviation


class AbstractNoise(ABC):
    """A random picture y from a binary one x, pixel by pixel."""

    @abstractmethod
    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Noisy values of the shape of `labels`, which are 0 and 1."""


@dataclass(frozen=True)
class PowerNoise(AbstractNoise):
    """y = x (1 - t^n) + (1 - x) t^n with t uniform on [0, 1] (Domke 2013, section 8.2).

    The smaller the exponent n >= 1, the more noise. At n = 1 nothing is left of x.
    """

    exponent: float

    def __post_init__(self) -> None:
        if not self.exponent >= 1:
            raise ValueError(f"`exponent` must be at least 1. Got {self.exponent}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Values in [0, 1]."""
        t = generator.random(labels.shape) ** self.exponent
        return labels * (1 - t) + (1 - labels) * t


@dataclass(frozen=True)
class GaussianNoise(AbstractNoise):
    """y = x + e with e normal. The papers do not print the deviation; 0.3 is believed to be Kumar and Hebert's."""

    deviation: float = 0.3

    def __post_init__(self) -> None:
        if not self.deviation >= 0:
            raise ValueError(f"`deviation` must not be negative. Got {self.deviation}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Values around 0 and 1."""
        return labels + self.deviation * generator.standard_normal(labels.shape)


@dataclass(frozen=True)
class BimodalNoise(AbstractNoise):
    """y from one of two normal distributions, either as likely, that depend on x.

    The papers implemented here do not print the parameters. The defaults are in the manner of Kumar and Hebert's: one
    mode of each class lies between those of the other, so that no threshold on y separates them.

    Arguments:
        zero: (mean, standard deviation) of the two modes where x = 0.
        one: the same where x = 1.
    """

    zero: tuple[Mode, Mode] = ((0.55, 0.02), (0.42, 0.10))
    one: tuple[Mode, Mode] = ((0.08, 0.03), (0.46, 0.03))

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Values around four modes."""
        mode = np.array([self.zero, self.one])[labels, generator.integers(0, 2, labels.shape)]
        values: Floats = mode[..., 0] + mode[..., 1] * generator.standard_normal(labels.shape)
        return values


@dataclass(frozen=True)
class ReassignmentNoise(AbstractNoise):
    """A part of the pixels, `rate`, gets 0 or 1 at random (Domke 2008): half of them keep their value by chance."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"`rate` must be from 0 to 1. Got {self.rate}.")

    def __call__(self, labels: Labels, generator: np.random.Generator) -> Floats:
        """Zeros and ones."""
        hit = generator.random(labels.shape) < self.rate
        return np.where(hit, generator.integers(0, 2, labels.shape), labels).astype(np.float64)


def binarise(image: npt.ArrayLike, shape: tuple[int, int] | None = None) -> Labels:
    """1 where a picture is brighter than its mean, else 0.

    With a `shape`, such as the papers' (200, 300), the picture is brought to it first, by area: upright pictures are
    turned on their side for a `shape` that is wider than high, and the other way round.

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
    pictures: PictureSet, noise: AbstractNoise, *, shape: tuple[int, int] | None = (200, 300), seed: int = 0
) -> PictureSet:
    """Pictures to restore: labels from `binarise`, images from `noise`.

    The noise of a picture depends on `seed` and the picture's name alone, not on which others are in the set.
    """

    def noisy(picture: Picture) -> Picture:
        labels = binarise(picture.image, shape)
        generator = np.random.default_rng([seed, zlib.crc32(picture.name.encode())])
        return Picture(picture.name, noise(labels, generator), labels)

    return pictures.map(noisy, ("0", "1"))
