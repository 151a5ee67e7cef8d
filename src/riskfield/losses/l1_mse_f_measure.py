r"""Losses on decoded marginals, for empirical risk minimisation through inference and decoder.

Let d_i(x) be the weight that a soft decoder gives to state x of variable i, and x_i the label of i:

    L1          sum_i 1/2 sum_x |d_i(x) - [x = x_i]|  =  sum_i (1 - d_i(x_i))
    MSE         sum_i 1/2 sum_x (d_i(x) - [x = x_i])^2
    F-measure   k (1 - F),        F = 2 sum_i y_i x_i / (sum_i y_i + sum_i x_i),  y_i = d_i(1), k variables

(Stoyanov, Ropson & Eisner 2011, section 5.1). For binary variables the first two are |y_i - x_i| and (y_i - x_i)^2. The
paper divides by k, as `empirical_risk(..., per_variable=True)` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from riskfield.decoders import (
    AbstractSoftDecoder,
    ExpectedValue,
    SoftArgmax,
    SoftEqualCount,
    of_state_one,
    require_binary,
)
from riskfield.inference.solution import Solution
from riskfield.losses.loss import AbstractMarginalLoss
from riskfield.losses.marginal import at_labels, over_variables


@dataclass(frozen=True)
class L1(AbstractMarginalLoss):
    """sum_i (1 - d_i(x_i)): a differentiable count of the variables that the decoder gets wrong.

    d_i(x) is the weight that the decoder gives to state x of variable i, and x_i is the label of i.

    Arguments:
        decoder: a soft decoder; by default `SoftArgmax()`.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.decoders import SoftArgmax
    >>> from riskfield.losses import L1
    >>> graph = chain(3, num_states=2)
    >>> L1(SoftArgmax(0.1))(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))
    tensor(1.5000, dtype=torch.float64)
    """

    decoder: AbstractSoftDecoder = field(default_factory=SoftArgmax)

    def __post_init__(self) -> None:
        _check_decoder(self.decoder)

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum 1 - d_i(x_i) over the targets."""
        decoded = self.decoder(solution.graph, solution.mu, mask)
        return over_variables(solution.graph, decoded, labels, mask, _missed)


@dataclass(frozen=True)
class MSE(AbstractMarginalLoss):
    """sum_i 1/2 sum_x (d_i(x) - [x = x_i])^2: the squared error of fractional predictions.

    d_i(x) is the weight that the decoder gives to state x of variable i; [x = x_i] is 1 for the label x_i of i, else 0.

    Arguments:
        decoder: a soft decoder; by default `ExpectedValue()`.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import MSE
    >>> graph = chain(3, num_states=2)
    >>> MSE()(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))
    tensor(0.7500, dtype=torch.float64)
    """

    decoder: AbstractSoftDecoder = field(default_factory=ExpectedValue)

    def __post_init__(self) -> None:
        _check_decoder(self.decoder)

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum 1/2 sum_x (d_i(x) - [x = x_i])^2 over the targets."""
        decoded = self.decoder(solution.graph, solution.mu, mask)
        return over_variables(solution.graph, decoded, labels, mask, squared_error)


@dataclass(frozen=True)
class FMeasure(AbstractMarginalLoss):
    """k (1 - F), where F is the harmonic mean of precision and recall of state 1 over the k targets of an example.

    Binary variables only. The factor k puts it on the scale of the other losses, which are sums over variables, so that
    `Hybrid` weights it as the paper does.

    Arguments:
        decoder: a soft decoder; by default `SoftEqualCount()`.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import FMeasure
    >>> graph = chain(3, num_states=2)
    >>> FMeasure()(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))  # F = 4/7
    tensor(1.2857, dtype=torch.float64)
    """

    decoder: AbstractSoftDecoder = field(default_factory=SoftEqualCount)

    def __post_init__(self) -> None:
        _check_decoder(self.decoder)

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Return k (1 - F) of each example."""
        require_binary(solution.graph, "FMeasure")
        predicted = of_state_one(self.decoder(solution.graph, solution.mu, mask), solution.mu)
        return mask.sum(-1) * (1 - soft_f_measure(predicted, labels, mask))


def soft_f_measure(predicted: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """F of each example, of shape (*batch). It is 1 if no label is 1 and all weights of state 1 are 0.

    Arguments:
        predicted: weights of state 1, of shape (*batch, variable).
        labels: of shape (*batch, variable).
        mask: which variables are targets.
    """
    predicted = torch.where(mask, predicted, 0)
    truth = torch.where(mask, labels, 0)
    total = predicted.sum(-1) + truth.sum(-1)
    defined = total > 0
    return torch.where(defined, 2 * (predicted * truth).sum(-1) / torch.where(defined, total, 1), 1)


def squared_error(weights: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """1/2 sum_x (d(x) - [x = label])^2, and 0 where `counted` is False."""
    return torch.where(counted, (weights.square().sum(-1) + 1) / 2 - at_labels(weights, labels), 0)


def _missed(weights: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, 1 - at_labels(weights, labels), 0)


def _check_decoder(decoder: object) -> None:
    if not isinstance(decoder, AbstractSoftDecoder):
        raise TypeError(f"`decoder` must be a soft decoder such as `SoftArgmax(0.1)`. Got {decoder!r}.")
