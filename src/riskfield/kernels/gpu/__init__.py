"""Message passing, mean field and exact inference on forests on GPUs, in Triton.

See `plan` for the storage, `sweeps` for the kernels.

Importing this package does not import Triton.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from riskfield.errors import warn_slow
from riskfield.kernels.gpu.chains import ChainRun, Chains, chains_of
from riskfield.kernels.gpu.storage import power_of_two
from riskfield.kernels.problem import EVERY_SWEEP, ForestProblem, MeanFieldProblem, MessagePassingProblem, Task

if TYPE_CHECKING:
    from riskfield.kernels.gpu.mean_field import MeanFieldRun
    from riskfield.kernels.gpu.run import ForestRun, MessagePassingRun

_LARGEST_ARITY = 4
_LARGEST_TILE = 8192  # entries of a table with axes padded to powers of two: what the registers of a program can hold


def lacks(task: Task) -> str | None:
    """What the engine would need for `task` and does not have; None if it can run it."""
    if find_spec("triton") is None:
        return "anything without Triton, which is not installed (`pip install triton`)"
    if task.theta.dtype not in (torch.float32, torch.float64):
        return f"numbers of type {task.theta.dtype}"
    if task.along is not None:
        return "several steps along a direction at once"
    if task.tangent is not None:
        return "second derivatives or forward mode"
    if _chains(task) is not None:
        return "autograd, forward mode or `torch.func`" if task.needs_autograd() else None
    shapes = [group.shape for group in task.problem.graph.factor_groups]
    if any(len(shape) > _LARGEST_ARITY for shape in shapes):
        return f"factors of more than {_LARGEST_ARITY} variables"
    if any(math.prod(map(power_of_two, shape)) > _LARGEST_TILE for shape in shapes):
        return f"tables of more than {_LARGEST_TILE} entries, with axes padded to powers of two"
    if task.needs_autograd():
        return "autograd, forward mode, `torch.func`, or gradients of damping"
    if task.differentiates_counting() and (task.record != EVERY_SWEEP or task.messages is not None):
        return "gradients of counting numbers with checkpoints, at fixed points or from given messages"
    if task.record is not None and isinstance(task.problem, MessagePassingProblem) and task.problem.maximise:
        return "the tape of max-product"
    return None


def _chains(task: Task) -> Chains | None:
    """The chains that one sweep of this task solves exactly; None if it is another task."""
    problem = task.problem
    if isinstance(problem, MeanFieldProblem) or (isinstance(problem, MessagePassingProblem) and not problem.exact):
        return None
    return chains_of(problem.graph, task.theta.device)


def start(task: Task) -> MessagePassingRun | MeanFieldRun | ChainRun | ForestRun:
    """Start a run."""
    from riskfield.kernels.gpu.mean_field import MeanFieldRun
    from riskfield.kernels.gpu.run import ForestRun, MessagePassingRun

    problem = task.problem
    if isinstance(problem, MeanFieldProblem):
        return MeanFieldRun(problem, task.theta, task.messages, record=task.record)
    stateless = isinstance(problem, ForestProblem)
    if isinstance(problem, ForestProblem):
        problem = problem.as_message_passing()
    if problem.exact:
        unswept = None if stateless else partial(MessagePassingRun, problem, task.theta, task.messages)
        chains = _chains(task)
        if chains is not None:
            return ChainRun(problem.graph, chains, task.theta, task.messages, unswept)
        return ForestRun(problem, task.theta, task.messages, unswept, record=task.record)
    run = MessagePassingRun(problem, task.theta, task.messages, record=task.record)
    if run.deep:
        warn_slow(
            f"`{type(problem.schedule).__name__}` compiles into many small levels on this graph, which keep a GPU "
            "waiting. `schedule=Coloured()` has few large ones."
        )
    return run
