"""The report: one HTML page about one run, or about several runs side by side.

The page contains its style and pictures and loads nothing from the network.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

from riskfield import __version__
from riskfield.datasets.images import ImageSet, LabelledImage
from riskfield.estimators.image_run import ImageRun
from riskfield.io._atomic import check_writable, write_text
from riskfield.progress import bar
from riskfield.report.evaluation import Evaluation, Floats
from riskfield.report.gallery import gallery
from riskfield.report.html import element, section, text
from riskfield.report.predictions import evaluate_run
from riskfield.report.sections import commands, confusions, reliability, results, settings, tiles, timings, training

_SCRIPT = """
for (const slider of document.querySelectorAll("input[data-sets]"))
  slider.addEventListener("input", () => document.documentElement.style.setProperty(slider.dataset.sets, slider.value));
"""


@dataclass(frozen=True, eq=False)
class Result:
    """A run, its evaluation, and its marginals on the pictures in the gallery."""

    run: ImageRun
    evaluation: Evaluation
    marginals: dict[str, Floats] = field(default_factory=dict)


def write_report(
    path: str | os.PathLike[str],
    runs: Sequence[ImageRun],
    pictures: ImageSet,
    *,
    title: str | None = None,
    command: str = "",
    num_shown: int = 6,
    progress: bool = False,
) -> list[Evaluation]:
    """Write a page about one run, or about several runs with the same classes.

    Arguments:
        path: where to write the page. It is replaced atomically.
        runs: fitted runs.
        pictures: the test pictures. Their labels must be indices into the classes of the runs.
        title: the title of the page.
        command: the command that writes this page, which the page shows.
        num_shown: how many pictures the gallery shows. They are spread evenly over the set.
        progress: whether to show progress bars.

    Returns:
        The evaluation of each run.
    """
    _check(runs, pictures, num_shown)
    check_writable(path)
    places = np.unique(np.linspace(0, len(pictures) - 1, min(num_shown, len(pictures))).round().astype(int))
    shown = [pictures[int(k)] for k in places]
    found = [_result(run, pictures, {picture.name for picture in shown}, progress) for run in runs]
    write_text(path, _page(title or " · ".join(run.name for run in runs), found, shown, command))
    return [result.evaluation for result in found]


def _check(runs: Sequence[ImageRun], pictures: ImageSet, num_shown: int) -> None:
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
    if pictures.classes != tuple(classes.values()):
        raise ValueError(f"`pictures` must have the classes {tuple(classes.values())}. Got {pictures.classes}.")
    if len(pictures) == 0:
        raise ValueError("`pictures` must hold at least one picture.")
    if num_shown < 1:
        raise ValueError(f"`num_shown` must be positive. Got {num_shown}.")


def _result(run: ImageRun, pictures: ImageSet, shown: set[str], progress: bool) -> Result:
    marginals: dict[str, Floats] = {}

    def see(picture: LabelledImage, beliefs: Floats) -> None:
        if picture.name in shown:
            marginals[picture.name] = beliefs

    evaluation = evaluate_run(run, bar(pictures, shown=progress, what=f"predicting by {run.name}"), see)
    return Result(run, evaluation, marginals)


def _page(title: str, found: Sequence[Result], shown: Sequence[LabelledImage], command: str) -> str:
    runs = [result.run for result in found]
    scores = [result.evaluation for result in found]
    parts = [
        ("results", "Results", "Each pixel gets its most probable label.", results(runs, scores)),
        (
            "pictures",
            "Pictures",
            "Each class has a colour, with the marginal as its opacity. The sliders fade single classes in and out.",
            gallery(list(runs[0].classes.values()), shown, {r.run.name: r.marginals for r in found}),
        ),
        (
            "confusion",
            "Confusion",
            "Rows are true classes and columns are predicted classes. Each row sums to 100 %.",
            confusions(runs, scores),
        ),
        (
            "calibration",
            "Calibration",
            "Marginals are grouped by size; the chart shows which share of each group belongs to the true class. "
            "Calibrated marginals lie on the diagonal, overconfident ones below it. Larger dots are larger groups.",
            reliability(runs, scores),
        ),
        ("training", "Training", "The objective (loss per pixel plus ridge) at each iteration.", training(runs)),
        ("settings", "Settings", "", settings(runs)),
        ("timings", "Timings", "Wall-clock seconds.", timings(runs, scores)),
        ("commands", "Commands", "", commands(runs, command)),
    ]
    parts = [part for part in parts if part[3]]
    links = "".join(element("a", text(name), href=f"#{anchor}") for anchor, name, _, _ in parts)
    count = scores[0]
    about = (
        f"{_several(count.num_pictures, 'picture')} · {count.num_pixels:,} labelled pixels · {', '.join(count.names)}"
    )
    header = (
        element("div", "riskfield", class_="brand")
        + element("h1", text(title))
        + element("div", text(about), class_="soft")
        + element("nav", links)
    )
    now = datetime.now().astimezone()
    written = f"{now.day} {now:%B %Y, %H:%M %Z}"
    footer = (
        f"Written {written} by riskfield {__version__}, torch {torch.__version__}, Python {platform.python_version()}."
    )
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    body = (
        element("header", header)
        + element("main", tiles(runs, scores) + "".join(section(*part) for part in parts))
        + element("footer", text(footer))
        + element("script", _SCRIPT)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
