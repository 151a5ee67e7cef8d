"""Linear maps that torch does not know, such as products with a SciPy matrix, with derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def apply_linear(forward: Map, transposed: Map, vector: Tensor) -> Tensor:
    """Return `forward(vector)`, differentiable. `transposed` is the transpose of the linear map `forward`."""
    value: Tensor = _Linear.apply(vector, forward, transposed)
    return value


class _Linear(torch.autograd.Function):
    """Each of the two maps is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, forward: Map, transposed: Map) -> Tensor:
        ctx.maps = transposed, forward
        return forward(vector.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Linear.apply(grad, *ctx.maps), None, None
