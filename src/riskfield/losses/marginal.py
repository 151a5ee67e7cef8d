r"""Losses on marginals: how well the marginals that were really computed predict the labels.

With mu a univariate marginal and x its label, or a clique marginal and the joint label of the clique,

    logistic                  -log mu(x)                                        (Domke 2013, sections 4.2.1 and 4.2.3)
    quadratic                 -2 mu(x) + sum_x' mu(x')^2                        (Domke 2008, section 3.2)
    smoothed classification   S(max_{x' != x} mu(x') - mu(x)),  S(t) = 1 / (1 + exp(-alpha t))
                                                                                (Domke 2013, section 4.2.2)

summed over counted variables, or over cliques. A clique is counted if at least one of its variables is and none is
hidden. The clique is a factor of the graph; variables without factors have no part in clique losses.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.inference.solution import Solution
from riskfield.losses.loss import AbstractMarginalLoss


class _Univariate(AbstractMarginalLoss):
    """A sum over counted variables."""

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Compare every univariate marginal with its label."""
        total = solution.mu.new_zeros(labels.shape[:-1])
        for group, view in zip(solution.graph.node_groups, solution.node_marginals, strict=True):
            variables = index_tensor(group.variables, labels.device)
            total = total + self.compare(view, labels[..., variables], mask[..., variables]).sum(-1)
        return total

    @abstractmethod
    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """Compare marginals (*batch, block, state) with labels (*batch, block); 0 where not counted."""


class _Clique(AbstractMarginalLoss):
    """A sum over counted cliques."""

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Compare every clique marginal with its joint label."""
        total = solution.mu.new_zeros(labels.shape[:-1])
        for group, view in zip(solution.graph.factor_groups, solution.factor_marginals, strict=True):
            variables = index_tensor(group.variables, labels.device)
            counted = (labels[..., variables] >= 0).all(-1) & mask[..., variables].any(-1)
            joint = group.joint_states(labels)
            total = total + self.compare(view.flatten(-group.arity), joint, counted).sum(-1)
        return total

    @abstractmethod
    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """Compare marginals (*batch, block, state) with labels (*batch, block); 0 where not counted."""


@dataclass(frozen=True)
class UnivariateLogistic(_Univariate):
    """-sum_i log mu(x_i): the divergence of the predicted from the true univariate marginals (up to a constant).

    The first choice where marginals are what will be used. It is infinite if a label has probability 0.

    >>> from riskfield import Exact, Inference, UnivariateLogistic, chain
    >>> graph = chain(3, num_states=2)
    >>> UnivariateLogistic()(graph, graph.zeros(), torch.tensor([[0, 1, 1], [0, -1, 1]]), Inference(Exact()))
    tensor([2.0794, 1.3863], dtype=torch.float64)
    """

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """-log mu(x)."""
        return _logistic(blocks, labels, counted)


@dataclass(frozen=True)
class CliqueLogistic(_Clique):
    """-sum_c log mu(x_c): the same for cliques. With exact inference and a true model it finds the true parameters.

    >>> from riskfield import CliqueLogistic, Exact, Inference, chain
    >>> graph = chain(3, num_states=2)
    >>> CliqueLogistic()(graph, graph.zeros(), torch.tensor([[0, 1, 1], [0, -1, 1]]), Inference(Exact()))
    tensor([2.7726, 0.0000], dtype=torch.float64)
    """

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """-log mu(x)."""
        return _logistic(blocks, labels, counted)


@dataclass(frozen=True)
class UnivariateQuadratic(_Univariate):
    """sum_i (-2 mu(x_i) + sum_x' mu(x')^2): the squared distance to the true marginals (the Brier score less 1).

    Bounded, so less upset by outliers than the logistic loss, and more often stuck.
    """

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """-2 mu(x) + sum_x' mu(x')^2."""
        return _quadratic(blocks, labels, counted)


@dataclass(frozen=True)
class CliqueQuadratic(_Clique):
    """sum_c (-2 mu(x_c) + sum_x' mu(x')^2): the same for cliques."""

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """-2 mu(x) + sum_x' mu(x')^2."""
        return _quadratic(blocks, labels, counted)


@dataclass(frozen=True)
class SmoothedClassification(_Univariate):
    """sum_i S(max_{x' != x_i} mu(x') - mu(x_i)), S a sigmoid: about how many variables the largest marginal gets wrong.

    Initialise it from another criterion, since it has many local minima.

    Arguments:
        alpha: the steepness of the sigmoid: the larger, the closer to the number of errors and the harder to minimise.

    >>> from riskfield import Exact, Inference, chain
    >>> graph = chain(3, num_states=2)
    >>> SmoothedClassification(50)(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))
    tensor(1.5000, dtype=torch.float64)
    """

    alpha: float = 15.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """S(max_{x' != x} mu(x') - mu(x))."""
        return _smoothed(blocks, labels, counted, self.alpha)


@dataclass(frozen=True)
class CliqueSmoothedClassification(_Clique):
    """sum_c S(max_{x' != x_c} mu(x') - mu(x_c)): the same for cliques and their joint states.

    Arguments:
        alpha: the steepness of the sigmoid.
    """

    alpha: float = 15.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def compare(self, blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """S(max_{x' != x} mu(x') - mu(x))."""
        return _smoothed(blocks, labels, counted, self.alpha)


def _logistic(blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    # The logarithm is not taken, and so has no infinite slope, where the probability does not count.
    return -torch.where(counted, _at(blocks, labels), 1).log()


def _quadratic(blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, blocks.square().sum(-1) - 2 * _at(blocks, labels), 0)


def _smoothed(blocks: Tensor, labels: Tensor, counted: Tensor, alpha: float) -> Tensor:
    is_label = torch.arange(blocks.shape[-1], device=blocks.device) == labels.unsqueeze(-1)
    rival = blocks.masked_fill(is_label, float("-inf")).amax(-1)
    return torch.where(counted, torch.sigmoid(alpha * (rival - _at(blocks, labels))), 0)


def _at(blocks: Tensor, labels: Tensor) -> Tensor:
    """The entries at the labels; any entry where a label is -1."""
    blocks = blocks.expand(*labels.shape, blocks.shape[-1])
    return blocks.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _check_alpha(alpha: float) -> None:
    if isinstance(alpha, str) or not 0 < alpha < float("inf"):
        raise ValueError(f"`alpha` must be above 0 and finite. Got {alpha!r}.")
