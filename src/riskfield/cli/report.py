"""`riskfield report`: a page that shows what a model has learned."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from riskfield.cli._common import Config, Images, Masks, Quiet, readable
from riskfield.datasets.folders import image_folder


def report(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Folders that `riskfield fit` wrote.")],
    images: Images,
    masks: Masks,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page. [report.html in the folder of the first model]")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page. [the names of the models]")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="How many pictures are shown.")] = 6,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Write a page on one model, or on several side by side.

    One file of HTML that needs no network: errors, confusion, calibration of the marginals, pictures with truth,
    marginals and predictions, the course of the training, settings, timings and commands. Numbers are those of all the
    pictures in --images, by the labels in --masks; use others than in training. A picture that cannot be read
    or labelled is reported and left out, and the exit code is 2.

    \b
    Examples:
      riskfield report model/ --images test/images/ --masks test/masks/
      riskfield report likelihood/ clique/ --images test/images/ --masks test/masks/ --out compared.html --pictures 12
    """
    from riskfield.estimators.image_run import ImageRun  # here, because scikit-learn takes a second to load
    from riskfield.report.page import write_report

    runs = [ImageRun.load(model) for model in models]
    test = image_folder(images, masks, classes=runs[0].classes, ignore=runs[0].ignore)
    good = readable(test, [run.crf.features_ for run in runs])
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
    write_report(
        path,
        runs,
        good,
        title=title,
        command=shlex.join([*words, "--pictures", str(pictures)]),
        num_shown=pictures,
        progress=not quiet and sys.stderr.isatty(),
    )
    if not quiet:
        typer.echo(f"wrote {path}")
    if len(good) < len(test):
        raise typer.Exit(2)
