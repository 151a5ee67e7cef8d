"""Sums over variables and factors, shared by the losses that need no inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup
from riskfield.kernels.logspace import NEG_INF, logsumexp
from riskfield.losses._class_weight import ClassWeight, weights_of


def conditional_logits(graph: FactorGraph, theta: Tensor, states: Tensor, groups: Sequence[FactorGroup]) -> Tensor:
    """Return the log-probability, up to a constant, of every state of every variable given all other variables.

    Only factors in `groups` contribute. A factor that joins the variable to a hidden one is left out.

    Arguments:
        graph: the structure.
        theta: of shape (*batch, theta) or (theta,).
        states: of shape (*batch, variable), -1 where hidden.
        groups: factor groups of the graph.

    Returns:
        A tensor of shape (*batch, graph.node_size), in the layout of the node part of theta.
    """
    batch, device = states.shape[:-1], theta.device
    theta = theta.expand(*batch, graph.theta_size)
    logits = theta[..., : graph.node_size]
    hidden = states < 0
    states = states.clamp(min=0)
    for group in groups:
        strides = [int(np.prod(group.shape[slot + 1 :])) for slot in range(group.arity)]
        table = group.theta_start + index_tensor(group.tables, device) * group.table_size
        joint = table + group.joint_states(states)
        for slot, (size, stride) in enumerate(zip(group.shape, strides, strict=True)):
            own = index_tensor(group.variables[:, slot], device)
            steps = torch.arange(size, device=device)
            # The table entries along this slot, with the other variables fixed at their states.
            entries = (joint - stride * states[..., own]).unsqueeze(-1) + stride * steps
            terms = theta.gather(-1, entries.flatten(-2)).unflatten(-1, (group.num_factors, size))
            if hidden.any():
                others = index_tensor(np.delete(group.variables, slot, axis=1), device)
                terms = torch.where(hidden[..., others].any(-1, keepdim=True), 0, terms)
            target = index_tensor(graph.node_entries(group.variables[:, slot]), device)
            logits = logits.index_add(-1, target.flatten(), terms.flatten(-2))
    return logits


def univariate_surprise(graph: FactorGraph, logits: Tensor, labels: Tensor, class_weight: ClassWeight = None) -> Tensor:
    """-sum_i log softmax(logits_i)(x_i) over all variables with a label, of shape (*batch).

    Arguments:
        graph: the structure.
        logits: of shape (*batch, graph.node_size).
        labels: of shape (*batch, variable), -1 for variables that are not targets.
        class_weight: the weight of a variable by its label, a number for each state.
    """
    total = logits.new_zeros(labels.shape[:-1])
    for group in graph.node_groups:
        block = logits[..., group.start : group.stop].unflatten(-1, (len(group.variables), group.num_states))
        own = labels[..., index_tensor(group.variables, labels.device)]
        block = block.expand(*own.shape, group.num_states)
        score = block.gather(-1, own.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        weights = None if class_weight is None else weights_of(own, class_weight, block)
        total = total + surprise(score, log_total(block), own >= 0, weights)
    return total


def log_total(scores: Tensor) -> Tensor:
    """log sum exp over the last axis; -inf with gradient 0 where all scores are -inf."""
    return logsumexp(scores, (scores.ndim - 1,))


def surprise(score: Tensor, log_total: Tensor, counted: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum log_total - score over the counted entries of the last axis; inf if a counted label is impossible."""
    value = torch.where(score == NEG_INF, float("inf"), log_total - score)
    value = torch.where(counted, value, 0)
    return (value if weights is None else value * weights).sum(-1)
