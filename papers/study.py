"""A study: the cells it measures, and the table and the plot made from them."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.cells import Cell, Cells, locked, write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]  # the settings of a cell and what was measured in it
TABLES = "tables.md"  # all tables of a folder of results
_SECTION = re.compile(r'^<a id="(.+)"></a>\n\n', re.MULTILINE)


class AbstractStudy(ABC):
    """One table or figure of a paper. Subclasses are frozen dataclasses of its settings."""

    name: str  # of its section in the file of tables, and of its plot
    title: str
    device: str = "cpu"  # where its cells are computed
    precision: str = "float64"  # and in which

    @property
    @abstractmethod
    def num_cells(self) -> int:
        """How many cells `measure` asks for."""

    def cells(self) -> Sequence[Cell]:
        """Those of its cells that do not depend on others, the most important first: processes can share them."""
        return ()

    @abstractmethod
    def measure(self, cells: Cells) -> list[Record]:
        """All records: from the cells on file, and from those that are computed."""

    @abstractmethod
    def tables(self, records: list[Record]) -> str:
        """The results as Markdown, without the title."""

    @abstractmethod
    def plot(self, records: list[Record]) -> Figure:
        """The results as a figure."""

    def open_cells(self, folder: str | Path, progress: bool = False) -> Cells:
        """Its cells in a folder of results."""
        return Cells(folder, self.num_cells, progress, device=self.device, precision=self.precision)


def reproduce(
    study: AbstractStudy, folder: str | Path, command: str, progress: bool = False, jobs: int = 1
) -> list[Path]:
    """Run a study, or the rest of it, and write its table and its plot.

    Arguments:
        study: what to run.
        folder: where the files go. Cells that its file of cells has are not computed again.
        command: the command that gives these results; it is written above the table.
        progress: show a progress bar.
        jobs: how many processes to compute in, where the study names its cells.

    Returns:
        The paths of the file with the table, and of the plot.

    Raises:
        ModuleNotFoundError: without matplotlib, and before the work begins.
    """
    require_matplotlib()
    folder = Path(folder)
    with study.open_cells(folder, progress) as cells:
        if jobs > 1:
            cells.prepare(study.cells(), jobs)
        records = study.measure(cells)
    path, plot = folder / TABLES, folder / f"{study.name}.png"
    with locked(folder):
        found = sections(folder) | {study.name: section(study, records, command)}
        write_bytes(path, join_sections(found).encode())
    write_plot(study, records, plot)
    return [path, plot]


def sections(folder: Path) -> dict[str, str]:
    """The tables in a folder of results, each under its title, by their names."""
    path = folder / TABLES
    if not path.exists():
        return {}
    _, *parts = _SECTION.split(path.read_text(encoding="utf-8"))
    return {name: f"{text.rstrip()}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def join_sections(found: dict[str, str]) -> str:
    """A file of tables: a list of their titles and commands, and the tables in the order of their names."""
    listed, body = "", ""
    for name, text in sorted(found.items()):
        title, command = text.removeprefix("# ").splitlines()[:3:2]
        listed += f"- [{name}](#{name}): {title}, by `{command.strip()}`\n"
        body += f'\n<a id="{name}"></a>\n\n{text}'
    return listed + body


def write_plot(study: AbstractStudy, records: list[Record], path: Path) -> None:
    """Write the plot of a study as a PNG file."""
    picture = io.BytesIO()
    study.plot(records).savefig(picture, format="png", dpi=110)
    write_bytes(path, picture.getvalue())


def section(study: AbstractStudy, records: list[Record], command: str) -> str:
    """The table of a study under its title, the command and the plot."""
    text = f"# {study.title}\n\n    {command}\n\n![{study.title}]({study.name}.png)\n\n{study.tables(records)}"
    return f"{text.rstrip()}\n"


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
        raise ModuleNotFoundError("Plots need matplotlib: pip install 'riskfield[papers]'.") from error


def select(records: list[Record], **settings: object) -> list[Record]:
    """The records with these settings."""
    return [record for record in records if all(record[key] == value for key, value in settings.items())]


def panels(num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels, and these row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * num_columns, 3.4 * num_rows), layout="constrained")
    return figure, list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
