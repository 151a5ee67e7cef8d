"""The log-partition function of chains that share one table, with its gradient, by forward-backward.

It is exact, so dA/dtheta is the vector of expected statistics, which the kernel computes along with the value. Second
derivatives go through the algorithm that is asked for, which is exact on chains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from riskfield.adjoints.unroll import Unroll
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.request import Request
from riskfield.inference.stop import Stop
from riskfield.kernels import is_transformed
from riskfield.kernels.chains import chains_of, expectations


def chain_log_partition(graph: FactorGraph, theta: Tensor, algorithm: AbstractAlgorithm, stop: Stop) -> Tensor | None:
    """A(theta) of shape (*batch), differentiable; None where forward-backward does not apply.

    It applies to one theta, with or without a batch axis, on a graph for which `chains_of` finds chains. `algorithm`
    must be exact on them when it ends by `stop`.
    """
    if theta.shape[:-1].numel() != 1 or is_transformed(theta):
        return None
    if forward_ad.unpack_dual(theta).tangent is not None:
        return None
    chains = chains_of(graph)
    found = None if chains is None else expectations(graph, chains, theta.detach().reshape(-1))
    if found is None:
        return None
    batch = theta.shape[:-1]
    again = partial(Request, graph, algorithm=algorithm, stop=stop, messages=None, kernels=None, progress=False)
    value: Tensor = _Value.apply(theta, found.log_partition.reshape(batch), found.statistics.view_as(theta), again)
    return value


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, value: Tensor, statistics: Tensor, again: partial[Request]) -> Tensor:
        ctx.save_for_backward(theta, statistics)
        ctx.again = again
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():
            request = ctx.again(theta=theta)
            statistics = request.graph.collapse(Unroll().apply(request).mu)
        return grad.unsqueeze(-1) * statistics, None, None, None
