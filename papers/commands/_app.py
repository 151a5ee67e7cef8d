"""What the commands share: the program, its options and its errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import riskfield as rf
from papers.study import AbstractStudy, reproduce, require_matplotlib

app = typer.Typer(
    help="""Run the studies of the papers: a table and a plot each.

    Finished cells are kept. A command that was interrupted or killed continues with the cells that are missing.""",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller models: seconds instead of minutes or hours.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the results. [results/NAME, or NAME-quick]")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="How many processes to compute in, with a thread each. [as many as processors]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]
Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the public data sets. [environment: RISKFIELD_DATA]")
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="Only these lines of the table, separated by commas; others are shown if on file."
    ),
]
Finished = Annotated[bool, typer.Option("--finished", help="Compute nothing; write the tables from the cells on file.")]


class Device(StrEnum):
    """Where models are trained."""

    CPU = "cpu"
    CUDA = "cuda"


OnDevice = Annotated[Device, typer.Option(help="Where models are trained.")]

# Typer keeps a copy of click in some versions and imports it in others; this name holds in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the program on `arguments` (by default those of the process) and return its exit code."""
    try:
        code = app(arguments, prog_name="python -m papers", standalone_mode=False) or 0
    except _UsageError as error:
        return _complain(f"{error.format_message()} Try 'python -m papers --help'.")  # type: ignore[attr-defined]
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}." if error.strerror else str(error))
    except (rf.errors.RiskfieldError, ValueError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        _complain("interrupted. Finished cells are kept; the same command continues.")
    return int(code)


def run(
    name: str,
    studies: Sequence[AbstractStudy],
    quick: bool,
    out: Path | None,
    quiet: bool,
    options: Sequence[str],
    jobs: int = 1,
) -> None:
    """Run the studies of one command, write their results and print where they are.

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
    command = " ".join(["python -m papers", name, *given])
    for study in studies:
        for path in reproduce(study, folder, command, not quiet and sys.stderr.isatty(), jobs):
            if not quiet:
                typer.echo(f"wrote {path}")


def _complain(message: str) -> int:
    """Print in one line what is wrong, and return the exit code for it."""
    print(f"papers: {' '.join(message.split())}", file=sys.stderr)
    return 2


def folder(data: Path | None) -> str | None:
    """The folder of data sets, as studies take it."""
    return None if data is None else str(data)
