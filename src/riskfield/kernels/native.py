"""The C++ engine, for tensors on the CPU.

A schedule is compiled into a plan once per graph and kept as long as the graph lives. A run packs theta into the plan's
storage, sweeps there, and unpacks the marginals at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from riskfield import _native
from riskfield._native import Kind, Sweep
from riskfield.entropy import Counting
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Levels, Parallel
from riskfield.kernels.arrays import as_array, empty_array
from riskfield.kernels.forest import ForestRun
from riskfield.kernels.initial_state import messages_like, starting_marginals
from riskfield.kernels.problem import (
    EVERY_SWEEP,
    Along,
    ForestProblem,
    MeanFieldProblem,
    MessagePassingProblem,
    Task,
    mean_field_levels,
    schedule_levels,
)
from riskfield.threads import get_num_threads

_MOST_PLANS = 8  # kept for one graph
# Counting numbers made from plain numbers are kept with their graph; what follows from them is kept with them.
_counting: WeakKeyDictionary[Counting, tuple[np.ndarray, np.ndarray, _Sharing]] = WeakKeyDictionary()
# Vectors of table entries that each thread is to read in a stage, or waiting for others takes longer than it gains.
_WORTH_SHARING = 110
# By how much batch lanes must be faster, as far as a plan can say, to be chosen.
_CLEARLY_FASTER = 1.25
_isa = ""  # the instruction set; tests set it to try the others
_batch_lanes: bool | None = None  # what fills the lanes of vectors; tests set it to try both
# Complex numbers are dual ones, with the slope along some direction for an imaginary part.
_RUNS = {torch.float32: _native.RunFloat, torch.float64: _native.RunDouble, torch.complex128: _native.RunDual}


def lacks(task: Task) -> str | None:
    """What the engine would need for `task` and does not have; None if it can run it."""
    if not task.theta.is_cpu:
        return f"theta on {task.theta.device}; it must be on the CPU"
    if task.theta.dtype not in (torch.float32, torch.float64):
        return f"numbers of type {task.theta.dtype}"
    if task.needs_autograd():
        return "autograd, forward mode or `torch.func` in this run"
    if task.record is not None:
        if isinstance(task.problem, MessagePassingProblem) and task.problem.maximise:
            return "the tape of max-product"
        whole = task.record == EVERY_SWEEP and task.messages is None and task.theta.dtype == torch.float64
        if task.differentiates_counting() and not whole:
            return "gradients of counting numbers with checkpoints, from given messages or in float32"
        if task.differentiates_node_counting():
            return "gradients of the counting numbers of variables"
    return None


def start(task: Task) -> MessagePassingRun | MeanFieldRun | ForestRun:
    """Start a run. With a tangent it runs on dual numbers, in double precision."""
    theta, record, problem = task.theta, task.record or 0, task.problem
    stateless = isinstance(problem, ForestProblem)
    if isinstance(problem, ForestProblem):
        problem = problem.as_message_passing()
    plain = task.tangent is None and task.along is None and not task.differentiates_counting()
    if plain and isinstance(problem, MessagePassingProblem) and problem.exact:
        unswept = None if stateless else partial(MessagePassingRun, problem, theta, task.messages)
        return ForestRun(problem.graph, theta, task.messages, unswept, isa=_isa)
    if task.tangent is not None:
        theta = torch.complex(theta.detach().double(), task.tangent.detach().double())
    if isinstance(problem, MeanFieldProblem):
        return MeanFieldRun(problem, theta, task.messages, record=record, along=task.along)
    return MessagePassingRun(problem, theta, task.messages, record=record, along=task.along)


class _NativeRun:
    """What the two kinds of run share."""

    def __init__(self, graph: FactorGraph, theta: Tensor, along: Along | None):
        self._graph, self._dtype, self._rows = graph, theta.dtype, theta.shape[0]
        self._batch = self._rows if along is None else along[1].numel()
        self._run: _native.RunDouble | _native.RunFloat | _native.RunDual

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep; items that reached `tol` are left as they are."""
        residual = np.empty(self._batch)
        ran = np.zeros(self._batch, np.int64)
        self._run.advance(sweeps, tol, get_num_threads(), residual, ran)
        return torch.from_numpy(residual), torch.from_numpy(ran)

    def marginals(self, weights: Tensor | None = None) -> Tensor:
        """Mu; NaN for an impossible model. With weights of shape (step, batch), the weighted sum over the steps."""
        rows = self._batch if weights is None else self._rows
        out = empty_array(rows, self._graph.mu_size, self._dtype)
        each = None if weights is None else as_array(weights.reshape(-1), torch.float64)
        self._run.marginals(each, out, get_num_threads())
        return torch.from_numpy(out)

    def _state(self, size: int) -> Tensor:
        out = empty_array(self._batch, size, self._dtype)
        self._run.state(out, get_num_threads())
        return torch.from_numpy(out)

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta, of shape (batch, theta), through the sweeps of a run that recorded them."""
        out = empty_array(self._batch, self._graph.theta_size, self._dtype)
        self._run.backward(as_array(grad_mu, self._dtype), out, get_num_threads())
        return torch.from_numpy(out)

    def backward_counting(self, grad_mu: Tensor) -> tuple[Tensor, Tensor, None]:
        """The same, in float64, and d(grad_mu . mu) / dc_c of every factor, summed over the batch."""
        out = empty_array(self._batch, self._graph.theta_size, self._dtype)
        in_groups = np.zeros(self._graph.num_factors)
        self._run.backward_counting(as_array(grad_mu, self._dtype), out, in_groups, get_num_threads())
        counting = np.empty_like(in_groups)
        counting[_factor_order(self._graph)] = in_groups
        return torch.from_numpy(out), torch.from_numpy(counting), None

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as if the last recorded sweep had run for ever. See `kernels.protocols.RecordingRun`."""
        out = empty_array(self._batch, self._graph.theta_size, self._dtype)
        residual, ran = np.empty(self._batch), np.zeros(self._batch, np.int64)
        self._run.backward_fixed_point(
            as_array(grad_mu, self._dtype), out, steps, tol, get_num_threads(), residual, ran
        )
        return torch.from_numpy(out), torch.from_numpy(residual), torch.from_numpy(ran)

    def _start(
        self,
        plan: _native.Plan,
        kind: Kind,
        theta: Tensor,
        state: Tensor | None,
        *,
        record: int,
        along: Along | None,
        damping: float = 0.0,
        factor_counting: np.ndarray | None = None,
        node_counting: np.ndarray | None = None,
    ) -> None:
        self._run = _RUNS[theta.dtype](
            _isa,
            plan,
            kind,
            damping,
            record,
            as_array(theta, theta.dtype),
            factor_counting,
            node_counting,
            None if state is None else as_array(state, theta.dtype),
            None if along is None else as_array(along[0], theta.dtype),
            None if along is None else as_array(along[1].reshape(-1), torch.float64),
            self._graph.node_size,
            self._graph.message_size,
            self._graph.mu_size,
            get_num_threads(),
        )


