"""Berkeley Segmentation Data Set, BSDS500: photographs to binarise (Arbelaez, Maire, Fowlkes, Malik, TPAMI 2011)."""

from __future__ import annotations

from collections.abc import Sequence

from riskfield.data._source import Root, Source
from riskfield.data.pictures import Picture, PictureSet, read_image
from riskfield.errors import MissingDataError

SOURCE = Source(
    "BSDS500",
    "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/resources.html (BSR_bsds500.tgz)",
    "BSDS500/data/images/train/100075.jpg",
)
SUBSETS = ("train", "val", "test")


def bsds500(root: Root = None, subsets: Sequence[str] = ("train", "val")) -> PictureSet:
    """The photographs of BSDS500, 481 by 321 or 321 by 481, by their numbers; without labels.

    Arguments:
        root: the folder that has `BSDS500/`. By default the environment variable RISKFIELD_DATA says it.
        subsets: of "train" (200 pictures), "val" (100) and "test" (200). The first two together are BSDS300.

    Raises:
        MissingDataError: if a subset is not there; it says what to download.
    """
    unknown = [subset for subset in subsets if subset not in SUBSETS]
    if unknown or not subsets or isinstance(subsets, str):
        raise ValueError(f"`subsets` must be some of {SUBSETS}. Got {subsets!r}.")
    folders = SOURCE.find(root, *(f"BSDS500/data/images/{subset}" for subset in subsets))
    files = {file.stem: file for folder in folders for file in folder.glob("*.jpg")}
    if not files:
        raise MissingDataError(f"BSDS500 has no pictures: {', '.join(map(str, folders))} without *.jpg.")
    # By number, as they are known, not by the text of the number.
    names = sorted(files, key=lambda name: (len(name), name))
    return PictureSet(names, lambda name: Picture(name, read_image(files[name])))
