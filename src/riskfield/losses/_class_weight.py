"""Weights of targets by their label, for losses that are sums over variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from riskfield.losses.loss import AbstractLoss

ClassWeight = tuple[float, ...] | None


def checked_class_weight(weights: Sequence[float] | None) -> ClassWeight:
    """The weights as a tuple of floats; None if all are 1."""
    if weights is None:
        return None
    try:
        numbers = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"`class_weight` must be a positive number for each state, or None. Got {weights!r}.")
    return numbers


def weights_of(labels: Tensor, weights: tuple[float, ...], like: Tensor) -> Tensor:
    """The weight of each label, in the shape of `labels`; arbitrary where a label is -1.

    Arguments:
        labels: states of variables.
        weights: the weight of each state.
        like: its last axis are the states, and the result has its dtype.
    """
    if len(weights) != like.shape[-1]:
        raise ValueError(
            f"`class_weight` must have a weight for each of {like.shape[-1]} states. Got {len(weights)} weights."
        )
    return torch.tensor(weights, dtype=like.dtype, device=like.device)[labels.clamp(min=0)]


def takes_class_weight(loss: AbstractLoss) -> bool:
    """Whether a loss has the setting `class_weight`."""
    return is_dataclass(loss) and any(own.name == "class_weight" for own in fields(loss))


def with_class_weight(loss: AbstractLoss, weights: ClassWeight) -> AbstractLoss:
    """The loss with these weights."""
    if weights is None:
        return loss
    own: Any = loss
    if own.class_weight is not None:
        raise ValueError(f"`class_weight` must be given once. The loss has its own: {loss!r}.")
    weighted: AbstractLoss = replace(own, class_weight=weights)
    return weighted


def class_weight_of(loss: AbstractLoss) -> ClassWeight:
    """The weights of a loss; None if it has none."""
    own: Any = loss
    weights: ClassWeight = own.class_weight if takes_class_weight(loss) else None
    return weights
