"""`riskfield evaluate`: measures of the quality of a model's predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from riskfield.cli._common import (
    BAD_IMAGE,
    Config,
    DeviceOfRun,
    Images,
    Masks,
    Quiet,
    Run,
    Threads,
    complain_of_image,
    note_tiles,
    warn_of_missing_classes,
)
from riskfield.datasets.folders import image_folder
from riskfield.io._atomic import check_writable, write_text
from riskfield.progress import bar
from riskfield.report.evaluation import Evaluation, Tally


def evaluate(
    model: Run,
    images: Images,
    masks: Masks,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the evaluation to this file.")
    ] = None,
    device: DeviceOfRun = None,
    threads: Threads = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Compare predictions with masks.

    For each class, the command prints the number of its pixels, the share of them that is labelled wrong, and the
    intersection over union of true and predicted pixels. For all pixels, it prints the share that is labelled wrong,
    the log loss of the marginals, and the calibration error: the mean difference between a marginal and the frequency
    with which such marginals are right. The confusion matrix shows, for the pixels of the class in a row, the share
    that is labelled as the class in a column. The masks must use the same values as in training, and are read in the
    same way. An image that cannot be read or labelled is reported and left out, and the exit code is 2.

    \b
    Examples:
      riskfield evaluate model/ --images test/images/ --masks test/masks/
      riskfield evaluate model/ --images test/images/ --masks test/masks/ --json scores.json --quiet
    """
    from riskfield.estimators.image_run import ImageRun  # here, because scikit-learn takes a second to load
    from riskfield.report.predictions import evaluate_image

    if json_file is not None:
        check_writable(json_file)
    run = ImageRun.load(model, device=device)
    test = image_folder(images, masks, classes=run.classes, ignore=run.ignore, reading=run.reading)
    tally, failed = Tally([*run.classes.values()]), set[str]()
    for number in bar(range(len(test)), shown=not quiet, what="evaluating"):
        try:
            image = test[number]
            note_tiles(run.crf, image.image.shape, image.name)
            evaluate_image(run, image, tally)
        except BAD_IMAGE as error:
            complain_of_image(test.names[number], error)
            failed.add(test.names[number])
    if len(failed) == len(test):
        raise typer.Exit(2)
    found = tally.evaluation()
    good = [name for name in test.names if name not in failed]
    warn_of_missing_classes(run, found.confusion.sum(1).tolist(), masks, good)
    if json_file is not None:
        write_text(json_file, json.dumps(found.as_dict(), indent=1) + "\n")
    if not quiet:
        _print(found)
    if failed:
        raise typer.Exit(2)


def _print(found: Evaluation) -> None:
    width = max(8, *(len(name) for name in found.names))
    typer.echo(f"{'class':<{width}}  {'pixels':>10}  {'error':>7}  {'overlap':>7}")
    totals = found.confusion.sum(1)
    for name, pixels, error, overlap in zip(found.names, totals, found.class_errors, found.overlaps, strict=True):
        typer.echo(f"{name:<{width}}  {pixels:>10}  {_percent(error):>7}  {_percent(overlap):>7}")
    typer.echo(
        f"{'all':<{width}}  {found.num_pixels:>10}  {_percent(found.error):>7}  {_percent(found.mean_overlap):>7}\n\n"
        f"log loss           {found.log_loss:.4f}\n"
        f"calibration error  {found.calibration_error:.4f}\n"
        f"images             {found.num_images}, {found.seconds / found.num_images:.2g} s each\n"
    )
    columns = [max(7, len(name)) for name in found.names]
    header = "  ".join(f"{name:>{column}}" for name, column in zip(found.names, columns, strict=True))
    typer.echo("predicted classes in columns, as shares of the true class in the row:")
    typer.echo(f"{'':<{width}}  {header}")
    for name, row in zip(found.names, found.confusion, strict=True):
        shares = row / row.sum() if row.sum() else np.full(len(row), np.nan)
        cells = "  ".join(f"{_percent(share):>{column}}" for share, column in zip(shares, columns, strict=True))
        typer.echo(f"{name:<{width}}  {cells}")


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f} %"
