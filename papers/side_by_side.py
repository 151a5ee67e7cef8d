"""Numbers of a paper beside ours, and pictures beside their marginals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

import riskfield as rf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shown = npt.NDArray[Any]  # (row, column) from 0 to 1, or (row, column, 3)

# A relative difference from the paper above this needs an explanation.
FAR = 0.15
HOW_TO_READ = (
    "Every entry is the paper's number, ours in bold with its standard error over the choice of pictures, and the "
    f"relative difference. Entries that differ by more than {100 * FAR:.0f} % are marked ‡.\n"
)


def beside(paper: float | None, ours: float | None, spread: float | None = None, digits: int = 3) -> str:
    """An entry of a table.

    >>> beside(0.143, 0.139), beside(0.03, 0.036, 0.002), beside(None, 0.2), beside(0.1, None)
    ('.143 / **.139** (-3 %)', '.030 / **.036** ± .002 (+20 %) ‡', '**.200**', '.100 / -')
    """
    printed = None if paper is None else _short(paper, digits)
    if ours is None:
        return f"{printed} / -" if printed else ""
    number = f"**{_short(ours, digits)}**" + ("" if spread is None else f" ± {_short(spread, digits)}")
    if paper is None:
        return number
    off = ours / paper - 1
    return f"{printed} / {number} ({100 * off:+.0f} %)" + (" ‡" if is_far(paper, ours) else "")


def is_far(paper: float, ours: float) -> bool:
    """Whether a number needs an explanation."""
    return abs(ours / paper - 1) > FAR


def could_be_pictures(paper: float, ours: float, spread: float) -> bool:
    """Whether the difference is within two standard errors of that of two samples of pictures."""
    return abs(ours - paper) <= 2 * 2**0.5 * spread


def shade(marginals: Tensor) -> Shown:
    """A picture of marginals (row, column, state): P(1) in grey, or the mean colour of the states."""
    values = marginals.cpu().numpy()
    if values.shape[-1] == 2:
        return np.asarray(values[..., 1])
    return np.asarray(values @ _palette(values.shape[-1]))


def shade_labels(labels: npt.NDArray[np.int64], num_states: int) -> Shown:
    """A picture of labels in the colours of `shade`; black where there is none."""
    if num_states == 2:
        return labels.astype(np.float64)
    return np.asarray(np.where(labels[..., None] >= 0, _palette(num_states)[labels], 0.0))


def gallery(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Shown | None]]]) -> Figure:
    """A figure of pictures in rows and columns; None leaves a place empty."""
    from matplotlib.figure import Figure

    first = next(shown for _, pictures in rows for shown in pictures if shown is not None)
    width, height = 2.6, 2.6 * first.shape[0] / first.shape[1] + 0.15
    figure = Figure(figsize=(1.2 + width * len(columns), 0.3 + height * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for line, (name, pictures) in zip(axes, rows, strict=True):
        for axis, shown in zip(line, pictures, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            if shown is None:
                axis.set_frame_on(False)
            else:
                within = np.clip(shown, 0, 1) if shown.dtype.kind == "f" else shown  # rounding may exceed the range
                axis.imshow(within, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        line[0].set_ylabel(name, rotation="horizontal", horizontalalignment="right", verticalalignment="center")
    for axis, title in zip(axes[0], columns, strict=True):
        axis.set_title(title)
    return figure


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def _palette(num_states: int) -> npt.NDArray[np.float64]:
    return np.array(rf.datasets.class_colours(num_states)) / 255
