"""Buckets: which tables meet when variables are eliminated one by one.

`Exact`, `ExactMAP` and `sample_exactly` use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from riskfield.errors import TreewidthError
from riskfield.graph._scopes import IntArray, index_tensor
from riskfield.graph.elimination import Elimination, by_number, min_fill
from riskfield.graph.factor_graph import FactorGraph

NEG_INF = float("-inf")
# No machine holds tables over this many variables of two states or more, and on a large grid the order takes minutes.
_HOPELESS_WIDTH = 64


class Cut:
    """Tables without the states that are impossible in every batch item, and the way back to the layout of mu.

    Tables are numbered: first the variables, then the factors group by group. Variables of which one state is left are
    *known* and dropped from the scopes.
    """

    def __init__(self, graph: FactorGraph, theta: Tensor):
        self.graph = graph
        # By a list, since the tensors of `torch.func.jvp` have no storage that NumPy could share.
        possible = np.array((theta[:, : graph.node_size].detach() > NEG_INF).any(0).tolist(), bool)
        self.states: list[IntArray] = []  # by variable
        for start, count in zip(graph.node_start.tolist(), graph.num_states.tolist(), strict=True):
            kept = np.flatnonzero(possible[start : start + count])
            self.states.append(kept if len(kept) else np.zeros(1, np.int64))
        self.num_states = np.array([len(kept) for kept in self.states], np.int64)
        self.known = self.num_states == 1
        whole = self.num_states == graph.num_states
        self.scopes: list[tuple[int, ...]] = []
        self._entries: list[IntArray | None] = []  # what is kept of each flattened table; None for all
        blocks = [np.arange(graph.num_variables)[:, None], *(group.variables for group in graph.factor_groups)]
        for block in blocks:
            for scope, is_whole in zip(block.tolist(), whole[block].all(axis=1).tolist(), strict=True):
                self.scopes.append(tuple(v for v in scope if not self.known[v]))
                self._entries.append(None if is_whole else self._kept_entries(scope))

    def _kept_entries(self, scope: list[int]) -> IntArray:
        entries = np.zeros(1, np.int64)
        for v in scope:
            entries = (entries[:, None] * self.graph.num_states[v] + self.states[v]).ravel()
        return entries

    def tables(self, theta: Tensor) -> list[Tensor]:
        """All tables, each of shape (batch, *kept states of the variables that are not known)."""
        flat: list[Tensor] = []
        for start, count in zip(self.graph.node_start.tolist(), self.graph.num_states.tolist(), strict=True):
            flat.append(theta[:, start : start + count])
        for group, view in zip(self.graph.factor_groups, self.graph.factor_views(theta), strict=True):
            rows = view.flatten(2)
            flat += [rows[:, table] for table in group.tables.tolist()]
        out = []
        for table, entries, scope in zip(flat, self._entries, self.scopes, strict=True):
            kept = table if entries is None else table[:, index_tensor(entries, theta.device)]
            out.append(kept.reshape(len(theta), *(int(self.num_states[v]) for v in scope)))
        return out

    def restore(self, tables: list[Tensor], theta: Tensor) -> Tensor:
        """Marginals of all tables in the layout of mu, with zeros where states were cut away."""
        # The empty sum ties mu to theta for autograd even where every state is known.
        mu = theta[:, :0].sum(1, keepdim=True).expand(-1, self.graph.mu_size)
        if not tables:
            return mu
        starts, sizes = self.graph.node_start.tolist(), self.graph.num_states.tolist()
        for group in self.graph.factor_groups:
            starts += range(group.mu_start, group.mu_stop, group.table_size)
            sizes += [group.table_size] * group.num_factors
        index = [
            start + (np.arange(size) if entries is None else entries)
            for start, size, entries in zip(starts, sizes, self._entries, strict=True)
        ]
        values = torch.cat([table.reshape(len(theta), math.prod(table.shape[1:])) for table in tables], dim=1)
        return mu.index_copy(1, index_tensor(np.concatenate(index), theta.device), values)


@dataclass(frozen=True, eq=False)
class Fit:
    """How a smaller table fits into the table of a bucket; axis 0 is the batch."""

    order: tuple[int, ...]  # its axes in the order of elimination
    back: tuple[int, ...]  # and the way back
    shape: tuple[int, ...]  # without the batch: 1 where the bucket has a variable that it has not
    summed: tuple[int, ...]  # the axes of those variables

    def spread(self, table: Tensor) -> Tensor:
        return table.permute(self.order).reshape(table.shape[:1] + self.shape)

    def marginal(self, joint: Tensor) -> Tensor:
        return (joint.sum(self.summed) if self.summed else joint).permute(self.back)


@dataclass(frozen=True, eq=False)
class Bucket:
    """One variable to eliminate, and what is gathered for it."""

    scope: tuple[int, ...]  # the variable itself, then those it is joined with, in the order of elimination
    shape: tuple[int, ...]  # of the table over them
    tables: list[tuple[int, Fit]] = field(default_factory=list)
    children: list[tuple[int, Fit]] = field(default_factory=list)  # the buckets whose messages arrive here

    def fit(self, scope: tuple[int, ...]) -> Fit:
        axis = {v: k for k, v in enumerate(self.scope)}
        order = sorted(range(len(scope)), key=lambda k: axis[scope[k]])
        back = sorted(range(len(scope)), key=order.__getitem__)
        missing = [v not in scope for v in self.scope]
        return Fit(
            (0, *(k + 1 for k in order)),
            (0, *(k + 1 for k in back)),
            tuple(1 if out else n for n, out in zip(self.shape, missing, strict=True)),
            tuple(k + 1 for k, out in enumerate(missing) if out),
        )


class BucketTree:
    """The buckets in the order of elimination."""

    def __init__(self, elimination: Elimination, cut: Cut):
        order, later = elimination.order, elimination.later
        position = {v: k for k, v in enumerate(order)}
        self.buckets: list[Bucket] = []
        for v, others in zip(order, later, strict=True):
            self.buckets.append(Bucket((v, *others), tuple(cut.num_states[[v, *others]].tolist())))
        self.roots: list[int] = []
        for k, others in enumerate(later):
            if others:
                parent = self.buckets[position[others[0]]]
                parent.children.append((k, parent.fit(others)))
            else:
                self.roots.append(k)
        self.constants: list[int] = []  # tables of known variables only
        for number, scope in enumerate(cut.scopes):
            if scope:
                bucket = self.buckets[min(position[v] for v in scope)]
                bucket.tables.append((number, bucket.fit(scope)))
            else:
                self.constants.append(number)

    def item_bytes(self, differentiable: bool) -> int:
        """Estimate the memory one batch item takes at its peak, in float64."""
        sizes = [math.prod(bucket.shape) for bucket in self.buckets]
        messages = sum(size // bucket.shape[0] for size, bucket in zip(sizes, self.buckets, strict=True))
        # Three copies of the largest table, every message and its marginal; autograd holds about six of every table.
        return 8 * (6 * sum(sizes) if differentiable else 3 * max(sizes, default=0) + 2 * messages)

    def collect(
        self, theta: Tensor, tables: list[Tensor], eliminate: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Eliminate all variables: the value of shape (batch,), and the messages, each with maximum 0.

        `eliminate` takes away the first axis after the batch, by a log-sum or a maximum.
        """
        messages: list[Tensor] = []
        value = theta[:, :0].sum(1)
        for bucket in self.buckets:
            message = eliminate(gather(bucket, tables, messages))
            # Without this, sums over a large part of the graph would swallow the differences between states.
            top = message.detach().flatten(1).amax(1) if message.ndim > 1 else message.detach()
            top = torch.where(top == NEG_INF, 0.0, top)
            messages.append(message - top.reshape(-1, *[1] * (message.ndim - 1)))
            value = value + top
        for part in [tables[number] for number in self.constants] + [messages[root] for root in self.roots]:
            value = value + part
        return value, messages


