"""Colours of classes, and overlays of classes on images."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.features.image import as_floats

Bytes = npt.NDArray[np.uint8]

# The palette of Okabe and Ito without black, which colour-blind people can distinguish; the strongest colours first.
_FIRST = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Return colours for `count` classes, as (red, green, blue) from 0 to 255.

    >>> class_colours(2)
    [(0, 114, 178), (230, 159, 0)]
    """
    colours = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:], 16)) for c in _FIRST[:count]]
    for k in range(len(colours), count):  # steps of the golden angle never repeat a hue
        red, green, blue = colorsys.hls_to_rgb(k * 0.618034 % 1, 0.35 + 0.3 * (k % 2), 0.65)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return colours


def as_bytes(image: npt.NDArray[Any]) -> Bytes:
    """Convert an image of any type that `ImageFeatures` accepts to bytes of shape (row, column, 3), for display.

    If an entry of a floating-point image is outside [0, 1], the image is rescaled linearly from its range to [0, 1].
    """
    floats = as_floats(image)
    if floats.min() < 0 or floats.max() > 1:
        floats = (floats - floats.min()) / (floats.max() - floats.min() or 1.0)
    return np.repeat(np.round(255 * floats).astype(np.uint8), 3 // floats.shape[-1], axis=-1)


def overlay(image: npt.NDArray[Any], classes: npt.NDArray[np.int64], count: int, opacity: float = 0.55) -> Bytes:
    """Return an image with the colours of its classes laid over it. Pixels of class -1 are unchanged.

    Arguments:
        image: an image of any type that `ImageFeatures` accepts.
        classes: of shape (row, column), from 0 to `count` - 1, or -1.
        count: the number of classes.
        opacity: the weight of the colours, from 0 to 1; by default 0.55.
    """
    plain = as_bytes(image).astype(np.float64)
    colours = np.array([*class_colours(count), (0, 0, 0)], np.float64)[classes]
    strength = np.where(classes >= 0, opacity, 0.0)[..., None]
    return np.round((1 - strength) * plain + strength * colours).astype(np.uint8)
