"""How many sweeps a tape has room for."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from riskfield.devices import physical_memory
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Parallel
from riskfield.kernels.problem import ForestProblem, MeanFieldProblem, MessagePassingProblem, Problem

_SHARE = 0.25  # of the memory of a device that a tape takes unless told otherwise


def sweeps_that_fit(problem: Problem, theta: Tensor, max_bytes: int | None) -> float:
    """How many sweeps of theta, of shape (*batch, theta), fit on a tape of `max_bytes`, a quarter of all by default.

    Infinity for exact runs, which need no tape.
    """
    if isinstance(problem, ForestProblem) or (isinstance(problem, MessagePassingProblem) and problem.exact):
        return math.inf
    # A sweep from the first variable to the last and back sends all messages but those to the last variables twice.
    twice = isinstance(problem, MessagePassingProblem) and not isinstance(problem.schedule, Parallel)
    graph = problem.graph
    numbers = graph.derived(("tape", twice), lambda: _numbers_per_sweep(graph, twice))
    if isinstance(problem, MeanFieldProblem):
        numbers += graph.node_size  # the new marginals
    batch = theta.numel() // max(1, graph.theta_size)
    most = _share_of_memory(theta.device) if max_bytes is None else max_bytes
    return most // max(1, batch * numbers * theta.element_size())


def _numbers_per_sweep(graph: FactorGraph, twice: bool) -> int:
    """For every message sent the cavities of the other variables, of which binary ones are one number."""
    total = 0
    for group in graph.factor_groups:
        cavities = (group.arity - 1) * sum(1 if states == 2 else states for states in group.shape)
        rounds = 2 * (group.arity - 1) / group.arity if twice else 1.0
        total += math.ceil(group.num_factors * cavities * rounds)
    return total


@cache
def _share_of_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(_SHARE * physical_memory())
