"""The parts that all reports have: scores, confusion, calibration, learned tables, training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riskfield.estimators.base import AbstractCRF
from riskfield.learning.result import Fit
from riskfield.losses.loss import as_loss
from riskfield.losses.names import name_of
from riskfield.report.charts import Chart, Line
from riskfield.report.evaluation import NUM_BINS, Evaluation
from riskfield.report.templating import NOTHING, Cell, Table, mark_best, percent, three_digits

_MAX_COLUMNS = 9  # of scores, so that the table fits on a page


@dataclass(frozen=True)
class Measure:
    """A number of an evaluation: its name, how it is found and written, and whether more is better."""

    name: str
    of: Callable[[Evaluation], float]
    write: Callable[[float], str]
    largest: bool = False


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page, and the run that has it if there are several."""

    number: str
    name: str
    run: str = ""
    series: int = 0


@dataclass(frozen=True)
class Curve:
    """The training of a run: a chart, and why each stage ended."""

    name: str
    series: int
    chart: str
    endings: tuple[str, ...]
    has_validation: bool


def tiles(measures: Sequence[Measure], names: Sequence[str], scores: Sequence[Evaluation]) -> list[Tile]:
    """Return one tile per measure. With several runs, each shows the best value and the run that has it."""
    found = []
    for measure in measures:
        values = [measure.of(score) for score in scores]
        best = int(np.argmax(values) if measure.largest else np.argmin(values))
        run = names[best] if len(names) > 1 else ""
        found.append(Tile(measure.write(values[best]), measure.name, run, best))
    return found


def scores_table(measures: Sequence[Measure], names: Sequence[str], scores: Sequence[Evaluation]) -> Table:
    """Return a table with a row per run and a column per measure; the other way round if there are many measures."""
    columns = [mark_best([m.of(score) for score in scores], m.write, largest=m.largest) for m in measures]
    runs = [Cell(name, series=k) for k, name in enumerate(names)]
    if len(measures) > _MAX_COLUMNS:
        return Table(["", *runs], [[m.name, *column] for m, column in zip(measures, columns, strict=True)])
    rows = [[run, *(column[k] for column in columns)] for k, run in enumerate(runs)]
    return Table(["", *(measure.name for measure in measures)], rows)


def confusion_table(score: Evaluation, noun: str) -> Table:
    """Return the confusion matrix of a run, each row as shares of the true class."""
    rows: list[list[Cell | str]] = []
    for name, counts in zip(score.names, score.confusion, strict=True):
        total = int(counts.sum())
        cells = [
            Cell(percent(count / total), share=count / total, title=f"{count:,} {noun}") if total else Cell(NOTHING)
            for count in counts.tolist()
        ]
        rows.append([name, *cells])
    return Table(["", *score.names], rows, kind="shaded")


def reliability_chart(scores: Sequence[Evaluation]) -> str:
    """Return the reliability diagram of all runs."""
    lines = []
    for k, score in enumerate(scores):
        filled = score.bin_counts > 0
        counts = score.bin_counts[filled]
        sizes = 1.5 + 3 * np.sqrt(counts / counts.max())
        lines.append(Line(k, score.bin_means[filled].tolist(), score.bin_shares[filled].tolist(), sizes.tolist()))
    labels = ("marginal", "share of the true class")
    return Chart("Reliability of the marginals", *labels, lines, (0, 1), (0, 1), diagonal=True).svg()


def reliability_table(names: Sequence[str], scores: Sequence[Evaluation]) -> Table:
    """Return the numbers of the diagram: counts, means and shares of one run, or only the shares of several runs."""
    rows: list[list[Cell | str]] = []
    for b in range(NUM_BINS):
        row: list[Cell | str] = [f"{b / NUM_BINS:.1f} to {(b + 1) / NUM_BINS:.1f}"]
        if len(scores) == 1:
            (score,) = scores
            row += [f"{score.bin_counts[b]:,}", _in_bin(score.bin_means[b], score.bin_counts[b])]
        row += [
            Cell(_in_bin(score.bin_shares[b], score.bin_counts[b]), title=f"{score.bin_counts[b]:,} marginals")
            for score in scores
        ]
        rows.append(row)
    if len(scores) == 1:
        return Table(["marginals", "number", "mean", "true"], rows)
    return Table(["marginals", *names], rows, caption="Share of the true class")


