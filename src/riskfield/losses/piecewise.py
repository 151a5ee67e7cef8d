r"""Losses that take the model apart: piecewise likelihood, and variables by themselves.

    piecewise     -sum_c log softmax(theta_c)(x_c) - sum_i log softmax(theta_i)(x_i)
                                                              (Sutton & McCallum 2005; Domke 2013, section 4.1.5)
    independent   -sum_i log softmax(theta_i)(x_i)                                      (Domke 2013, section 8)

Piecewise likelihood replaces A(theta) by the sum of the log-partition functions of all factors and all variables, which
is never smaller: the loss is never below minus the log-likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup
from riskfield.inference.settings import Inference
from riskfield.kernels.logspace import NEG_INF
from riskfield.losses._local import conditional_logits, log_total, surprise, univariate_surprise
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class Piecewise(AbstractLoss):
    """Every factor and every variable a model of its own, without inference.

    States given as evidence restrict the factors around them. Hidden variables are left out, and so are the factors
    that touch them.

    >>> import torch
    >>> from riskfield import Piecewise, chain
    >>> graph = chain(3, num_states=2)
    >>> Piecewise()(graph, graph.zeros(), torch.tensor([0, 1, 1]))  # 3 log 2 + 2 log 4
    tensor(4.8520, dtype=torch.float64)
    """

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """One softmax per factor and per variable."""
        total = univariate_surprise(graph, theta[..., : graph.node_size], target.labels)
        for group, tables in zip(graph.factor_groups, graph.factor_views(theta), strict=True):
            total = total + _pieces(group, tables.flatten(-group.arity), target)
        return total


@dataclass(frozen=True)
class Independent(AbstractLoss):
    """Every variable by its own potentials (and factors of that variable alone): logistic regression.

    The baseline that structured models have to beat, and a good start for training them.

    >>> import torch
    >>> from riskfield import Independent, chain
    >>> graph = chain(3, num_states=2)
    >>> Independent()(graph, graph.zeros(), torch.tensor([0, -1, 1]))
    tensor(1.3863, dtype=torch.float64)
    """

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """One softmax per variable."""
        single = [group for group in graph.factor_groups if group.arity == 1]
        return univariate_surprise(graph, conditional_logits(graph, theta, target.known, single), target.labels)


def _pieces(group: FactorGroup, tables: Tensor, target: Target) -> Tensor:
    """The surprise of the factors of a group, of shape (*batch); tables of shape (*batch, table, joint state)."""
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
