r"""Second derivatives of a loss through inference.

The product of the Hessian with a vector is the gradient of the gradient's product with it (Pearlmutter 1994),

    H v = d/dtheta ( dL/dtheta . v ),

so that one more backward pass, through the first one, gives it at a small multiple of the cost of a gradient.
Stochastic meta-descent (Stoyanov, Ropson & Eisner 2011) is built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor


@overload
def hessian_vector_product(loss_fn: Callable[[Tensor], Tensor], params: Tensor, v: Tensor) -> Tensor: ...


@overload
def hessian_vector_product(
    loss_fn: Callable[[Sequence[Tensor]], Tensor], params: Sequence[Tensor], v: Sequence[Tensor]
) -> tuple[Tensor, ...]: ...


def hessian_vector_product(
    loss_fn: Callable[[Any], Tensor], params: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor]
) -> Tensor | tuple[Tensor, ...]:
    """The Hessian of a loss at `params`, times `v`.

    Exact, for any loss through `infer(..., adjoint=Unroll())`; the other adjoints have first derivatives only, and
    refuse. Parameters that the gradient does not depend on get zeros.

    Arguments:
        loss_fn: a function of params that returns a scalar tensor. It is called with copies of params.
        params: a tensor, or a sequence of tensors, which are not changed.
        v: a tensor, or a sequence of tensors, with the shapes of params.

    Returns:
        A tensor like params, or a tuple of them.

    Marginals can be differentiated forward as well: `torch.autograd.forward_ad` and `torch.func.jvp` work with
    `infer(..., adjoint=Unroll())`.

    >>> import torch
    >>> from riskfield import MessagePassing, Stop, TRW, Unroll, grid, infer
    >>> from riskfield.adjoints import hessian_vector_product
    >>> graph = grid(3, 3, num_states=2)
    >>> def loss(theta):
    ...     solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(5, tol=None), adjoint=Unroll())
    ...     return -graph.node(solution.mu, 4)[1].log()
    >>> direction = graph.zeros()
    >>> graph.node(direction, 4)[1] = 1.0
    >>> graph.node(hessian_vector_product(loss, graph.zeros(), direction), 4)
    tensor([-0.2500,  0.2500], dtype=torch.float64)
    """
    single = isinstance(params, Tensor)
    given = (params,) if isinstance(params, Tensor) else tuple(params)
    directions = (v,) if isinstance(v, Tensor) else tuple(v)
    if [p.shape for p in given] != [d.shape for d in directions]:
        raise ValueError(
            f"`v` must have the shapes of `params`, {[tuple(p.shape) for p in given]}. "
            f"Got {[tuple(d.shape) for d in directions]}."
        )
    leaves = tuple(p.detach().requires_grad_() for p in given)
    with torch.enable_grad():
        loss = loss_fn(leaves[0] if single else leaves)
        if loss.numel() != 1:
            raise ValueError(f"`loss_fn` must return one number. Got a tensor of shape {tuple(loss.shape)}.")
        gradients: tuple[Tensor | None, ...] = (None,)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss.reshape(()), leaves, create_graph=True, allow_unused=True)
        if all(g is None for g in gradients):
            raise ValueError(
                "`loss_fn` must compute its loss from the tensors it is given, copies of `params`. Got a loss that "
                "depends on none of them; for a model use `torch.func.functional_call`."
            )
        slope = sum((g * d.detach()).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
    if not (isinstance(slope, Tensor) and slope.requires_grad):  # a linear loss
        products = tuple(torch.zeros_like(p) for p in leaves)
    else:
        products = torch.autograd.grad(slope, leaves, materialize_grads=True)
    return products[0] if single else products
