"""Exact inference on graphs that consist of chains: two passes along each chain, all chains and batch items at once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.kernels.gpu.buffers import on_device
from riskfield.kernels.gpu.plan import ties_of
from riskfield.kernels.gpu.storage import power_of_two
from riskfield.kernels.initial_state import messages_like
from riskfield.kernels.protocols import ExactRun, Run

MOST_STATES = 128  # the table of a chain must fit into the registers of a program


@dataclass(frozen=True, eq=False)
class Chains:
    """The variables of a graph, chain by chain, the longest first. See `chain_passes` for the arrays."""

    states: int
    same: bool  # whether all factors of a chain have one table, read in one direction
    begin: Tensor  # int32 (chain,)
    length: Tensor  # int32 (chain,)
    node_at: Tensor  # int64 (position,)
    table_at: Tensor  # int64 (position,)
    mu_at: Tensor  # int64 (position,)
    flipped: Tensor  # int8 (position,)
    ahead_at: Tensor  # int64 (message,)  where messages to later variables are in the caller's layout
    ahead_to: Tensor  # int64 (message,)  positions of those variables
    back_at: Tensor  # the same for messages to earlier variables
    back_to: Tensor


def chains_of(graph: FactorGraph, device: torch.device) -> Chains | None:
    """The chains of a graph; None for a graph with anything else, or with variables of different numbers of states."""
    return graph.derived(("gpu chains", device), lambda: _chains(graph, device))


def _chains(graph: FactorGraph, device: torch.device) -> Chains | None:
    if len(graph.node_groups) != 1 or len(graph.factor_groups) > 1 or not graph.is_forest:
        return None
    states, count = graph.node_groups[0].num_states, graph.num_variables
    pairs = np.empty((0, 2), np.int64)
    if graph.factor_groups:
        pairs = graph.factor_groups[0].variables
    if pairs.shape[1] != 2 or np.bincount(pairs.reshape(-1), minlength=count).max() > 2 or states > MOST_STATES:
        return None
    chain, step, variable, edge = _walk(pairs, count)
    length = np.bincount(chain)
    order = np.lexsort((step, chain, -length[chain]))
    chain, variable, edge = chain[order], variable[order], edge[order]
    inner = edge >= 0  # positions with a factor before them
    factor = np.maximum(edge, 0)
    flipped, table_at, mu_at = (np.zeros(count, np.int64) for _ in range(3))
    ahead = back = np.empty(0, np.int64)
    same = False
    if graph.factor_groups:
        (group,) = graph.factor_groups
        flipped[inner] = pairs[factor[inner], 0] == variable[inner]
        table_at = group.theta_start + group.tables[factor] * group.table_size
        mu_at = group.mu_start + factor * group.table_size
        kind = 2 * table_at + flipped  # a table and its direction
        same = bool((kind[1:] == kind[:-1])[inner[1:] & inner[:-1]].all())
        starts = np.array([group.message_range(slot)[0] for slot in range(2)])
        ahead = starts[1 - flipped[inner]] + factor[inner] * states
        back = starts[flipped[inner]] + factor[inner] * states
    begin = np.flatnonzero(~inner)

    def tensor(numbers: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype)).to(device)

    places = np.flatnonzero(inner)
    return Chains(
        states,
        same,
        tensor(begin, np.int32),
        tensor(np.diff([*begin, count]), np.int32),
        tensor(graph.node_start[variable]),
        tensor(table_at),
        tensor(mu_at),
        tensor(flipped, np.int8),
        tensor((ahead[:, None] + np.arange(states)).reshape(-1)),
        tensor(places),
        tensor((back[:, None] + np.arange(states)).reshape(-1)),
        tensor(places - 1),
    )


def _walk(pairs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chain, step, variable and factor before it (-1 for the first) of every variable."""
    ends, others = pairs.reshape(-1), pairs[:, ::-1].reshape(-1)
    factors = np.repeat(np.arange(len(pairs)), 2)
    order = np.argsort(ends, kind="stable")
    degree = np.bincount(ends, minlength=count)
    slot = np.arange(len(ends)) - np.repeat(np.cumsum(degree) - degree, degree)
    factor = np.full((count, 2), -1)
    neighbour = np.full((count, 2), -1)
    factor[ends[order], slot], neighbour[ends[order], slot] = factors[order], others[order]
    # Every chain is walked from both ends. The walk from the end with the smaller number is kept.
    variable = np.flatnonzero(degree <= 1)
    chain, came = np.arange(len(variable)), np.full(len(variable), -1)
    last, found = variable.copy(), []
    step = 0
    while len(variable):
        found.append((chain, np.full(len(chain), step), variable, came))
        last[chain] = variable
        onward = (factor[variable, 0] == came).astype(np.int64) * (came >= 0)
        came, variable = factor[variable, onward], neighbour[variable, onward]
        chain, came, variable = chain[came >= 0], came[came >= 0], variable[came >= 0]
        step += 1
    joined = [np.concatenate(column) for column in zip(*found, strict=True)]
    kept = np.flatnonzero(degree <= 1) <= last
    number = np.cumsum(kept) - 1
    rows = kept[joined[0]]
    return number[joined[0][rows]], joined[1][rows], joined[2][rows], joined[3][rows]


