"""Tell brick, grass and gravel apart, pixel by pixel, with three ways of learning: what `make demo` runs.

Pictures are put together from patches of scikit-image's textures and written as two folders, as a user would have
them. All else is done by the program `riskfield`, in the commands that are printed: a conditional random field is
fitted by surrogate likelihood, by univariate and by clique logistic loss, all through the same ten sweeps of
tree-reweighted message passing; the last one labels new pictures; and a page shows all three side by side.

    python examples/textures.py --out demo
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from riskfield.cli import main as riskfield
from riskfield.data.bundled import mosaics
from riskfield.data.pictures import PictureSet

LOSSES = {  # by the names of their runs
    "surrogate-likelihood": "likelihood",
    "univariate-logistic": "univariate-logistic",
    "clique-logistic": "clique-logistic",
}


def write_folders(pictures: PictureSet, folder: Path) -> None:
    """Images and masks as two folders of PNG files."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for picture in pictures:
        assert picture.labels is not None
        Image.fromarray(picture.image).save(folder / "images" / f"{picture.name}.png")
        Image.fromarray(picture.labels.astype("uint8")).save(folder / "masks" / f"{picture.name}.png")


def command(*words: object) -> None:
    """Print a command and run it."""
    arguments = [str(word) for word in words]
    print(f"\n$ {shlex.join(['riskfield', *arguments])}", flush=True)
    code = riskfield(arguments)
    if code:
        sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the pictures, fit, predict and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all files (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="rows of a picture (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=40, help="of the optimiser (default: %(default)s)")
    given = parser.parse_args(arguments)
    if not 8 <= given.size <= 192:
        parser.error(f"--size must be from 8 to 192. Got {given.size}.")
    began = time.perf_counter()
    out, shape = given.out, (given.size, given.size * 4 // 3)
    for part in ("train", "test", "predicted", *LOSSES):  # of an earlier demo
        shutil.rmtree(out / part, ignore_errors=True)
    write_folders(mosaics(8, shape), out / "train")
    write_folders(mosaics(8, shape, test=True), out / "test")
    print(f"wrote 8 pictures to {out / 'train'} and 8 to {out / 'test'}")

    train = ["--images", out / "train" / "images", "--masks", out / "train" / "masks"]
    test = ["--images", out / "test" / "images", "--masks", out / "test" / "masks"]
    names = ["--class", "0=brick", "--class", "1=grass", "--class", "2=gravel"]
    for name, loss in LOSSES.items():
        settings = ["--loss", loss, "--inference", "trw", "--sweeps", 10, "--ridge", 1e-3]
        command("fit", *train, *names, *settings, "--iterations", given.iterations, "--out", out / name)
    command("predict", out / "clique-logistic", out / "test" / "images", "--out", out / "predicted")
    page = out / "report.html"
    title = "Brick, grass and gravel"
    command("report", *(out / name for name in LOSSES), *test, "--out", page, "--title", title)
    print(f"\n{time.perf_counter() - began:.0f} seconds. Open this page in a browser:\n{page.resolve()}")


if __name__ == "__main__":
    main()
