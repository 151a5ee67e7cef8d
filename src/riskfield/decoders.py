r"""Decoders: predictions from marginals.

A *hard* decoder selects one state per variable. A *soft* decoder is a differentiable replacement for training: it
returns non-negative weights of the states, which sum to 1. The state that the hard decoder would select has a weight
close to 1.

| loss | best decoder | to train with |
|---|---|---|
| L1, errors | `MaxMarginal` | `SoftArgmax(temperature)` |
| squared error of fractions | `ExpectedValue` | `ExpectedValue` |
| F-measure | `EqualCount` (an approximation) | `SoftEqualCount(temperature)` |
| all variables right at once | `MAP` | |

(Stoyanov, Ropson & Eisner 2011, section 5.1 and table 2.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.message_passing import MaxProduct
from riskfield.inference.solution import Solution, modes

__all__ = [
    "MAP",
    "AbstractDecoder",
    "AbstractSoftDecoder",
    "EqualCount",
    "ExpectedValue",
    "MaxMarginal",
    "SoftArgmax",
    "SoftEqualCount",
    "decode",
]


class AbstractDecoder(ABC):
    """A rule that selects states from marginals."""

    @abstractmethod
    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> Tensor:
        """States, an int64 tensor of shape (*batch, variable).

        Arguments:
            graph: the structure.
            mu: of shape (*batch, mu).
            mask: bool, of shape (*batch, variable): which variables are predicted, for decoders that weigh them against
                each other; by default all.
        """

    def inference(self, inference: Inference) -> Inference:
        """The inference that this decoder needs, in place of `inference`. By default `inference` itself."""
        return inference

    def of_solution(self, solution: Solution, mask: Tensor | None = None) -> Tensor:
        """States from the solution that `inference` returned."""
        return self(solution.graph, solution.mu, mask)


class AbstractSoftDecoder(ABC):
    """A differentiable rule: weights per state from marginals."""

    @abstractmethod
    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Weights, shaped like `solution.node_marginals`: one tensor (*batch, node, state) per node group."""


@dataclass(frozen=True)
class MaxMarginal(AbstractDecoder):
    """The most probable state of every variable by itself (MPM): the fewest expected errors if the marginals are exact.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.decoders import MaxMarginal
    >>> graph = chain(2, num_states=2)
    >>> MaxMarginal()(graph, torch.tensor([0.9, 0.1, 0.4, 0.6, 0.4, 0.5, 0.0, 0.1]))
    tensor([0, 1])
    """

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> Tensor:
        """The largest entry of every univariate marginal."""
        return modes(graph, mu)


@dataclass(frozen=True)
class MAP(AbstractDecoder):
    """The most probable joint state, as far as `algorithm` finds it.

    Arguments:
        algorithm: what `decode` runs in place of the algorithm that computes marginals: `MaxProduct(...)`, exact on
            forests, or `ExactMAP()`, exact on graphs of small treewidth.
    """

    algorithm: AbstractAlgorithm = field(default_factory=MaxProduct)

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, AbstractAlgorithm):
            raise TypeError(f"`algorithm` must be an algorithm such as `MaxProduct()`. Got {self.algorithm!r}.")

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> Tensor:
        """The largest entry of every max-marginal. `decode` does better where states tie: it uses `solution.mode()`."""
        return modes(graph, mu)

    def of_solution(self, solution: Solution, mask: Tensor | None = None) -> Tensor:
        """The joint state that the algorithm finds."""
        return solution.mode()

    def inference(self, inference: Inference) -> Inference:
        """The algorithm of this decoder in place of that of `inference`."""
        return replace(inference, algorithm=self.algorithm, adjoint=None)


@dataclass(frozen=True)
class EqualCount(AbstractDecoder):
    """As many variables in state 1 as in state 0: those whose marginals lie above the median. Binary variables only.

    An approximation to the best decoder for the F-measure (Stoyanov, Ropson & Eisner 2011, section 5.1).
    """

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> Tensor:
        """1 where the marginal of state 1 is above the median of the predicted variables."""
        require_binary(graph, "EqualCount")
        positive = of_state_one(graph.node_views(mu), mu)
        return (positive > _median(positive, mask)).long()


@dataclass(frozen=True)
class ExpectedValue(AbstractSoftDecoder):
    """The marginals as they are: the best fractional prediction under squared error.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.decoders import ExpectedValue
    >>> graph = chain(1, num_states=2)
    >>> ExpectedValue()(graph, torch.tensor([0.9, 0.1]))
    (tensor([[0.9000, 0.1000]]),)
    """

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """The univariate marginals."""
        return graph.node_views(mu)


