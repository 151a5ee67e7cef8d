"""Kernels: the sweeps themselves, and the one place that chooses between them.

`torch_reference` is short, runs on any device (on a GPU through `fused` where that can) and is differentiable; `native`
is the C++ engine. Both offer the classes `MessagePassingRun` and `MeanFieldRun` with the same arguments, and tests
compare them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from riskfield.kernels.problem import MessagePassingProblem

__all__ = ["EVERY_SWEEP", "LAST_SWEEP", "MessagePassingProblem", "is_differentiated", "native_available", "select"]

# What a run that records keeps: all that every sweep, or the last one, was made from. A number k > 0 stands for a
# checkpoint every k sweeps.
EVERY_SWEEP, LAST_SWEEP = -1, -2


def native_available() -> bool:
    """Whether the compiled extension can be imported."""
    try:
        import riskfield._native  # noqa: F401
    except ModuleNotFoundError:  # anything else is a broken build, and better said aloud
        return False
    return True


def select(theta: Tensor, kernels: str | None = None, *others: Tensor | float | None) -> ModuleType:
    """The kernels to run `theta` with: the ones named, or the fastest that can.

    `others` are the other numbers the run depends on. Gradients, of those or of theta, need the torch kernels.
    """
    if kernels not in (None, "native", "torch"):
        raise ValueError(f'`kernels` must be "native", "torch" or None. Got {kernels!r}.')
    differentiable = any(isinstance(number, Tensor) and is_differentiated(number) for number in (theta, *others))
    if kernels == "native":
        if not native_available():
            raise ValueError('`kernels="native"` needs the compiled extension, which is not installed.')
        if theta.device.type != "cpu":
            raise ValueError(f'`kernels="native"` needs theta on the CPU. Got {theta.device}.')
        if differentiable:
            raise ValueError('`kernels="native"` carries no gradient. Use `kernels="torch"`, or detach its inputs.')
    native = theta.device.type == "cpu" and not differentiable and native_available()
    if kernels == "torch" or not native:
        from riskfield.kernels import torch_reference

        return torch_reference
    from riskfield.kernels import native as native_kernels

    return native_kernels


def is_differentiated(tensor: Tensor) -> bool:
    """Whether derivatives are asked for, in reverse or in forward mode."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(tensor).tangent is not None
