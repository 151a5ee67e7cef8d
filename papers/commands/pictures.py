"""`python -m papers denoising`, `horses` and `backgrounds`: the studies of pictures."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from papers import horses as horses_table
from papers.backgrounds import curves as learning_curves
from papers.backgrounds import table as backgrounds_table
from papers.commands._app import Data, Device, Finished, OnDevice, Out, Quick, Quiet, Rows, app, folder, run
from papers.denoising import table_2010 as implicit
from papers.denoising import table_2013 as power
from papers.study import AbstractStudy


class Table(StrEnum):
    """The tables of `python -m papers denoising`."""

    PAMI = "2013"
    NIPS = "2010"


class Part(StrEnum):
    """The parts of `python -m papers backgrounds`."""

    TABLE = "table"
    CURVES = "curves"


# Smaller sizes, by study.
QUICK: dict[str, dict[str, Any]] = {
    "denoising 2013": {"num_train": 8, "num_test": 16, "shape": (50, 75), "again": False},
    "denoising 2010": {"num_pictures": 8, "num_tests": 19, "shape": (50, 75), "tol": 1e-4},
    "horses": {"num_train": 12, "num_test": 12, "iterations": 40, "scale": 0.1},
    "backgrounds table": {
        "folds": (0,),
        "num_train": 16,
        "num_test": 16,
        "scale": 0.1,
        "iterations": 40,
        "first": 8,
    },
    "backgrounds curves": {
        "num_pictures": 8,
        "scale": 0.1,
        "iterations": 20,
        "sweeps": (5, 20),
        "tolerances": (1e-2, 1e-4),
    },
}


@app.command()
def denoising(
    data: Data = None,
    table: Annotated[Table | None, typer.Option(help="Only the one of this year.")] = None,
    rows: Rows = None,
    finished: Finished = False,
    device: OnDevice = Device.CPU,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Restore binary pictures: the same model, trained by several losses.

    2013 is Table 1 and Figure 4 of Domke (2013): ten losses at three noise levels, 32 training and 100 test pictures of
    the Berkeley Segmentation Data Set. 2010 is Table 1 and Figure 1 of Domke (2010): four training losses, each
    measured by all of them, on 100 and 100 such pictures, and on shapes that stand in for the pictures of its other
    columns.

    At full size they take some hours on one core.

    \b
    Examples:
      python -m papers denoising --data ~/data --quick
      python -m papers denoising --data ~/data --table 2013 --rows "surrogate likelihood, univariate logistic"
    """
    shared: dict[str, Any] = {"root": folder(data), "device": device.value}
    studies: list[AbstractStudy] = []
    if table is not Table.NIPS:
        size = shared | (QUICK["denoising 2013"] if quick else {})
        studies.append(power.PowerNoiseTable(rows=_chosen(rows, finished, tuple(power.PAPER)), **size))
    if table is not Table.PAMI:
        size = shared | (QUICK["denoising 2010"] if quick else {})
        studies.append(implicit.ImplicitTable(rows=_chosen(rows, finished, tuple(implicit.PAPER)), **size))
    options = [*(["--table", table] if table else []), *_given(rows, finished, device)]
    run("denoising", studies, quick, out, quiet, options)


@app.command()
def horses(
    data: Data = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Resolution of inference, as a part of the pictures'. [1, or less with --quick]"),
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Train on the first pictures by name, and test with the last.")
    ] = False,
    step: Annotated[
        float | None,
        typer.Option(help="Ten multiples of this as thresholds of edge features; the paper does not give its own."),
    ] = None,
    rows: Rows = None,
    finished: Finished = False,
    device: OnDevice = Device.CPU,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Segment horses: truncated fitting by several losses, kinds of inference and numbers of sweeps.

    Table 2 and Figure 5 of Domke (2013): 200 training and 127 test pictures of the Weizmann horse database,
    tree-reweighted inference and mean field, truncated after 10, 20 and 40 sweeps. Four more lines, which are not in
    the paper, explain differences from it.

    At full size it takes days on one core.

    \b
    Examples:
      python -m papers horses --data ~/data --quick
      python -m papers horses --data ~/data --scale 0.25
      python -m papers horses --data ~/data --device cuda --rows "univariate logistic, clique logistic"
    """
    size = QUICK["horses"] if quick else {}
    if scale is not None:
        size = size | {"scale": scale}
    lines = _chosen(rows, finished, horses_table.ROWS)
    study = horses_table.HorsesTable(
        folder(data), rows=lines, in_order=in_order, step=step, device=device.value, **size
    )
    options = [
        *([f"--scale {scale:g}"] if scale else []),
        *(["--in-order"] if in_order else []),
        *([] if step is None else [f"--step {step:g}"]),
        *_given(rows, finished, device),
    ]
    run("horses", [study], quick, out, quiet, options)


@app.command()
def backgrounds(
    data: Data = None,
    part: Annotated[Part | None, typer.Option(help="Only the table with Figure 6, or only the curves.")] = None,
    folds: Annotated[str, typer.Option(metavar="NUMBERS", help="Only these of the five folds.")] = "0,1,2,3,4",
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Of training: of the first stage [1000], or of each curve [300]; less with --quick."),
    ] = None,
    rows: Rows = None,
    finished: Finished = False,
    device: OnDevice = Device.CPU,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Label outdoor scenes with eight classes: truncated fitting by several losses and numbers of sweeps.

    table is Table 3 and Figure 6 of Domke (2013): five-fold cross-validation on the 715 pictures of the Stanford
    Background Dataset, inference truncated after 5, 10 and 20 sweeps. One more line, which is not in the paper, is of
    surrogate EM that is not stopped where it diverges. curves is Figure 7: objectives against time, of truncated
    fitting, perturbation and back-propagation; its --rows are these three.

    At full size it takes days on one core.

    \b
    Examples:
      python -m papers backgrounds --data ~/data --quick
      python -m papers backgrounds --data ~/data --part table --folds 0,1 --device cuda
    """
    shared: dict[str, Any] = {"root": folder(data), "device": device.value}
    length = {} if iterations is None else {"iterations": iterations}
    studies: list[AbstractStudy] = []
    if part is not Part.CURVES:
        size = (QUICK["backgrounds table"] if quick else {"folds": _numbers(folds)}) | length
        studies.append(
            backgrounds_table.BackgroundsTable(rows=_chosen(rows, finished, backgrounds_table.ROWS), **shared, **size)
        )
    if part is not Part.TABLE:
        size = (QUICK["backgrounds curves"] if quick else {}) | length
        methods = _chosen(rows, finished, learning_curves.LearningCurves().rows)
        studies.append(learning_curves.LearningCurves(rows=methods, **shared, **size))
    options = [*(["--part", part] if part else []), *(["--folds", folds] if folds != "0,1,2,3,4" else [])]
    options += [] if iterations is None else [f"--iterations {iterations}"]
    options += _given(rows, finished, device)
    run("backgrounds", studies, quick, out, quiet, options)


def _chosen(rows: str | None, finished: bool, everything: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of a table to compute."""
    if finished:
        return ()
    return everything if rows is None else tuple(name.strip() for name in rows.split(","))


def _given(rows: str | None, finished: bool, device: Device) -> list[str]:
    """These options, to be written down."""
    options = [*(["--rows", f'"{rows}"'] if rows else []), *(["--finished"] if finished else [])]
    return [*options, *(["--device cuda"] if device is Device.CUDA else [])]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < 5 for number in numbers):
        raise typer.BadParameter(f"--folds must be numbers from 0 to 4 with commas between. Got {text!r}.")
    return numbers
