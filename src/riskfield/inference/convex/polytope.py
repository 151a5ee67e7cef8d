"""The local polytope of a graph: the part of Newton's equations that depends on the structure alone.

A vector of beliefs has the shape (item, mu). The last state of each variable follows from the others, which are the
unknowns; `relabelling` makes the most probable state the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import IntArray, index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup
from riskfield.inference.convex.factorise import Sparsity


class Block(NamedTuple):
    """The constraints of one factor group. A row is a slot and one state of its variable, except the last."""

    start: int  # the range of its beliefs in mu
    stop: int
    shape: tuple[int, ...]
    variables: Tensor  # (factor, slot)
    entries: list[Tensor]  # for each slot: (factor, state)  where its variables' beliefs lie in mu
    unknowns: Tensor  # (row, factor)  the unknown that each row is about
    sums: Tensor  # (row, cell)  0 or 1: which cells of a table a row adds up
    others: Tensor  # (row, cell)  the opposite
    pairs: Tensor  # (row * row, cell)  cells that two rows have in common

    @property
    def num_rows(self) -> int:
        """How many rows a factor has."""
        return len(self.sums)

    def cells(self, vector: Tensor) -> Tensor:
        """Its part of a vector of shape (item, mu), as (item * factor, cell)."""
        return vector[:, self.start : self.stop].reshape(-1, self.sums.shape[1])

    def rows(self, free: Tensor) -> Tensor:
        """The unknowns, given as (item, unknown), that its rows are about: of shape (row, item * factor)."""
        return free[:, self.unknowns].transpose(0, 1).flatten(1)

    def add_rows(self, free: Tensor, values: Tensor) -> None:
        """Add numbers of shape (row, item * factor) to the unknowns that the rows are about."""
        values = values.unflatten(1, (len(free), len(self.variables))).transpose(0, 1).flatten(1)
        free.scatter_add_(1, self.unknowns.reshape(1, -1).expand(len(free), -1), values)

    def whole(self, cells: Tensor, items: int) -> Tensor:
        """The opposite of `cells`."""
        return cells.reshape(items, self.stop - self.start)


class Nodes(NamedTuple):
    """The variables with `size` states."""

    start: int  # where their beliefs lie in mu
    stop: int
    size: int
    variables: Tensor  # (node,)
    first: int  # of their unknowns

    def view(self, vector: Tensor) -> Tensor:
        """Their part of a vector of shape (item, mu), as (item, node, state)."""
        view: Tensor = vector[:, self.start : self.stop].unflatten(1, (len(self.variables), self.size))
        return view

    def unknowns(self, free: Tensor) -> Tensor:
        """Their unknowns, as (item, node, state but the last)."""
        count = len(self.variables) * (self.size - 1)
        view: Tensor = free[:, self.first : self.first + count].unflatten(1, (len(self.variables), self.size - 1))
        return view


class Polytope:
    """The constraints of a graph, and the places of the entries of K."""

    def __init__(self, graph: FactorGraph):
        self.num_nodes, self.num_variables = graph.node_size, graph.num_variables
        self.nodes, first = [], 0
        unknown = np.empty(graph.num_variables, np.int64)  # the first one of each variable
        for group in graph.node_groups:
            self.nodes.append(Nodes(group.start, group.stop, group.num_states, index_tensor(group.variables), first))
            unknown[group.variables] = first + (group.num_states - 1) * np.arange(len(group.variables))
            first += (group.num_states - 1) * len(group.variables)
        self.num_unknowns = first
        self.blocks = [_block(graph, group, unknown) for group in graph.factor_groups]
        self.reduced = _Places(self)

    def free(self, vector: Tensor) -> Tensor:
        """Node entries but the last of each variable, of shape (item, unknown)."""
        return torch.cat([vector[:, :0], *(nodes.view(vector)[..., :-1].flatten(1) for nodes in self.nodes)], dim=1)

    def last(self, vector: Tensor) -> list[Tensor]:
        """The last node entry of each variable, of shape (item, node) for each number of states."""
        return [nodes.view(vector)[..., -1] for nodes in self.nodes]

    def spread(self, values: list[Tensor]) -> Tensor:
        """A number per variable, repeated for its unknowns."""
        parts = [v.repeat_interleave(n.size - 1, dim=1) for v, n in zip(values, self.nodes, strict=True)]
        return torch.cat(parts, dim=1) if parts else torch.zeros(0, 0, dtype=torch.float64)

    def missing(self, b: Tensor) -> Missing:
        """By how much beliefs violate the constraints."""
        nodes = [1 - n.view(b).sum(-1) for n in self.nodes]
        free = self.free(b)
        rows = [block.rows(free) - block.sums @ block.cells(b).T for block in self.blocks]
        return Missing(nodes, rows, [1 - block.cells(b).sum(1) for block in self.blocks])

    def uniform(self, possible: Tensor) -> Tensor:
        """Uniform beliefs over the possible states of each region; NaN where a region has none."""
        b = possible.to(torch.float64)
        parts = [(n.view(b) / n.view(b).sum(-1, keepdim=True)).flatten(1) for n in self.nodes]
        for block in self.blocks:
            cells = block.cells(b)
            parts.append(block.whole(cells / cells.sum(1, keepdim=True), len(b)))
        return torch.cat([b[:, :0], *parts], dim=1)

    def consistent(self, possible: Tensor) -> Tensor:
        """The states that remain after states without a possible partner in some factor are removed repeatedly."""
        while not possible.all():
            before = possible
            possible = before.clone()
            for block in self.blocks:
                table = possible[:, block.start : block.stop].unflatten(1, (-1, *block.shape))
                for slot, size in enumerate(block.shape):
                    entries = block.entries[slot]
                    supported = table.movedim(2 + slot, 2).reshape(*table.shape[:2], size, -1).any(-1)
                    lost = torch.zeros(len(possible), self.num_nodes, dtype=torch.int64)
                    where = entries.reshape(1, -1).expand(len(possible), -1)
                    lost.scatter_add_(1, where, (~supported).long().flatten(1))
                    possible[:, : self.num_nodes] &= lost == 0
                    view = [1] * table.ndim
                    view[0], view[1], view[2 + slot] = len(possible), len(entries), size
                    table &= possible[:, entries].reshape(view)
            if torch.equal(possible, before):
                break
        return possible

    def relabelling(self, b: Tensor) -> Tensor:
        """Where each entry of mu goes when the most probable state of each variable swaps places with the last.

        Of shape (item, mu), and its own inverse.
        """
        items, states, parts = len(b), torch.empty(len(b), self.num_nodes, dtype=torch.int64), []
        for nodes in self.nodes:
            best = nodes.view(b).argmax(-1, keepdim=True)
            own = nodes.view(states)
            own[:] = torch.arange(nodes.size)
            own[..., -1:] = best
            own.scatter_(-1, best, nodes.size - 1)
            places = nodes.start + nodes.size * torch.arange(len(nodes.variables))
            parts.append((places[:, None] + own).flatten(1))
        for block in self.blocks:
            table_size, place = block.sums.shape[1], torch.zeros((), dtype=torch.int64)
            for slot, size in enumerate(block.shape):
                of_slot = states[:, block.entries[slot]]
                place = (place * size).unsqueeze(-1) + of_slot.reshape(items, -1, *[1] * slot, size)
            starts = block.start + table_size * torch.arange(len(block.variables))
            parts.append((place.reshape(items, -1, table_size) + starts[:, None]).flatten(1))
        return torch.cat([torch.empty(items, 0, dtype=torch.int64), *parts], dim=1)


class Missing(NamedTuple):
    """The violation r of each constraint."""

    nodes: list[Tensor]  # (item, node) for each number of states: of sum b_i = 1
    rows: list[Tensor]  # (row, item * factor) for each block: of sum_{x_c \\ i} b_c = b_i
    tables: list[Tensor]  # (item * factor,) for each block: of sum b_c = 1

    def nothing(self) -> Missing:
        """Zeros of the same shapes."""
        return Missing(*([torch.zeros_like(part) for part in parts] for parts in self))


def polytope(graph: FactorGraph) -> Polytope:
    """The polytope of a graph. It is computed once and kept with the graph."""
    return graph.derived("local polytope", lambda: Polytope(graph))


class _Places:
    """Where the entries of K come from: the curvatures of nodes, and the stiffness of factors."""

    def __init__(self, polytope: Polytope):
        unknowns = np.arange(polytope.num_unknowns)
        self.below: list[tuple[Tensor, Tensor]] = []  # pairs of states of one variable, for each number of states
        rows, columns = [unknowns], [unknowns]
        for nodes in polytope.nodes:
            k, j = np.tril_indices(nodes.size - 1)
            first = nodes.first + (nodes.size - 1) * np.arange(len(nodes.variables))[:, None]
            rows.append((first + k).ravel())
            columns.append((first + j).ravel())
            self.below.append((index_tensor(k), index_tensor(j)))
        self.pairs: list[tuple[Tensor, Tensor]] = []  # of the rows of each block
        for block in polytope.blocks:
            k, j = np.tril_indices(block.num_rows)
            rows.append(block.unknowns.numpy()[k].ravel())
            columns.append(block.unknowns.numpy()[j].ravel())
            self.pairs.append((index_tensor(k), index_tensor(j)))
        row, column = np.concatenate(rows), np.concatenate(columns)
        low, high = np.maximum(row, column), np.minimum(row, column)
        places, entry = np.unique(low * max(polytope.num_unknowns, 1) + high, return_inverse=True)
        self.entry = index_tensor(entry.reshape(-1))
        low, high = np.divmod(places, max(polytope.num_unknowns, 1))
        self.low, self.high = index_tensor(low), index_tensor(high)
        self.sparsity = Sparsity(polytope.num_unknowns, low, high)
        self.num_entries = len(places)

    def entries(self, free: Tensor, last: list[Tensor], at_free: Tensor, stiffness: list[Tensor]) -> Tensor:
        """The lower triangle of K, of shape (item, entry)."""
        parts, items, start = [free], len(free), 0
        for (k, j), own in zip(self.below, last, strict=True):
            count = int(k[-1]) + 1 if len(k) else 0
            there = at_free[:, start : start + count * own.shape[1]].reshape(items, own.shape[1], count)
            parts.append(torch.where(there[..., k] & there[..., j], own.unsqueeze(-1), 0.0).flatten(1))
            start += count * own.shape[1]
        for (k, j), own in zip(self.pairs, stiffness, strict=True):
            parts.append(own[k, j].unflatten(1, (items, own.shape[2] // items)).transpose(0, 1).flatten(1))
        values = torch.cat(parts, dim=1)
        out = values.new_zeros(items, self.num_entries)
        return out.scatter_add_(1, self.entry.expand(items, -1), values)


def _block(graph: FactorGraph, group: FactorGroup, unknown: IntArray) -> Block:
    states = np.unravel_index(np.arange(group.table_size), group.shape)
    sums = [np.arange(n - 1)[:, None] == states[s] for s, n in enumerate(group.shape)]
    table = np.concatenate([np.zeros((0, group.table_size), bool), *sums])
    unknowns = [unknown[group.variables[:, s]] + np.arange(n - 1)[:, None] for s, n in enumerate(group.shape)]
    pairs = (table[:, None] & table).reshape(-1, group.table_size)
    return Block(
        group.mu_start,
        group.mu_stop,
        group.shape,
        index_tensor(group.variables),
        [index_tensor(graph.node_entries(group.variables[:, slot])) for slot in range(group.arity)],
        index_tensor(np.concatenate([np.zeros((0, group.num_factors), np.int64), *unknowns])),
        *(torch.from_numpy(part.astype(np.float64)) for part in (table, ~table, pairs)),
    )
