"""Features of pictures, kept on the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.features.image import ImageFeatures, PictureFeatures
from riskfield.io._atomic import write_bytes

_VERSION = 1  # to be raised when a feature of the same name and settings becomes another
_DIGEST = 32
_PARTS = ("pixels", "horizontal", "vertical")


class FeatureCache:
    """Computes features of pictures once, and keeps them in a folder.

    A file's name is a digest of the recipe and of the picture, so that no file is ever out of date. Files are written
    whole or not at all, and carry a digest of their content: what is damaged is computed again.

    Arguments:
        folder: is made if it is not there. It may be shared by processes, and emptied at any time.

    >>> import tempfile
    >>> cache = FeatureCache(tempfile.mkdtemp())
    >>> cache(ImageFeatures(), np.zeros((4, 5))).pixels.shape
    torch.Size([4, 5, 100])
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, features: ImageFeatures, picture: npt.ArrayLike) -> PictureFeatures:
        """What `features(picture)` gives, from the folder if it is there."""
        array = np.asarray(picture)
        path = self.folder / f"{_key(features, array)}.features"
        kept = _read(path)
        if kept is None:
            kept = features(array)
            _write(path, kept)
        return kept


def _key(features: ImageFeatures, picture: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{_VERSION} {features!r} {picture.dtype.str} {picture.shape} ".encode())
    digest.update(np.ascontiguousarray(picture).data)
    return digest.hexdigest()


def _write(path: Path, features: PictureFeatures) -> None:
    from safetensors.torch import save

    content = save({name: getattr(features, name).contiguous() for name in _PARTS})
    write_bytes(path, hashlib.sha256(content).digest() + content)


def _read(path: Path) -> PictureFeatures | None:
    """The features in a file, or None if there is none or it is damaged."""
    from safetensors.torch import load

    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        return None
    # Clones, because torch's kernels may round differently on memory that is not aligned as torch aligns its own.
    return PictureFeatures(**{name: part.clone() for name, part in load(content[_DIGEST:]).items()})
