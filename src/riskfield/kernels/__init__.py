"""Kernels: the sweeps themselves, twice over, and the one place that chooses between them.

`torch_reference` is short, runs on any device and is differentiable; `native` is the C++ engine. Both offer the classes
`MessagePassingRun` and `MeanFieldRun` with the same arguments, and tests compare them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from riskfield.kernels.problem import MessagePassingProblem

__all__ = ["MessagePassingProblem", "native_available", "select"]


def native_available() -> bool:
    """Whether the compiled extension can be imported."""
    try:
        import riskfield._native  # noqa: F401
    except ModuleNotFoundError:  # anything else is a broken build, and better said aloud
        return False
    return True


def select(theta: Tensor, kernels: str | None = None) -> ModuleType:
    """The kernels to run `theta` with: the ones named, or the fastest that can."""
    if kernels not in (None, "native", "torch"):
        raise ValueError(f'`kernels` must be "native", "torch" or None. Got {kernels!r}.')
    differentiable = theta.requires_grad and torch.is_grad_enabled()
    if kernels == "native":
        if not native_available():
            raise ValueError('`kernels="native"` needs the compiled extension, which is not installed.')
        if theta.device.type != "cpu":
            raise ValueError(f'`kernels="native"` needs theta on the CPU. Got {theta.device}.')
        if differentiable:
            raise ValueError('`kernels="native"` carries no gradient. Use `kernels="torch"`, or detach theta.')
    native = theta.device.type == "cpu" and not differentiable and native_available()
    if kernels == "torch" or not native:
        from riskfield.kernels import torch_reference

        return torch_reference
    from riskfield.kernels import native as native_kernels

    return native_kernels
