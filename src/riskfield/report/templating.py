"""Pages made from the templates in `templates/`, and the tables that the templates draw."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from riskfield import __version__
from riskfield.io._atomic import write_text
from riskfield.report.charts import NUM_SERIES

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Arguments:
        text: what it says.
        series: the number of a run or model, which decides the colour of its swatch.
        best: whether it is the best of its column.
        share: from -1 to 1, shown as a shade; negative values have another colour.
        title: the tooltip.
        span: over how many columns it goes.
    """

    text: str
    series: int | None = None
    best: bool = False
    share: float | None = None
    title: str = ""
    span: int = 1


@dataclass(frozen=True)
class Table:
    """A table. The first cell of each row is its heading."""

    header: Sequence[Cell | str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    kind: str = ""


def write_page(path: str | os.PathLike[str], template: str, **content: Any) -> None:
    """Render a template and write the page, whole or not at all."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("riskfield.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": as_cell, "series": _series}
    now = datetime.now().astimezone()
    written = (
        f"Written {now.day} {now:%B %Y, %H:%M %Z} by riskfield {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}."
    )
    write_text(path, environment.get_template(template).render(written=written, **content))


def _series(number: int) -> str:
    return f"s{number % NUM_SERIES}"


def as_cell(value: Cell | str) -> Cell:
    """A text as a cell; a cell as it is."""
    return value if isinstance(value, Cell) else Cell(value)


def mark_best(values: Sequence[float], write: Callable[[float], str], *, largest: bool = False) -> list[Cell]:
    """Return one cell per value. If there are several, the best is marked: the smallest, or the largest."""
    finite = [value for value in values if not math.isnan(value)]
    best = (max(finite) if largest else min(finite)) if len(values) > 1 and finite else None
    return [Cell(write(value), best=value == best) for value in values]


def percent(share: float) -> str:
    """Format a share as a percentage."""
    return NOTHING if math.isnan(share) else f"{100 * share:.1f} %"


def three_digits(value: float) -> str:
    """Format a number with three decimals."""
    return NOTHING if math.isnan(value) else f"{value:.3f}"


def in_seconds(value: float) -> str:
    """Format a time."""
    return NOTHING if math.isnan(value) else f"{value:.3g} s"


def several(count: int, noun: str) -> str:
    """Format a number of things.

    >>> several(1, "image"), several(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
