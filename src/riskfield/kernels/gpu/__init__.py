"""Message passing on GPUs, in Triton. See `plan` for the storage, `sweeps` and `ends` for the kernels.

Importing this package does not import Triton.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from riskfield.kernels.gpu.storage import power_of_two
from riskfield.kernels.problem import MessagePassingProblem

_LARGEST_ARITY = 4
_LARGEST_TILE = 8192  # entries of a table with axes padded to powers of two: what the registers of a program can hold


def lacks(problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None, record: int | None) -> str | None:
    """What the engine would need for this run and does not have; None if it can run. `record`: as in `kernels`."""
    shapes = [group.shape for group in problem.graph.factor_groups]
    damping, counting = problem.damping, problem.counting
    if find_spec("triton") is None:
        return "anything without Triton, which is not installed (`pip install triton`)"
    if theta.dtype not in (torch.float32, torch.float64):
        return f"numbers of type {theta.dtype}"
    if record is not None and record != -1:
        return "checkpoints (`Unroll(checkpoint=...)`), forward mode or the tape of `FixedPoint`"
    if any(len(shape) > _LARGEST_ARITY for shape in shapes):
        return f"factors of more than {_LARGEST_ARITY} variables"
    if any(math.prod(map(power_of_two, shape)) > _LARGEST_TILE for shape in shapes):
        return f"tables of more than {_LARGEST_TILE} entries, with axes padded to powers of two"
    if any(_wants_gradient(number) for number in (damping, counting.factor, counting.node_total)):
        return "gradients of damping or counting numbers"
    if is_functorch_wrapped_tensor(theta) or any(map(_wants_gradient, (theta, messages))):
        return "derivatives through `torch.func`, forward mode or autograd"
    return None


def _wants_gradient(number: object) -> bool:
    return isinstance(number, Tensor) and (
        (number.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(number).tangent is not None
    )
