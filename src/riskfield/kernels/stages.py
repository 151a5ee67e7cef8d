"""Index tensors for the torch kernels, from factors and variables into flat tensors, and the stages of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Levels


@dataclass(frozen=True, eq=False)
class Stage:
    """Messages sent together, then the beliefs of the variables that received them."""

    sends: tuple[tuple[int, int, Tensor], ...]  # (factor group, slot, rows)
    receivers: Tensor  # (variable,)


class Layout:
    """Index tensors from factors and variables into the flat vectors."""

    def __init__(self, graph: FactorGraph, device: torch.device):
        self.graph = graph
        self.num_states = index_tensor(graph.num_states, device)
        self.node_start = index_tensor(graph.node_start, device)
        self.messages: list[list[Tensor]] = []  # [group][slot]: (factor, state) positions in a message vector
        self.nodes: list[list[Tensor]] = []  # [group][slot]: (factor, state) positions in the node part
        owners, starts, factors = [], [], []
        for group in graph.factor_groups:
            message_rows, node_rows = [], []
            for slot, size in enumerate(group.shape):
                first, last = group.message_range(slot)
                message_rows.append(torch.arange(first, last, device=device).reshape(-1, size))
                node_rows.append(index_tensor(graph.node_entries(group.variables[:, slot]), device))
                owners.append(index_tensor(group.variables[:, slot], device))
                starts.append(message_rows[-1][:, 0])
                factors.append(index_tensor(group.factors, device))
            self.messages.append(message_rows)
            self.nodes.append(node_rows)
        empty = torch.empty(0, dtype=torch.int64, device=device)
        order = torch.argsort(torch.cat(owners), stable=True) if owners else empty
        self._message_start = torch.cat(starts)[order] if owners else empty
        self._factor = torch.cat(factors)[order] if owners else empty
        self._degree = torch.bincount(torch.cat(owners) if owners else empty, minlength=graph.num_variables)
        self._first = self._degree.cumsum(0) - self._degree

    def by_states(self, variables: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`variables` split by their number of states. Each part comes with its positions (variable, state)."""
        sizes = self.num_states[variables]
        found = []
        for size in torch.unique(sizes).tolist():
            members = variables[sizes == size]
            found.append((members, self.node_start[members][:, None] + torch.arange(size, device=members.device)))
        return found

    def incoming(self, variables: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The messages to `variables`: the receiver, the positions (message, state) and the factor of each."""
        degree = self._degree[variables]
        owner = torch.repeat_interleave(torch.arange(len(variables), device=variables.device), degree)
        within = torch.arange(len(owner), device=variables.device) - (degree.cumsum(0) - degree)[owner]
        position = self._first[variables][owner] + within
        entries = self._message_start[position][:, None] + torch.arange(size, device=variables.device)
        return owner, entries, self._factor[position]


def forward_backward(graph: FactorGraph, levels: Levels, device: torch.device) -> list[Stage]:
    """Forward: a variable receives from the factors in which it is not first; backward: in which it is not last."""
    forward: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    backward: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    for g, group in enumerate(graph.factor_groups):
        rank = levels.rank[group.variables]
        for slot in range(group.arity):
            level = levels.level[group.variables[:, slot]]
            not_first = (rank[:, slot] > rank.min(axis=1)) | (group.arity == 1)
            not_last = rank[:, slot] < rank.max(axis=1)
            for stages, chosen in ((forward, not_first), (backward, not_last)):
                for where, rows in _by_level(level, np.flatnonzero(chosen)):
                    stages[where].append((g, slot, rows))
    return [_stage(graph, sends, device) for sends in [*forward, *reversed(backward)] if sends]


def colour_by_colour(graph: FactorGraph, levels: Levels, device: torch.device) -> list[Stage]:
    """Every variable receives from all its factors, level by level."""
    sends: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    for g, group in enumerate(graph.factor_groups):
        for slot in range(group.arity):
            level = levels.level[group.variables[:, slot]]
            for where, rows in _by_level(level, np.arange(group.num_factors)):
                sends[where].append((g, slot, rows))
    members = dict(_by_level(levels.level, np.arange(graph.num_variables)))
    return [
        Stage(
            tuple((g, slot, index_tensor(rows, device)) for g, slot, rows in sends[level]),
            index_tensor(members[level], device),
        )
        for level in range(levels.count)
    ]


def flooding(graph: FactorGraph, device: torch.device) -> list[Stage]:
    """All messages at once."""
    sends = [
        (g, slot, np.arange(group.num_factors))
        for g, group in enumerate(graph.factor_groups)
        for slot in range(group.arity)
    ]
    return [_stage(graph, sends, device)] if sends else []


def _stage(graph: FactorGraph, sends: list[tuple[int, int, np.ndarray]], device: torch.device) -> Stage:
    receivers = np.unique(np.concatenate([graph.factor_groups[g].variables[rows, slot] for g, slot, rows in sends]))
    return Stage(
        tuple((g, slot, index_tensor(rows, device)) for g, slot, rows in sends),
        index_tensor(receivers, device),
    )


def _by_level(level: np.ndarray, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    ordered = rows[np.argsort(level[rows], kind="stable")]
    values, starts = np.unique(level[ordered], return_index=True)
    return [(int(v), ordered[a:b]) for v, a, b in zip(values, starts, [*starts, len(ordered)][1:], strict=True)]
