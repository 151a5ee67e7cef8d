"""Images embedded in the page, as PNG or JPEG in base64, reduced to the size at which they are shown."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from riskfield.datasets.colours import as_bytes, class_colours

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST = 640  # pixels, the longest side
_LEVELS = 63  # of opacity; more levels only make the page larger


def photograph(image: npt.NDArray[Any]) -> str:
    """Return an image as a data URL."""
    reduced = _small(_from(as_bytes(image)))
    if reduced.width * reduced.height <= 2**15:
        return _address(reduced, "png", optimize=True)
    return _address(reduced, "jpeg", quality=88)


def backdrop(image: npt.NDArray[Any]) -> str:
    """Return a grey image as a data URL, the background of class layers."""
    return _address(_small(_from(as_bytes(image))).convert("L"), "jpeg", quality=75)


def layers(shares: npt.NDArray[np.float64]) -> list[str]:
    """Return one image per class, in its colour. The opacity is the share of the class, from (row, column, class)."""
    return [heat(shares[..., k], colour) for k, colour in enumerate(class_colours(shares.shape[-1]))]


def heat(values: npt.NDArray[np.float64], colour: tuple[int, int, int]) -> str:
    """Return an image in one colour. The opacity is the value, from 0 to 1, of each pixel."""
    opacities = np.append(np.round(np.arange(_LEVELS + 1) * 255 / _LEVELS), np.zeros(256 - _LEVELS - 1))
    # Reduce before rounding to levels, so that values are averaged and not levels.
    small = np.asarray(_small(_from(values.astype(np.float32))))
    layer = _from(np.round(np.clip(small, 0, 1) * _LEVELS).astype(np.uint8)).convert("P")
    layer.putpalette(list(colour) * 256)
    return _address(layer, "png", transparency=opacities.astype(np.uint8).tobytes(), optimize=True)


def one_hot(labels: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """Return labels as shares: 1 for the class of a pixel, 0 for the others, and all 0 without a label."""
    return np.asarray(labels[..., None] == np.arange(count), np.float64)


def _from(pixels: npt.NDArray[Any]) -> Image:
    from PIL import Image

    return Image.fromarray(pixels)


def _small(image: Image) -> Image:
    from PIL.Image import Resampling

    longest = max(image.size)
    if longest <= _LONGEST:
        return image
    width, height = (max(1, round(side * _LONGEST / longest)) for side in image.size)
    return image.resize((width, height), Resampling.BOX)


def _address(image: Image, kind: str, **options: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
