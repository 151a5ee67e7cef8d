r"""Denoise a binary image with three approximations of the same model.

The truth x is scikit-image's `camera`, thresholded at its mean. Noise is added to every pixel with an independent t_i,
uniform on [0, 1]:

    y_i = x_i (1 - t_i^n) + (1 - x_i) t_i^n,        n = 1.25

A single pixel carries little information: thresholding y at 1/2 gets 43 % of the pixels wrong. The model consists of
the exact log-likelihood of y, theta_i(x_i) = log p(y_i | x_i), and of a hand-set reward for equal neighbours (Potts, on
the 4-connected grid). Mean field, loopy belief propagation and tree-reweighted belief propagation (TRW) approximate
P(x_i = 1 | y) for each pixel, and the figure compares the results with the truth.

    python examples/denoise.py --out demo.png
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

import riskfield as rf

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Image = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NOISE = 1.25
AGREEMENT = 1.2  # log-odds of equal neighbours; TRW needs a larger value than BP for the same smoothing
STOP = rf.Stop(sweeps=1000, tol=1e-4)
ALGORITHMS: dict[str, rf.inference.AbstractAlgorithm] = {
    "mean field": rf.MeanField(),
    "loopy BP": rf.MessagePassing(rf.Bethe()),
    "TRW(0.5)": rf.MessagePassing(rf.TRW(0.5)),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one algorithm, and its cost."""

    marginals: Image  # (row, column)  P(x = 1)
    error: float
    seconds: float
    sweeps: int
    converged: bool
    log_partition: float


