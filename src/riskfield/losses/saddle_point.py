r"""The saddle-point approximation: the most probable joint state in place of the marginals.

    max_x theta . f(x) - theta . f(x^),        gradient  f(x*) - f(x^)                       (Domke 2013, section 4.1.3)

It is the likelihood's gradient if all probability sat at the maximiser x*: the structured perceptron. With hidden
variables the second term is the maximum with the observed ones clamped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.message_passing import MaxProduct
from riskfield.inference.settings import Inference, Role
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class SaddlePoint(AbstractLoss):
    """theta . f(x*) - theta . f(x^), x* the most probable joint state that `algorithm` finds.

    For sharply peaked distributions. It is 0 wherever the labels are the most probable state, so it asks for no margin
    and does not fix the scale of theta; it is negative where the search for x* fails to do as well as the labels. The
    algorithm and the adjoint of `inference` are not used, only when it stops; it may be left out.

    Arguments:
        algorithm: how x* is found, by `solution.mode()`.

    >>> import torch
    >>> from riskfield import SaddlePoint, chain
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
        """Find the maximiser, and that given the labels where something is hidden."""
        search = replace(inference or Inference(), algorithm=self.algorithm, adjoint=None)
        best = search(graph, theta.detach(), evidence=target.evidence).mode()
        labels = target.known
        if not target.complete:
            labels = search(graph, theta.detach(), evidence=target.known, role=Role.CLAMPED).mode()
        return graph.score(theta, best) - graph.score(theta, labels)