class MessagePassingRun(_NativeRun):
    """Sum-product (or max-product) sweeps over a batch of thetas. See `inference.message_passing` for the update."""

    def __init__(
        self,
        problem: MessagePassingProblem,
        theta: Tensor,
        messages: Tensor | None,
        *,
        record: int = 0,
        along: Along | None = None,
    ):
        super().__init__(problem.graph, theta, along)
        factor_counting, node_counting, shared = _counting_arrays(problem.graph, problem.counting)
        state = None if messages is None else messages_like(problem.graph, theta, messages)
        self._start(
            _message_passing_plan(problem, shared, theta),
            Kind.MAX_PRODUCT if problem.maximise else Kind.SUM_PRODUCT,
            theta,
            state,
            record=record,
            along=along,
            damping=float(problem.damping),
            factor_counting=factor_counting,
            node_counting=node_counting,
        )

    def messages(self) -> Tensor:
        """Normalised log-messages."""
        return self._state(self._graph.message_size)


class MeanFieldRun(_NativeRun):
    """Coordinate ascent on a product distribution. See `inference.mean_field` for the update."""

    def __init__(
        self,
        problem: MeanFieldProblem,
        theta: Tensor,
        messages: Tensor | None,
        *,
        record: int = 0,
        along: Along | None = None,
    ):
        super().__init__(problem.graph, theta, along)
        graph, order = problem.graph, problem.order
        plan = _plan(graph, ("mean field", order), lambda: mean_field_levels(graph, order), Sweep.LEVEL_BY_LEVEL, theta)
        state = None if messages is None else starting_marginals(graph, theta.real, messages.real)
        self._start(plan, Kind.MEAN_FIELD, theta, state, record=record, along=along)

    def messages(self) -> Tensor:
        """Log node marginals."""
        return self._state(self._graph.node_size)