class OneSweepRun(ExactRun):
    """An `ExactRun` that can also be differentiated. One sweep is all it takes, from whatever messages.

    Arguments:
        graph: a forest.
        theta: of shape (batch, theta).
        messages: where an iterative run would start. They only matter if no sweep is run.
        unswept: makes a run that has not been swept, for the results in that case. None for an algorithm without
            sweeps and without messages.
    """

    def __init__(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, unswept: Callable[[], Run] | None):
        if messages is not None:
            messages_like(graph, theta, messages)  # raises if they do not fit
        self._graph, self._batch, self._unswept = graph, len(theta), unswept
        self._ran = False
        self.has_messages = unswept is not None

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """One sweep is exact: its residual is 0, or NaN for an impossible model.

        Without a tolerance all sweeps count as run: those after the first would change nothing.
        """
        count = sweeps if tol < 0 else int(sweeps > 0 and not self._ran)
        self._ran |= sweeps > 0
        residual = torch.zeros(self._batch, dtype=torch.float64).masked_fill_(self._impossible, torch.nan)
        return residual, torch.full((self._batch,), count)

    def node_marginals(self) -> Tensor:
        """The node part of mu."""
        if (before := self._before()) is not None:
            return before.marginals()[:, : self._graph.node_size]
        return self._possible(self._node_marginals())

    def marginals(self) -> Tensor:
        """Mu; NaN for an impossible model."""
        before = self._before()
        return self._possible(self._marginals()) if before is None else before.marginals()

    def messages(self) -> Tensor:
        """Normalised log-messages."""
        if (before := self._before()) is not None:
            found = before.messages()
            assert found is not None
            return found
        return self._possible(self._messages())

    @abstractmethod
    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta; `grad_mu` may hold the node part alone."""

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same: the sweep is at its fixed point."""
        ones = torch.ones(self._batch, dtype=torch.int64)
        return self.backward(grad_mu), torch.zeros(self._batch, dtype=torch.float64), ones

    @abstractmethod
    def _find_impossible(self) -> Tensor:
        """Which models are impossible, of shape (batch,)."""

    @abstractmethod
    def _node_marginals(self) -> Tensor: ...

    @abstractmethod
    def _marginals(self) -> Tensor: ...

    @abstractmethod
    def _messages(self) -> Tensor: ...

    @cached_property
    def _impossible(self) -> Tensor:
        return self._find_impossible().cpu()

    def _possible(self, out: Tensor) -> Tensor:
        """The same with NaN in the rows of impossible models."""
        impossible = self._impossible
        return out.masked_fill_(impossible.to(out.device)[:, None], torch.nan) if impossible.any() else out

    def _before(self) -> Run | None:
        """The run before its first sweep, if it is not past that."""
        return None if self._ran or self._unswept is None else self._unswept()


