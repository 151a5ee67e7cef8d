r"""The most probable joint state, exactly, by max-product variable elimination.

As `Exact`, with a maximum in place of the sum: eliminating v gathers every table that mentions v,

    t_v(x_v, x_later) = sum of the tables,        m_v(x_later) = max_{x_v} t_v(x_v, x_later),

and backwards through the order every variable takes the state that attains its maximum, x_v = argmax t_v(., x_later).
Ties go to the lowest state. Time and memory grow exponentially with the treewidth; beyond `max_bytes` it refuses. Use
`MaxProduct` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.devices import check_max_bytes
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference._buckets import NEG_INF, backtrack, plan
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.kernels import Run


@dataclass(frozen=True)
class ExactMAP(AbstractAlgorithm):
    """The most probable joint state by variable elimination: `solution.mode()`, certified.

    The "marginals" are 1 at that state and 0 elsewhere, and `log_partition` is its score theta . f(x). It computes in
    float64 on theta's device, takes one sweep and has no messages to start from.

    Arguments:
        max_bytes: how much memory the tables of one run may take. Batches are processed in parts that fit.

    Raises:
        TreewidthError: on use, if not even one batch item fits.

    >>> from riskfield import FactorGraph, infer
    >>> graph = FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = float("-inf")  # all three differ: two states are too few
    >>> graph.factor(theta, 2)[1, 1] = -3.0  # unless the last two are allowed to agree
    >>> mode = infer(graph, theta, ExactMAP()).joint_mode()
    >>> mode.states, float(mode.score), bool(mode.certified)
    (tensor([1, 0, 1]), -3.0, True)
    """

    max_bytes: int = 2 * 2**30

    iterative: ClassVar[bool] = False
    unrolls: ClassVar[bool] = False
    nonsmooth_because: ClassVar[str] = "a maximiser does not vary smoothly. Use MessagePassing."

    def __post_init__(self) -> None:
        check_max_bytes(self.max_bytes)

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Choose the order, and refuse before anything is computed if the tables do not fit."""
        if messages is not None:
            raise ValueError("`messages` must be None: exact inference has no state to start from.")
        return ExactMAPRun(graph, theta, self.max_bytes)

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """The score of the best state."""
        return graph.score(theta, self.mode(graph, theta, mu))

    def upper_bound(self, graph: FactorGraph, theta: Tensor, mu: Tensor, messages: Tensor | None) -> Tensor:
        """The score of the best state: no other is higher."""
        return graph.score(theta.double(), self.mode(graph, theta, mu))


class ExactMAPRun:
    """Max-product elimination on a batch of thetas. Nothing is computed before it is asked for."""

    def __init__(self, graph: FactorGraph, theta: Tensor, max_bytes: int):
        self.graph, self.theta = graph, theta
        self.cut, self.tree, self._items = plan(graph, theta, max_bytes, differentiable=False)
        self._ran = False

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """One sweep is all it takes."""
        ran = torch.full((len(self.theta),), int(sweeps > 0 and not self._ran))
        self._ran = True
        return torch.zeros(len(self.theta), dtype=torch.float64), ran

    def messages(self) -> None:
        """There is nothing to start another run from."""

    def marginals(self) -> Tensor:
        """1 at the best state, of shape (batch, mu)."""
        return self._marginals

    @cached_property
    def _marginals(self) -> Tensor:
        parts = []
        for k in range(0, max(len(self.theta), 1), self._items):
            theta = self.theta[k : k + self._items].double()
            tables = self.cut.tables(theta)
            value, messages = self.tree.collect(theta, tables, lambda table: table.amax(1))
            item = torch.arange(len(theta), device=theta.device)
            states = backtrack(self.tree, self.cut, tables, messages, item, lambda scores: scores.argmax(1))
            mu = indicator(self.graph, states).to(theta)
            # An impossible model has no best state; NaN marks it, and `infer` reports it.
            parts.append(torch.where((value == NEG_INF)[:, None], float("nan"), mu))
        return torch.cat(parts).to(self.theta.dtype)


def indicator(graph: FactorGraph, states: Tensor) -> Tensor:
    """f(x): 1 at `states`, of shape (batch, variable), and 0 elsewhere, of shape (batch, mu), float64."""
    entries = [index_tensor(graph.node_start, states.device) + states]
    for group in graph.factor_groups:
        start = group.mu_start + group.table_size * torch.arange(group.num_factors, device=states.device)
        entries.append(start + group.joint_states(states))
    mu = torch.zeros(len(states), graph.mu_size, dtype=torch.float64, device=states.device)
    return mu.scatter(1, torch.cat(entries, dim=1), 1.0)
