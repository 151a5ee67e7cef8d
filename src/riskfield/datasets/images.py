"""Images and their label maps, read from files when they are asked for."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from riskfield.errors import FileFormatError

if TYPE_CHECKING:
    from PIL.Image import Image

Labels = npt.NDArray[np.int64]

# A file of a few kilobytes can claim any size. 67 million pixels of three bytes are 200 MB.
MAX_PIXELS = 2**26


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """An image, and its labels if they are known.

    Arguments:
        name: the name that identifies the image within a set.
        image: an array of shape (row, column) or (row, column, 3), of a type that `ImageFeatures` accepts.
        labels: integers of shape (row, column), from 0, or -1 for a pixel without a label; None (the default) if no
            labels are known.

    Raises:
        ValueError: if the labels differ in size from the image.
    """

    name: str
    image: npt.NDArray[Any]
    labels: Labels | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and self.labels.shape != self.image.shape[:2]:
            raise ValueError(
                f"`labels` of {self.name} must have the shape of its image, {self.image.shape[:2]}. "
                f"Got {self.labels.shape}."
            )


class ImageSet(Sequence[LabelledImage]):
    """A sequence of images, each of which is read when it is accessed. Slices are again sets of images.

    Arguments:
        names: the names of the images, in order. They must differ from each other.
        read: a function that returns the image with a given name.
        classes: the names of the labels 0, 1, ...; empty (the default) if there are no labels.

    >>> images = ImageSet(["a", "b", "c"], lambda name: LabelledImage(name, np.zeros((2, 3))))
    >>> len(images), images[1].name, images[1:].names, images.select(["c", "a"]).names
    (3, 'b', ('b', 'c'), ('c', 'a'))
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], LabelledImage], classes: Iterable[str] = ()):
        self.names = tuple(names)
        self.classes = tuple(classes)
        self._read = read
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"`names` must differ from each other. Got {self.names}.")

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> LabelledImage: ...

    @overload
    def __getitem__(self, index: slice) -> ImageSet: ...

    def __getitem__(self, index: int | slice) -> LabelledImage | ImageSet:
        """Return the image with a number, or the set of the images of a slice."""
        if isinstance(index, slice):
            return ImageSet(self.names[index], self._read, self.classes)
        return self._read(self.names[index])

    def select(self, names: Iterable[str]) -> ImageSet:
        """Return the set of the images with these names, in this order.

        Raises:
            KeyError: if a name is not in the set.
        """
        chosen = tuple(names)
        missing = sorted(set(chosen) - set(self.names))
        if missing:
            raise KeyError(f"The set has no {few(missing)}.")
        return ImageSet(chosen, self._read, self.classes)

    def map(self, function: Callable[[LabelledImage], LabelledImage], classes: Iterable[str] | None = None) -> ImageSet:
        """Return a set that applies `function` to each image when it is accessed.

        Arguments:
            function: takes a `LabelledImage` and returns another one.
            classes: the names of the labels of the new images; by default those of this set.
        """
        return ImageSet(
            self.names, lambda name: function(self._read(name)), self.classes if classes is None else classes
        )

    def __repr__(self) -> str:
        """How many images, and which labels."""
        return f"ImageSet({len(self)} images, classes {self.classes})"


def read_image(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Read an image file: grey (row, column), as 8-bit or 16-bit integers, or coloured (row, column, 3), as 8-bit ones.

    The image is rotated as its EXIF data say. Transparency is ignored.

    Raises:
        FileFormatError: if the file holds no image, or part of one, or one of more than `MAX_PIXELS` pixels.
    """
    with _opened(path) as image:
        if image.mode.startswith("I"):
            return _sixteen_bits(image, path)
        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


def read_mask(path: str | os.PathLike[str]) -> Labels:
    """Read the integers in an image file of one channel: grey levels, or the indices of a palette.

    Several equal channels are read as one, and an opaque alpha channel is ignored.

    Raises:
        FileFormatError: if the file holds no such image, or one of more than `MAX_PIXELS` pixels.
    """
    with _opened(path) as image:
        if image.mode in ("1", "L", "P") or image.mode.startswith("I"):
            return np.asarray(image).astype(np.int64)
        channels = np.asarray(image)
        levels = channels[..., :-1] if image.mode in ("LA", "RGBA") else channels
        opaque = levels is channels or (channels[..., -1] == 255).all()
        if image.mode in ("RGB", "LA", "RGBA") and opaque and (levels == levels[..., :1]).all():
            return levels[..., 0].astype(np.int64)
        raise FileFormatError(
            f"{path} must be an image of one channel to be a mask. It has the mode {image.mode}. Save it as a grey or "
            "palette image with one value for each class."
        )


def size(shape: Sequence[int]) -> str:
    """The size of an array of shape (row, column, ...) as width x height.

    >>> size((240, 320, 3))
    '320 x 240'
    """
    return f"{shape[1]} x {shape[0]}"


def few(names: Sequence[object]) -> str:
    """The first three names in words, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Image]:
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow warns of large images, and of metadata it cannot read. The limit here is stricter.
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                columns, rows = image.size
                if columns * rows > MAX_PIXELS:  # known from the header, before there is memory for the pixels
                    raise FileFormatError(
                        f"{path} has {columns} x {rows} pixels; at most {MAX_PIXELS} are read. Scale it down first."
                    )
                image.load()
                upright = ImageOps.exif_transpose(image)
        yield upright
    except FileFormatError:
        raise
    except OSError as error:
        # A file that cannot be opened has an error number. A damaged one has none, or sends Pillow to a place in the
        # file that cannot exist.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _damaged(path, error) from error
    except Exception as error:  # Pillow's decoders report damage in many ways
        raise _damaged(path, error) from error


def _damaged(path: str | os.PathLike[str], error: Exception) -> FileFormatError:
    from PIL import UnidentifiedImageError

    # Pillow's own words would repeat the path.
    reason = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error) or type(error).__name__
    return FileFormatError(f"{path} cannot be read as an image: {reason}")


def _sixteen_bits(image: Image, path: str | os.PathLike[str]) -> npt.NDArray[np.uint16]:
    values = np.asarray(image)
    if values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
        raise FileFormatError(f"{path} must have values from 0 to 65535. Got {values.min()} to {values.max()}.")
    return values.astype(np.uint16)
