r"""Exact inference by variable elimination, for graphs of small treewidth.

Variables are summed out one by one on a min-fill order. Eliminating v gathers every table that mentions v,

    t_v(x_v, x_later) = sum of the tables,        m_v(x_later) = log sum_{x_v} exp t_v(x_v, x_later),

and m_v joins the tables of the next variable in its scope; the messages that are left without scope add up to A(theta).
The marginals dA/dtheta are the reverse-mode derivative of that, written out: backwards through the order,

    p(x_v, x_later) = p(x_later) exp(t_v(x_v, x_later) - m_v(x_later)),

of which the marginal of every gathered table is a sum. The tables t_v are computed anew on the way back, so that only
messages are held. States that are impossible in every batch item, such as those evidence excludes, are cut away first,
and a variable left with one state joins nothing.

Time and memory grow exponentially with the treewidth; beyond `max_bytes` it refuses. Use message passing there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from riskfield.errors import TreewidthError
from riskfield.graph._scopes import IntArray, index_tensor
from riskfield.graph.elimination import Elimination, by_number, min_fill
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm, Run
from riskfield.kernels import is_differentiated

NEG_INF = float("-inf")
# No machine holds tables over this many variables of two states or more, and on a large grid the order takes minutes.
_HOPELESS_WIDTH = 64


@dataclass(frozen=True)
class Exact(AbstractAlgorithm):
    """Exact marginals and log-partition function by variable elimination on a min-fill order.

    It computes in float64 whatever the dtype of theta, on theta's device, in torch whichever kernels are asked for. It
    takes one sweep and has no messages to start from. Gradients flow through where theta requires them.

    Arguments:
        max_bytes: how much memory the tables of one run may take. Batches are worked off in parts that fit.

    Raises:
        TreewidthError: on use, if not even one batch item fits.

    >>> from riskfield import chain, infer
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 1.0  # neighbours like to agree
    >>> solution = infer(graph, theta, Exact(), evidence={0: 1})
    >>> graph.node(solution.mu, 2).round(decimals=4), solution.log_partition.round(decimals=4)
    (tensor([0.3932, 0.6068], dtype=torch.float64), tensor(2.6265, dtype=torch.float64))
    """

    iterative: ClassVar[bool] = False
    symmetric_jacobian: ClassVar[bool] = True

    max_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        if not self.max_bytes > 0:
            raise ValueError(f"`max_bytes` must be positive. Got {self.max_bytes}.")

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Choose the order, and refuse before anything is computed if the tables do not fit."""
        if kernels not in (None, "native", "torch"):
            raise ValueError(f'`kernels` must be "native", "torch" or None. Got {kernels!r}.')
        if messages is not None:
            raise ValueError("`messages` must be None: exact inference has no state to start from.")
        return ExactRun(graph, theta, self.max_bytes)

    def value(self, run: Run) -> Tensor | None:
        """A(theta): elimination finds it on the way to the marginals."""
        return run.log_partition() if isinstance(run, ExactRun) else None

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """Compute A(theta) from theta alone; `mu` is not needed."""
        run = ExactRun(graph, theta.reshape(theta.shape[:-1].numel(), graph.theta_size), self.max_bytes)
        return run.log_partition().reshape(theta.shape[:-1])


