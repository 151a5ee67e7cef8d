"""The parts of the report that are tables and charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from riskfield.estimators.image_run import ImageRun
from riskfield.losses.loss import as_loss
from riskfield.losses.names import name_of
from riskfield.report.charts import Chart, Line
from riskfield.report.evaluation import NUM_BINS, Evaluation
from riskfield.report.html import card, element, table, text

_STYLES = 6  # series colours in the style sheet
_NOTHING = "\N{EN DASH}"


def tiles(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return the four main numbers. With several runs, each number is that of the best run."""
    shown: list[tuple[str, Callable[[Evaluation], float], Callable[[float], str], bool]] = [
        ("pixels labelled wrong", lambda s: s.error, percent, False),
        ("mean overlap (IoU)", lambda s: s.mean_overlap, percent, True),
        ("log loss per pixel", lambda s: s.log_loss, _three, False),
        ("calibration error", lambda s: s.calibration_error, _three, False),
    ]
    found = []
    for name, measure, write, larger in shown:
        values = [measure(score) for score in scores]
        best = int(np.argmax(values) if larger else np.argmin(values))
        of_run = element("span", text(runs[best].name), class_=_style(best)) if len(runs) > 1 else ""
        number = element("b", text(write(values[best])))
        found.append(element("div", number + element("span", text(name)) + of_run, class_="tile"))
    return element("div", "".join(found), class_="tiles")


