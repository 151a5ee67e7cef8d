"""What the commands of `riskfield reproduce` have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

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
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="How many processes to compute in, with a thread each. [as many as processors]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]


def run(
    name: str,
    studies: Sequence[AbstractStudy],
    quick: bool,
    out: Path | None,
    quiet: bool,
    options: Sequence[str],
    jobs: int = 1,
) -> None:
    """Run the studies of one command, write what they give and say where it is.

    Arguments:
        name: of the command.
        studies: what to run.
        quick, out, quiet: as given.
        options: the command's other options as given, to be written down with the results.
        jobs: how many processes to compute in.
    """
    try:
        require_matplotlib()
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    folder = out or Path("results", f"{name}-quick" if quick else name)
    given = [*options, *(["--quick"] if quick else []), *(["--out", str(out)] if out else [])]
    command = " ".join(["riskfield reproduce", name, *given])
    try:
        for study in studies:
            for path in reproduce_study(study, folder, command, not quiet and sys.stderr.isatty(), jobs):
                if not quiet:
                    typer.echo(f"wrote {path}")
    except KeyboardInterrupt:
        typer.echo("riskfield: finished cells are kept; the same command goes on from there.", err=True)
        raise
