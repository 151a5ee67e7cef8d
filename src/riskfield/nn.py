"""Inference as a PyTorch layer: it maps theta to marginals and can be differentiated."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.envelope import require_marginal_gradient
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.request import Stop

__all__ = ["MarginalInference"]


class MarginalInference(Module):
    """The marginals of a graph as a function of its log-potentials.

    The layer has no parameters; the network that computes theta has them. It uses the dtype (float32 or float64) and
    the device of theta.

    Arguments:
        graph: the structure. `graph.assemble` joins the outputs of a network into one theta.
        algorithm: `MessagePassing(...)` (the default: loopy belief propagation), `MeanField()`, `Exact()`, ...
        adjoint: the gradient method. By default `Unroll()`, which differentiates the sweeps that ran.
        stop: when a run ends. `Stop(sweeps=5, tol=None)` is truncated inference: every run has exactly five sweeps, in
            training and in prediction.

    >>> import torch
    >>> from riskfield import TRW, MessagePassing, Stop, Unroll, grid
    >>> graph = grid(3, 4, num_states=2, tied=True)
    >>> layer = MarginalInference(graph, MessagePassing(TRW(0.5)), Unroll(), stop=Stop(5, tol=None))
    >>> unary, pairwise = torch.zeros(8, 12, 2, requires_grad=True), torch.zeros(2, 2, 2, requires_grad=True)
    >>> mu = layer(graph.assemble([unary], [pairwise]))
    >>> graph.node_views(mu)[0].shape
    torch.Size([8, 12, 2])
    """

    def __init__(
        self,
        graph: FactorGraph,
        algorithm: AbstractAlgorithm | None = None,
        adjoint: AbstractAdjoint | None = None,
        *,
        stop: Stop | None = None,
    ):
        super().__init__()
        if not isinstance(graph, FactorGraph):
            raise TypeError(f"`graph` must be a FactorGraph. Got {type(graph).__name__}.")
        require_marginal_gradient(adjoint)
        self.graph = graph
        self.inference = Inference(
            MessagePassing() if algorithm is None else algorithm,
            Stop() if stop is None else stop,
            adjoint,
        )

    def forward(self, theta: Tensor, evidence: Tensor | Mapping[int, int] | None = None) -> Tensor:
        """Return mu of shape (*batch, mu).

        Arguments:
            theta: log-potentials of shape (*batch, theta), in the layout of the graph.
            evidence: observed states, a dict {variable: state} or an integer tensor of shape (*batch, variable) with -1
                for unobserved variables.
        """
        return self.inference(self.graph, theta, evidence=evidence).mu

    def extra_repr(self) -> str:
        """Return the settings of the layer, for its repr."""
        how = self.inference
        return f"{self.graph}, {how.algorithm}, {how.adjoint}, stop={how.stop}"