def potentials_table(
    caption: str,
    rows: Sequence[str],
    columns: Sequence[str],
    potentials: npt.NDArray[np.float64],
    forbidden: npt.NDArray[np.bool_] | None = None,
    *,
    largest: float | None = None,
) -> Table:
    """Return a table of log-potentials. Positive ones are shaded in one colour, negative ones in another.

    The pairs that are True in `forbidden` have a dash instead of a number. `largest` is the absolute value with the
    strongest colour, by default the largest in the table.
    """
    largest = (float(np.abs(potentials).max()) if largest is None else largest) or 1.0
    cells = [[Cell(f"{value:+.2f}", share=value / largest) for value in row] for row in potentials.tolist()]
    for row, column in [] if forbidden is None else np.argwhere(forbidden).tolist():
        cells[row][column] = Cell(NOTHING, title="forbidden")
    return Table(
        ["", *columns], [[name, *row] for name, row in zip(rows, cells, strict=True)], caption=caption, kind="shaded"
    )


def interaction(
    potentials: npt.NDArray[np.float64], forbidden: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """Remove from log-potentials (state, state) what a sum of a row term and a column term explains.

    What remains says which pairs of states attract (positive) or repel (negative) each other. The terms are those of
    least squares. Pairs that are True in `forbidden` do not count, and 0 is returned for them.

    >>> interaction(np.array([[3.0, 0.0], [1.0, 2.0]])).round(12)
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    counted = np.ones(potentials.shape) if forbidden is None else 1.0 - forbidden
    values = potentials * counted
    sums = np.concatenate([values.sum(1), values.sum(0)])
    numbers = np.block([[np.diag(counted.sum(1)), counted], [counted.T, np.diag(counted.sum(0))]])
    terms = np.linalg.lstsq(numbers, sums, rcond=None)[0]
    of_rows, of_columns = terms[: len(potentials)], terms[len(potentials) :]
    return np.asarray((potentials - of_rows[:, None] - of_columns) * counted)


def training_curve(name: str, series: int, crf: AbstractCRF, fits: Sequence[Fit]) -> Curve | None:
    """Return the objective, and the risk on validation data if there is one, by iteration."""
    lines, marks, endings, done, has_validation = [], {}, [], 0, False
    for stage, fit in zip(crf.stages(), fits, strict=False):  # an interrupted run has fewer fits
        loss = name_of(as_loss(stage.loss))
        steps = [done + record.iteration for record in fit.history]
        lines.append(Line(series, steps, [record.objective for record in fit.history]))
        watched = [(x, r.validation) for x, r in zip(steps, fit.history, strict=True) if r.validation is not None]
        if watched:
            has_validation = True
            lines.append(Line(series, [x for x, _ in watched], [risk for _, risk in watched], dashed=True))
        if steps:
            marks[float(steps[0])] = loss
        done += len(steps)
        endings.append(f"{loss} ended after {len(steps)} iterations: {fit.explanation}")
    if done == 0:
        return None
    chart = Chart(f"Training of {name}", "iteration", "objective", lines, marks=marks).svg()
    return Curve(name, series, chart, tuple(endings), has_validation)


def settings_table(names: Sequence[str], values: dict[str, list[object]]) -> Table:
    """Return a table of settings, with one column per run. Equal settings share a cell."""
    rows: list[list[Cell | str]] = []
    for name, of_runs in values.items():
        texts = [str(value) for value in of_runs]
        shared = len(set(texts)) == 1
        rows.append([name, *([Cell(texts[0], span=len(texts))] if shared else texts)])
    return Table(["", *(Cell(name, series=k) for k, name in enumerate(names))], rows, kind="settings")


def _in_bin(share: float, count: int) -> str:
    return three_digits(share) if count else NOTHING
