"""Weizmann horses: figure and ground (Borenstein & Ullman, ECCV 2002)."""

from __future__ import annotations

import numpy as np
import torch

from riskfield.datasets._source import Root, Source
from riskfield.datasets.images import ImageSet, LabelledImage, few, read_image
from riskfield.errors import FileFormatError, MissingDataError
from riskfield.features.image import as_floats
from riskfield.features.resample import resize

SOURCE = Source(
    "The Weizmann horse database",
    "http://www.msri.org/people/members/eranb/ (weizmann_horse_db.tar.gz), or a mirror of it",
    "weizmann_horse_db/rgb/horse001.jpg and weizmann_horse_db/figure_ground/horse001.jpg",
)
_BLACK_IN_SOME_COPIES = "horse318"


def weizmann_horses(root: Root = None) -> ImageSet:
    """Load the Weizmann horses, with the labels "ground" and "horse".

    A photograph and its mask differ in size. The photograph is resized to the size of the mask, as floats in [0, 1].
    Masks are JPEG files, thresholded at one half. In some copies of the data set `horse318` is black; it is then left
    out, and 327 of 328 images remain.

    Arguments:
        root: the folder that contains `weizmann_horse_db/`. By default it is taken from the environment variable
            RISKFIELD_DATA.

    Raises:
        MissingDataError: if the data set is missing; the message says what to download.
        FileFormatError: when an image is read, if its files are damaged or differ in aspect ratio.
    """
    photographs, masks = SOURCE.find(root, "weizmann_horse_db/rgb", "weizmann_horse_db/figure_ground")
    names = sorted(path.stem for path in photographs.glob("*.jpg"))
    without = [name for name in names if not (masks / f"{name}.jpg").exists()]
    if not names or without:
        raise MissingDataError(f"{masks} has no mask for {few(without)}." if names else f"{photographs} has no *.jpg.")
    if _BLACK_IN_SOME_COPIES in names and read_image(photographs / f"{_BLACK_IN_SOME_COPIES}.jpg").max() < 16:
        names.remove(_BLACK_IN_SOME_COPIES)

    def read(name: str) -> LabelledImage:
        mask = as_floats(read_image(masks / f"{name}.jpg"))
        labels = (mask.mean(axis=-1) > 0.5).astype(np.int64)
        photograph = as_floats(read_image(photographs / f"{name}.jpg"))
        if not 0.95 < photograph.shape[0] / photograph.shape[1] * labels.shape[1] / labels.shape[0] < 1.05:
            raise FileFormatError(
                f"{name}: mask and photograph must have the same aspect ratio. Got {labels.shape} and "
                f"{photograph.shape[:2]}."
            )
        return LabelledImage(name, resize(torch.from_numpy(photograph), labels.shape).numpy(), labels)

    return ImageSet(names, read, ("ground", "horse"))
