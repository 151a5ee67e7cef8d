"""Stanford Background Data Set: outdoor scenes of eight classes (Gould, Fulton & Koller, ICCV 2009)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from riskfield.datasets._source import Root, Source
from riskfield.datasets.images import ImageSet, LabelledImage, Labels, few, read_image
from riskfield.errors import FileFormatError, MissingDataError

SOURCE = Source(
    "The Stanford Background Dataset",
    "http://dags.stanford.edu/projects/scenedataset.html (iccv09Data.tar.gz)",
    "iccv09Data/images/0000047.jpg and iccv09Data/labels/0000047.regions.txt",
)
STANFORD_CLASSES = ("sky", "tree", "road", "grass", "water", "building", "mountain", "foreground")


def stanford_background(root: Root = None) -> ImageSet:
    """Load the 715 images of the Stanford Background Dataset, of about 240 by 320 pixels.

    The labels are the numbers of eight classes, `STANFORD_CLASSES`, and -1 where a pixel has none.

    Arguments:
        root: the folder that contains `iccv09Data/`. By default it is taken from the environment variable
            RISKFIELD_DATA.

    Raises:
        MissingDataError: if the data set is missing; the message says what to download.
        FileFormatError: when an image is read, if its files are damaged or differ in size.
    """
    images, regions = SOURCE.find(root, "iccv09Data/images", "iccv09Data/labels")
    names = sorted(path.stem for path in images.glob("*.jpg"))
    without = [name for name in names if not (regions / f"{name}.regions.txt").exists()]
    if not names or without:
        raise MissingDataError(f"{regions} has no labels for {few(without)}." if names else f"{images} has no *.jpg.")

    def read(name: str) -> LabelledImage:
        image, path = read_image(images / f"{name}.jpg"), regions / f"{name}.regions.txt"
        labels = _read_regions(path)
        if labels.shape != image.shape[:2]:
            raise FileFormatError(f"{path} must have the shape {image.shape[:2]} of {name}.jpg. Got {labels.shape}.")
        return LabelledImage(name, image, labels)

    return ImageSet(names, read, STANFORD_CLASSES)


def _read_regions(path: Path) -> Labels:
    """Read a file with one line of integers per row of the image. Negative integers mean no label."""
    try:
        labels = np.array([line.split() for line in path.read_text().splitlines() if line.strip()]).astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise FileFormatError(f"{path} must have lines with the same number of integers: {error}") from error
    if labels.size and labels.max() >= len(STANFORD_CLASSES):
        raise FileFormatError(f"{path} must have labels from 0 to {len(STANFORD_CLASSES) - 1}. Got {labels.max()}.")
    return np.maximum(labels, -1)