def gather(bucket: Bucket, tables: list[Tensor], messages: list[Tensor]) -> Tensor:
    """The sum of all tables and messages of a bucket."""
    own = tables[bucket.tables[0][0]]  # every variable has a table of its own
    total = own.new_zeros(own.shape[:1] + bucket.shape)
    for number, fit in bucket.tables:
        total.add_(fit.spread(tables[number]))
    for child, fit in bucket.children:
        total.add_(fit.spread(messages[child]))
    return total


def backtrack(
    tree: BucketTree,
    cut: Cut,
    tables: list[Tensor],
    messages: list[Tensor],
    item: Tensor,
    choose: Callable[[Tensor], Tensor],
) -> Tensor:
    """States of all variables, of shape (row, variable), chosen backwards through the order of elimination.

    Arguments:
        tree: the buckets.
        cut: what is left of the tables.
        tables: all tables.
        messages: the messages that `tree.collect` returned.
        item: of shape (row,): the batch item of each row.
        choose: takes t_v(., x_later), the scores of a variable's states given those chosen before, of shape (row,
            state), and returns states, of shape (row,).
    """
    kept = torch.zeros(len(item), cut.graph.num_variables, dtype=torch.int64, device=item.device)
    for bucket in reversed(tree.buckets):
        variable, others = bucket.scope[0], bucket.scope[1:]
        parts = [(tables[number], fit) for number, fit in bucket.tables]
        parts += [(messages[child], fit) for child, fit in bucket.children]
        scores = parts[0][0].new_zeros(len(item), bucket.shape[0])
        for table, fit in parts:
            spread = fit.spread(table)
            # Axes of length 1 belong to variables the table does not mention.
            index = [kept[:, v] if n > 1 else kept[:, v] * 0 for n, v in zip(fit.shape[1:], others, strict=True)]
            scores = scores + spread.movedim(1, -1)[(item, *index)]
        kept[:, variable] = choose(scores)
    states = torch.empty_like(kept)
    for variable, possible in enumerate(cut.states):
        states[:, variable] = index_tensor(possible, item.device)[kept[:, variable]]
    return states


