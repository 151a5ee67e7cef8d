"""`python -m papers erm`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from papers.commands._app import Finished, Jobs, Out, Quick, Quiet, app, run
from papers.erm.draws import Draws
from papers.erm.landscape import Landscape
from papers.erm.suite import MODELS, Suite
from papers.erm.tables import Mismatch, Overall, Pairs, Truncation
from papers.erm.tuning import SUPPLEMENTARY, Tuning
from papers.study import AbstractStudy


class ErmTable(StrEnum):
    """The tables of `python -m papers erm`."""

    OVERALL = "3"
    MISMATCH = "4"
    TRUNCATION = "5"
    PAIRS = "6"


_TABLES: dict[ErmTable, Callable[[Suite, bool], AbstractStudy]] = {
    ErmTable.OVERALL: Overall,
    ErmTable.MISMATCH: Mismatch,
    ErmTable.TRUNCATION: Truncation,
    ErmTable.PAIRS: Pairs,
}
_FIGURES: dict[int, AbstractStudy] = {1: Landscape()}
_QUICK = Suite(models=((20, 40), (30, 60)), examples=200, epochs=4, restarts=1)
_QUICK_TUNING = Tuning(((15, 30), (20, 40)), examples=100, epochs=2)
_QUICK_FIGURES: dict[int, AbstractStudy] = {1: Landscape(model=(20, 40), examples=200, epochs=4)}


@app.command()
def erm(
    table: Annotated[list[ErmTable] | None, typer.Option(help="Only this one; may be given again.")] = None,
    figure: Annotated[
        list[int] | None, typer.Option(min=1, max=1, help="Only this one; may be given with tables.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Compare temperatures and gains on supplementary models.")
    ] = False,
    draws: Annotated[
        int | None,
        typer.Option(min=2, max=20, help="Squared error on this many draws of the models."),
    ] = None,
    models: Annotated[
        int, typer.Option(min=1, max=len(MODELS), help="How many of the paper's models, those with the fewest edges.")
    ] = len(MODELS),
    restarts: Annotated[int, typer.Option(min=1, help="Random starts of settings other than -in.")] = 5,
    spread: Annotated[
        float, typer.Option(min=0.1, max=4, help="Standard deviation of the true parameters; 1 in the paper's text.")
    ] = 1.0,
    finished: Finished = False,
    quick: Quick = False,
    out: Out = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> None:
    """Training for the loss of decoded output, against approximate likelihood.

    Tables 3 to 6 and Figure 1 of Stoyanov, Ropson & Eisner (2011): random binary models, of which a third of the
    variables is input, a third hidden and a third output. 3 compares all ways of training; in 4 the structure is
    wrong, in 5 belief propagation ends early, in 6 training and test settings differ. Figure 1 shows the losses along
    lines through the true parameters. Tables share the runs they have in common. Staged training and the likelihood,
    which the paper's claims are about, come first. --tune and --draws, which are not in the paper, compare choices
    and run other models of the same sizes.

    \b
    Examples:
      python -m papers erm --quick
      python -m papers erm --table 3 --table 5 --models 8 --restarts 1
    """
    for name, given in (("--finished", finished), ("--spread", spread != 1)):
        if given and (figure or tune or not (table or draws)):
            raise typer.BadParameter(
                f"{name} applies to --table and --draws: give at least one of them, and neither --figure nor --tune."
            )
    suite = replace(_QUICK if quick else Suite(models=MODELS[:models], restarts=restarts), spread=spread)
    everything = not (table or figure or tune or draws)
    tables = list(ErmTable) if everything else list(dict.fromkeys(table or ()))
    studies: list[AbstractStudy] = [_TABLES[name](suite, finished) for name in tables]
    figures = _QUICK_FIGURES if quick else _FIGURES
    studies += [figures[number] for number in (figures if everything else dict.fromkeys(figure or ()))]
    if tune:
        studies.append(_QUICK_TUNING if quick else Tuning(SUPPLEMENTARY[:models]))
    if draws:
        studies.append(Draws(suite, finished, draws))
    options = [*(f"--table {name}" for name in table or ()), *(f"--figure {number}" for number in figure or ())]
    options += [*(["--tune"] if tune else []), *([f"--draws {draws}"] if draws else [])]
    options += ["--finished"] if finished else []
    options += [f"--spread {spread:g}"] if spread != 1 else []
    if not quick:
        options += [f"--models {models}"] if models != len(MODELS) else []
        options += [f"--restarts {restarts}"] if restarts != 5 else []
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Several processes would compute what is missing.
    run("erm", studies, quick, out, quiet, options, 1 if finished else jobs or processors)
