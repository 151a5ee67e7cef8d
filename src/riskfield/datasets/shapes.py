"""A replacement for the binary images of Kumar & Hebert, which are not available: four shapes of 64 by 64 pixels.

Domke (2010) adds noise to each of four images fifty times, and trains on ten noisy versions of the first. The numbers
here are the same, but the images differ: results cannot be compared with published ones.
"""

from __future__ import annotations

import zlib

import numpy as np

from riskfield.datasets.images import ImageSet, LabelledImage, Labels
from riskfield.datasets.noise import AbstractNoise
from riskfield.datasets.splits import Split

_SIDE, _VERSIONS, _TRAINING = 64, 50, 10


def draw_shapes() -> tuple[Labels, ...]:
    """Return the four clean images of zeros and ones: a disc in a frame, a ring and bars, a star, waves."""
    down, right = np.mgrid[:_SIDE, :_SIDE] + 0.5
    radius = np.hypot(down - 32, right - 32)
    angle = np.arctan2(down - 32, right - 32)
    frame = np.maximum(abs(down - 32), abs(right - 32))
    images = (
        (radius < 16) | ((frame > 24) & (frame < 28)),
        ((radius > 12) & (radius < 20)) | ((abs(right - 32) > 24) & (down % 16 < 8)),
        radius < 18 + 9 * np.cos(5 * angle),
        np.sin(right / 9 + 1.5 * np.sin(down / 7)) > 0.1,
    )
    return tuple(image.astype(np.int64) for image in images)


def noisy_shapes(noise: AbstractNoise, seed: int = 0) -> tuple[ImageSet, Split]:
    """Return fifty noisy versions of each of four shapes, and a split into training and test images.

    The training images are ten versions of the first shape, and the test images are the other 190.

    Arguments:
        noise: a noise model, such as `GaussianNoise()`.
        seed: the seed of the noise, by default 0.

    >>> from riskfield.datasets import GaussianNoise
    >>> images, split = noisy_shapes(GaussianNoise())
    >>> len(images), len(split.train), len(split.test)
    (200, 10, 190)
    """
    clean = draw_shapes()
    names = [f"{shape}-{version:02}" for shape in range(len(clean)) for version in range(_VERSIONS)]

    def read(name: str) -> LabelledImage:
        labels = clean[int(name.partition("-")[0])]
        return LabelledImage(name, noise(labels, np.random.default_rng([seed, zlib.crc32(name.encode())])), labels)

    return ImageSet(names, read, ("0", "1")), Split(tuple(names[:_TRAINING]), tuple(names[_TRAINING:]))
