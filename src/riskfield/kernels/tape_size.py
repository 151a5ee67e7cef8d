"""How many sweeps a tape has room for."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from riskfield.devices import physical_memory
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Coloured, Sequential
from riskfield.kernels.problem import ForestProblem, MeanFieldProblem, MessagePassingProblem, Problem
from riskfield.threads import get_num_threads

_SHARE = 0.25  # of the memory of a device that a tape takes unless told otherwise
_DEFERRED_SWEEPS = 32  # as in cpp/deferred.hpp
_WIDEST_VECTOR = 64  # bytes


def sweeps_that_fit(problem: Problem, theta: Tensor, max_bytes: int | None) -> float:
    """How many sweeps of theta, of shape (*batch, theta), fit on a tape of `max_bytes`, a quarter of all by default.

    The numbers that the native backward pass writes down count as part of the tape. Infinity for exact runs, which need
    no tape.
    """
    if isinstance(problem, ForestProblem) or (isinstance(problem, MessagePassingProblem) and problem.exact):
        return math.inf
    schedule = problem.schedule if isinstance(problem, MessagePassingProblem) else None
    graph, on_gpu = problem.graph, not theta.is_cpu
    key = type(schedule), on_gpu
    numbers = graph.derived(("tape", key), lambda: _numbers_per_sweep(graph, *key))
    deferred = 0
    if isinstance(problem, MeanFieldProblem):
        numbers += graph.node_size  # the new marginals
    elif not on_gpu:
        deferred = _deferred_per_sweep(graph)
    batch = max(1, theta.numel() // max(1, graph.theta_size))
    most = _share_of_memory(theta.device) if max_bytes is None else max_bytes
    room = most // theta.element_size()
    numbers = max(1, numbers) * batch
    # What a thread writes down for the items it works on, of which it has at most one in each lane of a vector.
    deferred *= min(batch, get_num_threads() * (_WIDEST_VECTOR // theta.element_size()))
    few = room // (numbers + deferred)
    return few if few < _DEFERRED_SWEEPS else (room - _DEFERRED_SWEEPS * deferred) // numbers


def _numbers_per_sweep(graph: FactorGraph, schedule: type, on_gpu: bool) -> int:
    """For every message sent the cavities of the other variables, of which binary ones are one number.

    On a GPU they are one number or two, depending on theta; two are counted. There, the cotangents of all messages of a
    tape are in memory, too, and a launch has room for all messages to its variables, even to those that receive few in
    this half of a sweep.
    """
    total = 0
    for group in graph.factor_groups:
        numbers = group.arity * sum(group.shape)
        if not on_gpu:
            numbers = (group.arity - 1) * sum(1 if states == 2 else states for states in group.shape)
        rounds = 1.0
        if on_gpu and schedule is Sequential:
            rounds = 2.0
        elif schedule in (Sequential, Coloured):  # there and back, all messages but those to the last variables twice
            rounds = 2 * (group.arity - 1) / group.arity
        total += math.ceil(group.num_factors * numbers * rounds)
    return total


def _deferred_per_sweep(graph: FactorGraph) -> int:
    """As many numbers as the messages whose gradients of tables are deferred: see cpp/deferred.hpp."""
    pairs = (group for group in graph.factor_groups if group.arity == 2 and min(group.shape) > 2)
    return sum(group.num_factors * sum(group.shape) for group in pairs)


@cache
def _share_of_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(_SHARE * physical_memory())
