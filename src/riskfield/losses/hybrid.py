"""`Hybrid`: a weighted sum of two losses, such as the loss of interest and a smoother one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.losses.loss import AbstractLoss, AbstractMarginalLoss, LossLike, Target, as_loss, marginals


@dataclass(frozen=True)
class Hybrid(AbstractLoss):
    """weight a + (1 - weight) b (Stoyanov, Ropson & Eisner 2011, section 7).

    Two losses on marginals share one run of inference. A loss whose weight is 0 is not computed.

    Arguments:
        a, b: losses, or functions of (solution, labels, mask).
        weight: the weight of `a`, in [0, 1].

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import Hybrid, UnivariateLogistic, UnivariateQuadratic
    >>> graph = chain(3, num_states=2)
    >>> loss = Hybrid(UnivariateLogistic(), UnivariateQuadratic(), weight=0.5)
    >>> loss(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))  # (3 log 2 - 3/2) / 2
    tensor(0.2897, dtype=torch.float64)
    """

    a: LossLike
    b: LossLike
    weight: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "a", as_loss(self.a))
        object.__setattr__(self, "b", as_loss(self.b))
        if isinstance(self.weight, str) or not 0 <= self.weight <= 1:
            raise ValueError(f"`weight` must lie in [0, 1]. Got {self.weight!r}.")

    @property
    def lower_bound(self) -> float:
        """The weighted sum of the bounds of both losses."""
        return sum(weight * loss.lower_bound for weight, loss in self._parts)

    @property
    def comparable(self) -> bool:
        """Whether both losses are comparable."""
        return all(loss.comparable for _, loss in self._parts)

    @property
    def _parts(self) -> list[tuple[float, AbstractLoss]]:
        pairs = ((self.weight, self.a), (1 - self.weight, self.b))
        return [(weight, as_loss(loss)) for weight, loss in pairs if weight > 0]

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Evaluate both losses, on one run of inference if both are functions of the marginals."""
        a, b = as_loss(self.a), as_loss(self.b)
        if self.weight == 1:
            return a.evaluate(graph, theta, target, inference)
        if self.weight == 0:
            return b.evaluate(graph, theta, target, inference)
        if isinstance(a, AbstractMarginalLoss) and isinstance(b, AbstractMarginalLoss):
            solution = marginals(graph, theta, target, self.require(inference))
            of_a, of_b = (loss.of_solution(solution, target.known, target.mask) for loss in (a, b))
        else:
            of_a, of_b = (loss.evaluate(graph, theta, target, inference) for loss in (a, b))
        return self.weight * of_a + (1 - self.weight) * of_b
