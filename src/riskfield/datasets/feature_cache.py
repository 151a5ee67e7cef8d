"""Features of images, kept on the disk."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.errors import FileFormatError
from riskfield.features.image import FeatureMaps, ImageFeatures
from riskfield.features.window import Window
from riskfield.io.codec import read_tree, write_tree

_VERSION = 1  # raise it when the numbers of a feature change and its name and settings do not
_KIND = "features"
_PARTS = ("pixels", "horizontal", "vertical")


class FeatureCache:
    """Computes features of images once, and keeps them in a folder.

    A file's name is a digest of the recipe and of the image, so a change of either makes a new file. A damaged file is
    computed again. Your own features must be dataclasses. The digest depends on their names and fields but not on their
    code: empty the folder when you change the code.

    Arguments:
        folder: where the files are. It is created if necessary. Several processes may share it, and you may empty it at
            any time.

    >>> import tempfile
    >>> cache = FeatureCache(tempfile.mkdtemp())
    >>> cache(ImageFeatures(), np.zeros((4, 5))).pixels.shape
    torch.Size([4, 5, 100])
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, features: ImageFeatures, image: npt.ArrayLike, window: Window | None = None) -> FeatureMaps:
        """Return `features(image, window)`, from the folder if it is stored there.

        Arguments:
            features: the recipe.
            image: as for `ImageFeatures`.
            window: the part of the inference grid to compute; by default all.

        Raises:
            TypeError: if a feature is not a dataclass, or has a field other than numbers, strings, tuples and features.
        """
        return self._kept(features, image, window)[1]

    def mapped(self, features: ImageFeatures, image: npt.ArrayLike, window: Window | None = None) -> FeatureMaps:
        """The same, as tensors that are mapped to the file: they are read when they are used, and need no memory."""
        path, _ = self._kept(features, image, window)
        with path.open("rb") as file:  # the format of safetensors: a length, a header in JSON, the numbers
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        parts = []
        for name in _PARTS:
            start, shape = 8 + length + header[name]["data_offsets"][0], tuple(header[name]["shape"])
            numbers: npt.NDArray[np.float32] = np.empty(shape, np.float32)
            if numbers.size:  # an image of one row has no vertical edges, and nothing cannot be mapped
                numbers = np.memmap(path, np.float32, "c", start, shape)
            parts.append(torch.from_numpy(numbers))
        return FeatureMaps(*parts)

    def _kept(self, features: ImageFeatures, image: npt.ArrayLike, window: Window | None) -> tuple[Path, FeatureMaps]:
        """The file of the features and its content, which is computed if it is missing or damaged."""
        array = np.asarray(image)
        path = self.folder / f"{_key(features, array, window)}.features"
        kept = _read(path)
        shape = features.shape(*array.shape[:2]) if window is None else window.shape
        if kept is None or not _fits(kept, features, shape):
            kept = features(array, window)
            _write(path, kept)
        return path, kept


def _key(features: ImageFeatures, image: npt.NDArray[Any], window: Window | None) -> str:
    part = "" if window is None else f"{tuple(window)} "
    digest = hashlib.sha256(f"{_VERSION} {_recipe(features)} {image.dtype.str} {image.shape} {part}".encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def _recipe(part: object) -> str:
    """A text that differs between recipes. The repr of an object is none: it may leave out settings."""
    kind = type(part)
    # A subclass that is no dataclass itself may have settings that are no fields.
    if is_dataclass(part) and "__dataclass_fields__" in vars(kind):
        settings = (f"{field.name}={_recipe(getattr(part, field.name))}" for field in fields(part))
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(settings)})"
    if isinstance(part, tuple):
        return f"({', '.join(map(_recipe, part))})"
    if part is None or isinstance(part, bool | int | float | str):
        return repr(part)
    raise TypeError(
        "A `cache` needs features that are dataclasses, with fields that are numbers, strings, tuples of these or "
        f"features: it tells recipes apart by them. Got {part!r}, of type {kind.__qualname__}."
    )


def _write(path: Path, features: FeatureMaps) -> None:
    write_tree(path, _KIND, {name: getattr(features, name) for name in _PARTS})


def _read(path: Path) -> FeatureMaps | None:
    """The features in a file, or None if there is none or it is damaged."""
    try:
        content = read_tree(path, _KIND)
    except (FileNotFoundError, FileFormatError):
        return None
    parts = [part for part in map(content.get, _PARTS) if isinstance(part, Tensor) and part.dtype == torch.float32]
    return FeatureMaps(*parts) if len(parts) == len(_PARTS) else None


def _fits(kept: FeatureMaps, features: ImageFeatures, shape: tuple[int, int]) -> bool:
    """Whether features from a file are those of an inference grid of this shape."""
    rows, columns = shape
    pixel, edge = features.num_pixel_features, features.num_edge_features
    shapes = (rows, columns, pixel), (rows, columns - 1, edge), (rows - 1, columns, edge)
    return tuple(tuple(getattr(kept, name).shape) for name in _PARTS) == shapes
