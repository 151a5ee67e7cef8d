"""Label the pixels of brick, grass and gravel with models trained by three losses.

The images are composed of patches of scikit-image's textures and written as folders of images and masks, like a
user's own data. The rest is done by the command `riskfield`; every command is printed. Three conditional random fields
are trained, by surrogate likelihood, univariate logistic loss and clique logistic loss, all through the same ten sweeps
of tree-reweighted message passing. The last one labels new images. A report shows all three side by side.

    python examples/textures.py --out textures
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
from riskfield.datasets.bundled import mosaics
from riskfield.datasets.images import ImageSet

LOSSES = ("surrogate-likelihood", "univariate-logistic", "clique-logistic")


def write_folders(images: ImageSet, folder: Path) -> None:
    """Write images and masks as two folders of PNG files."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for image in images:
        assert image.labels is not None
        Image.fromarray(image.image).save(folder / "images" / f"{image.name}.png")
        Image.fromarray(image.labels.astype("uint8")).save(folder / "masks" / f"{image.name}.png")


def command(*words: object) -> None:
    """Print a command and run it."""
    arguments = [str(word) for word in words]
    print(f"\n$ {shlex.join(['riskfield', *arguments])}", flush=True)
    code = riskfield(arguments)
    if code:
        sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the images, fit, predict and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("textures"), help="folder for all files (default: %(default)s)"
    )
    parser.add_argument("--size", type=int, default=96, help="rows of an image (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of the optimiser (default: %(default)s)")
    given = parser.parse_args(arguments)
    if not 8 <= given.size <= 192:
        parser.error(f"--size must be from 8 to 192. Got {given.size}.")
    began = time.perf_counter()
    out, shape = given.out, (given.size, given.size * 4 // 3)
    for part in ("train", "test", "predicted", *LOSSES):  # left by an earlier run
        shutil.rmtree(out / part, ignore_errors=True)
    write_folders(mosaics(8, shape), out / "train")
    write_folders(mosaics(8, shape, test=True), out / "test")
    print(f"wrote 8 images to {out / 'train'} and 8 to {out / 'test'}")

    train = ["--images", out / "train" / "images", "--masks", out / "train" / "masks"]
    test = ["--images", out / "test" / "images", "--masks", out / "test" / "masks"]
    names = ["--class", "0=brick", "--class", "1=grass", "--class", "2=gravel"]
    for loss in LOSSES:
        settings = ["--loss", loss, "--inference", "trw", "--sweeps", 10, "--ridge", 1e-3]
        command("fit", *train, *names, *settings, "--iterations", given.iterations, "--out", out / loss)
    command("predict", out / "clique-logistic", out / "test" / "images", "--out", out / "predicted")
    page = out / "report.html"
    title = "Brick, grass and gravel"
    command("report", *(out / loss for loss in LOSSES), *test, "--out", page, "--title", title)
    print(f"\n{time.perf_counter() - began:.0f} seconds. Open this page in a browser:\n{page.resolve()}")


if __name__ == "__main__":
    main()
