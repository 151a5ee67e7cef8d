"""Kernels: the sweeps. `start` begins a run on the fastest kernels that can do what is asked.

There are three, which tests compare with each other: `native` is the C++ engine, for the CPU; `gpu` is the engine in
Triton, for GPUs; `torch_reference` is short, runs on any device, and autograd can differentiate it.
Each is a module with `lacks(task)`, which names what it would need for a task and does not have, and `start(task)`.
Outside this package, only `learning/` and `models/sparse.py` ask on which device a tensor is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from riskfield.errors import KernelError, warn_slow
from riskfield.graph.schedule import Coloured, Schedule, Sequential
from riskfield.kernels.problem import (
    EVERY_SWEEP,
    LAST_SWEEP,
    Along,
    ForestProblem,
    MeanFieldProblem,
    MessagePassingProblem,
    Problem,
    Task,
    has_tangent,
    is_differentiated,
    is_transformed,
)
from riskfield.kernels.protocols import CountingRun, ExactRun, RecordingRun, Run, SteppedRun
from riskfield.kernels.tape_size import sweeps_that_fit

__all__ = [
    "EVERY_SWEEP",
    "LAST_SWEEP",
    "CountingRun",
    "ExactRun",
    "ForestProblem",
    "MeanFieldProblem",
    "MessagePassingProblem",
    "Problem",
    "RecordingRun",
    "Run",
    "SteppedRun",
    "check_kernels",
    "default_schedule",
    "fits_once_more",
    "gpu_memory",
    "has_tangent",
    "is_differentiated",
    "is_transformed",
    "marginals_at_once",
    "native_available",
    "one_sweep",
    "runs_at_once",
    "start",
    "sweeps_that_fit",
]

_MODULES = {"native": "native", "gpu": "gpu", "torch": "torch_reference"}
_GPUS = {"cuda"}  # types of devices that the GPU engine serves; tests add the CPU, where Triton interprets the kernels


@overload
def start(problem: Problem, theta: Tensor, messages: Tensor | None = ..., *, kernels: str | None = ...) -> Run: ...


@overload
def start(
    problem: Problem,
    theta: Tensor,
    messages: Tensor | None = ...,
    *,
    kernels: str | None = ...,
    record: int,
    tangent: Tensor | None = ...,
) -> RecordingRun: ...


@overload
def start(
    problem: Problem, theta: Tensor, messages: Tensor | None = ..., *, kernels: str | None = ..., along: Along
) -> SteppedRun: ...


def start(
    problem: Problem,
    theta: Tensor,
    messages: Tensor | None = None,
    *,
    kernels: str | None = None,
    record: int | None = None,
    tangent: Tensor | None = None,
    along: Along | None = None,
) -> Run:
    """Start a run for theta of shape (batch, theta).

    Arguments:
        problem: what to solve.
        theta: the log-potentials.
        messages: the state to start from; uniform by default.
        kernels: "native", "gpu" or "torch" to insist on these; by default the fastest that can run.
        record: record a tape: of EVERY_SWEEP, of the LAST_SWEEP, or with a checkpoint every so many sweeps.
        tangent: a direction of theta, of its shape, along which marginals and gradients are differentiated.
        along: a direction of shape (batch, theta) and steps of shape (step, batch), to run theta + step direction for
            all steps at once.

    Raises:
        KernelError: if no kernels, or not the named ones, can do this. It names what they lack.

    Warns:
        PerformanceWarning: if theta is on a GPU, but the GPU kernels lack something, or if the schedule is far too deep
            for a GPU. Each warning is given once.
    """
    check_kernels(kernels)
    task = Task(problem, theta, messages, record, tangent, along)
    lacking = []
    for name in _candidates(theta) if kernels is None else (kernels,):
        lacks = _lacks(name, task)
        if lacks is None:
            run: Run = _module(name).start(task)
            return run
        lacking.append(f"The {name} kernels do not support {lacks}.")
        # Steps can also be a larger batch, on the same kernels; and torch has its own exact inference.
        if name == "gpu" and kernels is None and along is None and not isinstance(problem, ForestProblem):
            warn_slow(f"{lacking[-1]} It runs on the torch kernels, which are much slower.")
    raise KernelError(" ".join(lacking))


def _candidates(theta: Tensor) -> tuple[str, ...]:
    """The kernels for theta's device, the fastest first."""
    if runs_at_once(theta) and theta.numel():
        return "gpu", "torch"
    return "native", "torch"


def _lacks(name: str, task: Task) -> str | None:
    if name == "native" and not native_available():
        return "anything without the compiled extension, which is not installed"
    lacks: str | None = _module(name).lacks(task)
    return lacks


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"riskfield.kernels.{_MODULES[name]}")


def one_sweep(problem: Problem, theta: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A sweep as a function of the state it begins from: the marginals there, and the next state.

    Autograd can differentiate it in the state, in theta of shape (batch, theta) and in the numbers of the problem.
    """
    from riskfield.kernels import torch_reference

    return torch_reference.start(Task(problem, theta)).one_sweep


def runs_at_once(theta: Tensor) -> bool:
    """Whether all sweeps of a truncated run should be asked for at once: a GPU replays them in one launch."""
    kind = "cpu" if theta.is_cpu else theta.device.type  # much faster than to ask a CPU tensor for its device
    return kind in _GPUS


def default_schedule(device: torch.device | str) -> Schedule:
    """The schedule for a device if the user leaves it open: `Coloured()`, with wide levels, on all but the CPU."""
    return Sequential() if torch.device(device).type == "cpu" else Coloured()


def marginals_at_once(device: torch.device | str) -> int:
    """How many marginals of small examples to compute at once: enough to fill a device, on a CPU for its cache."""
    return 1 << (21 if torch.device(device).type == "cpu" else 23)


def fits_once_more(tensors: Iterable[Tensor]) -> bool:
    """Whether a copy of these tensors takes at most a quarter of the free memory of their GPU; true on a CPU."""
    needed = Counter[torch.device]()
    for tensor in tensors:
        needed[tensor.device] += tensor.nbytes
    return all(
        device.type != "cuda" or 4 * size <= torch.cuda.mem_get_info(device)[0] for device, size in needed.items()
    )


def gpu_memory(device: torch.device | str | None) -> int | None:
    """The memory of a CUDA device in bytes; None for other devices."""
    place = torch.device("cpu" if device is None else device)
    return int(torch.cuda.mem_get_info(place)[1]) if place.type == "cuda" else None


@cache
def native_available() -> bool:
    """Whether the compiled extension can be imported."""
    try:
        import riskfield._native  # noqa: F401
    except ModuleNotFoundError:  # any other error means a broken build and should be seen
        return False
    return True


def check_kernels(kernels: str | None) -> None:
    """Raise unless `kernels` names kernels, or is None."""
    if kernels is not None and kernels not in _MODULES:
        raise ValueError(f'`kernels` must be "native", "gpu", "torch" or None. Got {kernels!r}.')
