"""Options that the studies of pictures have in common."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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


def folder(data: Path | None) -> str | None:
    """The folder of data sets, as studies take it."""
    return None if data is None else str(data)


def chosen(rows: str | None, finished: bool, everything: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of a table to compute."""
    if finished:
        return ()
    return everything if rows is None else tuple(name.strip() for name in rows.split(","))


def given(rows: str | None, finished: bool) -> list[str]:
    """These options, to be written down."""
    return [*(["--rows", f'"{rows}"'] if rows else []), *(["--finished"] if finished else [])]
