r"""Contrastive divergence: samples from short Gibbs chains that start at the data replace the marginals.

    gradient  f(x~) - f(x^),        x~ the states that k sweeps of Gibbs sampling reach from x^            (Hinton 2002)

The value theta . f(x~) - theta . f(x^), with x~ held fixed, has this gradient. It is not an objective: values at
different theta cannot be compared. Use an optimiser that does no line search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.inference.gibbs import sample
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class ContrastiveDivergence(AbstractLoss):
    """theta . f(x~) - theta . f(x^), where x~ are the states that Gibbs sampling reaches from the labels x^.

    theta . f(x) is the score of states x, as `graph.score` computes it. Hidden variables are drawn first, given the
    labels, with the same number of sweeps. The loss needs no inference. Only its gradient is meaningful: values at
    different theta cannot be compared. Use an optimiser without a line search, such as `Torch`.

    Arguments:
        steps: the number of sweeps, by default 1. With more sweeps the gradient comes closer to that of the likelihood.
        seed: an integer makes every call use the same random numbers. By default torch's global generator is used.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.losses import ContrastiveDivergence
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> ContrastiveDivergence(steps=1, seed=0)(graph, theta, torch.zeros(500, 3, dtype=torch.int64)).mean().backward()
    >>> graph.node(theta.grad, 0).round(decimals=1)  # half of the samples have left state 0
    tensor([-0.5000, 0.5000], dtype=torch.float64)
    """

    steps: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int | np.integer) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"`steps` must be a positive integer. Got {self.steps!r}.")

    @property
    def comparable(self) -> bool:
        """False: only the gradient is meaningful."""
        return False

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Run the chains from the labels and subtract the scores."""
        generator = None if self.seed is None else torch.Generator(theta.device).manual_seed(self.seed)
        data = target.known
        if not target.complete:
            drawn = sample(graph, theta.detach(), 1, burn_in=self.steps - 1, seed=generator, evidence=target.known)
            data = drawn.reshape(data.shape)
        reached = self._sample_from(graph, theta.detach(), data, target.evidence, generator)
        return graph.score(theta, reached) - graph.score(theta, data)

    def _sample_from(
        self,
        graph: FactorGraph,
        theta: Tensor,
        data: Tensor,
        evidence: Tensor | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        # When all examples share one model, each example is a chain of it and theta is not repeated.
        shared = theta.ndim == 1 and (evidence is None or evidence.ndim == 1)
        start = data.reshape(-1, graph.num_variables) if shared else data.unsqueeze(-2)
        if not len(start):
            return data
        if evidence is not None and not shared:
            evidence = evidence.expand(data.shape)
        drawn = sample(
            graph,
            theta,
            1,
            chains=len(start) if shared else 1,
            burn_in=self.steps - 1,
            seed=generator,
            evidence=evidence,
            start=start,
        )
        return drawn.reshape(data.shape)