def _factor_order(graph: FactorGraph) -> np.ndarray:
    """The factors group by group, the order in which the engine keeps their counting numbers."""
    return np.concatenate([group.factors for group in graph.factor_groups] or [np.empty(0, np.int64)])


def engine_name() -> str:
    """The instruction set the engine uses on this machine."""
    return str(_native.engine_name(_isa))


@dataclass(frozen=True, eq=False)
class _Sharing:
    """Which factors share a packed table: see `_shared_tables`."""

    numbers: list[np.ndarray | None]

    @cached_property
    def key(self) -> Hashable:
        return tuple(None if number is None else number.tobytes() for number in self.numbers)


def _counting_arrays(graph: FactorGraph, counting: Counting) -> tuple[np.ndarray, np.ndarray, _Sharing]:
    """The counting numbers of factors, in the engine's order, those of variables, and which factors share a table."""
    found = _counting.get(counting) if counting.constant else None
    if found is None:
        factor = as_array(counting.factor, torch.float64)[_factor_order(graph)]
        found = factor, as_array(counting.node_total, torch.float64), _Sharing(_shared_tables(graph, factor))
        if counting.constant:
            _counting[counting] = found
    return found


def _message_passing_plan(problem: MessagePassingProblem, shared: _Sharing, theta: Tensor) -> _native.Plan:
    graph, schedule = problem.graph, problem.schedule
    # A plan depends on which factors share a table, not on the counting numbers themselves.
    sweep = Sweep.ALL_AT_ONCE if isinstance(schedule, Parallel) else Sweep.FORWARD_BACKWARD
    levels = partial(schedule_levels, graph, schedule)
    return _plan(graph, (schedule, shared.key), levels, sweep, theta, shared.numbers, inside=not problem.maximise)


def _shared_tables(graph: FactorGraph, factor_counting: np.ndarray | None = None) -> list[np.ndarray | None]:
    """Per group, which factors share a packed table: those with one table and one counting number; None if not tied.

    Packed tables are numbered in the order of their first factors, so that equal partitions have equal numbers.
    """
    shared: list[np.ndarray | None] = []
    start = 0
    for group in graph.factor_groups:
        number = None
        if group.tied:
            pairs = group.tables[:, None]
            if factor_counting is not None:
                counting = factor_counting[start : start + group.num_factors]
                pairs = np.stack([group.tables, np.unique(counting, return_inverse=True)[1].reshape(-1)], axis=1)
            _, first, number = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
            number = np.argsort(np.argsort(first))[number.reshape(-1)].astype(np.int64)
        shared.append(number)
        start += group.num_factors
    return shared


