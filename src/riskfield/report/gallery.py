"""The images of a report: input, truth, and for every run marginals, prediction, errors and entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from riskfield.datasets.images import LabelledImage, Labels
from riskfield.report.evaluation import Floats
from riskfield.report.images import backdrop, heat, layers, one_hot, photograph
from riskfield.report.templating import percent

_SMALL = 260  # pixels: smaller images are enlarged without smoothing
_WRONG, _UNSURE = (214, 40, 40), (123, 31, 162)


@dataclass(frozen=True)
class Panel:
    """One view of an image.

    Arguments:
        title: what it shows.
        photo: the address of an image, shown as it is.
        classes: the addresses of one layer per class, over the grey image.
        map: the address of one layer over the grey image.
    """

    title: str
    photo: str = ""
    classes: tuple[str, ...] = ()
    map: str = ""


@dataclass(frozen=True)
class Row:
    """All views of an image.

    Arguments:
        name: of the image.
        notes: the error of every run.
        width, height: of the image, in pixels.
        small: whether it is enlarged without smoothing.
        backdrop: the address of the grey image under the layers.
        panels: input and truth.
        runs: the panels of each run.
    """

    name: str
    notes: tuple[str, ...]
    width: int
    height: int
    small: bool
    backdrop: str
    panels: tuple[Panel, ...]
    runs: tuple[tuple[Panel, ...], ...]


def gallery_row(num_classes: int, image: LabelledImage, marginals: Mapping[str, Floats]) -> Row:
    """Return the views of an image with labels, given {run: marginals}."""
    assert image.labels is not None
    height, width = image.labels.shape
    truth = Panel("Truth", classes=tuple(layers(one_hot(image.labels, num_classes))))
    notes, runs = [], []
    for run, beliefs in marginals.items():
        chosen = beliefs.argmax(-1)
        error = error_of(chosen, image.labels)
        many = len(marginals) > 1
        notes.append(f"{run} {percent(error)}" if many else f"{percent(error)} wrong")
        wrong = (chosen != image.labels) & (image.labels >= 0)
        of_run = f", {run}" if many else ""
        runs.append(
            (
                Panel(f"Marginals{of_run}", classes=tuple(layers(beliefs))),
                Panel(f"Prediction{of_run}", classes=tuple(layers(one_hot(chosen, num_classes)))),
                Panel(f"Errors{of_run}", map=heat(wrong.astype(np.float64), _WRONG)),
                Panel(f"Entropy{of_run}", map=heat(entropy(beliefs), _UNSURE)),
            )
        )
    return Row(
        image.name,
        tuple(notes),
        width,
        height,
        max(height, width) <= _SMALL,
        backdrop(image.image),
        (Panel("Input", photo=photograph(image.image)), truth),
        tuple(runs),
    )


def error_of(chosen: Labels, labels: Labels) -> float:
    """The share of the labelled pixels that are wrong; NaN if no pixel has a label."""
    known = labels >= 0
    return float(np.mean(chosen[known] != labels[known])) if known.any() else float("nan")


def entropy(marginals: Floats) -> Floats:
    """The entropy of the marginals of each pixel, from 0 for a certain class to 1 for equally probable ones.

    >>> entropy(np.array([[0.5, 0.5], [1.0, 0.0]]))
    array([1., 0.])
    """
    found: Floats = -(marginals * np.log(np.maximum(marginals, 1e-300))).sum(-1) / np.log(marginals.shape[-1])
    return np.abs(found)


def ranked(errors: Sequence[float], count: int) -> list[int]:
    """Choose `count` images at equal steps of a ranking by error. Return their numbers, from the worst to the best.

    >>> ranked([0.1, 0.5, 0.3, 0.2, 0.4], 3)
    [1, 2, 0]
    """
    order = np.argsort(-np.nan_to_num(np.asarray(errors), nan=-1.0), kind="stable")
    steps = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    return [int(order[step]) for step in steps]
