"""Kernels: the sweeps, and the choice between their implementations.

`torch_reference` is short, runs on any device and is differentiable; `native` is the C++ engine; `gpu` is the engine in
Triton, for message passing. All offer the class `MessagePassingRun`, the first two also `MeanFieldRun`, with the same
arguments, and tests compare them.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from riskfield.errors import PerformanceWarning
from riskfield.kernels.problem import MessagePassingProblem

if TYPE_CHECKING:
    from riskfield.kernels.gpu.run import MessagePassingRun

__all__ = [
    "EVERY_SWEEP",
    "LAST_SWEEP",
    "MessagePassingProblem",
    "check_kernels",
    "is_differentiated",
    "native_available",
    "on_gpu",
    "select",
    "start_on_gpu",
    "warn_slow",
]

# What the tape of a run holds: every sweep, or only the last one. A number k > 0 means a checkpoint every k sweeps.
EVERY_SWEEP, LAST_SWEEP = -1, -2

_GPUS = {"cuda"}  # types of devices that the GPU engine serves; tests add the CPU, where Triton interprets the kernels
_warned: set[str] = set()


def native_available() -> bool:
    """Whether the compiled extension can be imported."""
    try:
        import riskfield._native  # noqa: F401
    except ModuleNotFoundError:  # any other error means a broken build and should be seen
        return False
    return True


def check_kernels(kernels: str | None) -> None:
    """Raise unless `kernels` names kernels, or is None."""
    if kernels not in (None, "native", "torch"):
        raise ValueError(f'`kernels` must be "native", "torch" or None. Got {kernels!r}.')


def select(theta: Tensor, kernels: str | None = None, *others: Tensor | float | None) -> ModuleType:
    """The kernels for `theta`: the named ones, or else the native ones if they can run it.

    `others` are the other numbers that the run depends on. Gradients of these or of theta by autograd need the torch
    kernels.
    """
    check_kernels(kernels)
    differentiable = any(isinstance(number, Tensor) and is_differentiated(number) for number in (theta, *others))
    if kernels == "native":
        if not native_available():
            raise ValueError('`kernels="native"` needs the compiled extension, which is not installed.')
        if theta.device.type != "cpu":
            raise ValueError(f'`kernels="native"` needs theta on the CPU. Got {theta.device}.')
        if differentiable:
            raise ValueError(
                '`kernels="native"` does not support autograd. Use `kernels="torch"`, or detach the inputs.'
            )
    native = theta.device.type == "cpu" and not differentiable and native_available()
    if kernels == "torch" or not native:
        from riskfield.kernels import torch_reference

        return torch_reference
    from riskfield.kernels import native as native_kernels

    return native_kernels


def is_differentiated(tensor: Tensor) -> bool:
    """Whether derivatives with respect to `tensor` are required, in reverse or in forward mode."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(tensor).tangent is not None


def on_gpu(theta: Tensor) -> bool:
    """Whether theta is on a device that the GPU engine serves."""
    return theta.device.type in _GPUS


def start_on_gpu(
    problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None, record: int | None = None
) -> MessagePassingRun | None:
    """A run on the GPU engine; None where theta is on another device, or where the engine lacks something.

    What it lacks, and schedules that are far too deep for a GPU, are named in a warning, once.
    """
    if not on_gpu(theta) or theta.numel() == 0:
        return None
    from riskfield.kernels import gpu

    lacks = gpu.lacks(problem, theta, messages, record)
    if lacks is not None:
        warn_slow(lacks)
        return None
    from riskfield.kernels.gpu.run import MessagePassingRun

    run = MessagePassingRun(problem, theta, messages, record=record is not None)
    if run.deep:
        _warn_once(
            f"`{type(problem.schedule).__name__}` compiles into many small levels on this graph, which keep a GPU "
            "waiting. `schedule=Coloured()` has few large ones."
        )
    return run


def warn_slow(what: str) -> None:
    """Warn, once, that something runs on the slow torch kernels although theta is on a GPU."""
    _warn_once(f"The GPU kernels do not support {what}. It runs on the torch kernels, which are much slower.")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, PerformanceWarning, stacklevel=2)
