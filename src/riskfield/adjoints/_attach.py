"""Marginals that carry a gradient computed by a rule of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from riskfield.errors import AdjointError
from riskfield.inference.request import Request
from riskfield.inference.solution import Solution

_UNROLL = " Use `Unroll` for second ones."


@dataclass(frozen=True, eq=False)
class Jacobian:
    """The derivative J of mu in theta, and in other numbers that mu depends on, known by its products with vectors."""

    vjp: Callable[[Tensor], tuple[Tensor, ...]]  # J^T g, one part for each input, theta first; g of the shape of mu
    jvp: Callable[[tuple[Tensor, ...]], Tensor]  # J v, of the shape of mu, for v with one part for each input


def attach(request: Request, solution: Solution, jacobian: Jacobian, numbers: Sequence[Tensor] = ()) -> Solution:
    """Return `solution` with a mu whose derivative in `request.theta` and `numbers` is `jacobian`.

    A gradient J^T g can be differentiated again in the cotangent g, in which it is linear. Its derivative in theta and
    in the numbers, which J depends on, is refused with an `AdjointError`. The caller may change the mu of the solution
    in place: a Jacobian that needs the marginals must keep its own copy.
    """
    remedy = _UNROLL if request.algorithm.unrolls else ""
    mu = _Attached.apply(jacobian, remedy, solution.mu, request.theta, *numbers)
    return solution.with_mu(mu, theta=request.theta, _value=request.algorithm.log_partition)


def constant_in(result: Tensor, inputs: Sequence[Tensor], name: str, remedy: str = _UNROLL) -> Tensor:
    """Return `result`, the derivative of which in `inputs` raises an `AdjointError`; other derivatives are kept.

    Autograd's own `once_differentiable` raises only where no inputs are named: `torch.autograd.grad` with unused inputs
    allowed would return zeros. The error here is raised exactly when autograd would need the missing derivative.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return result + without_gradient(result.new_zeros(()), inputs, f"{name} has first derivatives only.{remedy}")
    return result


def without_gradient(value: Tensor, inputs: Sequence[Tensor], message: str) -> Tensor:
    """Return `value`, which depends on `inputs`; its derivative raises an `AdjointError` with `message`."""
    return _Refuse.apply(message, value, *inputs)  # type: ignore[no-any-return]


def graph_is_kept() -> bool:
    """Whether the present backward pass retains the graph, so that what it used will be needed again.

    Autograd frees saved tensors by itself, but not what else a function keeps, such as a tape. Torch has no public name
    for this question. A torch that does not answer it keeps tapes for as long as their graph.
    """
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is None or bool(keeps_graph())


class _Refuse(torch.autograd.Function):
    """A value that depends on its inputs and cannot be differentiated in them."""

    @staticmethod
    def forward(ctx: Any, message: str, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise AdjointError(ctx.message)


@dataclass(frozen=True, eq=False)
class _Linear:
    """A Jacobian and the inputs it was taken at, in which it is constant as far as autograd is concerned."""

    jacobian: Jacobian
    inputs: tuple[Tensor, ...]
    remedy: str

    def transposed(self, grad: Tensor) -> list[Tensor]:
        """J^T g."""
        return [self._guarded(part) for part in _Transposed.apply(self, grad)]

    def times(self, v: tuple[Tensor, ...]) -> Tensor:
        """J v."""
        return self._guarded(_Times.apply(self, *v))

    def _guarded(self, result: Tensor) -> Tensor:
        return constant_in(result, self.inputs, "This adjoint", self.remedy)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, jacobian: Jacobian, remedy: str, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.jacobian, ctx.remedy = jacobian, remedy
        ctx.save_for_backward(*inputs)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Reading the saved tensors raises if the Jacobian is gone.
        gradients = _Linear(ctx.jacobian, ctx.saved_tensors, ctx.remedy).transposed(grad)
        if not graph_is_kept():
            ctx.jacobian = None
        return None, None, None, *gradients


class _Transposed(torch.autograd.Function):
    """J^T g as a function of g."""

    @staticmethod
    def forward(ctx: Any, linear: _Linear, grad: Tensor) -> tuple[Tensor, ...]:
        ctx.linear = linear
        return linear.jacobian.vjp(grad.detach())

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[None, Tensor]:
        return None, ctx.linear.times(v)


class _Times(torch.autograd.Function):
    """J v as a function of v."""

    @staticmethod
    def forward(ctx: Any, linear: _Linear, *v: Tensor) -> Tensor:
        ctx.linear = linear
        return linear.jacobian.jvp(tuple(part.detach() for part in v))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.linear.transposed(grad)
