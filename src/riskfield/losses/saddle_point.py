r"""The saddle-point approximation: the most probable joint state replaces the marginals.

    max_x theta . f(x) - theta . f(x^),        gradient  f(x*) - f(x^)                       (Domke 2013, section 4.1.3)

This is the gradient of the negative log-likelihood if the maximiser x* had probability 1; it is the update of the
structured perceptron. With hidden variables the second term is the maximum with the known states clamped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, Role
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.message_passing import MaxProduct
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class SaddlePoint(AbstractLoss):
    """theta . f(x*) - theta . f(x^), where x* is the most probable joint state that `algorithm` finds.

    theta . f(x) is the score of states x, as `graph.score` computes it, and x^ are the labels; the algorithm completes
    them where variables are hidden. Use this loss for sharply peaked distributions. It is 0 wherever the labels are the
    most probable state, so it enforces no margin and does not fix the scale of theta. It is negative where the search
    finds an x* that scores less than the labels. Only the stopping rule of `inference` is used, not its algorithm or
    adjoint; `inference` may be omitted.

    Arguments:
        algorithm: finds x*, as `solution.mode()`; by default `MaxProduct()`.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.losses import SaddlePoint
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.node(theta, 0)[1] = 1.0
    >>> SaddlePoint()(graph, theta, torch.tensor([0, 1, 1]))
    tensor(1., dtype=torch.float64)
    """

    algorithm: AbstractAlgorithm = field(default_factory=MaxProduct)

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, AbstractAlgorithm):
            raise TypeError(f"`algorithm` must be an algorithm such as `MaxProduct()`. Got {self.algorithm!r}.")

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Find the maximiser and, if variables are hidden, the maximiser given the known states."""
        search = replace(inference or Inference(), algorithm=self.algorithm, adjoint=None)
        best = search(graph, theta.detach(), evidence=target.evidence).mode()
        labels = target.known
        if not target.complete:
            labels = search(graph, theta.detach(), evidence=target.known, role=Role.CLAMPED).mode()
        return graph.score(theta, best) - graph.score(theta, labels)
