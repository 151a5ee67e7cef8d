"""`python -m papers gradients`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from papers.commands._app import Out, Quick, Quiet, app, run
from papers.gradients.accuracy import Accuracy
from papers.gradients.times import Times
from papers.study import AbstractStudy


class GradientFigure(StrEnum):
    """The figures of `python -m papers gradients`."""

    ACCURACY = "accuracy"
    TIMES = "times"


_FULL: dict[GradientFigure, AbstractStudy] = {GradientFigure.ACCURACY: Accuracy(), GradientFigure.TIMES: Times()}
_QUICK: dict[GradientFigure, AbstractStudy] = {
    GradientFigure.ACCURACY: Accuracy(num_models=2, per_decade=1),
    GradientFigure.TIMES: Times(sides=(8, 16, 32), strengths=(1.0, 2.0, 3.0), num_models=2),
}


@app.command()
def gradients(
    figure: Annotated[GradientFigure | None, typer.Option(help="Only this one.")] = None,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """How accurate and how fast the gradients of a loss through inference are.

    accuracy is Figure 3 of Domke (2013): the error of one-, two- and four-sided perturbation against the multiplier of
    the step, for TRW and mean field and several interaction strengths. times is Figure 2 of Domke (2010): the time of
    perturbation, back-propagation at the fixed point, direct and iterative solves, with inference as reference, against
    grid size and interaction strength.

    \b
    Examples:
      python -m papers gradients --quick
      python -m papers gradients --figure accuracy
    """
    studies = _QUICK if quick else _FULL
    chosen = [studies[name] for name in ([figure] if figure else GradientFigure)]
    run("gradients", chosen, quick, out, quiet, [] if figure is None else ["--figure", figure])
