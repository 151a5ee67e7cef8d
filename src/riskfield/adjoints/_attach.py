"""Marginals that carry a gradient computed by a rule of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from riskfield.errors import AdjointError
from riskfield.inference.convex import ConvexFreeEnergy
from riskfield.inference.exact import Exact
from riskfield.inference.infer import Request
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.solution import Solution

Vjp = Callable[[Tensor], Tensor | tuple[Tensor, ...]]

_UNROLL = " Use `Unroll` for second ones."


def attach(request: Request, solution: Solution, vjp: Vjp, numbers: Sequence[Tensor] = ()) -> Solution:
    """`solution` with a mu whose gradient g, of the shape of mu, is sent to `request.theta` as vjp(g).

    Where there are other `numbers` to send gradients to, vjp(g) is a tuple of all of them, that of theta first. Second
    derivatives through it are refused by autograd. What is handed out may be changed in place: a vjp that needs the
    marginals keeps its own.
    """
    remedy = "" if isinstance(request.algorithm, ConvexFreeEnergy) else _UNROLL
    mu = _Attached.apply(solution.mu, vjp, remedy, request.theta, *numbers)
    return replace(solution, theta=request.theta, mu=mu, _value=request.algorithm.log_partition)


def require_convergence(request: Request, name: str, theta_only: bool = True) -> None:
    """Refuse what an adjoint at a fixed point cannot differentiate, naming the alternative."""
    if isinstance(request.algorithm, MaxProduct):
        raise ValueError(
            f"`{name}` cannot differentiate MaxProduct: a maximiser does not vary smoothly. Use MessagePassing."
        )
    if isinstance(request.algorithm, ConvexFreeEnergy):
        _require_convex(request, request.algorithm, name, theta_only)
    if request.stop.tol is None and not isinstance(request.algorithm, Exact):
        raise ValueError(
            f"`{name}` needs a run to convergence: give `stop` a tolerance, or use `Unroll` for a truncated run."
        )
    if theta_only and isinstance(request.algorithm, MessagePassing):
        counting = request.algorithm.entropy.counting(request.graph)
        if torch.is_grad_enabled() and (counting.factor.requires_grad or counting.node_total.requires_grad):
            raise ValueError(
                f"`{name}` sends gradients to theta only, and the counting numbers of the entropy require one. Use "
                "`FixedPoint` or `Unroll`, or detach the counting numbers."
            )


def _require_convex(request: Request, algorithm: ConvexFreeEnergy, name: str, theta_only: bool) -> None:
    if name == "FixedPoint":
        raise ValueError(
            "`FixedPoint` sweeps backwards over messages, and ConvexFreeEnergy has none. Use `KKT`, or `Perturb` for "
            "the gradient in theta alone."
        )
    if request.stop.tol is None:
        raise ValueError(f"`{name}` needs a run to convergence: give `stop` a tolerance.")
    weights = algorithm.weights(request.graph)
    if theta_only and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        raise ValueError(
            f"`{name}` sends gradients to theta only, and weights of the ConvexFreeEnergy require one. Use `KKT`, or "
            "detach the weights."
        )


def require_finite(grad: Tensor, name: str) -> None:
    """Refuse a dL/dmu with NaN or infinite entries: no gradient of theta can be right."""
    # One pass in place of several; a sum of finite numbers that overflows is looked into.
    if torch.isfinite(grad.sum()):
        return
    bad = ~torch.isfinite(grad)
    if bad.any():
        where = tuple(int(k) for k in bad.nonzero()[0])
        raise AdjointError(
            f"`{name}`: the gradient of the loss in the marginals is {float(grad[where])} at {where}. Is the loss "
            "finite there, where a marginal may be 0?"
        )


def first_order_only(gradient: Tensor, theta: Tensor, name: str, remedy: str = _UNROLL) -> Tensor:
    """`gradient`, through which a second derivative in theta raises.

    Autograd's own `once_differentiable` raises only where no inputs are named: `torch.autograd.grad` with unused inputs
    allowed would hand out zeros.
    """
    if torch.is_grad_enabled() and theta.requires_grad:
        return _FirstOrder.apply(gradient, theta, f"{name} has first derivatives only.{remedy}")  # type: ignore[no-any-return]
    return gradient


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, theta: Tensor, message: str) -> Tensor:
        ctx.message = message
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise AdjointError(ctx.message)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, vjp: Vjp, remedy: str, *inputs: Tensor) -> Tensor:
        ctx.vjp, ctx.remedy, ctx.inputs = vjp, remedy, inputs
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = ctx.vjp(grad.detach())
        gradients = [found] if isinstance(found, Tensor) else list(found)
        for number in ctx.inputs:
            gradients = [first_order_only(gradient, number, "This adjoint", ctx.remedy) for gradient in gradients]
        return None, None, None, *gradients