def plan(graph: FactorGraph, theta: Tensor, max_bytes: int, *, differentiable: bool) -> tuple[Cut, BucketTree, int]:
    """What is left of the tables, the buckets, and how many batch items fit into `max_bytes` at once.

    Raises:
        TreewidthError: if not even one item fits.
    """
    cut = Cut(graph, theta)
    needs: list[tuple[int, int]] = []  # (bytes, width) of the orders that were tried
    for find_order in (min_fill, by_number):
        elimination = find_order(graph, cut.known, max_width=_HOPELESS_WIDTH)
        if elimination.complete:
            tree = BucketTree(elimination, cut)
            item_bytes = tree.item_bytes(differentiable)
            if item_bytes <= max_bytes:
                return cut, tree, max(1, min(len(theta), max_bytes // max(item_bytes, 1)))
            needs.append((item_bytes, elimination.width))
    _refuse(min(needs, default=None), max_bytes)


def _refuse(least: tuple[int, int] | None, max_bytes: int) -> NoReturn:
    size, width = least or (2 ** (_HOPELESS_WIDTH + 3), _HOPELESS_WIDTH)
    more = "" if least else "more than "
    raise TreewidthError(
        f"Exact inference on a graph of treewidth {more}{width} (by the best elimination order found) needs {more}"
        f"{_readable(size)}",
        f"`max_bytes` allows {_readable(max_bytes)}. Raise it, or use message passing.",
    )


def _readable(size: int) -> str:
    for unit, power in (("bytes", 0), ("KiB", 10), ("MiB", 20)):
        if size < 2 ** (power + 10):
            return f"{size / 2**power:.3g} {unit}"
    return f"{size / 2**30:.3g} GiB" if size < 2**60 else f"2^{size.bit_length() - 1} bytes"
