"""The conditional random fields that Domke (2008) compares with, as the program they came from has them.

The paper names the program, Murphy and Schmidt's CRF2D (Vishwanathan et al. 2006), and the features: 1 and indicators
of y_i at a pixel, 1 and indicators of (y_i, y_j) at a pair. The rest is what a public copy of the program's source
says: x is -1 or 1, and log-potentials are

    x_i w . h(y_i),        x_i x_j v . g(y_i, y_j)

so that noisy pixels change how much two neighbours want to agree, and nothing else between them. Mean field starts from
the potentials of single pixels and goes through the picture pixel by pixel; belief propagation renews all messages at
once, undamped, from uniform ones. The first ends when the changes of all beliefs add up to less than 1e-3, for which no
change above 1e-6 stands here; the second when no belief changes by more than 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import riskfield as rf


class _Signed(nn.Module):
    """One linear function of the features, times a sign for every state."""

    def __init__(self, features: int, signs: Sequence[float]):
        super().__init__()
        self.linear = nn.Linear(features, 1, dtype=torch.float64)  # with a bias, the feature 1
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("signs", torch.tensor(signs, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        """(*batch, row, feature) to (*batch, row, state)."""
        out: Tensor = self.linear(features) * self.signs
        return out


def ising() -> rf.Conditional:
    """The program's potentials, all 0."""
    return rf.Conditional(_Signed(2, (-1, 1)), _Signed(4, (1, -1, -1, 1)))


@dataclass(frozen=True)
class MeanFieldFromPotentials(rf.MeanField):
    """Mean field that starts from the marginals which the potentials of single variables alone would give."""

    def problem(self, graph: rf.FactorGraph) -> None:
        """Runs start in a state of their own, so the kernels do not start them."""

    def start(
        self, graph: rf.FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None
    ) -> rf.inference.Run:
        """Begin from the potentials of variables, or from `messages`."""
        start = theta[:, : graph.node_size] if messages is None else messages
        return rf.MeanField(self.order).start(graph, theta, start, kernels)


def mean_field(num_pixels: int) -> rf.Inference:
    """The program's mean field."""
    return rf.Inference(MeanFieldFromPotentials(range(num_pixels)), rf.Stop(10_000, 1e-6))


def belief_propagation() -> rf.Inference:
    """The program's belief propagation."""
    # The paper stops after 10,000 iterations; what has not converged after 1000 oscillates.
    return rf.Inference(rf.MessagePassing(schedule=rf.Parallel()), rf.Stop(1000, 1e-3))
