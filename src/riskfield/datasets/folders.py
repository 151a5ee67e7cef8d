"""Your own images: a folder of images, and a folder of masks with the same names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from riskfield.datasets.images import ImageSet, LabelledImage, Labels, few, read_image, read_mask, size
from riskfield.errors import FileFormatError

MAX_CLASSES = 32  # values in masks; more are a photograph, or a mask that JPEG has changed
_HINT = (
    "JPEG and smooth resizing change the values of masks. To group them into classes, set `threshold` (two classes) or "
    "`levels` (a number of grey levels)."
)
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")


@dataclass(frozen=True)
class MaskReading:
    """How mask files are read. By default their values are used unchanged.

    Arguments:
        threshold: values of at least this become 255, and smaller ones 0. By default no threshold is applied.
        levels: each value becomes the nearest of this many grey levels at equal steps from 0 to 255. By default values
            are not rounded.
        resize_masks: resize a mask that differs in size from its image, without making new values. By default such a
            mask is an error.

    >>> MaskReading(levels=3).values(np.array([0, 3, 120, 250]))
    array([  0,   0, 128, 255])
    """

    threshold: int | None = None
    levels: int | None = None
    resize_masks: bool = False

    def __post_init__(self) -> None:
        if self.threshold is not None and self.levels is not None:
            raise ValueError("Set `threshold` or `levels`, not both.")
        if self.threshold is not None and not 1 <= self.threshold <= 65535:
            raise ValueError(f"`threshold` must be from 1 to 65535. Got {self.threshold}.")
        if self.levels is not None and not 2 <= self.levels <= MAX_CLASSES:
            raise ValueError(f"`levels` must be from 2 to {MAX_CLASSES}. Got {self.levels}.")

    def values(self, mask: Labels) -> Labels:
        """Return the values that replace those in a file."""
        if self.threshold is not None:
            return np.where(mask >= self.threshold, 255, 0)
        if self.levels is not None:
            step = 255 / (self.levels - 1)
            return np.round(np.round(np.clip(mask, 0, 255) / step) * step).astype(np.int64)
        return mask

    def check(self, name: str, values: Iterable[int]) -> None:
        """Raise a `ValueError` about the setting `name` if masks cannot have one of its values after being read."""
        setting = "threshold" if self.threshold is not None else "levels"
        if self.threshold is None and self.levels is None:
            return
        possible = [0, 255] if self.levels is None else np.unique(self.values(np.arange(256))).tolist()
        for value in values:
            if value not in possible:
                allowed = f"{', '.join(map(str, possible[:-1]))} and {possible[-1]}"
                raise ValueError(
                    f"`{name}` must name values that masks have after `{setting}` {getattr(self, setting)}, which are "
                    f"{allowed}. Got {value}."
                )

    def fit(self, mask: Labels, shape: tuple[int, ...]) -> Labels:
        """Return the mask in the size of its image if `resize_masks` is set, otherwise unchanged."""
        if not self.resize_masks or mask.shape == shape:
            return mask
        row, column = (np.arange(n) * old // n for n, old in zip(shape, mask.shape, strict=True))
        return mask[np.ix_(row, column)]


def image_folder(
    images: str | os.PathLike[str],
    masks: str | os.PathLike[str] | None = None,
    *,
    classes: Mapping[int, str] | None = None,
    ignore: int | None = None,
    reading: MaskReading | None = None,
) -> ImageSet:
    """Return the images of a folder, with labels from the masks of the same names in another folder.

    For example, the mask of `horse.jpg` is `horse.png`. It is an image of the same size, whose grey levels or palette
    indices are the labels.

    Arguments:
        images: a folder of PNG, JPEG, TIFF, BMP or WebP files, grey or coloured, of any sizes.
        masks: a folder with a mask for every image. Use PNG: JPEG changes values. By default the images have no labels.
        classes: {value: name} for all values in the masks, in the order of the labels 0, 1, ... By default all values
            that occur, in ascending order, so that masks of 0 and 255 have the labels 0 and 1.
        ignore: the value of pixels without a label. By default every pixel has one.
        reading: how the values in the files become labels, for example `MaskReading(threshold=128)` for masks saved as
            JPEG. By default they are used unchanged.

    Raises:
        FileNotFoundError: if a folder does not exist.
        ValueError: if there are no images, if an image has no mask, if two files of a folder have the same name without
            ending, if `ignore` is one of the classes or the only value, or if a class cannot occur in masks that are
            read with this `reading`.
        FileFormatError: if `classes` is not given and a mask is damaged, or the masks have more than 32 values. Reading
            an image later raises it if the image or its mask is damaged, or if the mask has another size or a value
            that is not a class.
    """
    if classes is not None and ignore in classes:
        raise ValueError(f"`ignore` must not be one of the classes {few([*classes])}. Got {ignore}.")
    reading = MaskReading() if reading is None else reading
    reading.check("classes", classes or ())
    files = image_files(images, "images")
    if masks is None:
        return ImageSet(files, lambda name: LabelledImage(name, read_image(files[name])))
    mask_files = image_files(masks, "masks")
    without = [path.name for name, path in files.items() if name not in mask_files]
    if without:
        raise ValueError(
            f"`masks`: {masks} has no mask for {few(without)}. A mask has the name of its image. The folder holds "
            f"{few([path.name for path in mask_files.values()])}."
        )
    if classes is None:
        found = _find_values([mask_files[name] for name in files], reading, ignore)
        classes = {value: str(value) for value in found}
    if not classes:
        raise ValueError(f"`masks`: {masks} has no labels other than {ignore}, which is ignored.")
    values = [*classes]

    def read(name: str) -> LabelledImage:
        image = read_image(files[name])
        mask = reading.fit(reading.values(read_mask(mask_files[name])), image.shape[:2])
        if mask.shape != image.shape[:2]:
            raise FileFormatError(
                f"{mask_files[name]} must have the size of {files[name].name}, {size(image.shape)} pixels. It has "
                f"{size(mask.shape)}. Set `resize_masks` to resize it."
            )
        unknown = [value for value in np.unique(mask).tolist() if value not in values and value != ignore]
        if unknown:
            raise FileFormatError(
                f"{mask_files[name]} has {'the value' if len(unknown) == 1 else 'the values'} {few(unknown)}, which "
                f"{'is' if len(unknown) == 1 else 'are'} not among the classes {few(values)}"
                f"{'' if ignore is None else f', nor the ignored value {ignore}'}."
                f"{f' {_HINT}' if len(unknown) > 3 or is_jpeg(mask_files[name]) else ''}"
            )
        return LabelledImage(name, image, _labels(mask, values))

    return ImageSet(files, read, classes.values())


def mask_values(folder: str | os.PathLike[str], names: Iterable[str]) -> list[int]:
    """The values in the files of the masks with these names, as they are before a threshold or levels."""
    files = image_files(folder, "masks")
    return sorted(set().union(*(np.unique(read_mask(files[name])).tolist() for name in names)))


def unmatched_masks(images: str | os.PathLike[str], masks: str | os.PathLike[str]) -> list[str]:
    """The names of masks without an image, which are not used."""
    names = image_files(images, "images")
    return [path.name for name, path in image_files(masks, "masks").items() if name not in names]


def _find_values(files: Sequence[Path], reading: MaskReading, ignore: int | None) -> list[int]:
    """The values that occur in masks, in ascending order.

    Raises:
        FileFormatError: if there are more than `MAX_CLASSES`. The message names the file with the most of them.
    """
    found: set[int] = set()
    most, where = 0, None
    for path in files:
        own = set(np.unique(reading.values(read_mask(path))).tolist()) - {ignore}
        found |= own
        if len(own) > most:
            most, where = len(own), path
    if len(found) > MAX_CLASSES:
        raise FileFormatError(
            f"{where} has {most} different values, and all masks have {len(found)}; at most {MAX_CLASSES} can be "
            f"classes. {_HINT}"
        )
    return sorted(found)


def image_files(folder: str | os.PathLike[str], name: str) -> dict[str, Path]:
    """The images of a folder by their names without ending, sorted."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(2, f"`{name}` must be an existing folder", str(folder))
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if file.suffix.lower() in ENDINGS and not file.name.startswith("."):
            if file.stem in files:
                raise ValueError(
                    f"`{name}`: {path} has both {files[file.stem].name} and {file.name}. Names must differ."
                )
            files[file.stem] = file
    if not files:
        raise ValueError(f"`{name}`: {folder} has no images ({', '.join(ENDINGS)}).")
    return files


def is_jpeg(path: Path) -> bool:
    """Whether a file has the ending of a JPEG."""
    return path.suffix.lower() in (".jpg", ".jpeg")


def _labels(mask: Labels, values: list[int]) -> Labels:
    """The places of the mask's values in `values`, -1 for others."""
    labels = np.full(mask.shape, -1, np.int64)
    for label, value in enumerate(values):
        labels[mask == value] = label
    return labels