def results(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return a table with one row per run: error, error of each class, overlap, log loss, calibration error."""
    names = scores[0].names
    header = [
        "",
        "wrong pixels",
        *(text(f"wrong {name}") for name in names),
        "mean overlap",
        "log loss",
        "calibration error",
    ]
    columns = [[score.error for score in scores], *np.array([score.class_errors for score in scores]).T.tolist()]
    columns += [[-score.mean_overlap for score in scores], [score.log_loss for score in scores]]
    columns += [[score.calibration_error for score in scores]]
    writers = [percent] * (1 + len(names)) + [lambda x: percent(-x), _three, _three]
    cells = [_best_marked(column, write) for column, write in zip(columns, writers, strict=True)]
    rows = [[_named(k, run.name), *(column[k] for column in cells)] for k, run in enumerate(runs)]
    return element("div", table(header, rows), class_="card")


def confusions(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return a confusion matrix for every run."""
    return element(
        "div", "".join(card(_named(k, run.name), _confusion(score)) for k, (run, score) in _both(runs, scores)),
        class_="cards",
    )  # fmt: skip


def _confusion(score: Evaluation) -> str:
    rows = []
    for name, counts in zip(score.names, score.confusion, strict=True):
        total = int(counts.sum())
        shares = counts / total if total else np.zeros(len(counts))
        cells = [
            element(
                "td", percent(share) if total else _NOTHING, style=f"--share:{share:.3f}", title=f"{count:,} pixels"
            )
            for share, count in zip(shares.tolist(), counts.tolist(), strict=True)
        ]
        rows.append([text(name), *cells])
    return table(["", *map(text, score.names)], rows, class_="confusion")


def reliability(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return the reliability diagram of all runs, and a table of its numbers."""
    lines = []
    for k, (run, score) in _both(runs, scores):
        filled = score.bin_counts > 0
        counts = score.bin_counts[filled]
        sizes = 2.5 + 5 * np.sqrt(counts / counts.max())
        means, shares = score.bin_means[filled].tolist(), score.bin_shares[filled].tolist()
        lines.append(Line(_style(k), means, shares, sizes.tolist(), run.name))
    chart = Chart(
        "Reliability of the marginals", "marginal", "share of the true class", lines, (0, 1), (0, 1), diagonal=True
    )
    drawn = element("div", _legend(runs) + chart.svg(), class_="card")
    return element("div", drawn + element("div", _bins(runs, scores), class_="card"), class_="cards wide")


def _bins(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return the numbers of the diagram: counts, means and shares of one run, or only the shares of several runs."""
    rows = []
    for b in range(NUM_BINS):
        row = [f"{b / NUM_BINS:.1f} to {(b + 1) / NUM_BINS:.1f}"]
        if len(runs) == 1:
            (score,) = scores
            row += [f"{score.bin_counts[b]:,}", _in_bin(score.bin_means[b], score.bin_counts[b])]
        for score in scores:
            number = f"{score.bin_counts[b]:,} marginals"
            row.append(element("td", _in_bin(score.bin_shares[b], score.bin_counts[b]), title=number))
        rows.append(row)
    if len(runs) == 1:
        return table(["marginals", "number", "mean", "true"], rows)
    return table(["marginals", *(text(run.name) for run in runs)], rows, caption="Share of the true class")


def training(runs: Sequence[ImageRun]) -> str:
    """Return a chart of the objective by iteration for every run that has a history."""
    charts = [
        card(_named(k, run.name), _curve(k, run)) for k, run in enumerate(runs) if any(f.history for f in run.fits)
    ]
    return element("div", "".join(charts), class_="cards") if charts else ""


def _curve(number: int, run: ImageRun) -> str:
    lines, marks, ends, done = [], {}, [], 0
    for stage, fit in zip(run.crf.stages(), run.fits, strict=False):  # an interrupted run has fewer fits
        name = name_of(as_loss(stage.loss))
        steps = [done + record.iteration for record in fit.history]
        lines.append(Line(_style(number), steps, [record.objective for record in fit.history], label=name))
        if steps:
            marks[float(steps[0])] = name
        done += len(steps)
        ends.append(f"{name} ended after {len(steps)} iterations: {fit.explanation}")
    chart = Chart(f"Training of {run.name}", "iteration", "objective", lines, marks=marks)
    return chart.svg() + "".join(element("div", text(end), class_="ending") for end in ends)


def settings(runs: Sequence[ImageRun]) -> str:
    """Return a table of the settings, with one column per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values: dict[str, list[object]] = {name: [run.settings.get(name, _NOTHING) for run in runs] for name in names}
    recipes = [run.crf.features_ for run in runs]
    values |= {
        "classes": [", ".join(f"{name} = {value}" for value, name in run.classes.items()) for run in runs],
        "features of pixels": [", ".join(type(f).__name__ for f in recipe.pixels) for recipe in recipes],
        "features of edges": [", ".join(type(f).__name__ for f in recipe.edges) for recipe in recipes],
        "parameters": [f"{sum(p.numel() for p in run.crf.model_.parameters()):,}" for run in runs],
    }
    rows = [[text(name), *_shared([str(value) for value in of_runs])] for name, of_runs in values.items()]
    header = ["", *(_named(k, run.name) for k, run in enumerate(runs))]
    return element("div", table(header, rows, class_="settings"), class_="card")


def _shared(values: Sequence[str]) -> list[str]:
    """Return one cell per value, or a single wide cell if all values are equal."""
    if len(set(values)) == 1:
        return [element("td", text(values[0]), colspan=len(values))]
    return [element("td", text(value)) for value in values]


def timings(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> str:
    """Return a table of the time that each step took."""
    rows = []
    for k, (run, score) in _both(runs, scores):
        evaluations = sum(fit.history[-1].evaluations for fit in run.fits if fit.history)
        spent = [run.seconds.get(name, math.nan) for name in ("reading", "features", "training")]
        each = spent[2] / evaluations if evaluations else math.nan
        cells = [*map(_seconds, spent), f"{evaluations:,}" if evaluations else _NOTHING, _seconds(each)]
        rows.append([_named(k, run.name), *cells, _seconds(score.seconds / score.num_pictures)])
    header = ["", "reading", "features", "training", "evaluations", "per evaluation", "prediction, per picture"]
    return element("div", table(header, rows), class_="card")


def commands(runs: Sequence[ImageRun], command: str) -> str:
    """Return the commands that produced the runs and the page."""
    return "".join(element("pre", text(line)) for line in [*(run.command for run in runs), command] if line)


def percent(share: float) -> str:
    """Format a share as a percentage."""
    return _NOTHING if math.isnan(share) else f"{100 * share:.1f} %"


def _best_marked(values: Sequence[float], write: Callable[[float], str]) -> list[str]:
    """Return one cell per value. If there are several, the lowest value is marked."""
    finite = [value for value in values if not math.isnan(value)]
    best = min(finite) if len(values) > 1 and finite else None
    return [element("td", text(write(value)), class_="best" if value == best else None) for value in values]


def _both(runs: Sequence[ImageRun], scores: Sequence[Evaluation]) -> list[tuple[int, tuple[ImageRun, Evaluation]]]:
    return list(enumerate(zip(runs, scores, strict=True)))


def _style(number: int) -> str:
    return f"s{number % _STYLES}"


def _named(number: int, name: str) -> str:
    return element("span", element("span", class_="swatch") + text(name), class_=_style(number))


def _legend(runs: Sequence[ImageRun]) -> str:
    if len(runs) == 1:
        return ""
    return element("ul", "".join(element("li", _named(k, run.name)) for k, run in enumerate(runs)), class_="legend")


def _in_bin(share: float, count: int) -> str:
    return f"{share:.3f}" if count else _NOTHING


def _three(value: float) -> str:
    return f"{value:.3f}"


def _seconds(value: float) -> str:
    return _NOTHING if math.isnan(value) else f"{value:.3g} s"
