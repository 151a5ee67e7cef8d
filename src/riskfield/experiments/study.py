"""A study: cells to measure, and the table and the plot they make."""

from __future__ import annotations

import io
import json
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from riskfield import __version__
from riskfield.experiments.cells import Cell, Cells
from riskfield.io._atomic import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]  # the settings of a cell and what was measured in it


class AbstractStudy(ABC):
    """One figure of a paper. Subclasses are frozen dataclasses of its settings."""

    name: str  # of its files
    title: str

    @property
    @abstractmethod
    def num_cells(self) -> int:
        """How many cells `measure` asks for."""

    def cells(self) -> Sequence[Cell]:
        """Those of its cells that need no results of others, the most important first: they can be shared out."""
        return ()

    @abstractmethod
    def measure(self, cells: Cells) -> list[Record]:
        """All records, of cells that are computed or on file."""

    @abstractmethod
    def tables(self, records: list[Record]) -> str:
        """The results as Markdown, below the title."""

    @abstractmethod
    def plot(self, records: list[Record]) -> Figure:
        """The results as a figure."""


def reproduce(
    study: AbstractStudy, folder: str | Path, command: str, progress: bool = False, jobs: int = 1
) -> list[Path]:
    """Run a study, or the rest of it, and write its data, table and plot.

    Arguments:
        study: what to run.
        folder: where the files go; finished cells are kept in `cells` below it, and are not computed again.
        command: what to write down as the command that gives these results.
        progress: show a progress bar.
        jobs: how many processes to compute in, where the study names its cells.

    Returns:
        The paths of the three files.

    Raises:
        ModuleNotFoundError: without matplotlib, and before the work begins.
    """
    require_matplotlib()
    folder = Path(folder)
    with Cells(folder / "cells", study.num_cells, progress) as cells:
        if jobs > 1:
            cells.prepare(study.cells(), jobs)
        records = study.measure(cells)
    about = {"command": command, **_environment()}
    paths = [folder / f"{study.name}.{ending}" for ending in ("json", "md", "png")]
    rows = ",\n  ".join(json.dumps(record) for record in records)
    write_text(paths[0], f'{{\n "about": {json.dumps(about)},\n "records": [\n  {rows}\n ]\n}}\n')
    lines = [f"# {study.title}", "", *(f"- {key}: {value}" for key, value in about.items())]
    write_text(paths[1], "\n".join(lines) + f"\n\n![{study.title}]({paths[2].name})\n\n" + study.tables(records))
    picture = io.BytesIO()
    study.plot(records).savefig(picture, format="png", dpi=110)
    write_bytes(paths[2], picture.getvalue())
    return paths


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["m", "error"], [["1", "2e-9"]]), end="")
    | m | error |
    |---|---|
    | 1 | 2e-9 |
    """
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n{body}"


def require_matplotlib() -> None:
    """Raise if plots cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Plots need matplotlib: pip install 'riskfield[demo]'.") from error


def select(records: list[Record], **settings: object) -> list[Record]:
    """The records with these settings."""
    return [record for record in records if all(record[key] == value for key, value in settings.items())]


def panels(num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels, and these row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * num_columns, 3.4 * num_rows), layout="constrained")
    return figure, list(figure.subplots(num_rows, num_columns, squeeze=False).flat)


def _environment() -> dict[str, str]:
    return {
        "riskfield": __version__,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
    }
