"""Colours of classes, and pictures painted with them."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.features.image import as_floats

Bytes = npt.NDArray[np.uint8]

# Okabe and Ito's, which colour-blind people can tell apart, without black; the strongest ones first.
_FIRST = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Colours for so many classes, as bytes.

    >>> class_colours(2)
    [(0, 114, 178), (230, 159, 0)]
    """
    colours = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:], 16)) for c in _FIRST[:count]]
    for k in range(len(colours), count):  # turned by the golden angle, no two hues are ever the same
        red, green, blue = colorsys.hls_to_rgb(k * 0.618034 % 1, 0.35 + 0.3 * (k % 2), 0.65)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return colours


def as_bytes(image: npt.NDArray[Any]) -> Bytes:
    """A picture of any type that `ImageFeatures` takes as bytes of shape (row, column, 3), to be shown.

    Floats outside of [0, 1] are taken there by their range.
    """
    floats = as_floats(image)
    if floats.min() < 0 or floats.max() > 1:
        floats = (floats - floats.min()) / (floats.max() - floats.min() or 1.0)
    return np.repeat(np.round(255 * floats).astype(np.uint8), 3 // floats.shape[-1], axis=-1)


def overlay(image: npt.NDArray[Any], classes: npt.NDArray[np.int64], count: int, opacity: float = 0.55) -> Bytes:
    """A picture with its classes painted over it; where a class is -1 it stays as it is."""
    picture = as_bytes(image).astype(np.float64)
    colours = np.array([*class_colours(count), (0, 0, 0)], np.float64)[classes]
    strength = np.where(classes >= 0, opacity, 0.0)[..., None]
    return np.round((1 - strength) * picture + strength * colours).astype(np.uint8)
