"""`riskfield reproduce`: the experiments of the papers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from riskfield.experiments.gradient_accuracy import Accuracy
from riskfield.experiments.gradient_times import Times
from riskfield.experiments.misspecification import Errors, Marginals
from riskfield.experiments.study import AbstractStudy, require_matplotlib
from riskfield.experiments.study import reproduce as reproduce_study

app = typer.Typer(
    help="""Run experiments of the papers: plots, and the data beside them.

    What is finished is kept. Interrupted or killed, the same command goes on where it stopped.""",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller models: minutes become seconds.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results. [results/NAME, or NAME-quick]")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]


class GradientFigure(StrEnum):
    """The figures of `riskfield reproduce gradients`."""

    ACCURACY = "accuracy"
    TIMES = "times"


_FULL: dict[GradientFigure, AbstractStudy] = {GradientFigure.ACCURACY: Accuracy(), GradientFigure.TIMES: Times()}
_QUICK: dict[GradientFigure, AbstractStudy] = {
    GradientFigure.ACCURACY: Accuracy(num_models=2, per_decade=1),
    GradientFigure.TIMES: Times(sides=(8, 16, 32), strengths=(1.0, 2.0, 3.0), num_models=2),
}

_MISSPECIFICATION: tuple[AbstractStudy, ...] = (Errors(), Marginals())
_MISSPECIFICATION_QUICK: tuple[AbstractStudy, ...] = (
    Errors(shifts=(0, 1, 3), sizes=(30, 300), num_distributions=2),
    Marginals(shifts=(0, 1, 3), size=300),
)


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
      riskfield reproduce gradients --quick
      riskfield reproduce gradients --figure accuracy --out results/gradients
    """
    studies = _QUICK if quick else _FULL
    chosen = [studies[name] for name in ([figure] if figure else GradientFigure)]
    _run("gradients", chosen, quick, out, quiet, [] if figure is None else ["--figure", figure])


@app.command()
def misspecification(quick: Quick = False, out: Out = None, quiet: Quiet = False) -> None:
    """What a model that is wrong does to the likelihood and to losses on marginals.

    Figures 1 and 2 of Domke (2013), section 4.3: chains that are to be predicted from inputs which belong to shifted
    positions. errors is the test error against the amount of data and the shift, of models fitted by likelihood,
    univariate and clique logistic loss with exact inference; marginals are those of an example input.

    \b
    Examples:
      riskfield reproduce misspecification --quick
      riskfield reproduce misspecification --out results/misspecification
    """
    _run("misspecification", _MISSPECIFICATION_QUICK if quick else _MISSPECIFICATION, quick, out, quiet, [])


def _run(
    name: str, studies: Sequence[AbstractStudy], quick: bool, out: Path | None, quiet: bool, options: Sequence[str]
) -> None:
    try:
        require_matplotlib()
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    folder = out or Path("results", f"{name}-quick" if quick else name)
    given = [*options, *(["--quick"] if quick else []), *(["--out", str(out)] if out else [])]
    command = " ".join(["riskfield reproduce", name, *given])
    try:
        for study in studies:
            for path in reproduce_study(study, folder, command, progress=not quiet and sys.stderr.isatty()):
                if not quiet:
                    typer.echo(f"wrote {path}")
    except KeyboardInterrupt:
        typer.echo("riskfield: finished cells are kept; the same command goes on from there.", err=True)
        raise
