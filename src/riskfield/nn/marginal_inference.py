"""Inference on any graph as a PyTorch layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import Module

from riskfield.adjoints.transforms import is_vmapped, solve_transformed
from riskfield.adjoints.unroll import Unroll
from riskfield.eager import eager
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, as_inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.evidence import Evidence
from riskfield.kernels import is_transformed


class MarginalInference(Module):
    """The marginals of a graph as a differentiable function of its log-potentials theta.

    The layer has no parameters: a network computes theta. The layer runs on the device of theta and in its dtype. If
    theta is in half precision, as under autocast, the layer computes and returns float32, and the gradient has the
    dtype of theta. `torch.compile` breaks its graph here and runs the layer eagerly.

    Arguments:
        graph: the structure. `graph.assemble` joins the outputs of a network into one theta.
        inference: an `Inference`, that is the algorithm, when it stops and how it is differentiated; or an algorithm
            alone. By default loopy belief propagation to convergence, differentiated through the sweeps. With
            `Stop(sweeps=5, tol=None)` inference is truncated: every run has exactly five sweeps, in training and in
            prediction.

    >>> import torch
    >>> from riskfield import TRW, Inference, MessagePassing, Stop, grid
    >>> graph = grid(3, 4, num_states=2, tied=True)
    >>> layer = MarginalInference(graph, Inference(MessagePassing(TRW(0.5)), Stop(5, tol=None)))
    >>> unary, pairwise = torch.zeros(8, 12, 2, requires_grad=True), torch.zeros(2, 2, 2, requires_grad=True)
    >>> theta = graph.assemble([unary], [pairwise])
    >>> graph.node_views(layer(theta))[0].shape
    torch.Size([8, 12, 2])
    >>> mu, log_partition = layer(theta, log_partition=True)
    >>> log_partition.shape
    torch.Size([8])
    """

    def __init__(self, graph: FactorGraph, inference: Inference | AbstractAlgorithm | None = None):
        super().__init__()
        if not isinstance(graph, FactorGraph):
            raise TypeError(f"`graph` must be a FactorGraph. Got {type(graph).__name__}.")
        self.graph = graph
        self.inference = Inference() if inference is None else as_inference(inference)

    @overload
    def forward(
        self, theta: Tensor, evidence: Evidence | None = ..., *, log_partition: Literal[False] = ...
    ) -> Tensor: ...

    @overload
    def forward(
        self, theta: Tensor, evidence: Evidence | None = ..., *, log_partition: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, theta: Tensor, evidence: Evidence | None = None, *, log_partition: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return mu of shape (*batch, mu), or (mu, log-partition value of shape (*batch)).

        Arguments:
            theta: log-potentials of shape (*batch, theta), in the layout of the graph.
            evidence: observed states, a dict {variable: state} or an integer tensor of shape (*batch, variable) with -1
                for unobserved variables; by default none.
            log_partition: whether to return the log-partition value too; by default False.
        """
        mu, value = solve(self.graph, theta, self.inference, evidence, log_partition=log_partition)
        return mu if value is None else (mu, value)

    def extra_repr(self) -> str:
        """Return the settings of the layer, for its repr."""
        return f"{self.graph}, {self.inference}"


@eager
def solve(
    graph: FactorGraph,
    theta: Tensor,
    inference: Inference,
    evidence: Evidence | None = None,
    *,
    log_partition: bool,
    marginals: Literal["all", "nodes", "none"] = "all",
) -> tuple[Tensor, Tensor | None]:
    """Return mu, and the log-partition value if it is wanted, also inside `autocast` and transforms of `torch.func`.

    The marginals of factors may be by far the largest result. With `marginals="nodes"`, mu is its node part alone. With
    "none", the first result has no meaning.
    """

    def run(theta: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        solution = inference(graph, theta, evidence=evidence if states is None else states)
        mu = theta[..., :1].detach()
        if marginals != "none":
            mu = solution.mu if marginals == "all" else solution.node_mu
        return mu, solution.log_partition if log_partition else theta[..., 0]

    with torch.autocast(theta.device.type, enabled=False):
        theta = at_least_float32(theta)
        states = evidence if isinstance(evidence, Tensor) else None
        # `Unroll` follows `torch.func.grad` by itself, to any order.
        unrolls = inference.adjoint is None or isinstance(inference.adjoint, Unroll)
        transformed = is_vmapped(theta) or is_vmapped(states) or (is_transformed(theta) and not unrolls)
        mu, value = solve_transformed(run, theta, states) if transformed else run(theta, states)
        return mu, value if log_partition else None


@contextmanager
def blaming(tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """If inference refuses theta, name the tensor that brought NaN or +inf into it. Only then are they searched."""
    try:
        yield
    except ValueError:
        for name, tensor in tensors.items():
            if tensor is None or is_vmapped(tensor):
                continue
            bad = ~(tensor.detach() < float("inf"))  # a NaN is no less
            if bad.any():
                where = tuple(int(k) for k in bad.nonzero()[0])
                raise ValueError(
                    f"`{name}` must not hold NaN or +inf. Got {float(tensor.detach()[where])} at {where}."
                ) from None
        raise


def require_tensors(**given: object) -> None:
    """Raise unless all arguments that are given are tensors."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor. Got {type(value).__name__}.")


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it is in half precision. The gradient comes back in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
