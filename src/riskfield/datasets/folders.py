"""Anyone's own images: a folder of images, and a folder of masks of the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from riskfield.datasets.images import ImageSet, LabelledImage, Labels, few, read_image, read_mask
from riskfield.errors import FileFormatError

ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")


def image_folder(
    images: str | os.PathLike[str],
    masks: str | os.PathLike[str] | None = None,
    *,
    classes: Mapping[int, str] | None = None,
    ignore: int | None = None,
) -> ImageSet:
    """The images of a folder, with labels from the masks of the same names in another.

    The mask of `horse.jpg` is `horse.png`, say: an image of the same size whose grey levels, or palette indices, are
    labels. Without `masks` images have no labels.

    Arguments:
        images: a folder of PNG, JPEG, TIFF, BMP or WebP files, grey or coloured, of any sizes.
        masks: a folder with a mask for every image. Use PNG: JPEG changes values.
        classes: {value: name} for all values in the masks, in the order of the labels 0, 1, ... By default all values
            that occur, in ascending order, so that masks of 0 and 255 have the labels 0 and 1.
        ignore: the value of pixels without a label.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if there are no images, or images without a mask, or `ignore` is one of the classes.
        FileFormatError: if `classes` have to be found and a mask is damaged; and, when an image is read, if it or its
            mask is damaged, or the mask has another size or a value that is no class.
    """
    if classes is not None and ignore in classes:
        raise ValueError(f"`ignore` must be none of the classes {few([*classes])}. Got {ignore}.")
    files = image_files(images, "images")
    if masks is None:
        return ImageSet(files, lambda name: LabelledImage(name, read_image(files[name])))
    mask_files = image_files(masks, "masks")
    without = [path.name for name, path in files.items() if name not in mask_files]
    if without:
        raise ValueError(f"`masks`: {masks} has no mask for {few(without)}. A mask has the name of its image.")
    if classes is None:
        found = set().union(*(np.unique(read_mask(mask_files[name])).tolist() for name in files))
        classes = {value: str(value) for value in sorted(found - {ignore})}
    if not classes:
        raise ValueError(f"`masks`: {masks} has no labels but {ignore}, to be ignored.")
    values = [*classes]

    def read(name: str) -> LabelledImage:
        image, mask = read_image(files[name]), read_mask(mask_files[name])
        if mask.shape != image.shape[:2]:
            wanted, got = (" x ".join(map(str, shape)) for shape in (image.shape[:2], mask.shape))
            raise FileFormatError(
                f"{mask_files[name]} must have the size of {files[name].name}, {wanted} pixels. It has {got}."
            )
        unknown = [value for value in np.unique(mask).tolist() if value not in values and value != ignore]
        if unknown:
            raise FileFormatError(
                f"{mask_files[name]} has the values {few(unknown)}, which are none of the classes {few(values)}"
                f"{'' if ignore is None else f' nor {ignore}, to be ignored'}."
            )
        return LabelledImage(name, image, _labels(mask, values))

    return ImageSet(files, read, classes.values())


def image_files(folder: str | os.PathLike[str], name: str) -> dict[str, Path]:
    """The images of a folder by their names without ending, sorted."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(2, f"`{name}` must be a folder; there is none", str(folder))
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if file.suffix.lower() in ENDINGS and not file.name.startswith("."):
            if file.stem in files:
                raise ValueError(f"`{name}`: {path} has both {files[file.stem].name} and {file.name}.")
            files[file.stem] = file
    if not files:
        raise ValueError(f"`{name}`: {folder} has no images ({', '.join(ENDINGS)}).")
    return files


def _labels(mask: Labels, values: list[int]) -> Labels:
    """The places of the mask's values in `values`, -1 for others."""
    labels = np.full(mask.shape, -1, np.int64)
    for label, value in enumerate(values):
        labels[mask == value] = label
    return labels
