"""Checks of the numbers that a caller passes: theta, and states of variables."""

from __future__ import annotations

import math

import torch
from numpy import broadcast_shapes  # torch's imports sympy, which takes a second
from torch import Tensor


def check_theta(theta: Tensor, size: int) -> None:
    """Raise unless `theta` is a float tensor of shape (*batch, size)."""
    if not isinstance(theta, Tensor):
        raise TypeError(f"`theta` must be a torch.Tensor. Got {type(theta).__name__}.")
    if theta.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`theta` must be float32 or float64. Got {theta.dtype}.")
    if theta.ndim == 0 or theta.shape[-1] != size:
        raise ValueError(f"`theta` must have shape (*batch, {size}). Got {tuple(theta.shape)}.")


def check_values(theta: Tensor, size: int) -> tuple[float, float]:
    """Raise unless `theta` is a float tensor of shape (*batch, size) without NaN or +inf. Return its range."""
    check_theta(theta, size)
    if theta.numel() == 0:
        return 0.0, 0.0
    low, high = map(Tensor.item, theta.detach().aminmax())
    if not high < math.inf:  # nor is a NaN
        where = tuple(int(k) for k in (torch.isnan(theta) | (theta == math.inf)).nonzero()[0])
        raise ValueError(f"`theta` must not hold NaN or +inf. Got {float(theta[where].detach())} at {where}.")
    return low, high


def checked_assignment(states: Tensor, num_states: Tensor, fewest: int, name: str, lowest: int) -> Tensor:
    """`states` as an int64 tensor of shape (*batch, variable), each from `lowest` to its number of states less one.

    `fewest` is the smallest of `num_states`: states below it need no other look.
    """
    states = torch.as_tensor(states)
    if states.is_floating_point() or states.is_complex():
        raise TypeError(f"`{name}` must be integers. Got {states.dtype}.")
    if states.ndim == 0 or states.shape[-1] != len(num_states):
        raise ValueError(f"`{name}` must have shape (*batch, {len(num_states)}). Got {tuple(states.shape)}.")
    states = states.long()
    if states.numel() == 0:
        return states
    low, high = map(Tensor.item, states.aminmax())
    if lowest <= low and high < fewest:
        return states
    bad = (states < lowest) | (states >= num_states)
    if bad.any():
        where = tuple(int(k) for k in bad.nonzero()[0])
        variable, state = where[-1], int(states[where])
        counting = " States are numbered from 0." if state == num_states[variable] else ""
        raise ValueError(
            f"`{name}` of variable {variable} must lie in {lowest}..{int(num_states[variable]) - 1}. "
            f"Got {state}.{counting}"
        )
    return states


def common_batch(*shapes: torch.Size) -> tuple[int, ...]:
    """The shape that all broadcast to. NumPy, which takes ten times as long, is only asked about mixed ones."""
    longest = max(shapes, key=len)
    return longest if all(not shape or shape == longest for shape in shapes) else broadcast_shapes(*shapes)