class ExactRun:
    """Variable elimination on a batch of thetas. Nothing is computed before it is asked for."""

    def __init__(self, graph: FactorGraph, theta: Tensor, max_bytes: int):
        self.graph, self.theta = graph, theta
        self.cut = _Cut(graph, theta)
        differentiable = theta.requires_grad and torch.is_grad_enabled()
        needs: list[tuple[int, int]] = []  # (bytes, width) of the orders that were tried
        for find_order in (min_fill, by_number):
            elimination = find_order(graph, self.cut.known, max_width=_HOPELESS_WIDTH)
            if elimination.complete:
                self.tree = _BucketTree(elimination, self.cut)
                item_bytes = self.tree.item_bytes(differentiable)
                if item_bytes <= max_bytes:
                    break
                needs.append((item_bytes, elimination.width))
        else:
            _refuse(min(needs, default=None), max_bytes)
        self._items = max(1, min(len(theta), max_bytes // max(item_bytes, 1)))
        self._ran = False

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """One sweep is all it takes."""
        ran = torch.full((len(self.theta),), int(sweeps > 0 and not self._ran))
        self._ran = True
        return torch.zeros(len(self.theta), dtype=torch.float64), ran

    def messages(self) -> None:
        """There is nothing to start another run from."""

    def marginals(self) -> Tensor:
        """Mu, of shape (batch, mu)."""
        return self._result[1]

    def log_partition(self) -> Tensor:
        """A(theta), of shape (batch,); -inf where no joint state is possible."""
        if "_result" in self.__dict__:
            return self._result[0]
        parts = [self.tree.collect(theta, self.cut.tables(theta))[0] for theta in self._parts()]
        return torch.cat(parts).to(self.theta.dtype)

    @cached_property
    def _result(self) -> tuple[Tensor, Tensor]:
        values, marginals = [], []
        for theta in self._parts():
            tables = self.cut.tables(theta)
            value, messages = self.tree.collect(theta, tables)
            mu = self.cut.restore(self.tree.distribute(tables, messages), theta)
            # An impossible model has no marginals; NaN marks it, and `infer` reports it.
            marginals.append(torch.where((value == NEG_INF)[:, None], float("nan"), mu))
            values.append(value)
        return torch.cat(values).to(self.theta.dtype), torch.cat(marginals).to(self.theta.dtype)

    def _parts(self) -> list[Tensor]:
        theta = self.theta.double()
        return [theta[k : k + self._items] for k in range(0, max(len(theta), 1), self._items)]


class _Cut:
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
class _Fit:
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
class _Bucket:
    """One variable to eliminate, and what is gathered for it."""

    scope: tuple[int, ...]  # the variable itself, then those it is joined with, in the order of elimination
    shape: tuple[int, ...]  # of the table over them
    tables: list[tuple[int, _Fit]] = field(default_factory=list)
    children: list[tuple[int, _Fit]] = field(default_factory=list)  # the buckets whose messages arrive here

    def fit(self, scope: tuple[int, ...]) -> _Fit:
        axis = {v: k for k, v in enumerate(self.scope)}
        order = sorted(range(len(scope)), key=lambda k: axis[scope[k]])
        back = sorted(range(len(scope)), key=order.__getitem__)
        missing = [v not in scope for v in self.scope]
        return _Fit(
            (0, *(k + 1 for k in order)),
            (0, *(k + 1 for k in back)),
            tuple(1 if out else n for n, out in zip(self.shape, missing, strict=True)),
            tuple(k + 1 for k, out in enumerate(missing) if out),
        )


class _BucketTree:
    """The buckets in the order of elimination."""

    def __init__(self, elimination: Elimination, cut: _Cut):
        order, later = elimination.order, elimination.later
        position = {v: k for k, v in enumerate(order)}
        self.buckets: list[_Bucket] = []
        for v, others in zip(order, later, strict=True):
            self.buckets.append(_Bucket((v, *others), tuple(cut.num_states[[v, *others]].tolist())))
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

    def collect(self, theta: Tensor, tables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Eliminate all variables: A(theta) of shape (batch,), and the messages."""
        messages: list[Tensor] = []
        for bucket in self.buckets:
            messages.append(_log_sum(_gather(bucket, tables, messages)))
        value = theta[:, :0].sum(1)
        for part in [tables[number] for number in self.constants] + [messages[root] for root in self.roots]:
            value = value + part
        return value, messages

    def distribute(self, tables: list[Tensor], messages: list[Tensor]) -> list[Tensor]:
        """Go backwards through the order: the marginals of all tables, each of its table's shape."""
        marginals = [torch.ones_like(table) if table.ndim == 1 else table for table in tables]
        above = {root: torch.ones_like(messages[root]) for root in self.roots}
        for k in range(len(self.buckets) - 1, -1, -1):
            bucket = self.buckets[k]
            message = messages[k].masked_fill(messages[k] == NEG_INF, 0.0)
            conditional = _gather(bucket, tables, messages).sub_(message.unsqueeze(1)).exp_()
            joint = conditional * above.pop(k).unsqueeze(1)
            for child, fit in bucket.children:
                above[child] = fit.marginal(joint)
            for number, fit in bucket.tables:
                marginals[number] = fit.marginal(joint)
        return marginals


def _gather(bucket: _Bucket, tables: list[Tensor], messages: list[Tensor]) -> Tensor:
    """The sum of all tables and messages of a bucket."""
    own = tables[bucket.tables[0][0]]  # every variable has a table of its own
    total = own.new_zeros(own.shape[:1] + bucket.shape)
    for number, fit in bucket.tables:
        total.add_(fit.spread(tables[number]))
    for child, fit in bucket.children:
        total.add_(fit.spread(messages[child]))
    return total


def _log_sum(table: Tensor) -> Tensor:
    """Sum out the first axis after the batch; the gradient is 0, not NaN, where all values are -inf."""
    if not is_differentiated(table):
        return torch.logsumexp(table, 1)
    top = table.detach().amax(1, keepdim=True)
    top = torch.where(top == NEG_INF, 0.0, top)
    total = (table - top).exp().sum(1)
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1.0).log(), NEG_INF) + top.squeeze(1)


def _refuse(least: tuple[int, int] | None, max_bytes: int) -> NoReturn:
    size, width = least or (2 ** (_HOPELESS_WIDTH + 3), _HOPELESS_WIDTH)
    more = "" if least else "more than "
    raise TreewidthError(
        f"Exact inference on a graph of treewidth {more}{width} (by the best elimination order found) needs {more}"
        f"{_readable(size)}; `max_bytes` allows {_readable(max_bytes)}. Raise it, or use `MessagePassing(...)`."
    )


def _readable(size: int) -> str:
    for unit, power in (("bytes", 0), ("KiB", 10), ("MiB", 20)):
        if size < 2 ** (power + 10):
            return f"{size / 2**power:.3g} {unit}"
    return f"{size / 2**30:.3g} GiB" if size < 2**60 else f"2^{size.bit_length() - 1} bytes"
