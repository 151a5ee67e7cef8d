"""The structure of a graphical model, and the one flat layout its numbers live in.

A `FactorGraph` knows which variables exist, how many states each has, and which tuples of variables are joined by a
factor. It holds no numbers. Those live in flat vectors (with any leading batch axes) laid out as

    theta:     [node groups ...][factor groups: one table each, or one per *tied* table ...]
    mu:        [node groups ...][factor groups: one block per factor ...]
    messages:  [for each factor group, for each slot: one message per factor ...]

A node group holds all variables with the same number of states; a factor group all factors of the same shape. Inside a
group numbers are contiguous, so `node_views` and `factor_views` are views, never copies. Without tied tables the
layouts of theta and mu coincide.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.errors import did_you_mean
from riskfield.graph._numbers import check_theta, check_values, checked_assignment, common_batch
from riskfield.graph._scopes import IntArray, checked_names, checked_states, checked_tables, index_tensor, scope_blocks
from riskfield.graph.groups import (
    FactorGroup,
    NodeGroup,
    factor_positions,
    group_factors,
    group_nodes,
    warn_of_large_tables,
)

T = TypeVar("T")


class FactorGraph:
    """A frozen, validated factor graph.

    Arguments:
        num_states: the number of states of each variable, all at least 1.
        factors: the variables each factor joins: a sequence of tuples, or one or several integer arrays of shape
            (factors, arity). A factor may have any arity from 1; several factors may join the same variables.
        tables: optional, one integer per factor: factors with the same integer share one table of theta (*tied*
            factors). They must have the same shape. Tied tables are never expanded in memory.
        names: optional, a distinct name for each variable, by which evidence and `node` may refer to it.

    Tables are always dense: one with more than 2**24 joint states (128 MiB in float64) gives a `PerformanceWarning`.

    Raises:
        ValueError: if a state count is below 1, a factor is empty, names a variable twice or names one out of range,
            or if tied factors differ in shape.

    >>> graph = FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 1, 2)])
    >>> graph
    FactorGraph(3 variables, 3 factors, theta 31, states 2..3, arity 2..3)
    >>> theta = graph.zeros()
    >>> graph.factor(theta, 0).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        num_states: Sequence[int] | npt.ArrayLike,
        factors: Iterable[Sequence[int]] | npt.NDArray[np.integer] | Sequence[npt.NDArray[np.integer]] = (),
        *,
        tables: npt.ArrayLike | None = None,
        names: Iterable[str] | None = None,
    ):
        self._num_states = checked_states(num_states)
        blocks = scope_blocks(factors, len(self._num_states))
        num_factors = sum(len(block.numbers) for block in blocks)
        table_ids = checked_tables(tables, num_factors)
        self._num_factors = num_factors
        self._node_groups, self._node_start = group_nodes(self._num_states)
        self._factor_groups = group_factors(self._num_states, self.node_size, blocks, table_ids)
        warn_of_large_tables(self._factor_groups)
        self._factor_group_of, self._factor_row = factor_positions(self._factor_groups, num_factors)
        self._numbers = checked_names(names, len(self._num_states))
        self._derived: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Plans of the native engine cannot be pickled, and all of it can be derived again.
        return {**self.__dict__, "_derived": {}}

    # -- structure ----------------------------------------------------------------------------------------------------

    @property
    def num_variables(self) -> int:
        """How many variables there are."""
        return len(self._num_states)

    @property
    def num_factors(self) -> int:
        """How many factors there are."""
        return self._num_factors

    @property
    def num_states(self) -> IntArray:
        """The number of states of each variable."""
        return self._num_states

    @property
    def node_groups(self) -> tuple[NodeGroup, ...]:
        """The groups of variables with equal state counts, by ascending count."""
        return self._node_groups

    @property
    def factor_groups(self) -> tuple[FactorGroup, ...]:
        """The groups of factors with equal shapes, by first appearance."""
        return self._factor_groups

    @property
    def node_start(self) -> IntArray:
        """Where each variable's block starts in theta and in mu."""
        return self._node_start

    @cached_property
    def node_size(self) -> int:
        """The length of the node part that opens theta and mu."""
        return int(self._num_states.sum())

    @cached_property
    def theta_size(self) -> int:
        """The length of a theta vector."""
        return self._factor_groups[-1].theta_stop if self._factor_groups else self.node_size

    @cached_property
    def mu_size(self) -> int:
        """The length of a mu vector; larger than `theta_size` when tables are tied."""
        return self._factor_groups[-1].mu_stop if self._factor_groups else self.node_size

    @cached_property
    def message_size(self) -> int:
        """The length of a message vector."""
        return sum(group.num_factors * sum(group.shape) for group in self._factor_groups)

    def scope(self, factor: int) -> tuple[int, ...]:
        """The variables that factor number `factor` joins."""
        group, row = self._locate(factor)
        return tuple(int(v) for v in group.variables[row])

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the variables, or None."""
        return tuple(self._numbers) or None

    def variable(self, which: int | str) -> int:
        """The number of a variable, given by its name or its number.

        >>> FactorGraph([2, 2], [(0, 1)], names=["rain", "road"]).variable("road")
        1
        """
        if isinstance(which, str):
            if which not in self._numbers:
                hint = did_you_mean(which, self._numbers) if self._numbers else " The graph has no names."
                raise ValueError(f"`variable` must be the name of a variable. Got {which!r}.{hint}")
            return self._numbers[which]
        if not 0 <= which < self.num_variables:
            raise ValueError(f"`variable` must lie in 0..{self.num_variables - 1}. Got {which}.")
        return int(which)

    def neighbour_pairs(self) -> IntArray:
        """All pairs of distinct variables that share a factor, with repeats, as an array of shape (pairs, 2)."""
        pairs = [
            group.variables[:, [a, b]]
            for group in self._factor_groups
            for a in range(group.arity)
            for b in range(a + 1, group.arity)
        ]
        return np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)

    def node_entries(self, variables: npt.NDArray[np.integer]) -> IntArray:
        """Positions of the states of `variables`, all with equally many, in theta and in mu: (*variables, state).

        >>> FactorGraph([2, 3, 2]).node_entries(np.array([0, 2]))
        array([[0, 1],
               [2, 3]])
        """
        sizes = np.unique(self._num_states[variables])
        if len(sizes) > 1:
            raise ValueError(f"`variables` must all have the same number of states. Got {sizes.tolist()}.")
        entries: IntArray = self._node_start[variables][..., None] + np.arange(sizes[0] if len(sizes) else 0)
        return entries

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed once and kept with the graph under `key`: index arrays, plans and the like.

        >>> graph = FactorGraph([2, 3])
        >>> graph.derived("largest", lambda: int(graph.num_states.max()))
        3
        """
        if key not in self._derived:
            with torch.inference_mode(False):  # tensors made in inference mode are of no use to later gradients
                self._derived.setdefault(key, make())  # of two threads that made it, both get the first one's
        found: T = self._derived[key]
        return found

    @cached_property
    def untied(self) -> FactorGraph:
        """The same graph with a table for every factor, so that theta has the layout of mu; all else stays in place."""
        if self.theta_size == self.mu_size:
            return self
        numbers = np.concatenate([group.factors for group in self._factor_groups])
        if (numbers == np.arange(self.num_factors)).all():
            scopes: list[Any] = [group.variables for group in self._factor_groups]
        else:
            scopes = [self.scope(factor) for factor in range(self.num_factors)]
        return FactorGraph(self.num_states, scopes, names=self.names)

    @cached_property
    def max_degree(self) -> int:
        """The largest number of factors that a variable has."""
        variables = self.factor_graph_edges()[:, 0]
        return int(np.bincount(variables).max(initial=0))

    @cached_property
    def is_forest(self) -> bool:
        """Whether the factor graph has no cycle, so that belief propagation on it is exact.

        The nodes of the factor graph are the variables and the factors. Two factors that share two variables form a
        cycle; a single factor never does, whatever its arity.

        >>> FactorGraph([2] * 4, [(0,), (0, 1, 2), (2, 3)]).is_forest, FactorGraph([2, 2], [(0, 1), (0, 1)]).is_forest
        (True, False)
        """
        num_nodes = self.num_variables + self.num_factors
        num_edges = sum(group.variables.size for group in self._factor_groups)
        if num_edges >= max(num_nodes, 1):
            return False
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        edges = coo_array((np.ones(num_edges), self.factor_graph_edges().T), (num_nodes, num_nodes))
        num_trees = connected_components(edges, directed=False, return_labels=False)
        return bool(num_edges == num_nodes - num_trees)

    def factor_graph_edges(self) -> IntArray:
        """The edges of the bipartite factor graph, (variable, num_variables + factor), of shape (edge, 2)."""
        edges = [np.empty((0, 2), np.int64)]
        for group in self._factor_groups:
            factors = np.repeat(self.num_variables + group.factors, group.arity)
            edges.append(np.stack([group.variables.ravel(), factors], axis=1))
        return np.concatenate(edges)

    # -- numbers in the layout ----------------------------------------------------------------------------------------

    def zeros(self, *batch: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
        """A theta of zeros with the given leading batch axes, to be filled through the views."""
        return torch.zeros(*batch, self.theta_size, dtype=dtype, device=device)

    def node_views(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Views of the node part of a theta or a mu, which may be given alone: (*batch, node, state) for each group."""
        if vector.ndim == 0 or vector.shape[-1] != self.node_size:
            self._factor_kind(vector)
        return tuple(
            vector[..., g.start : g.stop].unflatten(-1, (len(g.variables), g.num_states)) for g in self._node_groups
        )

    def factor_views(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Views of the factor part, one per factor group, of shape (*batch, factor, *shape).

        For a theta with tied tables the second axis counts tables instead of factors.
        """
        is_mu = self._factor_kind(vector) == "mu"
        views = []
        for g in self._factor_groups:
            start, stop, count = (
                (g.mu_start, g.mu_stop, g.num_factors) if is_mu else (g.theta_start, g.theta_stop, g.num_tables)
            )
            views.append(vector[..., start:stop].unflatten(-1, (count, *g.shape)))
        return tuple(views)

    def node(self, vector: Tensor, variable: int | str) -> Tensor:
        """The block of one variable, given by number or name, in theta or mu: a view of shape (*batch, state)."""
        self._factor_kind(vector)
        number = self.variable(variable)
        start = int(self._node_start[number])
        return vector[..., start : start + int(self._num_states[number])]

    def factor(self, vector: Tensor, factor: int) -> Tensor:
        """The block of one factor in theta or mu, as a view of shape (*batch, *shape)."""
        group, row = self._locate(factor)
        if self._factor_kind(vector) == "mu":
            start = group.mu_start + row * group.table_size
        else:
            start = group.theta_start + int(group.tables[row]) * group.table_size
        block: Tensor = vector[..., start : start + group.table_size].unflatten(-1, group.shape)
        return block

    def assemble(self, nodes: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
        """Join per-group tensors, shaped like `node_views` and `factor_views`, into one theta. Differentiable."""
        node_shapes = [(len(g.variables), g.num_states) for g in self._node_groups]
        factor_shapes = [(g.num_tables, *g.shape) for g in self._factor_groups]
        parts = []
        for name, given, shapes in (("nodes", nodes, node_shapes), ("factors", factors, factor_shapes)):
            if len(given) != len(shapes):
                raise ValueError(f"`{name}` must hold {len(shapes)} tensors, one per group. Got {len(given)}.")
            for k, (tensor, shape) in enumerate(zip(given, shapes, strict=True)):
                if tuple(tensor.shape[tensor.ndim - len(shape) :]) != shape:
                    raise ValueError(f"`{name}[{k}]` must have shape (*batch, {shape}). Got {tuple(tensor.shape)}.")
                parts.append(tensor.flatten(tensor.ndim - len(shape)))
        batch = common_batch(*(p.shape[:-1] for p in parts)) if parts else ()
        return torch.cat([p.expand(*batch, p.shape[-1]) for p in parts], dim=-1) if parts else torch.zeros(0)

    def expand(self, theta: Tensor) -> Tensor:
        """Theta in the layout of mu: tied tables repeated for each of their factors. Differentiable."""
        self.check_theta(theta)
        if self.theta_size == self.mu_size:
            return theta
        parts = [theta[..., : self.node_size]]
        for group, table in zip(self._factor_groups, self.factor_views(theta), strict=True):
            index = index_tensor(group.tables, theta.device)
            dim = theta.ndim - 1
            parts.append(table.index_select(dim, index).flatten(dim) if group.tied else table.flatten(dim))
        return torch.cat(parts, dim=-1)

    def collapse(self, mu: Tensor) -> Tensor:
        """Sum mu over the factors that share a table: the adjoint of `expand`, and the expected statistics of theta."""
        if mu.shape[-1] != self.mu_size:
            raise ValueError(f"`mu` must have length {self.mu_size}. Got shape {tuple(mu.shape)}.")
        if self.theta_size == self.mu_size:
            return mu
        parts, dim = [mu[..., : self.node_size]], mu.ndim - 1
        for group, block in zip(self._factor_groups, self.factor_views(mu), strict=True):
            if group.tied:
                total = block.new_zeros(*mu.shape[:-1], group.num_tables, *group.shape)
                block = total.index_add(dim, index_tensor(group.tables, mu.device), block)
            parts.append(block.flatten(dim))
        return torch.cat(parts, dim=-1)

    def score(self, theta: Tensor, states: Tensor) -> Tensor:
        """theta . f(x): the unnormalised log-probability of assignments `states` of shape (*batch, variable)."""
        self.check_theta(theta)
        states = self.check_states(states)
        # One gather for all tables, so that its gradient is one tensor.
        starts = self.derived(("starts of tables", theta.device), lambda: self._table_starts(theta.device))
        joint = [states, *(group.joint_states(states) for group in self._factor_groups)]
        return _gather_last(theta, torch.cat(joint, dim=-1) + starts).sum(-1)

    def _table_starts(self, device: torch.device) -> Tensor:
        """Where in theta the table of every variable starts, then that of every factor, group by group."""
        tables = [g.theta_start + g.tables * g.table_size for g in self._factor_groups]
        return index_tensor(np.concatenate([self._node_start, *tables]), device)

    def check_theta(self, theta: Tensor) -> None:
        """Raise unless `theta` is a float tensor of the right length."""
        check_theta(theta, self.theta_size)

    def check_values(self, theta: Tensor) -> tuple[float, float]:
        """Raise unless `theta` is a float tensor of the right length without NaN or +inf. Return its range."""
        return check_values(theta, self.theta_size)

    def check_states(self, states: Tensor, name: str = "states", *, allow_unobserved: bool = False) -> Tensor:
        """`states` as an int64 tensor of shape (*batch, variable), each in range (or -1 where that is allowed)."""
        device = torch.as_tensor(states).device
        num_states = self.derived(("states", device), lambda: index_tensor(self._num_states, device))
        fewest = self.derived("fewest states", lambda: int(self._num_states.min(initial=1 << 62)))
        return checked_assignment(states, num_states, fewest, name, lowest=-1 if allow_unobserved else 0)

    def __repr__(self) -> str:
        low, high = (int(self._num_states.min()), int(self._num_states.max())) if self.num_variables else (0, 0)
        arities = [g.arity for g in self._factor_groups] or [0]
        return (
            f"FactorGraph({self.num_variables} variables, {self.num_factors} factors, theta {self.theta_size}, "
            f"states {_span(low, high)}, arity {_span(min(arities), max(arities))})"
        )

    # -- building -----------------------------------------------------------------------------------------------------

    def _locate(self, factor: int) -> tuple[FactorGroup, int]:
        if not 0 <= factor < self._num_factors:
            raise ValueError(f"`factor` must lie in 0..{self._num_factors - 1}. Got {factor}.")
        return self._factor_groups[self._factor_group_of[factor]], int(self._factor_row[factor])

    def _factor_kind(self, vector: Tensor) -> str:
        size = vector.shape[-1] if vector.ndim else 0
        if size == self.theta_size:
            return "theta"
        if size == self.mu_size:
            return "mu"
        allowed = f"{self.theta_size}" if self.theta_size == self.mu_size else f"{self.theta_size} or {self.mu_size}"
        raise ValueError(f"`vector` must have shape (*batch, {allowed}). Got {tuple(vector.shape)}.")


def _gather_last(vector: Tensor, index: Tensor) -> Tensor:
    batch = common_batch(vector.shape[:-1], index.shape[:-1])
    return vector.expand(*batch, vector.shape[-1]).gather(-1, index.expand(*batch, index.shape[-1]))


def _span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}..{high}"
