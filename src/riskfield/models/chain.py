r"""`ChainModel`: a linear model of sequences, with potentials for their ends and with forbidden transitions.

theta_i = F u_i + [i is first] s + [i is last] e,        theta_{i,i+1} = G v + log allowed(x_i, x_{i+1})
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.models.conditional import Inputs, LinearModel

Bools = npt.NDArray[np.bool_]


class ChainModel(LinearModel):
    """A `LinearModel` on chains, or on a union of chains, whose pairs go from one variable to the next.

    Arguments:
        num_states, node_features, factor_features, dtype: as for `LinearModel`.
        boundaries: learn extra potentials of the first and of the last variable of a chain. By default there are none.
        forbidden: booleans of shape (states + 1, states + 1). Entry (a, b) is True if state b must not follow state a.
            The last row says which states a chain must not begin with, and the last column with which it must not end.
            By default everything is allowed.

    >>> import numpy as np, torch
    >>> from riskfield import chain, infer
    >>> from riskfield.models import ChainModel
    >>> forbidden = np.array([[True, False, False], [False, False, False], [False, True, False]])
    >>> model, graph = ChainModel(2, 1, 1, forbidden=forbidden), chain(3, num_states=2, tied=True)
    >>> theta = model(graph, {"nodes": torch.ones(3, 1).double(), "factors": torch.ones(1, 1).double()}).detach()
    >>> graph.node(infer(graph, theta).mu, 0)  # neither 0 after 0, nor 1 at the start
    tensor([1., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        num_states: int,
        node_features: int,
        factor_features: int,
        *,
        boundaries: bool = False,
        forbidden: Bools | None = None,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__(num_states, node_features, factor_features, dtype=dtype)
        self.forbidden = forbidden
        self.ends = nn.ParameterDict()
        if boundaries:
            for name in ("first", "last"):
                self.ends[name] = nn.Parameter(torch.zeros(num_states, dtype=dtype))

    def forward(self, graph: FactorGraph, inputs: Inputs) -> Tensor:
        """Theta of shape (*batch, theta)."""
        theta = super().forward(graph, inputs)
        first, last = graph.derived("ends of chains", lambda: _ends(graph))
        (nodes,) = graph.node_views(theta)
        shift = torch.zeros(nodes.shape[-2:], dtype=theta.dtype, device=theta.device)
        for name, variables in (("first", first), ("last", last)):
            rows = variables.to(theta.device)
            if name in self.ends:
                shift = shift.index_add(0, rows, self.ends[name].expand(len(rows), -1))
            if self.forbidden is not None:
                banned = self.forbidden[-1, :-1] if name == "first" else self.forbidden[:-1, -1]
                shift = shift.index_add(0, rows, _log_allowed(banned, theta).expand(len(rows), -1))
        tables = graph.factor_views(theta)
        if self.forbidden is not None:
            tables = tuple(table + _log_allowed(self.forbidden[:-1, :-1], theta) for table in tables)
        return graph.assemble([nodes + shift], tables)


def _ends(graph: FactorGraph) -> tuple[Tensor, Tensor]:
    """The variables that follow no other, and those that none follows."""
    first, last = (np.ones(graph.num_variables, np.bool_) for _ in range(2))
    for group in graph.factor_groups:
        last[group.variables[:, 0]] = False
        first[group.variables[:, 1]] = False
    return index_tensor(np.flatnonzero(first)), index_tensor(np.flatnonzero(last))


def _log_allowed(banned: Bools, like: Tensor) -> Tensor:
    """0 where a state is allowed, -inf where it is not."""
    return torch.where(torch.from_numpy(banned).to(like.device), float("-inf"), 0.0).to(like.dtype)
