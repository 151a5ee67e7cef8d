"""Charts, drawn by Matplotlib as SVG that becomes part of the page.

Matplotlib draws in placeholder colours. They are replaced by variables of the page's style sheet, so that a chart
follows the light or dark mode of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_SERIES = 6  # series colours in the style sheet
# Not black, which SVG takes as the default and Matplotlib does not write.
_INK, _SOFT, _LINE = "#a00010", "#a00011", "#a00012"
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _LINE: "--line"}
_VARIABLES |= {f"#a0000{k}": f"--s{k}" for k in range(NUM_SERIES)}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "text.color": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "ytick.left": False,
}


@dataclass(frozen=True)
class Line:
    """A line through points. There is a gap where y is not finite.

    Arguments:
        series: the number of the series, which decides the colour.
        x, y: the coordinates of the points.
        sizes: the radii of the dots on the points. If empty, no dots are drawn.
        dashed: whether the line is dashed.
    """

    series: int
    x: Sequence[float]
    y: Sequence[float]
    sizes: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines on common axes.

    Arguments:
        title: the text for screen readers.
        x_label, y_label: the labels of the axes.
        lines: the lines to draw.
        x_range, y_range: the ranges of the axes. By default they cover all finite points.
        marks: vertical lines with a text above them, as {x: text}.
        diagonal: whether to draw y = x.
        log_x: whether the x-axis is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    marks: Mapping[float, str] = field(default_factory=dict)
    diagonal: bool = False
    log_x: bool = False

    def svg(self) -> str:
        """Return the chart as an SVG element."""
        with _axes(self.title, self.x_label, self.y_label) as (figure, axes):
            if self.log_x:
                axes.set_xscale("log")
            if self.diagonal:
                axes.axline((0, 0), slope=1, color=_SOFT, linewidth=0.8, linestyle=(0, (5, 4)))
            for x, text in self.marks.items():
                axes.axvline(x, color=_SOFT, linewidth=0.8, linestyle=(0, (2, 3)))
                axes.annotate(text, (x, 1), (2, 4), xycoords=("data", "axes fraction"), textcoords="offset points")
            for line in self.lines:
                colour = _series(line.series)
                axes.plot(line.x, line.y, color=colour, linewidth=1.6, linestyle="--" if line.dashed else "-")
                if len(line.sizes):
                    area = np.square(2 * np.asarray(line.sizes, float))
                    axes.scatter(line.x, line.y, area, color=colour, clip_on=False, zorder=3)
            axes.set_xlim(self.x_range)
            axes.set_ylim(self.y_range)
            return _svg(figure, self.title)


def histogram(title: str, x_label: str, y_label: str, values: Sequence[Sequence[float]]) -> str:
    """Return how many values are in each of at most twenty bins: one chart for each series, with the same axes."""
    from matplotlib.ticker import MaxNLocator

    top = max([*(float(max(own)) for own in values if len(own)), 1e-3])
    bins = np.linspace(0, top, min(20, 4 + max(map(len, values), default=0) // 2) + 1)
    counts = [np.histogram(own, bins)[0] for own in values]
    most, alone = max(1, *(int(own.max()) for own in counts)), len(values) == 1
    charts = []
    for series, own in enumerate(counts):
        with _figure(title, *((4.6, 2.9) if alone else (2.6, 1.9))) as figure:
            axes = figure.add_subplot()
            axes.stairs(own, bins, color=_series(series), linewidth=1.6, fill=False)
            axes.stairs(own, bins, color=_series(series), alpha=0.25, fill=True)
            axes.set_ylim(0, 1.05 * most)
            axes.yaxis.set_major_locator(MaxNLocator("auto" if alone else 3, integer=True))
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            charts.append(_svg(figure, title))
    return charts[0] if alone else f'<div class="multiples">{"".join(charts)}</div>'


@contextmanager
def _figure(title: str, width: float, height: float) -> Iterator[Figure]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": title}):  # the same chart has the same bytes
        yield Figure(figsize=(width, height), layout="constrained")


@contextmanager
def _axes(title: str, x_label: str, y_label: str) -> Iterator[tuple[Figure, Axes]]:
    with _figure(title, 4.6, 2.9) as figure:
        axes = figure.add_subplot()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        yield figure, axes


def _series(number: int) -> str:
    return f"#a0000{number % NUM_SERIES}"


def _svg(figure: Figure, title: str) -> str:
    """Return the SVG element of a figure without what only a file of its own needs."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True)
    drawn = stream.getvalue()
    box = re.search(r'viewBox="([^"]*)"', drawn)
    assert box is not None
    inner = drawn.split("</metadata>", 1)[1]
    inner = re.sub(r"\s*<defs>\s*<style.*?</defs>", "", inner, count=1, flags=re.DOTALL)  # a rule for all elements
    inner = re.sub(r'<g id="[^"]*">', "<g>", inner)  # equal in all charts, and never referred to
    inner = re.sub(r"font(-size|-family)?: [^;\"]*;? ?", "", inner)
    inner = re.sub(r"\s*\n\s*", " ", inner.replace("xlink:href", "href"))
    for colour, variable in _VARIABLES.items():
        inner = inner.replace(f": {colour}", f": var({variable})")
    return f'<svg class="chart" viewBox="{box[1]}" role="img" aria-label="{escape(title)}">{inner.strip()}'