def load_truth(rows: int) -> Mask:
    """Make a binary image of `rows` x 3/2 `rows` pixels from a photograph that ships with scikit-image."""
    from skimage import data, transform

    photograph = data.camera()[40:381]  # 341 x 512, about 2 : 3, with the cameraman in it
    small = transform.resize(photograph.astype(np.float64), (rows, rows * 3 // 2), anti_aliasing=True)
    return np.asarray(small > small.mean())


def add_noise(truth: Mask, seed: int) -> Image:
    """Add noise to every pixel. The values are strictly between 0 and 1, so that their logarithms exist."""
    noise = np.random.default_rng(seed).random(truth.shape) ** NOISE
    return np.clip(np.where(truth, 1 - noise, noise), 1e-9, 1 - 1e-9)


def potentials(graph: rf.FactorGraph, noisy: Image) -> torch.Tensor:
    """Fill theta: the log-likelihood of every pixel, and a reward on the diagonal of the tied pairwise tables."""
    y = torch.from_numpy(noisy).flatten()
    theta = graph.zeros()
    # t^n = y if x = 0 and 1 - y if x = 1; t is uniform, so t^n = s has density s^(1/n - 1) / n.
    graph.node_views(theta)[0][:] = (1 / NOISE - 1) * torch.stack([y.log(), (-y).log1p()], dim=-1)
    graph.factor_views(theta)[0][:] = AGREEMENT * torch.eye(2)
    return theta


def run(graph: rf.FactorGraph, theta: torch.Tensor, algorithm: rf.inference.AbstractAlgorithm, truth: Mask) -> Outcome:
    """Infer, and score the marginals thresholded at 1/2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)  # the table shows it
        began = time.perf_counter()
        solution = rf.infer(graph, theta, algorithm, stop=STOP, progress=sys.stderr.isatty())
        seconds = time.perf_counter() - began
    marginals = solution.node_marginals[0][:, 1].numpy().reshape(truth.shape)
    return Outcome(
        marginals,
        float(np.mean((marginals > 0.5) != truth)),
        seconds,
        int(solution.sweeps),
        bool(solution.converged),
        float(solution.log_partition),
    )


def print_table(outcomes: dict[str, Outcome], noisy_error: float) -> None:
    """Print one line per algorithm."""
    print(f"{'algorithm':<18}{'sweeps':>8}{'seconds':>10}{'pixel error':>14}{'log-partition':>16}")
    print(f"{'threshold at 1/2':<18}{'-':>8}{'-':>10}{noisy_error:>13.1%} {'-':>16}")
    for name, outcome in outcomes.items():
        note = "" if outcome.converged else "   still changing"
        print(
            f"{name:<18}{outcome.sweeps:>8}{outcome.seconds:>10.2f}{outcome.error:>13.1%} "
            f"{outcome.log_partition:>16.1f}{note}"
        )


def draw(path: Path, noisy: Image, truth: Mask, noisy_error: float, outcomes: dict[str, Outcome]) -> None:
    """Draw the truth, the input, the marginals of each algorithm, and their calibration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 3, figsize=(9.9, 4.95))
    figure.subplots_adjust(left=0.01, right=0.945, bottom=0.095, top=0.945, wspace=0.04, hspace=0.14)
    images: list[tuple[str, npt.NDArray[np.generic]]] = [
        ("truth", truth),
        (f"input: {noisy_error:.1%} of pixels wrong", noisy),
    ]
    images += [(f"{name}: {outcome.error:.1%} wrong", outcome.marginals) for name, outcome in outcomes.items()]
    for axis, (title, image) in zip(axes.flat[:5], images, strict=True):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title)
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_edgecolor("0.6")
    draw_calibration(axes[1, 2], truth, outcomes)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_calibration(axis: Axes, truth: Mask, outcomes: dict[str, Outcome]) -> None:
    """Plot the share of white pixels in each bin of marginals. Calibrated marginals lie on the diagonal."""
    bins = np.linspace(0, 1, 11)
    axis.plot([0, 1], [0, 1], color="0.75", linewidth=1)
    for (name, outcome), colour in zip(outcomes.items(), ("#c44e52", "#4c72b0", "#55a868"), strict=True):
        which = np.clip(np.digitize(outcome.marginals.ravel(), bins) - 1, 0, len(bins) - 2)
        count = np.bincount(which, minlength=len(bins) - 1)
        predicted = np.bincount(which, outcome.marginals.ravel(), minlength=len(count))[count > 0] / count[count > 0]
        actual = np.bincount(which, truth.ravel(), minlength=len(count))[count > 0] / count[count > 0]
        axis.plot(predicted, actual, marker="o", markersize=3, linewidth=1.2, color=colour, label=name)
    axis.set(
        xlim=(0, 1), ylim=(-0.02, 1.02), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], title="calibration", box_aspect=2 / 3
    )
    axis.set_xlabel("marginal P(x = 1)", labelpad=0)
    axis.set_ylabel("share of white pixels", labelpad=2)
    axis.yaxis.tick_right()
    axis.yaxis.set_label_position("right")
    axis.legend(frameon=False, loc="upper left", fontsize=8, handlelength=1.4)
    axis.spines[["top", "left"]].set_visible(False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and validate the command line before anything is computed or written."""
    parser = argparse.ArgumentParser(description="Denoise a binary image by mean field, loopy BP and TRW.")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the PNG to write (default: %(default)s)")
    parser.add_argument(
        "--size", type=int, default=200, metavar="ROWS", help="rows; there are 3/2 as many columns (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    options = parser.parse_args(arguments)
    if options.size < 4:
        parser.error(f"--size must be at least 4. Got {options.size}.")
    if options.seed < 0:
        parser.error(f"--seed must not be negative. Got {options.seed}.")
    if options.out.suffix.lower() != ".png":
        parser.error(f"--out must name a .png file. Got {options.out}.")
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out must be in an existing folder. Got {options.out}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the image, add noise, run the three algorithms, and report."""
    options = parse(arguments)
    truth = load_truth(options.size)
    noisy = add_noise(truth, options.seed)
    rows, columns = truth.shape
    graph = rf.grid(rows, columns, num_states=2, tied=True)
    theta = potentials(graph, noisy)
    noisy_error = float(np.mean((noisy > 0.5) != truth))
    outcomes = {name: run(graph, theta, algorithm, truth) for name, algorithm in ALGORITHMS.items()}
    print_table(outcomes, noisy_error)
    draw(options.out, noisy, truth, noisy_error, outcomes)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
