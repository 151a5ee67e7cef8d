"""Features of images, kept on the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from riskfield.errors import FileFormatError
from riskfield.features.image import FeatureMaps, ImageFeatures
from riskfield.io.codec import read_tree, write_tree

_VERSION = 1  # raise it when the numbers of a feature change and its name and settings do not
_KIND = "features"
_PARTS = ("pixels", "horizontal", "vertical")


class FeatureCache:
    """Computes features of images once, and keeps them in a folder.

    A file's name is a digest of the recipe and of the image, so that no file is ever out of date. A damaged file is
    computed again.

    Arguments:
        folder: is created if necessary. Processes may share it, and it may be emptied at any time.

    >>> import tempfile
    >>> cache = FeatureCache(tempfile.mkdtemp())
    >>> cache(ImageFeatures(), np.zeros((4, 5))).pixels.shape
    torch.Size([4, 5, 100])
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, features: ImageFeatures, image: npt.ArrayLike) -> FeatureMaps:
        """What `features(image)` gives, from the folder if it is there."""
        array = np.asarray(image)
        path = self.folder / f"{_key(features, array)}.features"
        kept = _read(path)
        if kept is None:
            kept = features(array)
            _write(path, kept)
        return kept


def _key(features: ImageFeatures, image: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{_VERSION} {features!r} {image.dtype.str} {image.shape} ".encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def _write(path: Path, features: FeatureMaps) -> None:
    write_tree(path, _KIND, {name: getattr(features, name) for name in _PARTS})


def _read(path: Path) -> FeatureMaps | None:
    """The features in a file, or None if there is none or it is damaged."""
    try:
        content = read_tree(path, _KIND)
    except (FileNotFoundError, FileFormatError):
        return None
    parts = [part for part in map(content.get, _PARTS) if isinstance(part, Tensor) and part.ndim == 3]
    return FeatureMaps(*parts) if len(parts) == len(_PARTS) else None
