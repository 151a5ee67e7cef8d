"""Berkeley Segmentation Data Set, BSDS500: photographs to binarise (Arbelaez, Maire, Fowlkes, Malik, TPAMI 2011)."""

from __future__ import annotations

from collections.abc import Sequence

from riskfield.datasets._source import Root, Source
from riskfield.datasets.images import ImageSet, LabelledImage, read_image
from riskfield.errors import MissingDataError

SOURCE = Source(
    "BSDS500",
    "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/resources.html (BSR_bsds500.tgz)",
    "BSDS500/data/images/train/100075.jpg",
)
SUBSETS = ("train", "val", "test")


def bsds500(root: Root = None, subsets: Sequence[str] = ("train", "val")) -> ImageSet:
    """Load the photographs of BSDS500, 481 by 321 or 321 by 481, without labels. Their names are their numbers.

    Arguments:
        root: the folder that contains `BSDS500/`. By default it is taken from the environment variable RISKFIELD_DATA.
        subsets: some of "train" (200 images), "val" (100) and "test" (200). By default the first two, whose 300 images
            are those of BSDS300.

    Raises:
        MissingDataError: if a subset is missing; the message says what to download.
        ValueError: if `subsets` holds anything else, or nothing.
    """
    unknown = [subset for subset in subsets if subset not in SUBSETS]
    if unknown or not subsets or isinstance(subsets, str):
        raise ValueError(f"`subsets` must be some of {SUBSETS}. Got {subsets!r}.")
    folders = SOURCE.find(root, *(f"BSDS500/data/images/{subset}" for subset in subsets))
    files = {file.stem: file for folder in folders for file in folder.glob("*.jpg")}
    if not files:
        raise MissingDataError(f"BSDS500 has no images: {', '.join(map(str, folders))} without *.jpg.")
    # Sort by number, not alphabetically.
    names = sorted(files, key=lambda name: (len(name), name))
    return ImageSet(names, lambda name: LabelledImage(name, read_image(files[name])))
