r"""Exact inference by variable elimination, for graphs of small treewidth.

Variables are summed out one by one on a min-fill order. Eliminating v gathers every table that mentions v,

    t_v(x_v, x_later) = sum of the tables,        m_v(x_later) = log sum_{x_v} exp t_v(x_v, x_later),

and m_v joins the tables of the next variable in its scope; the messages that are left without scope add up to A(theta).
The marginals dA/dtheta are the reverse-mode derivative of that, written out: backwards through the order,

    p(x_v, x_later) = p(x_later) exp(t_v(x_v, x_later) - m_v(x_later)),

of which the marginal of every gathered table is a sum. The tables t_v are computed anew on the way back, so that only
messages are held. States that are impossible in every batch item, such as those evidence excludes, are cut away first,
and a variable left with one state joins nothing.

For the most probable joint state a maximum takes the place of the sum,

    m_v(x_later) = max_{x_v} t_v(x_v, x_later),

and backwards through the order every variable takes the state that attains it, x_v = argmax t_v(., x_later). Ties go to
the lowest state.

Time and memory grow exponentially with the treewidth; beyond `max_bytes` it refuses. Use `MessagePassing` or
`MaxProduct` there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.devices import check_max_bytes
from riskfield.errors import KernelError
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference._buckets import NEG_INF, BucketTree, backtrack, gather, plan
from riskfield.inference.algorithm import AbstractAlgorithm, ValueIs
from riskfield.kernels import ExactRun, ForestProblem, Run, is_differentiated
from riskfield.kernels import start as start_kernels


@dataclass(frozen=True)
class Exact(AbstractAlgorithm):
    """Exact marginals and log-partition function by variable elimination on a min-fill order.

    It computes in float64 whatever the dtype of theta, on theta's device. A forest is solved by the native or the GPU
    kernels in time linear in its tables, anything else in torch; on a GPU a forest is solved in the dtype of theta. It
    takes one sweep and has no messages to start from.

    Arguments:
        max_bytes: how much memory the tables of one run may take. Batches are processed in parts that fit.

    Raises:
        TreewidthError: on use, if not even one batch item fits.

    >>> from riskfield import chain, infer
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 1.0  # neighbours tend to agree
    >>> solution = infer(graph, theta, Exact(), evidence={0: 1})
    >>> graph.node(solution.mu, 2).round(decimals=4), solution.log_partition.round(decimals=4)
    (tensor([0.3932, 0.6068], dtype=torch.float64), tensor(2.6265, dtype=torch.float64))
    """

    iterative: ClassVar[bool] = False
    any_kernels: ClassVar[bool] = True
    symmetric_jacobian: ClassVar[bool] = True

    max_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        check_max_bytes(self.max_bytes)

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Choose the order, and refuse before anything is computed if the tables do not fit."""
        _refuse_messages(messages)
        problem = self.problem(graph)
        if problem is not None and kernels != "torch":
            try:
                return start_kernels(problem, theta)
            except KernelError:  # another device, or a derivative that autograd is to follow
                pass
        differentiable = theta.requires_grad and torch.is_grad_enabled()
        return EliminationRun(graph, theta, self.max_bytes, differentiable=differentiable)

    def problem(self, graph: FactorGraph) -> ForestProblem | None:
        """On a forest the kernels do it."""
        return ForestProblem(graph) if graph.is_forest else None

    def value_is(self, graph: FactorGraph, *, sweeps: int, converged: bool) -> ValueIs:
        """Exact."""
        return "exact"

    def value(self, run: Run) -> Tensor | Callable[[], Tensor] | None:
        """A(theta): elimination finds it on the way to the marginals."""
        if isinstance(run, ExactRun):
            return run.log_partition
        return run.log_partition() if isinstance(run, EliminationRun) else None

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """Compute A(theta) from theta alone; `mu` is not needed."""
        run = self.start(graph, theta.reshape(theta.shape[:-1].numel(), graph.theta_size), None, None)
        assert isinstance(run, ExactRun | EliminationRun)
        return run.log_partition().reshape(theta.shape[:-1])


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
    any_kernels: ClassVar[bool] = True
    unrolls: ClassVar[bool] = False
    nonsmooth_because: ClassVar[str] = "a maximiser does not vary smoothly. Use MessagePassing."

    def __post_init__(self) -> None:
        check_max_bytes(self.max_bytes)

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Choose the order, and refuse before anything is computed if the tables do not fit."""
        _refuse_messages(messages)
        return ExactMAPRun(graph, theta, self.max_bytes, differentiable=False)

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """The score of the best state."""
        return graph.score(theta, self.mode(graph, theta, mu))

    def upper_bound(self, graph: FactorGraph, theta: Tensor, mu: Tensor, messages: Tensor | None) -> Tensor:
        """The score of the best state: no other is higher."""
        return graph.score(theta.double(), self.mode(graph, theta, mu))


def _refuse_messages(messages: Tensor | None) -> None:
    if messages is not None:
        raise ValueError("`messages` must be None: exact inference has no state to start from.")


class _Elimination:
    """Variable elimination on a batch of thetas. Nothing is computed before it is asked for."""

    def __init__(self, graph: FactorGraph, theta: Tensor, max_bytes: int, *, differentiable: bool):
        self.graph, self.theta = graph, theta
        self.cut, self.tree, self._items = plan(graph, theta, max_bytes, differentiable=differentiable)
        self._ran = False

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """One sweep is all it takes."""
        ran = torch.full((len(self.theta),), int(sweeps > 0 and not self._ran))
        self._ran = True
        return torch.zeros(len(self.theta), dtype=torch.float64), ran

    def messages(self) -> None:
        """There is nothing to start another run from."""

    def _parts(self) -> list[Tensor]:
        """Batches of theta, in float64, that fit into the memory."""
        theta = self.theta.double()
        return [theta[k : k + self._items] for k in range(0, max(len(theta), 1), self._items)]


class EliminationRun(_Elimination):
    """Sums of the tables: marginals and the log-partition function."""

    def marginals(self) -> Tensor:
        """Mu, of shape (batch, mu)."""
        return self._result[1]

    def log_partition(self) -> Tensor:
        """A(theta), of shape (batch,); -inf where no joint state is possible."""
        if "_result" in self.__dict__:
            return self._result[0]
        parts = [self.tree.collect(theta, self.cut.tables(theta), _log_sum)[0] for theta in self._parts()]
        return torch.cat(parts).to(self.theta.dtype)

    @cached_property
    def _result(self) -> tuple[Tensor, Tensor]:
        values, marginals = [], []
        for theta in self._parts():
            tables = self.cut.tables(theta)
            value, messages = self.tree.collect(theta, tables, _log_sum)
            mu = self.cut.restore(_distribute(self.tree, tables, messages), theta)
            # An impossible model has no marginals; NaN marks it, and `infer` reports it.
            marginals.append(torch.where((value == NEG_INF)[:, None], float("nan"), mu))
            values.append(value)
        return torch.cat(values).to(self.theta.dtype), torch.cat(marginals).to(self.theta.dtype)


class ExactMAPRun(_Elimination):
    """Maxima of the tables: the best joint state."""

    def marginals(self) -> Tensor:
        """1 at the best state, of shape (batch, mu)."""
        return self._marginals

    @cached_property
    def _marginals(self) -> Tensor:
        parts = []
        for theta in self._parts():
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


def _distribute(tree: BucketTree, tables: list[Tensor], messages: list[Tensor]) -> list[Tensor]:
    """Go backwards through the order: the marginals of all tables, each of its table's shape."""
    marginals = [torch.ones_like(table) if table.ndim == 1 else table for table in tables]
    above = {root: torch.ones_like(messages[root]) for root in tree.roots}
    for k in range(len(tree.buckets) - 1, -1, -1):
        bucket = tree.buckets[k]
        total = gather(bucket, tables, messages)
        # Messages lack a constant per item, so the table is normalised afresh.
        log_sum = _log_sum(total)
        log_sum = torch.where(log_sum == NEG_INF, 0.0, log_sum)
        joint = total.sub_(log_sum.unsqueeze(1)).exp_() * above.pop(k).unsqueeze(1)
        for child, fit in bucket.children:
            above[child] = fit.marginal(joint)
        for number, fit in bucket.tables:
            marginals[number] = fit.marginal(joint)
    return marginals


def _log_sum(table: Tensor) -> Tensor:
    """Sum out the first axis after the batch; the gradient is 0, not NaN, where all values are -inf."""
    if not is_differentiated(table):
        return torch.logsumexp(table, 1)
    top = table.detach().amax(1, keepdim=True)
    top = torch.where(top == NEG_INF, 0.0, top)
    total = (table - top).exp().sum(1)
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1.0).log(), NEG_INF) + top.squeeze(1)
