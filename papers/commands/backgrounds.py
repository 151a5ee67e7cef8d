"""`python -m papers backgrounds`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from papers.backgrounds import curves as learning_curves
from papers.backgrounds.table import ROWS, BackgroundsTable
from papers.commands._app import (
    Data,
    Device,
    Finished,
    OnDevice,
    Out,
    Quick,
    Quiet,
    Rows,
    app,
    chosen,
    folder,
    given,
    run,
)
from papers.study import AbstractStudy


class Part(StrEnum):
    """The parts of `python -m papers backgrounds`."""

    TABLE = "table"
    CURVES = "curves"


_QUICK: dict[Part, dict[str, Any]] = {
    Part.TABLE: {"folds": (0,), "num_train": 16, "num_test": 16, "scale": 0.1, "iterations": 40, "first": 8},
    Part.CURVES: {"num_pictures": 8, "scale": 0.1, "iterations": 20, "sweeps": (5, 20), "tolerances": (1e-2, 1e-4)},
}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < 5 for number in numbers):
        raise typer.BadParameter(f"--folds must be numbers from 0 to 4 with commas between. Got {text!r}.")
    return numbers


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
        size = (_QUICK[Part.TABLE] if quick else {"folds": _numbers(folds)}) | length
        studies.append(BackgroundsTable(rows=chosen(rows, finished, ROWS), **shared, **size))
    if part is not Part.TABLE:
        size = (_QUICK[Part.CURVES] if quick else {}) | length
        methods = chosen(rows, finished, learning_curves.LearningCurves().rows)
        studies.append(learning_curves.LearningCurves(rows=methods, **shared, **size))
    options = [*(["--part", part] if part else []), *(["--folds", folds] if folds != "0,1,2,3,4" else [])]
    options += [] if iterations is None else [f"--iterations {iterations}"]
    options += [*given(rows, finished), *(["--device cuda"] if device is Device.CUDA else [])]
    run("backgrounds", studies, quick, out, quiet, options)
