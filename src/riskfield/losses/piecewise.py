r"""Losses that treat parts of the model separately: piecewise likelihood, and independent variables.

    piecewise     -sum_c log softmax(theta_c)(x_c) - sum_i log softmax(theta_i)(x_i)
                                                              (Sutton & McCallum 2005; Domke 2013, section 4.1.5)
    independent   -sum_i log softmax(theta_i)(x_i)                                      (Domke 2013, section 8)

Piecewise likelihood replaces A(theta) by the sum of the log-partition functions of all factors and all variables. This
sum is an upper bound of A(theta), so the loss is an upper bound of the negative log-likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup
from riskfield.infer import Inference
from riskfield.kernels.logspace import NEG_INF
from riskfield.losses._class_weight import ClassWeight, checked_class_weight
from riskfield.losses._local import conditional_logits, log_total, surprise, univariate_surprise
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class Piecewise(AbstractLoss):
    """The sum of the negative log-likelihoods of all factors and all variables, each as a separate model.

    It needs no inference. Observed states restrict the tables of the factors they belong to. Hidden variables are left
    out, and so are the factors that contain them.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.losses import Piecewise
    >>> graph = chain(3, num_states=2)
    >>> Piecewise()(graph, graph.zeros(), torch.tensor([0, 1, 1]))  # 3 log 2 + 2 log 4
    tensor(4.8520, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Compute one softmax per factor and per variable."""
        total = univariate_surprise(graph, theta[..., : graph.node_size], target.labels)
        for group, tables in zip(graph.factor_groups, graph.factor_views(theta), strict=True):
            total = total + _pieces(group, tables.flatten(-group.arity), target)
        return total


@dataclass(frozen=True)
class Independent(AbstractLoss):
    """Logistic regression: each variable is predicted from its own potentials and its single-variable factors alone.

    This is the baseline for structured models. Its parameters are also a good starting point for training them.

    Arguments:
        class_weight: the weight of a target by its label, a number for each state; by default 1.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.losses import Independent
    >>> graph = chain(3, num_states=2)
    >>> Independent()(graph, graph.zeros(), torch.tensor([0, -1, 1]))
    tensor(1.3863, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    class_weight: ClassWeight = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weight", checked_class_weight(self.class_weight))

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Compute one softmax per variable."""
        single = [group for group in graph.factor_groups if group.arity == 1]
        logits = conditional_logits(graph, theta, target.known, single)
        return univariate_surprise(graph, logits, target.labels, self.class_weight)


def _pieces(group: FactorGroup, tables: Tensor, target: Target) -> Tensor:
    """Sum the surprise of the factors of a group, of shape (*batch); tables have shape (*batch, table, joint state)."""
    device = tables.device
    variables = index_tensor(group.variables, device)
    counted = (target.known[..., variables] >= 0).all(-1) & target.mask[..., variables].any(-1)
    joint = group.joint_states(target.known).clamp(min=0)
    index = index_tensor(group.tables, device)
    flat = tables.flatten(-2).expand(*joint.shape[:-1], -1)
    score = flat.gather(-1, index * group.table_size + joint)
    if target.evidence is None:
        return surprise(score, log_total(tables)[..., index], counted)
    given = target.evidence[..., variables]  # (*batch, factor, slot)
    possible = torch.ones((), dtype=torch.bool, device=device)
    for slot, size in enumerate(group.shape):
        agrees = (given[..., slot, None] < 0) | (given[..., slot, None] == torch.arange(size, device=device))
        axes = [size if other == slot else 1 for other in range(group.arity)]
        possible = possible & agrees.unflatten(-1, axes)
    restricted = torch.where(possible.flatten(-group.arity), tables[..., index, :], NEG_INF)
    return surprise(score, log_total(restricted), counted)
