"""Groups of variables and of factors. Each group is contiguous in the flat vectors of a `FactorGraph`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from riskfield.errors import PerformanceWarning, warn
from riskfield.graph._scopes import IntArray, ScopeBlock, check_tied_shapes, frozen, index_tensor

_LARGE_TABLE = 2**24  # joint states: 128 MiB in float64


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """All variables with `num_states` states. They occupy `start:stop` in theta and in mu."""

    num_states: int
    variables: IntArray  # (node,)
    start: int

    @property
    def stop(self) -> int:
        """Where the group ends in theta and in mu."""
        return self.start + self.num_states * len(self.variables)


@dataclass(frozen=True, eq=False)
class FactorGroup:
    """All factors whose tables have `shape`."""

    shape: tuple[int, ...]
    factors: IntArray  # (factor,)        their numbers, in the order in which they were given
    variables: IntArray  # (factor, slot)   the variables each factor joins
    tables: IntArray  # (factor,)        the table of theta each factor uses
    num_tables: int
    theta_start: int
    mu_start: int
    message_start: int

    @property
    def arity(self) -> int:
        """How many variables each factor joins."""
        return len(self.shape)

    @property
    def num_factors(self) -> int:
        """How many factors the group holds."""
        return len(self.factors)

    @property
    def table_size(self) -> int:
        """How many entries a table has."""
        return math.prod(self.shape)

    @property
    def theta_stop(self) -> int:
        """Where the tables end in theta."""
        return self.theta_start + self.num_tables * self.table_size

    @property
    def mu_stop(self) -> int:
        """Where the marginals end in mu."""
        return self.mu_start + self.num_factors * self.table_size

    @property
    def tied(self) -> bool:
        """Whether some factors share a table."""
        return self.num_tables < self.num_factors

    def message_range(self, slot: int) -> tuple[int, int]:
        """The range of the messages to the variables in `slot`, in a flat message vector."""
        start = self.message_start + self.num_factors * sum(self.shape[:slot])
        return start, start + self.num_factors * self.shape[slot]

    def joint_states(self, states: Tensor) -> Tensor:
        """The entries of the flattened tables at `states`, of shape (*batch, variable): one index per factor."""
        return self._joint([states.index_select(-1, index.to(states.device)) for index in self._slots])

    def joint_entries(self, states: Tensor) -> Tensor:
        """The same from the states of each factor's own variables, of shape (*batch, factor, slot)."""
        return self._joint(states.unbind(-1))

    def _joint(self, states: Sequence[Tensor]) -> Tensor:
        joint = states[0]
        for size, own in zip(self.shape[1:], states[1:], strict=True):
            joint = joint * size + own
        return joint

    @cached_property
    def _slots(self) -> tuple[Tensor, ...]:
        """The variables of each slot as an index."""
        return tuple(index_tensor(self.variables[:, slot]) for slot in range(self.arity))


def group_nodes(num_states: IntArray) -> tuple[tuple[NodeGroup, ...], IntArray]:
    """The groups of variables with equal numbers of states, and where each variable starts in theta and in mu."""
    groups, start = [], 0
    node_start = np.empty(len(num_states), np.int64)
    for count in np.unique(num_states):
        variables = np.flatnonzero(num_states == count)
        groups.append(NodeGroup(int(count), frozen(variables), start))
        node_start[variables] = start + count * np.arange(len(variables))
        start = groups[-1].stop
    return tuple(groups), frozen(node_start)


def group_factors(
    num_states: IntArray, node_size: int, blocks: list[ScopeBlock], table_ids: IntArray | None
) -> tuple[FactorGroup, ...]:
    """The groups of factors whose tables have equal shapes, in the order in which the shapes first appear."""
    members: dict[tuple[int, ...], list[tuple[IntArray, IntArray]]] = {}
    for block in blocks:
        shapes = num_states[block.variables]
        if (shapes == shapes[0]).all():
            members.setdefault(tuple(map(int, shapes[0])), []).append((block.numbers, block.variables))
            continue
        distinct, inverse = np.unique(shapes, axis=0, return_inverse=True)
        for k, shape in enumerate(distinct):
            rows = np.flatnonzero(inverse.reshape(-1) == k)
            members.setdefault(tuple(map(int, shape)), []).append((block.numbers[rows], block.variables[rows]))
    ordered = sorted(members.items(), key=lambda item: int(item[1][0][0][0]))
    if table_ids is not None:
        check_tied_shapes(ordered, table_ids)
    groups = []
    theta_start = mu_start = node_size
    message_start = 0
    for shape, pieces in ordered:
        factors = np.concatenate([numbers for numbers, _ in pieces])
        variables = np.concatenate([block for _, block in pieces])
        order = np.argsort(factors, kind="stable")
        factors, variables = factors[order], variables[order]
        tables = np.arange(len(factors))
        if table_ids is not None:
            # Tables are numbered by first appearance, so that theta has the layout of mu if no factors are tied.
            _, first_use, inverse = np.unique(table_ids[factors], return_index=True, return_inverse=True)
            tables = np.argsort(np.argsort(first_use))[inverse.reshape(-1)]
        group = FactorGroup(
            shape,
            frozen(factors),
            frozen(variables),
            frozen(tables),
            int(tables.max()) + 1,
            theta_start,
            mu_start,
            message_start,
        )
        groups.append(group)
        theta_start, mu_start = group.theta_stop, group.mu_stop
        if mu_start >= 2**62:
            raise ValueError(
                f"`factors` must have fewer than 2**62 joint states in all. Those of shape {shape} have more."
            )
        message_start += group.num_factors * sum(shape)
    return tuple(groups)


def factor_positions(groups: tuple[FactorGroup, ...], num_factors: int) -> tuple[IntArray, IntArray]:
    """For each factor, the number of its group and its row there."""
    group_of, row = np.empty(num_factors, np.int64), np.empty(num_factors, np.int64)
    for k, group in enumerate(groups):
        group_of[group.factors] = k
        row[group.factors] = np.arange(group.num_factors)
    return frozen(group_of), frozen(row)


def warn_of_large_tables(groups: tuple[FactorGroup, ...]) -> None:
    """Warn of the first factor whose table is so large that it was perhaps not meant to be dense."""
    for group in groups:
        if group.table_size > _LARGE_TABLE:
            warn(
                f"Factor {int(group.factors[0])} joins {group.arity} variables with {group.table_size:,} joint states. "
                f"Its table is dense and takes {group.table_size * 8 / 2**30:,.3g} GiB in float64.",
                PerformanceWarning,
            )
            return
