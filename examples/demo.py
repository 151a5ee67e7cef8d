"""Restore noisy binary images with one model, trained by five losses. `make demo` runs this.

The setting is that of Domke (2013), section 8.2, with the photographs that come with scikit-image. A photograph is
thresholded at its mean, and noise is added to every pixel, with t uniform on [0, 1]:

    y = x (1 - t^n) + (1 - x) t^n,        n = 1.25

The model is a grid of binary variables. Its unary potentials are linear in y. All horizontal edges share one table, and
all vertical edges another: twelve parameters in all. No choice of them describes photographs well. The model is trained
by each loss through tree-reweighted message passing (TRW), and tested on images that it has not seen.

    python examples/demo.py --out demo
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np
import numpy.typing as npt

import riskfield as rf
from riskfield.datasets.bundled import bundled_images
from riskfield.datasets.images import ImageSet, LabelledImage
from riskfield.datasets.noise import PowerNoise, denoising
from riskfield.estimators.image_run import ImageRun
from riskfield.report.page import write_report

NOISE = PowerNoise(1.25)
FEATURES = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Intensity()), edges=(rf.features.Constant(),)
)
LOSSES = ("independent", "pseudolikelihood", "surrogate-likelihood", "clique-logistic", "univariate-logistic")
LIKELIHOOD = "surrogate-likelihood"  # the one that others are compared with


@dataclass(frozen=True, eq=False)
class Outcome:
    """One loss: the trained model, and its predictions for the test images."""

    loss: str
    crf: rf.ImageCRF
    seconds: float
    marginals: list[npt.NDArray[np.float64]]  # P(x = 1), of each image
    errors: npt.NDArray[np.float64]  # the share of wrong pixels, of each image
    log_losses: npt.NDArray[np.float64]  # minus the mean logarithm of the marginal of the truth, of each image

    @property
    def title(self) -> str:
        """The name of the loss, in words."""
        return self.loss.replace("-", " ")


def split(shape: tuple[int, int]) -> tuple[ImageSet, ImageSet]:
    """Return noisy training and test images: every other photograph, in alphabetical order."""
    noisy = denoising(bundled_images(), NOISE, shape=shape)
    kept = {example.name: example for example in noisy}  # read once
    images = ImageSet(noisy.names, kept.__getitem__, noisy.classes)
    return images[0::2], images[1::2]


def run(loss: str, train: ImageSet, test: ImageSet, iterations: int) -> Outcome:
    """Train by one loss, and test."""
    crf = rf.ImageCRF(
        FEATURES,
        loss=loss,
        inference=rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-4), rf.Unroll()),
        ridge=0.0,
        optimiser=rf.optim.LBFGS(iterations=iterations, change_tol=1e-6),
    )
    began = time.perf_counter()
    crf.fit([example.image for example in train], [example.labels for example in train])
    seconds = time.perf_counter() - began
    marginals = [values[..., 1] for values in crf.predict_marginals([example.image for example in test])]
    truths = [example.labels == 1 for example in test]
    errors = [np.mean((p > 0.5) != truth) for p, truth in zip(marginals, truths, strict=True)]
    log_losses = [-np.log(np.where(truth, p, 1 - p)).mean() for p, truth in zip(marginals, truths, strict=True)]
    return Outcome(loss, crf, seconds, marginals, np.array(errors), np.array(log_losses))


def standard_error(values: npt.NDArray[np.float64]) -> float:
    """Return the standard error of the mean of independent values."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of the table, header first. Differences are taken image by image."""
    (likelihood,) = (outcome for outcome in outcomes if outcome.loss == LIKELIHOOD)
    rows = [["trained by", "pixel error", "minus likelihood's", "log loss", "minus likelihood's", "training"]]
    for outcome in outcomes:
        row = [outcome.title]
        for values, reference, scale, unit in (
            (outcome.errors, likelihood.errors, 100, " %"),
            (outcome.log_losses, likelihood.log_losses, 1, ""),
        ):
            digits = 1 if scale == 100 else 3
            gap = scale * (values - reference)
            own = f"{scale * values.mean():.{digits}f} ± {scale * standard_error(values):.{digits}f}{unit}"
            compared = f"{gap.mean():+.{digits}f} ± {standard_error(gap):.{digits}f}"
            row += [own, "" if outcome is likelihood else compared]
        rows.append([*row, f"{outcome.seconds:.1f} s"])
    return rows


