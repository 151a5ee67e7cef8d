"""`riskfield predict`: labels and marginals of images."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from riskfield.cli._common import (
    BAD_IMAGE,
    Config,
    DeviceOfRun,
    Quiet,
    Run,
    Threads,
    complain,
    complain_of_image,
    message_of,
    note_tiles,
)
from riskfield.datasets.colours import overlay
from riskfield.datasets.folders import image_files
from riskfield.datasets.images import read_image
from riskfield.io._atomic import check_writable, write_bytes
from riskfield.progress import bar

_KINDS = {"labels": ".png", "overlays": ".png", "marginals": ".npz"}


def predict(
    model: Run,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Images, or folders of them.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the results.")],
    device: DeviceOfRun = None,
    threads: Threads = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Label the pixels of images.

    For horse.jpg, the command writes three files to the folder --out: labels/horse.png, the labels, as the values that
    the masks had in training; overlays/horse.png, the image with its labels in colours; and marginals/horse.npz, with
    the arrays marginals (row, column, class), values (of the classes in masks) and names (of the classes). An image
    that cannot be found, read or labelled is reported and left out, and the exit code is 2. An image that is too large
    for the memory is labelled in overlapping tiles.

    \b
    Examples:
      riskfield predict model/ photo.jpg --out predicted/
      riskfield predict model/ images/ more/*.png --out predicted/
    """
    from riskfield.estimators.image_run import ImageRun  # here, because scikit-learn takes a second to load

    run = ImageRun.load(model, device=device)
    done, (files, failed) = 0, _files(images)
    if files:
        _prepare(out, files)
    values = np.array([*run.classes], np.uint8 if max(run.classes) < 256 else np.uint16)  # as masks have them
    for name, path in bar(files.items(), shown=not quiet, what="predicting"):
        try:
            image = read_image(path)
            note_tiles(run.crf, image.shape, path)
            (marginals,) = run.crf.predict_marginals([image])
        except BAD_IMAGE as error:
            complain_of_image(path, error)
            failed += 1
            continue
        chosen = marginals.argmax(-1)
        write_bytes(out / "labels" / f"{name}.png", _png(values[chosen]))
        write_bytes(out / "overlays" / f"{name}.png", _png(overlay(image, chosen, len(run.classes))))
        write_bytes(out / "marginals" / f"{name}.npz", _npz(marginals, run.classes))
        done += 1
    if not quiet and done:
        typer.echo(f"labelled {done} image{'s' if done > 1 else ''}\nwrote {out}")
    if failed:
        raise typer.Exit(2)


def _files(given: Sequence[Path]) -> tuple[dict[str, Path], int]:
    """The images by the names their results will have, and how many paths lead to none. Those are reported."""
    files: dict[str, Path] = {}
    missing = 0
    for path in given:
        try:
            found = [*image_files(path, "IMAGES").values()] if path.is_dir() else [path]
            if not found[0].exists():
                raise FileNotFoundError(2, "No such file or folder", str(path))
        except (OSError, ValueError) as error:
            complain(message_of(error).replace("`IMAGES`: ", ""), error)
            missing += 1
            continue
        for file in found:
            if file.stem in files:
                raise typer.BadParameter(f"IMAGES must have different names. Got {files[file.stem]} and {file}.")
            files[file.stem] = file
    return files, missing


def _prepare(out: Path, files: dict[str, Path]) -> None:
    """Make the folders, and raise if results could not be written, or would replace an image."""
    inputs = {os.path.realpath(path) for path in files.values()}
    for kind, ending in _KINDS.items():
        (out / kind).mkdir(parents=True, exist_ok=True)
        for name in files:
            if os.path.realpath(out / kind / f"{name}{ending}") in inputs:
                raise typer.BadParameter(f"--out {out} would overwrite {files[name]}.")
        check_writable(out / kind / f"{next(iter(files))}{ending}")


def _png(pixels: npt.NDArray[Any]) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def _npz(marginals: npt.NDArray[np.float64], classes: Mapping[int, str]) -> bytes:
    stream = io.BytesIO()
    values, names = np.array([*classes], np.int64), np.array([*classes.values()])
    np.savez_compressed(stream, marginals=marginals.astype(np.float32), values=values, names=names)
    return stream.getvalue()
