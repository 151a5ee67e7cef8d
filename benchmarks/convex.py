"""The time of a loss and its gradient with convex inference, as a function of the size of the image.

    python benchmarks/convex.py [--out results/benchmarks/convex]

The models are binary grids with random potentials and random weights of b log b. The benchmark measures the univariate
logistic loss and its gradient with respect to theta and all weights, by `KKT`. Warm runs start from the messages of a
run whose potentials differ by a hundredth. Times are processor times on one thread.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise

import torch
from torch import Tensor

import riskfield as rf
from timing import about, add_out, write

SIZES = ((28, 28), (50, 50), (100, 100), (200, 300))
_STOP = rf.Stop(100, 1e-8)


def loss_and_gradient(graph: rf.FactorGraph, theta: Tensor, weights: Tensor, messages: Tensor | None) -> rf.Solution:
    """One evaluation, as in training."""
    theta, weights = (tensor.detach().requires_grad_() for tensor in (theta, weights))
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    solution = rf.infer(graph, theta, energy, stop=_STOP, messages=messages, adjoint=rf.KKT())
    (-solution.node_marginals[0][..., 0].log().sum()).backward()
    return solution


def measure(rows: int, columns: int, items: int, rounds: int) -> list[dict[str, object]]:
    """Return the shortest times of cold and of warm evaluations, per image."""
    graph, generator = rf.grid(rows, columns, 2), torch.manual_seed(0)
    theta = torch.randn(items, graph.theta_size, dtype=torch.float64, generator=generator)
    weights = 0.05 + 2 * torch.rand(graph.mu_size, dtype=torch.float64, generator=generator)
    before = loss_and_gradient(graph, theta, weights, None).messages
    moved = theta + 0.01 * torch.randn(theta.shape, dtype=torch.float64, generator=generator)
    out: list[dict[str, object]] = []
    for kind, messages in (("cold", None), ("warm", before)):
        best, steps = math.inf, 0.0
        for _ in range(rounds):
            began = time.process_time()
            solution = loss_and_gradient(graph, moved, weights, messages)
            best = min(best, (time.process_time() - began) / items)
            steps = float(solution.sweeps.double().mean())
        size = {"rows": rows, "columns": columns, "batch": items, "start": kind}
        out.append(size | {"steps": steps, "ms": round(1e3 * best, 1), "us per pixel": 1e6 * best / (rows * columns)})
    return out


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    found = []
    for (rows, columns), items, rounds in [
        (SIZES[0], 10, 5),
        *((size, 1, 5) for size in SIZES[:-1]),
        (SIZES[-1], 1, 2),
    ]:
        for row in measure(rows, columns, items, rounds):
            found.append(row)
            print(row, flush=True)
    lines = []
    for kind in ("cold", "warm"):
        alone = [row for row in found if row["batch"] == 1 and row["start"] == kind]
        for small, large in pairwise(alone):
            pixels = [float(row["rows"] * row["columns"]) for row in (small, large)]  # type: ignore[operator]
            power = math.log(float(large["ms"]) / float(small["ms"])) / math.log(pixels[1] / pixels[0])  # type: ignore[arg-type]
            lines.append(
                f"{kind}, {small['rows']}x{small['columns']} to {large['rows']}x{large['columns']}: "
                f"time grows as pixels to the power of {power:.2f}"
            )
    print("\n".join(lines))
    if arguments.out:
        header = "| image | batch | start | Newton steps | ms per image | us per pixel |\n|---|---|---|---|---|---|\n"
        body = "\n".join(
            f"| {r['rows']}x{r['columns']} | {r['batch']} | {r['start']} | {r['steps']:g} | {r['ms']} | "
            f"{r['us per pixel']:.1f} |"
            for r in found
        )
        write(arguments.out, "Convex inference: a loss and its gradient", about(), lines, header + body, found)


if __name__ == "__main__":
    main()
