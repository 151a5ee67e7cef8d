"""The state in which a run starts: uniform, or the state of an earlier run, whose theta may have been different."""

from __future__ import annotations

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.kernels.logspace import NEG_INF, normalised


def starting_messages(graph: FactorGraph, theta: Tensor, messages: Tensor | None) -> Tensor:
    """Normalised log-messages of shape (batch, message): uniform, or `messages` without their zeros.

    A message with a zero probability becomes uniform, because a zero would never disappear again, although the state
    may have become possible since the earlier run. The first sweeps compute the zeros of the new theta.
    """
    start = theta.new_zeros(len(theta), graph.message_size)
    if messages is not None:
        start = messages_like(graph, theta, messages).clone()
    for group in graph.factor_groups:
        for slot, size in enumerate(group.shape):
            first, last = group.message_range(slot)
            block = start[:, first:last].unflatten(1, (group.num_factors, size))
            impossible = (block == NEG_INF).any(-1, keepdim=True)
            block.copy_(normalised(torch.where(impossible, 0.0, block)))
    return start


def messages_like(graph: FactorGraph, theta: Tensor, messages: Tensor) -> Tensor:
    """`messages` in the dtype and on the device of theta. Their size is checked."""
    _check_size(messages, graph.message_size)
    return messages.to(theta)


def starting_marginals(graph: FactorGraph, theta: Tensor, marginals: Tensor | None) -> Tensor:
    """Log node marginals of shape (batch, node): uniform over the possible states, or close to `marginals` there."""
    possible = theta[:, : graph.node_size] != NEG_INF
    start = torch.zeros_like(theta[:, : graph.node_size])
    if marginals is not None:
        _check_size(marginals, graph.node_size)
        start = marginals.to(theta).clamp(min=torch.finfo(theta.dtype).min / 4)
    start = torch.where(possible, start, NEG_INF)
    for group in graph.node_groups:
        block = start[:, group.start : group.stop].unflatten(1, (len(group.variables), group.num_states))
        block.copy_(normalised(block))
    return start


def _check_size(state: Tensor, size: int) -> None:
    if state.shape[-1] != size:
        raise ValueError(f"`messages` must have shape (*batch, {size}). Got {tuple(state.shape)}.")
