"""Random grids with random states, and the loss that the papers' experiments on gradients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import riskfield as rf

Distribution = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class RandomGrid:
    """A model on a square grid, and a state of each of its variables."""

    graph: rf.FactorGraph
    theta: Tensor
    states: Tensor  # (variable,)

    @classmethod
    def draw(
        cls, side: int, num_states: int, strength: float, seed: Sequence[int], distribution: Distribution
    ) -> RandomGrid:
        """Theta from `distribution`, times `strength` for the factors; all states are equally probable."""
        rng = np.random.default_rng(seed)
        graph = rf.grid(side, side, num_states)
        theta = torch.from_numpy(distribution(rng, graph.theta_size))
        theta[graph.node_size :] *= strength
        return cls(graph, theta, torch.from_numpy(rng.integers(num_states, size=graph.num_variables)))

    def loss(self, solution: rf.Solution) -> Tensor:
        """The univariate logistic loss, -sum_i log mu_i(x_i)."""
        return -solution.node_marginals[0].gather(-1, self.states[:, None]).log().sum()
