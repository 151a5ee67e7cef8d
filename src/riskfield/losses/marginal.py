r"""Losses on marginals: how well the approximate marginals predict the labels.

Let mu be the marginal of a variable and x its label, or the marginal of a clique and x its joint label:

    logistic                  -log mu(x)                                        (Domke 2013, sections 4.2.1 and 4.2.3)
    quadratic                 -2 mu(x) + sum_x' mu(x')^2                        (Domke 2008, section 3.2)
    smoothed classification   S(max_{x' != x} mu(x') - mu(x)),  S(t) = 1 / (1 + exp(-alpha t))
                                                                                (Domke 2013, section 4.2.2)

summed over all targets, or over cliques. A clique is a factor of the graph. It is scored if at least one of its
variables is a target and none is hidden. Variables without factors do not contribute to clique losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup, NodeGroup
from riskfield.inference.solution import Solution
from riskfield.losses._class_weight import ClassWeight, checked_class_weight, weights_of
from riskfield.losses.loss import AbstractMarginalLoss

# compare(marginals, labels, counted) -> loss of every block, 0 where not counted.
# Shapes: marginals (*batch, block, state); labels, counted and the result (*batch, block).
Compare = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class UnivariateLogistic(AbstractMarginalLoss):
    """-sum_i log mu(x_i): the KL divergence from the true to the predicted univariate marginals, up to a constant.

    mu(x_i) is the marginal probability of the label x_i of variable i. This loss is the first choice if you will use
    the marginals. It is infinite if a label has probability 0.

    Arguments:
        class_weight: the weight of a target by its label, a number for each state; by default 1.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import UnivariateLogistic
    >>> graph = chain(3, num_states=2)
    >>> UnivariateLogistic()(graph, graph.zeros(), torch.tensor([[0, 1, 1], [0, -1, 1]]), Inference(Exact()))
    tensor([2.0794, 1.3863], dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    class_weight: ClassWeight = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weight", checked_class_weight(self.class_weight))

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum -log mu(x_i) over the targets."""
        return over_variables(solution.graph, solution.node_marginals, labels, mask, _logistic, self.class_weight)


@dataclass(frozen=True)
class CliqueLogistic(AbstractMarginalLoss):
    """-sum_c log mu(x_c): the logistic loss of cliques. Consistent with exact inference and a well-specified model.

    A clique is a factor of the graph, and mu(x_c) is the marginal probability of the joint label x_c of its variables.
    A clique is scored if at least one of its variables is a target and none is hidden. Variables without factors do not
    contribute.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import CliqueLogistic
    >>> graph = chain(3, num_states=2)
    >>> CliqueLogistic()(graph, graph.zeros(), torch.tensor([[0, 1, 1], [0, -1, 1]]), Inference(Exact()))
    tensor([2.7726, 0.0000], dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum -log mu(x_c) over the scored cliques."""
        return _over_cliques(solution, labels, mask, _logistic)


@dataclass(frozen=True)
class UnivariateQuadratic(AbstractMarginalLoss):
    """sum_i (-2 mu(x_i) + sum_x' mu(x')^2): the Brier score minus 1 per variable.

    mu(x) is the marginal probability of state x of variable i, and x_i is its label. The loss is bounded, so outliers
    affect it less than the logistic loss. But its gradient with respect to theta vanishes where a wrong state has a
    probability close to 1, so training may end in a poor local minimum.

    Arguments:
        class_weight: the weight of a target by its label, a number for each state; by default 1.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import UnivariateQuadratic
    >>> graph = chain(3, num_states=2)
    >>> UnivariateQuadratic()(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))
    tensor(-1.5000, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    class_weight: ClassWeight = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weight", checked_class_weight(self.class_weight))

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum -2 mu(x_i) + sum_x' mu(x')^2 over the targets."""
        return over_variables(solution.graph, solution.node_marginals, labels, mask, _quadratic, self.class_weight)


@dataclass(frozen=True)
class CliqueQuadratic(AbstractMarginalLoss):
    """sum_c (-2 mu(x_c) + sum_x' mu(x')^2): the quadratic loss of the cliques that `CliqueLogistic` scores."""

    additive: ClassVar[bool] = True

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum -2 mu(x_c) + sum_x' mu(x')^2 over the scored cliques."""
        return _over_cliques(solution, labels, mask, _quadratic)


