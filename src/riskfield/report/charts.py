"""Line charts as SVG. Their colours come from the style sheet of the page, so they follow its light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 46  # margins for ticks and labels


@dataclass(frozen=True)
class Line:
    """A line through points.

    Arguments:
        style: a CSS class, such as "s0" for the first series.
        x, y: the coordinates of the points.
        sizes: the radii of the dots on the points. If empty, no dots are drawn.
        label: the tooltip.
    """

    style: str
    x: Sequence[float]
    y: Sequence[float]
    sizes: Sequence[float] = ()
    label: str = ""


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
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    marks: dict[float, str] = field(default_factory=dict)
    diagonal: bool = False

    def svg(self) -> str:
        """Return the chart as an SVG element."""
        x_axis = self.x_range or _range([x for line in self.lines for x in line.x])
        y_axis = self.y_range or _range([y for line in self.lines for y in line.y])
        plane = _Plane(x_axis, y_axis)
        parts = [*_grid(plane, x_axis, y_axis)]
        if self.diagonal:
            low, high = max(x_axis[0], y_axis[0]), min(x_axis[1], y_axis[1])
            parts.append(f'<path class="ideal" d="{plane.path([low, high], [low, high])}"/>')
        for x, text in self.marks.items():
            at = plane.x(x)
            parts.append(f'<path class="mark" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text class="note" x="{at:.1f}" y="{_TOP - 9}">{escape(text)}</text>')
        for line in self.lines:
            label = f"<title>{escape(line.label)}</title>" if line.label else ""
            parts.append(
                f'<g class="{escape(line.style)}">{label}<path class="line" d="{plane.path(line.x, line.y)}"/>'
            )
            for x, y, size in zip(line.x, line.y, line.sizes or [0.0] * len(line.x), strict=True):
                if size > 0 and math.isfinite(y):
                    parts.append(f'<circle cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="{size:.1f}"/>')
            parts.append("</g>")
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        centre = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text class="label" transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return (
            f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"{''.join(parts)}</svg>"
        )


@dataclass(frozen=True)
class _Plane:
    """Maps data coordinates to SVG coordinates."""

    x_axis: tuple[float, float]
    y_axis: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_axis
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_axis
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        """Return a path through the points. It has a gap at every point that is not finite."""
        steps, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if not math.isfinite(y):
                pen = "M"
                continue
            steps.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "L"
        return "".join(steps)


def _grid(plane: _Plane, x_axis: tuple[float, float], y_axis: tuple[float, float]) -> list[str]:
    parts = []
    for value, text in ticks(*y_axis):
        at = plane.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in ticks(*x_axis):
        at, bottom = plane.x(value), _HEIGHT - _BOTTOM
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom}v5"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">{text}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    return parts


def ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """Return at most `most` + 1 round numbers between `low` and `high`, each with its text.

    >>> ticks(0, 1)
    [(0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1')]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    numbers = [round(k * step, digits) for k in range(first, last + 1)]
    return [(number, f"{number:.{digits}f}" if number % 1 else f"{number:.0f}") for number in numbers]


def _range(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
