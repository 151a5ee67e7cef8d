"""Generative models, without inputs: the potentials themselves are the parameters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from riskfield.graph._scopes import index_tensor, integers
from riskfield.graph.factor_graph import FactorGraph


class Generative(nn.Module):
    """Every entry of theta is a parameter, initialised to 0: one table per variable and per factor.

    Factors that the graph ties share a table. `node_types` ties variables in the same way.

    Arguments:
        graph: the graph of the model.
        node_types: optional, one integer per variable. Variables with the same integer share their potentials; they
            must have the same number of states.
        dtype: the dtype of the parameters, by default float64.

    >>> import torch
    >>> from riskfield import grid
    >>> from riskfield.models import Generative
    >>> graph = grid(20, 30, num_states=2, tied=True)
    >>> ising = Generative(graph, node_types=torch.zeros(600, dtype=torch.int64))
    >>> sum(parameter.numel() for parameter in ising.parameters()), ising(graph).shape  # 2 + 2 * 4
    (10, torch.Size([1208]))
    """

    def __init__(
        self, graph: FactorGraph, node_types: npt.ArrayLike | None = None, *, dtype: torch.dtype = torch.float64
    ):
        super().__init__()
        self.theta_size = graph.theta_size
        entries = np.arange(graph.node_size)
        if node_types is not None:
            entries = _shared_entries(graph, integers(node_types, "node_types"))
        count = int(entries.max(initial=-1)) + 1
        self.register_buffer("entries", index_tensor(entries), persistent=False)
        self.nodes = nn.Parameter(torch.zeros(count, dtype=dtype))
        self.factors = nn.Parameter(torch.zeros(graph.theta_size - graph.node_size, dtype=dtype))

    def forward(self, graph: FactorGraph, inputs: None = None) -> Tensor:
        """Return theta of shape (theta,), which all examples share."""
        if inputs is not None:
            raise ValueError(f"`inputs` must be None for a generative model. Got {type(inputs).__name__}.")
        if graph.theta_size != self.theta_size:
            raise ValueError(f"`graph` must have a theta of length {self.theta_size}. Got {graph.theta_size}.")
        return torch.cat([self.nodes[self.get_buffer("entries")], self.factors])


def _shared_entries(graph: FactorGraph, types: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return the index of the parameter for every entry of the node part of theta."""
    if types.shape != (graph.num_variables,):
        raise ValueError(
            f"`node_types` must hold one integer per variable ({graph.num_variables}). Got shape {types.shape}."
        )
    _, first, types = np.unique(types, return_index=True, return_inverse=True)
    types = types.reshape(-1)
    sizes = graph.num_states[first]
    if (graph.num_states != sizes[types]).any():
        variable = int(np.flatnonzero(graph.num_states != sizes[types])[0])
        raise ValueError(
            f"`node_types`: variables {first[types[variable]]} and {variable} are of one type but have "
            f"{sizes[types[variable]]} and {graph.num_states[variable]} states."
        )
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    entries = np.empty(graph.node_size, np.int64)
    for group in graph.node_groups:
        own = starts[types[group.variables]][:, None] + np.arange(group.num_states)
        entries[group.start : group.stop] = own.ravel()
    return entries