def shown(outcomes: Sequence[Outcome]) -> list[int]:
    """Choose three test images: those with the lowest, the median and the highest error of the likelihood."""
    (likelihood,) = (outcome for outcome in outcomes if outcome.loss == LIKELIHOOD)
    order = np.argsort(likelihood.errors)
    return [int(order[0]), int(order[len(order) // 2]), int(order[-1])]


def draw(path: Path, test: Sequence[LabelledImage], outcomes: Sequence[Outcome]) -> None:
    """Draw three images: the input, the truth, and the marginals of each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    chosen = shown(outcomes)
    rows, columns = len(chosen), 2 + len(outcomes)
    figure, axes = plt.subplots(rows, columns, figsize=(2.0 * columns, 1.53 * rows + 0.25), squeeze=False)
    figure.subplots_adjust(left=0.005, right=0.995, bottom=0.045, top=0.93, wspace=0.03, hspace=0.16)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        for spine in axis.spines.values():
            spine.set_edgecolor("0.6")
    titles = ["input", "truth", *(outcome.title for outcome in outcomes)]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    for line, k in zip(axes, chosen, strict=True):
        labels = test[k].labels
        assert labels is not None
        wrong = float(np.mean((test[k].image > 0.5) != labels))
        panels = [(test[k].image, wrong), (labels, None)]
        panels += [(outcome.marginals[k], float(outcome.errors[k])) for outcome in outcomes]
        for axis, (panel, error) in zip(line, panels, strict=True):
            axis.imshow(panel, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
            axis.set_xlabel(test[k].name if error is None else f"{error:.1%} wrong", fontsize=9, labelpad=2)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def page(rows: list[list[str]], train: ImageSet, test: ImageSet) -> str:
    """Return the page as HTML."""
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    body = "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
    noisy = np.mean([np.mean((example.image > 0.5) != example.labels) for example in test])
    height, width = test[0].image.shape
    numbers = {"num_train": len(train), "num_test": len(test), "rows": height, "columns": width}
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(numbers, table=body, noisy=f"{noisy:.0%}")


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Train, test, and write the figure, the page and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all files (default: %(default)s)")
    parser.add_argument("--size", type=int, default=80, help="rows of an image (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="iterations of the optimiser (default: %(default)s)")
    given = parser.parse_args(arguments)
    if not 8 <= given.size <= 200:
        parser.error(f"--size must be from 8 to 200. Got {given.size}.")
    began = time.perf_counter()
    given.out.mkdir(parents=True, exist_ok=True)
    train, test = split((given.size, given.size * 3 // 2))
    print(f"train on {', '.join(train.names)}\ntest on {', '.join(test.names)}", flush=True)
    outcomes = []
    for loss in LOSSES:
        outcomes.append(run(loss, train, test, given.iterations))
        print(f"{loss}: trained in {outcomes[-1].seconds:.0f} seconds", flush=True)
    rows = table(outcomes)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(
        "", *("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows), sep="\n"
    )
    draw(given.out / "demo.png", test, outcomes)
    runs = [ImageRun(o.title, o.crf, {0: "0", 1: "1"}, fits=tuple(o.crf.results_)) for o in outcomes]
    write_report(given.out / "report.html", runs, test, title="One model, five losses", num_shown=len(test))
    (given.out / "index.html").write_text(page(rows, train, test), encoding="utf-8")
    page_path = given.out.resolve() / "index.html"
    print(f"\n{time.perf_counter() - began:.0f} seconds. Open this page in a browser:\n{page_path}")
    return outcomes


if __name__ == "__main__":
    main()
