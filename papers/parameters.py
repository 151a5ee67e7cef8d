"""All parameters of a model as one list of numbers, as cells keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.nn import Module
from torch.nn.utils import parameters_to_vector

M = TypeVar("M", bound=Module)


def parameters_of(model: Module) -> list[float]:
    """The parameters of a model, one after the other.

    >>> parameters_of(with_parameters(torch.nn.Linear(2, 1), [1, 2, 3]))
    [1.0, 2.0, 3.0]
    """
    values: list[float] = parameters_to_vector(model.parameters()).tolist()
    return values


@torch.no_grad()
def with_parameters(model: M, values: Sequence[float]) -> M:
    """`model`, after its parameters have been replaced by `values`."""
    parameters = list(model.parameters())
    parts = torch.tensor(values, dtype=torch.float64).split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))
    return model