def _plan(
    graph: FactorGraph,
    key: Hashable,
    levels: Callable[[], Levels],
    sweep: Sweep,
    theta: Tensor,
    shared: list[np.ndarray | None] | None = None,
    inside: bool = False,
) -> _native.Plan:
    """The plan kept under `key`, made if there is none yet. Each graph keeps the last few that were used.

    With `inside`, states may fill the lanes of vectors. What fills them does not depend on the number of threads, so
    that marginals do not either.
    """
    batch, batch_lanes, threads = theta.shape[0], _batch_lanes, get_num_threads()
    if batch_lanes is None and batch > 1:
        batch_lanes = _batch_lanes_pay(_plan_of(graph, key, levels, sweep, theta, shared, inside, False, 1), batch)
    models = _native.lanes(_isa, theta.dtype == torch.float32) if batch_lanes else 1  # that share an item
    parts = threads if -(-batch // models) < threads else 1
    return _plan_of(graph, key, levels, sweep, theta, shared, inside, bool(batch_lanes), parts)


def _plan_of(
    graph: FactorGraph,
    key: Hashable,
    levels: Callable[[], Levels],
    sweep: Sweep,
    theta: Tensor,
    shared: list[np.ndarray | None] | None,
    inside: bool,
    batch_lanes: bool,
    most_parts: int,
) -> _native.Plan:
    """The plan for these lanes, whose levels are in up to `most_parts` parts, one for each thread."""
    plans: OrderedDict[Hashable, _native.Plan] = graph.derived("plans", OrderedDict)
    kind = key, theta.dtype == torch.float32, _isa, inside, batch_lanes
    whole_key = (*kind, most_parts)
    plan = plans.get(whole_key)
    if plan is None:
        compiled = levels()
        # In batch lanes no vector is gathered or partly filled, so that an entry takes less time.
        per_vector = 2.5 if batch_lanes else _native.lanes(_isa, theta.dtype == torch.float32)
        worth = _stage_entries(graph, compiled, sweep) / max(per_vector * _WORTH_SHARING, 1e-9)
        parts = int(max(1, min(most_parts, worth)))
        plan = plans.get((*kind, parts))
        if plan is None:
            tables = _shared_tables(graph) if shared is None else shared
            plan = _make_plan(graph, compiled, sweep, tables, theta.dtype, inside, batch_lanes, parts)
            plans[*kind, parts] = plan
        plans[whole_key] = plan
        while len(plans) > _MOST_PLANS:
            plans.popitem(last=False)
    elif len(plans) > 1:
        with suppress(KeyError):  # another thread may have dropped it just now
            plans.move_to_end(whole_key)
    return plan


def _batch_lanes_pay(plan: _native.Plan, batch: int) -> bool:
    """Whether models of a batch should fill the lanes, instead of the members of a level as in `plan`."""
    vectors = -(-batch // plan.lanes)
    return bool(_CLEARLY_FASTER * vectors * plan.batch_cost < batch * plan.level_cost)


def _stage_entries(graph: FactorGraph, levels: Levels, sweep: Sweep) -> float:
    """Table entries read in a stage, on average; a message takes as long as some more of them."""
    entries = 0
    for group in graph.factor_groups:
        messages = 2 * group.arity - 2 if sweep == Sweep.FORWARD_BACKWARD else group.arity
        entries += group.num_factors * (group.table_size + 4) * max(messages, 1)
    return entries / max(2 * (levels.count - 1) if sweep == Sweep.FORWARD_BACKWARD else levels.count, 1)


def _make_plan(
    graph: FactorGraph,
    levels: Levels,
    sweep: Sweep,
    shared: list[np.ndarray | None],
    dtype: torch.dtype,
    inside: bool,
    batch_lanes: bool,
    parts: int,
) -> _native.Plan:
    groups = []
    factor_start = 0
    for group, numbers in zip(graph.factor_groups, shared, strict=True):
        groups.append(
            (
                list(group.shape),
                group.variables,
                group.tables,
                numbers,
                group.theta_start,
                group.mu_start,
                group.message_start,
                factor_start,
            )
        )
        factor_start += group.num_factors
    return _native.make_plan(
        _isa,
        dtype == torch.float32,
        batch_lanes,
        parts,
        inside,
        sweep,
        graph.num_states,
        graph.node_start,
        levels.rank,
        levels.level,
        groups,
    )
