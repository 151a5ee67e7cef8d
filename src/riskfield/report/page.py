"""The report on images: one HTML page about one run, or about several runs side by side.

The page contains its style and images and loads nothing from the network.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from riskfield.datasets.colours import class_colours
from riskfield.datasets.images import ImageSet, LabelledImage, few
from riskfield.estimators.image_run import ImageRun
from riskfield.estimators.ridge_path import limit_of_search
from riskfield.io._atomic import check_writable
from riskfield.progress import bar
from riskfield.report.charts import Chart, Line, histogram
from riskfield.report.evaluation import Evaluation, Floats
from riskfield.report.gallery import error_of, gallery_row, ranked
from riskfield.report.learned import edge_tables
from riskfield.report.predictions import evaluate_run
from riskfield.report.tables import (
    Measure,
    confusion_table,
    reliability_chart,
    reliability_table,
    scores_table,
    settings_table,
    tiles,
    training_curve,
)
from riskfield.report.templating import (
    NOTHING,
    Cell,
    Table,
    in_seconds,
    percent,
    several,
    three_digits,
    write_page,
)

_ERROR = Measure("pixels labelled wrong", lambda score: score.error, percent)
_MARGINALS = (
    Measure("mean overlap (IoU)", lambda score: score.mean_overlap, percent, largest=True),
    Measure("log loss per pixel", lambda score: score.log_loss, three_digits),
    Measure("calibration error", lambda score: score.calibration_error, three_digits),
)


BASELINE = "independent pixels"
_PARTS = ("reading", "features", "choice of the ridge", "training")  # of a run, whose times are shown


@dataclass(frozen=True, eq=False)
class Result:
    """A run, its evaluation, and the share of wrong pixels of every image."""

    run: ImageRun
    evaluation: Evaluation
    errors: tuple[float, ...]


def write_report(
    path: str | os.PathLike[str],
    runs: Sequence[ImageRun],
    images: ImageSet,
    *,
    title: str | None = None,
    command: str = "",
    num_shown: int = 6,
    progress: bool = False,
) -> list[Evaluation]:
    """Write a page about one run, or about several runs with the same classes.

    The page shows the runs and the baseline of the first run, which is the same model without edges. The baseline is
    left out if it was not fitted, or if one of the runs is such a model.

    Arguments:
        path: where to write the page. It is replaced atomically.
        runs: fitted runs.
        images: the test images. Their labels must be indices into the classes of the runs.
        title: the title of the page; by default the names of the classes and the number of images.
        command: the command that writes this page, which the page shows; by default none.
        num_shown: how many images the page shows, by default 6. They are chosen at equal steps of a ranking by the
            error of the first run, from the worst image to the best.
        progress: whether to show progress bars; by default False.

    Returns:
        The evaluation of each run.

    Raises:
        ValueError: if there are no runs or no images, if the runs differ in their classes or have equal names, if the
            classes of the images are not those of the runs, if no pixel has a label, or if `num_shown` is not positive.
        OSError: if the page cannot be written.
    """
    _check(runs, images, num_shown)
    check_writable(path)
    num_runs = len(runs)
    runs = [*runs, *_baseline(runs)]
    found = [_result(run, images, progress) for run in runs]
    names, scores = [run.name for run in runs], [result.evaluation for result in found]
    classes = list(runs[0].classes.values())
    measures = [_ERROR, *(_class_error(k, name) for k, name in enumerate(classes)), *_MARGINALS]
    first = scores[0]
    labels = f"{several(first.num_images, 'image')} · {several(first.num_pixels, 'labelled pixel')}"
    default = f"{', '.join(classes) if len(classes) <= 4 else few(classes)} in {several(first.num_images, 'image')}"
    write_page(
        path,
        "images.html",
        title=title or default,
        about=f"{', '.join(names[:num_runs])} · {labels} · {', '.join(classes)}",
        names=names,
        baseline=names[num_runs] if len(runs) > num_runs else "",
        classes=[
            {"name": name, "colour": f"rgb{colour}"}
            for name, colour in zip(classes, class_colours(len(classes)), strict=True)
        ],
        tiles=tiles([_ERROR, *_MARGINALS], names, scores),
        scores=scores_table(measures, names, scores),
        histogram=_histogram(found),
        rows=[gallery_row(len(classes), *_views(runs, images[k])) for k in ranked(found[0].errors, num_shown)],
        confusions=[confusion_table(score, "pixels") for score in scores],
        reliability=reliability_chart(scores),
        bins=reliability_table(names, scores),
        edges=edge_tables({run.name: run.crf for run in runs[:num_runs]}, classes),
        curves=[c for c in (training_curve(r.name, k, r.crf, r.fits) for k, r in enumerate(runs)) if c is not None],
        ridge_path=_ridge_path(runs[0]),
        settings=_settings(runs[:num_runs]),
        timings=_timings(found[:num_runs]),
        commands=[line for line in [*(run.command for run in runs), command] if line],
    )
    return scores[:num_runs]


def _baseline(runs: Sequence[ImageRun]) -> list[ImageRun]:
    """The model of the first run without edges, unless the runs include such a model or it was not fitted."""
    first = runs[0]
    if first.crf.baseline_ is None or any(run.crf.loss == "independent" for run in runs):
        return []
    names = {run.name for run in runs}
    name = BASELINE if BASELINE not in names else f"{BASELINE} ({first.name})"
    return [ImageRun(name, first.crf.independent(), first.classes, first.ignore)]


def _ridge_path(run: ImageRun) -> dict[str, str] | None:
    """The log loss on held-out images of every ridge that was tried for a run."""
    path = run.crf.path_
    if not path:
        return None
    ridges = [trial.ridge for trial in path]
    lines = [
        Line(0, ridges, [trial.model for trial in path], [2.0] * len(path)),
        Line(1, ridges, [trial.independent for trial in path], [2.0] * len(path), dashed=True),
    ]
    chart = Chart(f"Ridges of {run.name}", "ridge", "log loss on held-out images", lines, log_x=True)
    limit = f", the {found} that is tried" if (found := limit_of_search(path)) else ""
    return {
        "chart": chart.svg(),
        "text": f"{run.name}: {run.crf.ridge_:g} was chosen{limit}. Dashed: the same model without edges.",
    }


def _check(runs: Sequence[ImageRun], images: ImageSet, num_shown: int) -> None:
    if not runs:
        raise ValueError("`runs` must hold at least one run. Got none.")
    classes = runs[0].classes
    for run in runs:
        if dict(run.classes) != dict(classes):
            raise ValueError(
                f"`runs` must have the same classes. {runs[0].name} has {dict(classes)}, and {run.name} has "
                f"{dict(run.classes)}."
            )
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"`runs` must have different names. Got {', '.join(run.name for run in runs)}.")
    if images.classes != tuple(classes.values()):
        raise ValueError(f"`images` must have the classes {tuple(classes.values())}. Got {images.classes}.")
    if len(images) == 0:
        raise ValueError("`images` must hold at least one image.")
    if num_shown < 1:
        raise ValueError(f"`num_shown` must be positive. Got {num_shown}.")


def _result(run: ImageRun, images: ImageSet, progress: bool) -> Result:
    errors: list[float] = []

    def see(image: LabelledImage, marginals: Floats) -> None:
        assert image.labels is not None
        errors.append(error_of(marginals.argmax(-1), image.labels))

    evaluation = evaluate_run(run, bar(images, shown=progress, what=f"predicting by {run.name}"), see)
    return Result(run, evaluation, tuple(errors))


def _views(runs: Sequence[ImageRun], image: LabelledImage) -> tuple[LabelledImage, dict[str, Floats]]:
    """An image that is shown, predicted again: the marginals of all images would not fit into memory."""
    return image, {run.name: run.crf.predict_marginals([image.image])[0] for run in runs}


def _class_error(k: int, name: str) -> Measure:
    return Measure(f"wrong {name}", lambda score: float(score.class_errors[k]), percent)


def _histogram(found: Sequence[Result]) -> str:
    errors = [[100 * error for error in result.errors if not math.isnan(error)] for result in found]
    return histogram("Errors of single images", "wrong pixels, %", "images", errors)


def _settings(runs: Sequence[ImageRun]) -> Table:
    unused = set() if any("early-stopping" in run.settings for run in runs) else {"patience"}
    names = [name for name in dict.fromkeys(name for run in runs for name in run.settings) if name not in unused]
    recipes = [run.crf.features_ for run in runs]
    values: dict[str, list[object]] = {name: [run.settings.get(name, NOTHING) for run in runs] for name in names}
    values |= {
        "ridge": [f"{run.crf.ridge_:g}" for run in runs],
        "classes": [", ".join(f"{name} = {value}" for value, name in run.classes.items()) for run in runs],
        "features of pixels": [", ".join(type(f).__name__ for f in recipe.pixels) for recipe in recipes],
        "features of edges": [", ".join(type(f).__name__ for f in recipe.edges) for recipe in recipes],
        "parameters": [f"{sum(p.numel() for p in run.crf.model_.parameters()):,}" for run in runs],
    }
    return settings_table([run.name for run in runs], values)


def _timings(found: Sequence[Result]) -> Table:
    rows: list[list[Cell | str]] = []
    for k, result in enumerate(found):
        run, score = result.run, result.evaluation
        evaluations = sum(fit.history[-1].evaluations for fit in run.fits if fit.history)
        spent = [run.seconds.get(name, math.nan) for name in _PARTS]
        each = spent[-1] / evaluations if evaluations else math.nan
        cells = [*map(in_seconds, spent), f"{evaluations:,}" if evaluations else NOTHING, in_seconds(each)]
        rows.append([Cell(run.name, series=k), *cells, in_seconds(score.seconds / score.num_images)])
    header = ["", *_PARTS, "evaluations", "per evaluation", "prediction, per image"]
    return Table(header, rows)