class ChainRun(OneSweepRun):
    """Exact inference on a graph of chains."""

    def __init__(
        self,
        graph: FactorGraph,
        chains: Chains,
        theta: Tensor,
        messages: Tensor | None,
        unswept: Callable[[], Run] | None,
    ):
        from riskfield.kernels.gpu import chain_passes

        super().__init__(graph, theta, messages, unswept)
        self._passes, self._chains = chain_passes, chains
        # A copy: results are computed when they are needed, and the caller may have changed theta by then.
        self._theta = theta.detach().clone(memory_format=torch.contiguous_format)
        self._nodes: Tensor | None = None  # node marginals, computed together with the messages back
        self._ahead, self._back = (self._empty(graph.num_variables, len(theta), chains.states) for _ in range(2))
        log_z = torch.empty(len(chains.begin), len(theta), dtype=torch.float64, device=theta.device)
        c = chains
        self._launch(
            chain_passes.collect, self._theta, self._ahead, log_z, c.begin, c.length, c.node_at, c.table_at, c.flipped,
            len(c.begin), len(theta), graph.theta_size, EVEN=-math.log(c.states),
        )  # fmt: skip
        self._log_z = log_z.sum(0)

    def log_partition(self) -> Tensor:
        """log Z, of shape (batch,)."""
        return self._log_z.to(self._theta.dtype)

    def statistics(self) -> Tensor:
        """d log Z / dtheta, of shape (batch, theta)."""
        if not self._sums:
            return self._collapse(self._possible(self._marginals()))
        out = self._empty(len(self._theta), self._graph.theta_size)
        sums = self._tables()
        self._distribute(out, sums)
        self._nodes = out[:, : self._graph.node_size].clone()  # the caller may change the whole
        self._add_up(out, sums)
        return self._possible(out)

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta; `grad_mu` may hold the node part alone."""
        graph, c = self._graph, self._chains
        nodes = self._swept_nodes()
        grad = grad_mu.detach().to(self._theta.dtype).contiguous()
        pairs = grad.shape[-1] > graph.node_size
        sums = self._tables() if self._sums else grad
        out = self._empty(len(grad), graph.theta_size if self._sums else graph.mu_size)
        self._launch(
            self._passes.pull_back, self._theta, self._ahead, self._back, nodes, grad, torch.empty_like(self._ahead),
            out, sums, c.begin, c.length, c.node_at, c.table_at, c.mu_at, c.flipped, len(c.begin), len(grad),
            graph.theta_size, grad.shape[-1], out.shape[-1], graph.node_size, PAIRS=pairs, SUM=self._sums,
        )  # fmt: skip
        if not self._sums:
            return self._collapse(out)
        self._add_up(out, sums)
        return out

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _sums(self) -> bool:
        """Whether marginals of factors need only be summed along each chain to get the statistics."""
        groups = self._graph.factor_groups
        return self._chains.same and groups[0].num_tables == 1

    def _tables(self) -> Tensor:
        return self._empty(len(self._chains.begin), len(self._theta), self._chains.states**2)

    def _add_up(self, out: Tensor, sums: Tensor) -> None:
        """Put the tables of all chains, summed, where the one table of theta is."""
        out[:, self._graph.node_size :] = sums[0] if len(sums) == 1 else sums.sum(0)

    def _collapse(self, mu: Tensor) -> Tensor:
        """Sums over factors with one table. Those of `graph.collapse` have no fixed order on a GPU."""
        ties = ties_of(self._graph, mu.device)
        return mu if ties.sums is None else ties.collapse(mu.t()).t().contiguous()

    def _find_impossible(self) -> Tensor:
        return self._log_z == -torch.inf

    def _marginals(self) -> Tensor:
        out = self._empty(len(self._theta), self._graph.mu_size)
        self._distribute(out, None, pairs=bool(self._graph.factor_groups))
        self._nodes = out[:, : self._graph.node_size].clone()  # the caller may change the whole
        return out

    def _node_marginals(self) -> Tensor:
        return self._swept_nodes().clone()

    def _swept_nodes(self) -> Tensor:
        """Node marginals, with the messages back."""
        if self._nodes is None:
            self._nodes = self._empty(len(self._theta), self._graph.node_size)
            self._distribute(self._nodes, None)
        return self._nodes

    def _messages(self) -> Tensor:
        self._swept_nodes()
        out, c = self._empty(len(self._theta), self._graph.message_size), self._chains
        for numbers, at, to in ((self._ahead, c.ahead_at, c.ahead_to), (self._back, c.back_at, c.back_to)):
            out[:, at] = numbers[to].transpose(0, 1).flatten(1)
        return out

    def _distribute(self, out: Tensor, sums: Tensor | None, pairs: bool = False) -> None:
        c = self._chains
        self._launch(
            self._passes.distribute, self._theta, self._ahead, self._back, out, out if sums is None else sums, c.begin,
            c.length, c.node_at, c.table_at, c.mu_at, c.flipped, len(c.begin), len(out), self._graph.theta_size,
            out.shape[-1], EVEN=-math.log(c.states), PAIRS=pairs, SUM=sums is not None,
        )  # fmt: skip

    def _launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        width = power_of_two(self._chains.states)
        walks = max(1, 256 // width**2)
        programs = -(-len(self._chains.begin) * len(self._theta) // walks)
        warps = 1 if width <= 16 else 2 if width <= 64 else 8
        with on_device(self._theta.device):
            kernel[(programs,)](
                *arguments, S=self._chains.states, SX=width, C=walks, SAME=self._chains.same, num_warps=warps, **options
            )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._theta.dtype, device=self._theta.device)
