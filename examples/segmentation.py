r"""A segmentation network whose pairwise terms are trained with it.

Scenes of sky, land and water, drawn at random, seen through noise. Sky and water have the same colour: what tells them
apart is that sky is above land and water below it, which may be far away, out of sight of a small network. And land has
towers one pixel wide, which smoothing takes for noise. Three ways to label the pixels:

    network                 convolutions with a 5 x 5 field of view
    + fixed smoothing       a reward for equal neighbours put behind the trained network, as a fixed CRF is used for
                            post-processing; its strength is the best one on the training data
    + trained pairwise      tables of how neighbours go together, for each direction, trained with the network through
                            five sweeps of tree-reweighted message passing

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
    """Pictures of shape (batch, 1, side, side) to the probabilities of labels, of shape (batch, pixel, label)."""

    def __init__(self, side: int, labels: int = 3, channels: int = 16):
        super().__init__()
        first, second = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(channels, labels, 1))
        self.pairwise = nn.Parameter(torch.zeros(2, labels, labels))  # a table for horizontal, one for vertical edges
        self.graph = rf.grid(side, side, labels, tied=True)
        trw, truncated = rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps=5, tol=None)
        self.marginals = rf.nn.MarginalInference(self.graph, trw, rf.Unroll(), stop=truncated)

    def forward(self, pictures: Tensor) -> Tensor:
        """Unary potentials from the network, pairwise ones from the tables, marginals from both."""
        unary = self.network(pictures).flatten(2).transpose(1, 2)
        return self.graph.node_views(self.marginals(self.graph.assemble([unary], [self.pairwise])))[0]


def scenes(number: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures, of shape (scene, 1, side, side), and their labels, of shape (scene, pixel)."""
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
    pictures = (labels == LAND) + NOISE * rng.normal(size=labels.shape)
    return torch.from_numpy(pictures).float().unsqueeze(1), torch.from_numpy(labels).flatten(1)


def loss(model: Segmenter, pictures: Tensor, labels: Tensor) -> Tensor:
    """The univariate logistic loss per pixel."""
    return -model(pictures).gather(-1, labels.unsqueeze(-1)).log().mean()


def train(model: Segmenter, parameters: Iterable[nn.Parameter], data: tuple[Tensor, Tensor], epochs: int) -> None:
    """Adam, ten scenes at a time."""
    optimiser = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(10):
            optimiser.zero_grad()
            loss(model, data[0][batch], data[1][batch]).backward()
            optimiser.step()


def smoothed(model: Segmenter, data: tuple[Tensor, Tensor]) -> Segmenter:
    """The model with the reward for equal neighbours that makes the fewest errors on `data`."""
    candidates = []
    for strength in STRENGTHS:
        candidate = copy.deepcopy(model)
        with torch.no_grad():
            candidate.pairwise.copy_(strength * torch.eye(candidate.pairwise.shape[-1]))
        candidates.append(candidate)
    return min(candidates, key=lambda candidate: measures(candidate, data)[0])


@torch.no_grad()
def measures(model: Segmenter, data: tuple[Tensor, Tensor]) -> tuple[float, float, float]:
    """The share of wrong pixels, the mean over labels of intersection over union, the loss."""
    pictures, labels = data
    predicted = model(pictures).argmax(-1)
    overlaps = []
    for k in (SKY, LAND, WATER):
        found, true = predicted == k, labels == k
        overlaps.append(int((found & true).sum()) / max(int((found | true).sum()), 1))
    return rf.error_rate(predicted, labels), sum(overlaps) / 3, float(loss(model, pictures, labels))


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float, float]]:
    """Train the three and print how they do on other scenes."""
    parser = argparse.ArgumentParser(description="A segmentation network with trainable pairwise terms.")
    parser.add_argument("--side", type=int, default=32, help="pixels of a side (default: %(default)s)")
    parser.add_argument("--scenes", type=int, default=60, help="to train on, and to test on (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=80, help="of either training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of scenes and parameters (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    train_data = scenes(options.scenes, options.side, 2 * options.seed)
    test_data = scenes(options.scenes, options.side, 2 * options.seed + 1)
    began = time.perf_counter()
    alone = Segmenter(options.side)
    train(alone, alone.network.parameters(), train_data, options.epochs)  # tables of zeros join nothing
    together = copy.deepcopy(alone)
    train(together, together.parameters(), train_data, options.epochs)
    train(alone, alone.network.parameters(), train_data, options.epochs)  # as long as the other
    models = {"network": alone, "+ fixed smoothing": smoothed(alone, train_data), "+ trained pairwise": together}
    results = {name: measures(model, test_data) for name, model in models.items()}
    print(f"{'':<20}{'pixel error':>12}{'mean IoU':>10}{'loss':>8}")
    for name, (error, overlap, value) in results.items():
        print(f"{name:<20}{error:>12.1%}{overlap:>10.3f}{value:>8.3f}")
    print("\nlearned: log-potentials of the upper pixel (row) and the lower one (column), less the largest")
    vertical = together.pairwise.detach()[1]
    for name, row in zip(("sky", "land", "water"), (vertical - vertical.max()).tolist(), strict=True):
        print(f"{name:<8}" + "".join(f"{entry:>8.2f}" for entry in row))
    print(f"\n{time.perf_counter() - began:.0f} seconds")
    return results


if __name__ == "__main__":
    main()
