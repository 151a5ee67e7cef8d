"""Inference inside the transforms of `torch.func`, which cannot follow the sweeps.

`vmap` adds a batch axis that the code inside does not see. Inference takes leading batch axes anyway, so the rule for
`vmap` moves the new axis to the front and runs the whole batch at once. The backward pass runs inference again with a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from riskfield.errors import AdjointError
from riskfield.kernels import is_transformed

# (theta of shape (*batch, theta), evidence or None) -> mu of shape (*batch, mu), log-partition of shape (*batch)
Solve = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def is_vmapped(tensor: Tensor | None) -> bool:
    """Whether `tensor` has a batch axis hidden by `torch.func.vmap`, also below other transforms."""
    if tensor is None or not is_transformed(tensor):
        return False
    try:
        tensor.detach().sum().item()
    except RuntimeError:  # inside `vmap` a number has many values
        return True
    return False


def solve_transformed(solve: Solve, theta: Tensor, evidence: Tensor | None) -> tuple[Tensor, Tensor]:
    """`solve(theta, evidence)` inside `vmap` and `grad`, with first derivatives in theta."""
    mu, value = _Solve.apply(solve, theta, evidence)
    return mu, value


def _in_front(info: Any, tensor: Tensor | None, axis: int | None) -> Tensor | None:
    """The tensor with the axis of `vmap` first."""
    if tensor is None:
        return None
    return tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _refuse_forward_mode(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    raise AdjointError(
        "Inference with this adjoint has no forward-mode derivatives (`torch.func.jvp`, `jacfwd`, `hessian`). Use "
        "`torch.func.grad` or `jacrev`, or inference with `Unroll()` outside `vmap`."
    )


class _Solve(torch.autograd.Function):
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(solve: Solve, theta: Tensor, evidence: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return solve(theta, evidence)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Solve, Tensor, Tensor | None], output: Any) -> None:
        ctx.solve, theta, evidence = inputs
        ctx.save_for_backward(theta, evidence)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_mu: Tensor | None, grad_value: Tensor | None) -> tuple[None, Tensor, None]:
        theta, evidence = ctx.saved_tensors
        return None, _Gradient.apply(ctx.solve, theta, evidence, grad_mu, grad_value), None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[None, int | None, int | None], solve: Solve, theta: Tensor, evidence: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        moved = (_in_front(info, tensor, axis) for tensor, axis in zip((theta, evidence), axes[1:], strict=True))
        return _Solve.apply(solve, *moved), (0, 0)


class _Gradient(torch.autograd.Function):
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(solve: Solve, theta: Tensor, evidence: Tensor | None, *grads: Tensor | None) -> Tensor:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            outputs = zip(solve(leaf, evidence), grads, strict=True)
            wanted = [(output, grad) for output, grad in outputs if grad is not None]
            if not wanted:
                return torch.zeros_like(theta)
            return torch.autograd.grad([output for output, _ in wanted], leaf, [grad for _, grad in wanted])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise AdjointError(
            "Inside `torch.func.vmap` inference has first derivatives only. Inside `torch.func.grad` only `Unroll()` "
            "has second ones. Use a batch axis instead of `vmap`."
        )

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None, ...], solve: Solve, *tensors: Tensor | None) -> tuple[Tensor, int]:
        moved = (_in_front(info, tensor, axis) for tensor, axis in zip(tensors, axes[1:], strict=True))
        return _Gradient.apply(solve, *moved), 0
