r"""A segmentation network whose pairwise terms are trained with it.

The data are noisy random scenes of sky, land and water. Sky and water have the same colour. They differ only in that
sky is above land and water is below it, and the land may be outside the receptive field of a small network. Land has
towers that are one pixel wide, which smoothing treats as noise. The example compares three models:

    network                 a convolutional network with a 5 x 5 receptive field
    + fixed smoothing       the trained network, followed by a fixed CRF with a reward for equal neighbours; the
                            strength of the reward is the best one on the training data
    + trained pairwise      the network with pairwise tables, one per direction, trained jointly through five sweeps of
                            tree-reweighted message passing

    python examples/segmentation.py
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import riskfield as rf

SKY, LAND, WATER = range(3)
NOISE = 0.5
STRENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


class Segmenter(nn.Module):
    """Maps images of shape (batch, 1, side, side) to label probabilities of shape (batch, pixel, label)."""

    def __init__(self, side: int, labels: int = 3, channels: int = 16):
        super().__init__()
        first, second = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(channels, labels, 1))
        self.pairwise = nn.Parameter(torch.zeros(2, labels, labels))  # horizontal edges, vertical edges
        self.graph = rf.grid(side, side, labels, tied=True)
        truncated = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps=5, tol=None))
        self.marginals = rf.nn.MarginalInference(self.graph, truncated)

    def forward(self, images: Tensor) -> Tensor:
        """Compute unary potentials with the network, and marginals from these and the pairwise tables."""
        unary = self.network(images).flatten(2).transpose(1, 2)
        return self.graph.node_views(self.marginals(self.graph.assemble([unary], [self.pairwise])))[0]


def scenes(number: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images of shape (scene, 1, side, side) and their labels of shape (scene, pixel)."""
    rng = np.random.default_rng(seed)
    waves = np.arange(1, 4)[:, None]

    def outline(height: float) -> npt.NDArray[np.float64]:
        phases = 2 * np.pi * (waves * np.arange(side) / side + rng.random((3, 1)))
        return height + side / 20 * (rng.normal(size=(3, 1)) * np.sin(phases)).sum(0)

    labels = np.empty((number, side, side), int)
    for scene in labels:
        top, bottom = np.sort(rng.uniform(0, side, 2))
        skyline = outline(top)
        towers = rng.choice(side, side // 6, replace=False)
        skyline[towers] -= side / 4 * rng.random(len(towers))
        shore = np.maximum(outline(bottom), skyline + 2)
        rows = np.arange(side)[:, None]
        scene[:] = np.where(rows < skyline, SKY, np.where(rows < shore, LAND, WATER))
    images = (labels == LAND) + NOISE * rng.normal(size=labels.shape)
    return torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(labels).flatten(1)


def loss(model: Segmenter, images: Tensor, labels: Tensor) -> Tensor:
    """Return the univariate logistic loss per pixel."""
    return -model(images).gather(-1, labels.unsqueeze(-1)).log().mean()


def train(model: Segmenter, parameters: Iterable[nn.Parameter], data: tuple[Tensor, Tensor], epochs: int) -> None:
    """Run Adam with batches of ten scenes."""
    optimiser = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(10):
            optimiser.zero_grad()
            loss(model, data[0][batch], data[1][batch]).backward()
            optimiser.step()


def smoothed(model: Segmenter, data: tuple[Tensor, Tensor]) -> Segmenter:
    """Return the model with the reward for equal neighbours that has the lowest error on `data`."""
    candidates = []
    for strength in STRENGTHS:
        candidate = copy.deepcopy(model)
        with torch.no_grad():
            candidate.pairwise.copy_(strength * torch.eye(candidate.pairwise.shape[-1]))
        candidates.append(candidate)
    return min(candidates, key=lambda candidate: measures(candidate, data)[0])


@torch.no_grad()
def measures(model: Segmenter, data: tuple[Tensor, Tensor]) -> tuple[float, float, float]:
    """Return the error rate, the mean intersection over union, and the loss."""
    images, labels = data
    predicted = model(images).argmax(-1)
    overlaps = []
    for k in (SKY, LAND, WATER):
        found, true = predicted == k, labels == k
        overlaps.append(int((found & true).sum()) / max(int((found | true).sum()), 1))
    return rf.metrics.error_rate(predicted, labels), sum(overlaps) / 3, float(loss(model, images, labels))


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float, float]]:
    """Train the three models and print their errors on other scenes."""
    parser = argparse.ArgumentParser(description="A segmentation network with trainable pairwise terms.")
    parser.add_argument("--side", type=int, default=32, help="side of a scene in pixels (default: %(default)s)")
    parser.add_argument("--scenes", type=int, default=60, help="training and test scenes, each (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=80, help="epochs of each training run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of scenes and parameters (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    train_data = scenes(options.scenes, options.side, 2 * options.seed)
    test_data = scenes(options.scenes, options.side, 2 * options.seed + 1)
    began = time.perf_counter()
    alone = Segmenter(options.side)
    train(alone, alone.network.parameters(), train_data, options.epochs)  # zero tables: no coupling
    together = copy.deepcopy(alone)
    train(together, together.parameters(), train_data, options.epochs)
    train(alone, alone.network.parameters(), train_data, options.epochs)  # as many epochs as `together`
    models = {"network": alone, "+ fixed smoothing": smoothed(alone, train_data), "+ trained pairwise": together}
    results = {name: measures(model, test_data) for name, model in models.items()}
    print(f"{'':<20}{'pixel error':>12}{'mean IoU':>10}{'loss':>8}")
    for name, (error, overlap, value) in results.items():
        print(f"{name:<20}{error:>12.1%}{overlap:>10.3f}{value:>8.3f}")
    print("\nlearned log-potentials of the upper pixel (row) and the lower pixel (column), minus the largest")
    vertical = together.pairwise.detach()[1]
    for name, row in zip(("sky", "land", "water"), (vertical - vertical.max()).tolist(), strict=True):
        print(f"{name:<8}" + "".join(f"{entry:>8.2f}" for entry in row))
    print(f"\n{time.perf_counter() - began:.0f} seconds")
    return results


if __name__ == "__main__":
    main()
