r"""Decoders: predictions from marginals.

A *hard* decoder selects one state per variable. A *soft* decoder is a differentiable replacement for training: it
returns non-negative weights of the states, which sum to 1. At a low temperature, the state that the hard decoder
selects has a weight close to 1, unless two states are almost equally probable.

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
        """Return states, an int64 tensor of shape (*batch, variable).

        Arguments:
            graph: the structure.
            mu: marginals in the layout of the graph, of shape (*batch, mu).
            mask: bool, of shape (*batch, variable): which variables are predicted, for decoders that compare variables
                with each other; by default all.
        """

    def inference(self, inference: Inference) -> Inference:
        """Return the inference that `decode` runs for this decoder. Unless overridden, it is `inference` itself.

        Arguments:
            inference: the inference that was passed to `decode`.
        """
        return inference

    def of_solution(self, solution: Solution, mask: Tensor | None = None) -> Tensor:
        """States from the solution that `inference` returned."""
        return self(solution.graph, solution.mu, mask)


class AbstractSoftDecoder(ABC):
    """A differentiable rule that computes weights of the states from marginals."""

    @abstractmethod
    def __call__(self, graph: FactorGraph, mu: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return weights, shaped like `solution.node_marginals`: one tensor (*batch, node, state) per node group.

        Arguments:
            graph: the structure.
            mu: marginals in the layout of the graph, of shape (*batch, mu).
            mask: bool, of shape (*batch, variable): which variables are predicted, for decoders that compare variables
                with each other; by default all.
        """


@dataclass(frozen=True)
class MaxMarginal(AbstractDecoder):
    """The most probable state of each variable by itself (MPM).

    If the marginals are exact, no other decoder makes fewer errors in expectation.

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
    """The most probable joint state that `algorithm` finds.

    Arguments:
        algorithm: what `decode` runs instead of the algorithm that computes marginals: `MaxProduct()` (the default),
            which is exact on forests, or `ExactMAP()`, which is exact but needs a small treewidth.

    >>> import torch
    >>> from riskfield import ExactMAP, Inference, grid
    >>> from riskfield.decoders import MAP, decode
    >>> graph = grid(2, 3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:] = torch.eye(2)  # neighbours tend to agree
    >>> graph.node(theta, 0)[1] = 0.1  # the first variable tends to state 1
    >>> decode(graph, theta, Inference(), MAP(ExactMAP()))
    tensor([1, 1, 1, 1, 1, 1])
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
        """Return `inference` with the algorithm of this decoder instead of its own."""
        return replace(inference, algorithm=self.algorithm, adjoint=None)


@dataclass(frozen=True)
class EqualCount(AbstractDecoder):
    """State 1 for the variables whose marginal of state 1 is above the median, and state 0 for the others.

    About half of the variables get each state. It approximates the best decoder for the F-measure (Stoyanov, Ropson &
    Eisner 2011, section 5.1). Binary variables only.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.decoders import EqualCount
    >>> graph = chain(4, num_states=2)
    >>> mu = torch.zeros(graph.mu_size)
    >>> graph.node_views(mu)[0][:, 1] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    >>> EqualCount()(graph, mu)
    tensor([0, 1, 0, 1])
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
    """The weight of state x is mu(x)^(1/t) / sum_x' mu(x')^(1/t), where mu is the marginal of a variable.

    It tends to `MaxMarginal` as t tends to 0, and at t = 1 it is `ExpectedValue`.

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
    """The weight of state 1 is sigmoid((logit mu(1) - m) / t), where m is the median of logit mu(1) over the variables.

    It tends to `EqualCount` as t tends to 0. If the median of the marginals is 1/2, it is `SoftArgmax(t)`. Binary
    variables only.

    Arguments:
        temperature: t, above 0; 0.1 by default.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.decoders import SoftEqualCount
    >>> graph = chain(2, num_states=2)
    >>> mu = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.7, 0.2, 0.1, 0.0])  # of two variables, then of their pair
    >>> SoftEqualCount(1.0)(graph, mu)[0].round(decimals=2)
    tensor([[0.6000, 0.4000],
            [0.4000, 0.6000]])
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
    """Predict states: run inference, then the decoder.

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (*batch, theta).
        inference: how marginals are computed. `MAP` runs its own algorithm instead.
        decoder: how marginals become states; by default `MaxMarginal()`.
        evidence: observed states, of shape (*batch, variable), -1 elsewhere; by default none. They are returned
            unchanged.
        mask: bool, of shape (*batch, variable): which variables are predicted, for decoders that compare variables
            with each other. By default all that are not observed. Exclude hidden variables here.

    Returns:
        An int64 tensor of shape (*batch, variable).

    Raises:
        TypeError: if `decoder` is not a hard decoder.

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
    """`decoder`, or `MaxMarginal()` if it is None."""
    decoder = MaxMarginal() if decoder is None else decoder
    if not isinstance(decoder, AbstractDecoder):
        raise TypeError(f"`decoder` must be a hard decoder such as `MaxMarginal()`. Got {decoder!r}.")
    return decoder


def of_state_one(views: tuple[Tensor, ...], mu: Tensor) -> Tensor:
    """The entries of state 1, of shape (*batch, variable), in the `views` of a graph of binary variables."""
    return views[0][..., 1] if views else mu.new_zeros(*mu.shape[:-1], 0)


def _logit(probability: Tensor) -> Tensor:
    """log p - log(1 - p), cut off near 0 and 1, where it has no gradient: neither a first nor a second one is NaN."""
    tiny = torch.finfo(probability.dtype).eps
    inside = (probability > tiny) & (probability < 1 - tiny)
    safe = torch.where(inside, probability, 0.5)
    certain = torch.where(probability > 0.5, -math.log(tiny), math.log(tiny))
    return torch.where(inside, safe.log() - (-safe).log1p(), certain.to(safe))


def _median(values: Tensor, mask: Tensor | None) -> Tensor:
    """The median of the values in `mask`, of shape (*batch, 1): of an even number, the mean of the two middle ones."""
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
