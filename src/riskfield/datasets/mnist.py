"""MNIST: handwritten digits (LeCun, Cortes & Burges), in IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.datasets._source import Root, Source
from riskfield.datasets.images import Labels
from riskfield.errors import FileFormatError

SOURCE = Source(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/ (the files *-ubyte.gz)",
    "MNIST/raw/t10k-images-idx3-ubyte.gz and MNIST/raw/t10k-labels-idx1-ubyte.gz",
)
_BYTES = 8  # the code of unsigned bytes in an IDX file


@dataclass(frozen=True, eq=False)
class Digits:
    """Images of digits and their labels.

    Arguments:
        images: uint8 of shape (n, 28, 28).
        digits: the digits 0 to 9, int64 of shape (n,).
    """

    images: npt.NDArray[np.uint8]
    digits: Labels


def mnist(root: Root = None, *, train: bool = False) -> Digits:
    """Load the 10,000 test images of MNIST, or its 60,000 training images.

    Arguments:
        root: the folder that contains `MNIST/raw/`. By default it is taken from the environment variable
            RISKFIELD_DATA.
        train: load the training images. By default the test images are loaded.

    Raises:
        MissingDataError: if the data set is missing; the message says what to download.
        FileFormatError: if a file is damaged.
    """
    (folder,) = SOURCE.find(root, "MNIST/raw")
    part = "train" if train else "t10k"
    images = _read_idx(_file(root, folder, f"{part}-images-idx3-ubyte"), 3)
    digits = _read_idx(_file(root, folder, f"{part}-labels-idx1-ubyte"), 1)
    if len(images) != len(digits):
        raise FileFormatError(f"{folder} has {len(images)} images but {len(digits)} labels for {part}.")
    return Digits(images, digits.astype(np.int64))


def _file(root: Root, folder: Path, name: str) -> Path:
    """Return the uncompressed file if it exists, otherwise the compressed one."""
    plain = folder / name
    return plain if plain.exists() else SOURCE.find(root, f"MNIST/raw/{name}.gz")[0]


def _read_idx(path: Path, axes: int) -> npt.NDArray[Any]:
    """Read an IDX file: two zeros, the code of the type, the number of axes, their lengths (big-endian), the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path} is a damaged gzip file: {error}") from error
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, _BYTES, axes]) or len(content) < start:
        raise FileFormatError(f"{path} must begin as an IDX file of bytes with {axes} axes. Got {content[:4]!r}.")
    shape = np.frombuffer(content, ">u4", axes, 4).tolist()
    if len(content) - start != math.prod(shape):
        raise FileFormatError(f"{path} must have {math.prod(shape)} values. It has {len(content) - start}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
