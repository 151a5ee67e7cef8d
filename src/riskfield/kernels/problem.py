"""What the kernels solve, and with what a run of them is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from riskfield.entropy import Bethe, Counting
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import (
    Coloured,
    Levels,
    Parallel,
    Schedule,
    Sequential,
    colour_order,
    coloured_levels,
    compile_levels,
)

# What the tape of a run holds: every sweep, or only the last one. A number k > 0 means a checkpoint every k sweeps.
EVERY_SWEEP, LAST_SWEEP = -1, -2
_BETHE = Bethe()


@dataclass(eq=False)
class MessagePassingProblem:
    """A graph, counting numbers, and how messages are updated."""

    graph: FactorGraph
    counting: Counting
    schedule: Schedule
    damping: float | Tensor = 0.0  # a tensor only if it requires a gradient
    maximise: bool = False  # max-product instead of sum-product

    @property
    def exact(self) -> bool:
        """Whether one sweep, from any messages, gives the exact marginals: belief propagation on a forest."""
        if not self.graph.is_forest:
            return False
        plain = not self.maximise and not isinstance(self.damping, Tensor) and self.damping == 0
        ordered = isinstance(self.schedule, Sequential) and self.schedule.order is None
        return plain and ordered and self.counting is _BETHE.counting(self.graph)


@dataclass(frozen=True, eq=False)
class MeanFieldProblem:
    """A graph, and the order in which its variables are updated; None for colour by colour."""

    graph: FactorGraph
    order: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class ForestProblem:
    """Exact sum-product on a graph without cycles."""

    graph: FactorGraph

    def as_message_passing(self) -> MessagePassingProblem:
        """The same as belief propagation, which solves it in one sweep."""
        return MessagePassingProblem(self.graph, _BETHE.counting(self.graph), Sequential())


Problem = MessagePassingProblem | MeanFieldProblem | ForestProblem

# A direction of shape (batch, theta) and steps of shape (step, batch): a run of theta + step direction for all steps.
Along = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Task:
    """What a run is started with. Each of the kernels says which tasks it lacks something for."""

    problem: Problem
    theta: Tensor  # (batch, theta)
    messages: Tensor | None = None  # a state to start from
    record: int | None = None  # what its tape holds, EVERY_SWEEP for example; None for a run without a tape
    tangent: Tensor | None = None  # a direction of theta, along which everything is differentiated too
    along: Along | None = None

    def needs_autograd(self) -> bool:
        """Whether only autograd can differentiate this run: a tape leads back to theta and to counting numbers."""
        numbers = [self.theta] if self.messages is None else [self.theta, self.messages]
        if isinstance(self.problem, MessagePassingProblem) and isinstance(self.problem.damping, Tensor):
            numbers.append(self.problem.damping)
        counting = self._counting_numbers()
        if any(map(is_differentiated, numbers if self.record is not None else (*numbers, *counting))):
            return True
        return any(map(has_tangent, counting)) or any(map(is_transformed, (*numbers, *counting)))

    def differentiates_counting(self) -> bool:
        """Whether derivatives with respect to counting numbers, of factors or of variables, are required."""
        return any(map(is_differentiated, self._counting_numbers()))

    def differentiates_node_counting(self) -> bool:
        """Whether derivatives with respect to the counting numbers c^_i of variables are required."""
        return any(map(is_differentiated, self._counting_numbers()[1:]))

    def _counting_numbers(self) -> tuple[Tensor, ...]:
        """The c_c and c^_i, unless they are constants."""
        if not isinstance(self.problem, MessagePassingProblem) or self.problem.counting.constant:
            return ()
        return self.problem.counting.factor, self.problem.counting.node_total


def is_differentiated(tensor: Tensor) -> bool:
    """Whether derivatives with respect to `tensor` are required, in reverse or in forward mode."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return has_tangent(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether `tensor` is a dual number of forward mode."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_transformed(tensor: Tensor) -> bool:
    """Whether `tensor` is an argument inside a transformation of `torch.func`. Its numbers cannot be read."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def schedule_levels(graph: FactorGraph, schedule: Schedule) -> Levels:
    """The levels of `schedule`. A parallel schedule has one level."""
    if isinstance(schedule, Parallel):
        n = graph.num_variables
        return Levels(np.arange(n), np.zeros(n, np.int64), min(n, 1))
    if isinstance(schedule, Coloured):
        return coloured_levels(graph)
    return compile_levels(graph, schedule.order)


def mean_field_levels(graph: FactorGraph, order: Sequence[int] | None) -> Levels:
    """The levels in which mean field visits the variables: by default the colours of a greedy colouring."""
    return compile_levels(graph, colour_order(graph) if order is None else order)