@dataclass(frozen=True)
class SoftArgmax(AbstractSoftDecoder):
    """mu(x)^(1/t) / sum_x' mu(x')^(1/t): `MaxMarginal` as t tends to 0, `ExpectedValue` at t = 1.

    Arguments:
        temperature: t, above 0; 0.1 by default.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.decoders import SoftArgmax
    >>> graph = chain(1, num_states=2)
    >>> SoftArgmax(0.5)(graph, torch.tensor([0.75, 0.25]))
    (tensor([[0.9000, 0.1000]]),)
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """The univariate marginals, sharpened."""
        return tuple(self._sharpen(view) for view in graph.node_views(mu))

    def _sharpen(self, marginals: Tensor) -> Tensor:
        possible = marginals > 0
        # A probability of 0 stays 0 without a gradient: its logarithm would give 0 times infinity.
        logits = torch.where(possible, torch.where(possible, marginals, 1).log() / self.temperature, float("-inf"))
        return logits.softmax(-1)


@dataclass(frozen=True)
class SoftEqualCount(AbstractSoftDecoder):
    """Sigmoid((logit mu(1) - median) / t), where the median is that of the logits: `EqualCount` as t tends to 0.

    With the median at probability 1/2 it is `SoftArgmax(t)`. Binary variables only.

    Arguments:
        temperature: t, above 0; 0.1 by default.
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Weights of states 0 and 1, by the distance of the logit from the median."""
        require_binary(graph, "SoftEqualCount")
        logits = _logit(of_state_one(graph.node_views(mu), mu))
        weight = torch.sigmoid((logits - _median(logits, mask)) / self.temperature)
        return (torch.stack([1 - weight, weight], -1),) if graph.num_variables else ()


def decode(
    graph: FactorGraph,
    theta: Tensor,
    inference: Inference,
    decoder: AbstractDecoder | None = None,
    *,
    evidence: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Predict states: run inference, then the decoder (by default `MaxMarginal()`).

    Arguments:
        graph: the structure.
        theta: of shape (*batch, theta).
        inference: how marginals are computed.
        decoder: how they become states.
        evidence: observed states, of shape (*batch, variable), -1 elsewhere. They are returned unchanged.
        mask: bool, of shape (*batch, variable): which variables are predicted, for decoders that compare variables
            with each other. By default all that are not observed. Exclude hidden variables here.

    Returns:
        An int64 tensor of shape (*batch, variable).

    >>> import torch
    >>> from riskfield import Inference, chain
    >>> from riskfield.decoders import MAP
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 0.5  # neighbours tend to agree
    >>> decode(graph, theta, Inference(), MAP(), evidence=torch.tensor([-1, 1, -1]))
    tensor([1, 1, 1])
    """
    decoder = as_decoder(decoder)
    with torch.no_grad():
        solution = decoder.inference(inference)(graph, theta.detach(), evidence=evidence)
        if mask is not None:
            mask = mask.to(theta.device)
        if evidence is None:
            return decoder.of_solution(solution, mask)
        evidence = evidence.to(theta.device)
        given = evidence >= 0
        return torch.where(given, evidence, decoder.of_solution(solution, ~given if mask is None else mask & ~given))


def as_decoder(decoder: AbstractDecoder | None) -> AbstractDecoder:
    """`decoder`, or `MaxMarginal()` where it is None."""
    decoder = MaxMarginal() if decoder is None else decoder
    if not isinstance(decoder, AbstractDecoder):
        raise TypeError(f"`decoder` must be a hard decoder such as `MaxMarginal()`. Got {decoder!r}.")
    return decoder


def of_state_one(views: tuple[Tensor, ...], mu: Tensor) -> Tensor:
    """The numbers of state 1, of shape (*batch, variable), in `views` of a graph of binary variables, or of none."""
    return views[0][..., 1] if views else mu.new_zeros(*mu.shape[:-1], 0)


def _logit(probability: Tensor) -> Tensor:
    """log p - log(1 - p), cut off near 0 and 1, where it has no gradient: neither a first nor a second one is NaN."""
    tiny = torch.finfo(probability.dtype).eps
    inside = (probability > tiny) & (probability < 1 - tiny)
    safe = torch.where(inside, probability, 0.5)
    certain = torch.where(probability > 0.5, -math.log(tiny), math.log(tiny))
    return torch.where(inside, safe.log() - (-safe).log1p(), certain.to(safe))


def _median(values: Tensor, mask: Tensor | None) -> Tensor:
    """The middle of the two middle values of those in `mask`, of shape (*batch, 1)."""
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    if values.shape[-1] == 0:
        return values.new_zeros(*values.shape[:-1], 1)
    ordered = torch.where(mask, values, float("inf")).sort(-1).values
    count = mask.sum(-1, keepdim=True).expand(*ordered.shape[:-1], 1)
    low, high = ((count - 1) // 2).clamp(min=0), (count // 2).clamp(max=ordered.shape[-1] - 1)
    return (ordered.gather(-1, low) + ordered.gather(-1, high)) / 2


def require_binary(graph: FactorGraph, name: str) -> None:
    """Refuse graphs with variables of other than two states."""
    other = (graph.num_states != 2).nonzero()[0]
    if len(other):
        raise ValueError(
            f"`{name}` is defined for binary variables. Variable {other[0]} has {graph.num_states[other[0]]} states."
        )


def _check_temperature(temperature: float) -> None:
    if isinstance(temperature, str) or not 0 < temperature < float("inf"):
        raise ValueError(f"`temperature` must be above 0 and finite. Got {temperature!r}.")
