"""Damaged pictures and masks of all formats: an array, or a FileFormatError."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import riskfield as rf
from fuzz.mutations import mutated_bytes
from riskfield.datasets.images import read_image, read_mask

FORMATS = {"png": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], "jpeg": ["L", "RGB", "CMYK"], "bmp": ["1", "L", "RGB"]}
FORMATS |= {"tiff": ["1", "L", "RGB", "I;16", "F", "I"], "webp": ["RGB", "RGBA"], "gif": ["P"]}


def example(rng):
    ending = list(FORMATS)[rng.integers(len(FORMATS))]
    mode = FORMATS[ending][rng.integers(len(FORMATS[ending]))]
    content = _picture(ending, mode, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{ending}"
        path.write_bytes(content if rng.random() < 0.1 else mutated_bytes(content, rng))
        for read in (read_image, read_mask):
            try:
                array = read(path)
            except rf.errors.FileFormatError as error:
                assert str(path) in str(error)
                continue
            assert array.ndim == 2 or array.shape[2] == 3
            assert array.dtype in (np.uint8, np.uint16, np.int64)


def _picture(ending, mode, rng):
    rows, columns = (int(size) for size in rng.integers(1, 40, size=2))
    pixels = rng.integers(0, 256, size=(rows, columns, 3), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(pixels).convert(mode)
    stream = io.BytesIO()
    options = {"exif": _exif(rng)} if ending in ("jpeg", "webp", "png") and rng.random() < 0.3 else {}
    if ending == "tiff" and mode != "1":
        options["compression"] = [None, "tiff_lzw", "tiff_adobe_deflate"][rng.integers(3)]
    image.save(stream, ending, **options)
    return stream.getvalue()


def _exif(rng):
    exif = Image.Exif()
    exif[0x0112] = int(rng.integers(0, 10))  # orientation
    return exif
