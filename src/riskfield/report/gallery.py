"""Panels with pictures, true labels, marginals and predictions. Sliders set the opacity of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from riskfield.datasets.images import LabelledImage, Labels
from riskfield.report.colours import class_colours
from riskfield.report.evaluation import Floats
from riskfield.report.html import element, text
from riskfield.report.images import backdrop, layers, one_hot, photograph

_SMALL = 260  # pixels: smaller pictures are enlarged without smoothing


def gallery(
    names: Sequence[str], pictures: Sequence[LabelledImage], marginals: Mapping[str, Mapping[str, Floats]]
) -> str:
    """Return a row of panels for every picture.

    Arguments:
        names: the names of the classes.
        pictures: pictures with labels.
        marginals: {run: {picture: marginals}}.
    """
    return _controls(names) + "".join(_row(names, picture, marginals) for picture in pictures)


def _controls(names: Sequence[str]) -> str:
    sliders = [
        _slider(name, f"--o{k}", 1, style=f"--colour:{_css(colour)}")
        for k, (name, colour) in enumerate(zip(names, class_colours(len(names)), strict=True))
    ]
    return element("div", "".join(sliders) + _slider("all colours", "--paint", 0.8), class_="controls")


def _slider(name: str, variable: str, start: float, style: str | None = None) -> str:
    swatch = "" if style is None else element("span", class_="swatch")
    control = f'<input type="range" min="0" max="1" step="0.01" value="{start}" data-sets="{variable}">'
    return element("label", swatch + text(name) + control, style=style)


def _row(names: Sequence[str], picture: LabelledImage, marginals: Mapping[str, Mapping[str, Floats]]) -> str:
    assert picture.labels is not None
    shape, count = picture.labels.shape, len(names)
    img = f'<img src="{photograph(picture.image)}" alt="{text(picture.name)}">'
    panels = [_panel("Input", _stack(img, shape)), _painted("Truth", one_hot(picture.labels, count), picture.name)]
    wrong = []
    for run, of_pictures in marginals.items():
        beliefs = of_pictures[picture.name]
        chosen = beliefs.argmax(-1)
        of_run = f", {run}" if len(marginals) > 1 else ""
        panels.append(_painted(f"Marginals{of_run}", beliefs, picture.name))
        panels.append(_painted(f"Prediction{of_run}", one_hot(chosen, count), picture.name))
        wrong.append(f"{run} {_error(chosen, picture.labels)}" if of_run else f"{_error(chosen, picture.labels)} wrong")
    caption = element("h3", text(picture.name) + element("span", text(" · ".join(wrong))))
    kind = "panels several" if len(marginals) > 1 else "panels"
    style = f"--photo:url({backdrop(picture.image)})"
    return element(
        "article", caption + element("div", "".join(panels), class_=kind), class_="card picture", style=style
    )


def _painted(title: str, shares: Floats, name: str) -> str:
    """Return a panel with the picture in grey and one layer per class."""
    images = "".join(
        f'<img style="opacity:var(--o{k},1)" src="{address}" alt="">' for k, address in enumerate(layers(shares))
    )
    content = element("span", class_="base") + element("div", images, class_="layers")
    return _panel(title, _stack(content, shares.shape[:2], f"{title} of {name}"))


def _panel(title: str, content: str) -> str:
    return element("figure", content + element("figcaption", text(title)))


def _stack(content: str, shape: Sequence[int], label: str | None = None) -> str:
    rows, columns = shape
    kind = "stack small" if max(rows, columns) <= _SMALL else "stack"
    role = None if label is None else "img"
    return element("div", content, class_=kind, style=f"aspect-ratio:{columns}/{rows}", role=role, aria_label=label)


def _error(chosen: Labels, labels: Labels) -> str:
    known = labels >= 0
    return f"{100 * float(np.mean(chosen[known] != labels[known])):.1f} %" if known.any() else "no labels"


def _css(colour: tuple[int, int, int]) -> str:
    return f"rgb{colour}"
