"""Arithmetic on probabilities stored as logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def logsumexp(values: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """logsumexp with a zero gradient, instead of NaN, where all values are -inf."""
    top = values.detach().amax(dims, keepdim=True)
    top = torch.where(top == NEG_INF, 0.0, top)
    total = (values - top).exp().sum(dims, keepdim=True)
    positive = total > 0
    result = torch.where(positive, torch.where(positive, total, 1.0).log(), NEG_INF) + top
    return result if keepdim else result.squeeze(dims)


def normalised(log_values: Tensor) -> Tensor:
    """Log-probabilities along the last axis; NaN where every value is -inf, which marks an impossible variable."""
    total = logsumexp(log_values, (log_values.ndim - 1,), keepdim=True)
    return log_values - torch.where(total == NEG_INF, float("nan"), total)


def scaled(log_values: Tensor, number: Tensor | float) -> Tensor:
    """log_values times a positive number. -inf stays -inf and adds 0, not NaN, to the gradient of the number."""
    if not isinstance(number, Tensor):
        return log_values * number
    impossible = log_values == NEG_INF
    return torch.where(impossible, NEG_INF, torch.where(impossible, 0.0, log_values) * number)


def expected(log_weights: Tensor, values: Tensor) -> Tensor:
    """The sum of exp(log_weights) * values along the last axis. Values of weight 0 may be infinite."""
    return torch.where(log_weights > NEG_INF, log_weights.exp() * values, 0.0).sum(-1)
