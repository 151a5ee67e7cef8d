"""The problem that all kernels solve, and the levels of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from riskfield.entropy import Counting
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Coloured, Levels, Parallel, Schedule, colour_order, coloured_order, compile_levels


@dataclass(frozen=True, eq=False)
class MessagePassingProblem:
    """A graph, counting numbers, and how messages are updated."""

    graph: FactorGraph
    counting: Counting
    schedule: Schedule
    damping: float | Tensor  # a tensor only if it requires a gradient
    maximise: bool  # max-product instead of sum-product


def schedule_levels(graph: FactorGraph, schedule: Schedule) -> Levels:
    """The levels of `schedule`. A parallel schedule has one level."""
    if isinstance(schedule, Parallel):
        n = graph.num_variables
        return Levels(np.arange(n), np.zeros(n, np.int64), min(n, 1))
    return compile_levels(graph, coloured_order(graph) if isinstance(schedule, Coloured) else schedule.order)


def mean_field_levels(graph: FactorGraph, order: Sequence[int] | None) -> Levels:
    """The levels in which mean field visits the variables: by default the colours of a greedy colouring."""
    return compile_levels(graph, colour_order(graph) if order is None else order)