@dataclass(frozen=True)
class SmoothedClassification(AbstractMarginalLoss):
    """sum_i S(max_{x' != x_i} mu(x') - mu(x_i)): a smoothed count of the labels that `MaxMarginal` would get wrong.

    mu are the marginal probabilities of variable i, x_i is its label, and S(t) = 1 / (1 + exp(-alpha t)). The loss has
    many local minima, so start from parameters that were trained with another loss.

    Arguments:
        alpha: the steepness of the sigmoid S, by default 15. With a larger value the loss is closer to the number of
            errors, and harder to minimise.
        class_weight: the weight of a target by its label, a number for each state; by default 1.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import SmoothedClassification
    >>> graph = chain(3, num_states=2)
    >>> SmoothedClassification(50)(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))
    tensor(1.5000, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    alpha: float = 15.0
    class_weight: ClassWeight = None

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        object.__setattr__(self, "class_weight", checked_class_weight(self.class_weight))

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum S(max_{x' != x_i} mu(x') - mu(x_i)) over the targets."""
        compare = _smoothed(self.alpha)
        return over_variables(solution.graph, solution.node_marginals, labels, mask, compare, self.class_weight)


@dataclass(frozen=True)
class CliqueSmoothedClassification(AbstractMarginalLoss):
    """sum_c S(max_{x' != x_c} mu(x') - mu(x_c)): `SmoothedClassification` of the joint states of cliques.

    It scores the same cliques as `CliqueLogistic`.

    Arguments:
        alpha: the steepness of the sigmoid S, by default 15.
    """

    additive: ClassVar[bool] = True

    alpha: float = 15.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Sum S(max_{x' != x_c} mu(x') - mu(x_c)) over the scored cliques."""
        return _over_cliques(solution, labels, mask, _smoothed(self.alpha))


def over_variables(
    graph: FactorGraph,
    nodes: Sequence[Tensor],
    labels: Tensor,
    mask: Tensor,
    compare: Compare,
    class_weight: ClassWeight = None,
) -> Tensor:
    """Sum `compare` over the targets, of shape (*batch). `nodes` is laid out like `solution.node_marginals`."""
    total = nodes[0].new_zeros(labels.shape[:-1])
    for k, (group, view) in enumerate(zip(graph.node_groups, nodes, strict=True)):
        own, counted = labels, mask
        if len(group.variables) < graph.num_variables:
            variables = _kept_index(graph, group, k, labels.device)
            own, counted = labels.index_select(-1, variables), mask.index_select(-1, variables)
        values = compare(view, own, counted)
        if class_weight is not None:
            values = values * weights_of(own, class_weight, view)
        total = total + values.sum(-1)
    return total


def _over_cliques(solution: Solution, labels: Tensor, mask: Tensor, compare: Compare) -> Tensor:
    """Sum `compare` over the scored cliques, of shape (*batch)."""
    total = solution.mu.new_zeros(labels.shape[:-1])
    groups = zip(solution.graph.factor_groups, solution.factor_marginals, strict=True)
    for k, (group, view) in enumerate(groups):
        variables = _kept_index(solution.graph, group, k, labels.device)
        states = labels[..., variables]
        counted = (states >= 0).all(-1) & mask[..., variables].any(-1)
        total = total + compare(view.flatten(-group.arity), group.joint_entries(states), counted).sum(-1)
    return total


def _kept_index(graph: FactorGraph, group: NodeGroup | FactorGroup, number: int, device: torch.device) -> Tensor:
    """The variables of a group, kept with the graph, so that they are not copied to a GPU in every iteration."""
    key = "variables", type(group).__name__, number, device
    return graph.derived(key, lambda: index_tensor(group.variables, device))


def at_labels(blocks: Tensor, labels: Tensor) -> Tensor:
    """Return the entries at the labels. Where a label is -1 the entry is arbitrary."""
    blocks = blocks.expand(*labels.shape, blocks.shape[-1])
    return blocks.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _logistic(blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    # Entries that are not scored are replaced by 1 before the logarithm: log 0 would make their gradient NaN.
    return -torch.where(counted, at_labels(blocks, labels), 1).log()


def _quadratic(blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, blocks.square().sum(-1) - 2 * at_labels(blocks, labels), 0)


def _smoothed(alpha: float) -> Compare:
    def compare(blocks: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        is_label = torch.arange(blocks.shape[-1], device=blocks.device) == labels.unsqueeze(-1)
        rival = blocks.masked_fill(is_label, float("-inf")).amax(-1)
        return torch.where(counted, torch.sigmoid(alpha * (rival - at_labels(blocks, labels))), 0)

    return compare


def _check_alpha(alpha: float) -> None:
    if isinstance(alpha, str) or not 0 < alpha < float("inf"):
        raise ValueError(f"`alpha` must be above 0 and finite. Got {alpha!r}.")
