"""`riskfield report`: a page that shows what a model has learned."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from riskfield.cli._common import Config, DeviceOfRun, Images, Masks, Quiet, Threads, readable, warn_of_missing_classes
from riskfield.datasets.folders import image_folder


def report(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Folders that `riskfield fit` wrote.")],
    images: Images,
    masks: Masks,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page. [report.html in the folder of the first model]")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="The title of the page. [the classes and the number of images]")
    ] = None,
    shown: Annotated[int, typer.Option(min=1, help="How many images the page shows.")] = 6,
    device: DeviceOfRun = None,
    threads: Threads = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Write an HTML report on one model, or on several side by side.

    The report is one HTML file that loads nothing from the network. It shows errors, the confusion matrix, the
    calibration of the marginals, images with true labels, marginals and predictions, training curves, settings, timings
    and commands. The numbers are computed on all images in --images, with the labels in --masks. Use images that were
    not used for training. An image that cannot be read or labelled is reported and left out, and the exit code is 2.

    \b
    Examples:
      riskfield report model/ --images test/images/ --masks test/masks/
      riskfield report likelihood/ clique/ --images test/images/ --masks test/masks/ --out compared.html --shown 12
    """
    from riskfield.estimators.image_run import ImageRun  # here, because scikit-learn takes a second to load
    from riskfield.report.page import write_report

    runs = [ImageRun.load(model, device=device) for model in models]
    test = image_folder(images, masks, classes=runs[0].classes, ignore=runs[0].ignore, reading=runs[0].reading)
    good = readable(test, [run.crf for run in runs])
    path = out or models[0] / "report.html"
    words = [
        "riskfield",
        "report",
        *map(str, models),
        "--images",
        str(images),
        "--masks",
        str(masks),
        "--out",
        str(path),
    ]
    words += ["--title", title] if title else []
    found = write_report(
        path,
        runs,
        good,
        title=title,
        command=shlex.join([*words, "--shown", str(shown)]),
        num_shown=shown,
        progress=not quiet,
    )
    warn_of_missing_classes(runs[0], found[0].confusion.sum(1).tolist(), masks, good.names)
    if not quiet:
        typer.echo(f"wrote {path}")
    if len(good) < len(test):
        raise typer.Exit(2)
