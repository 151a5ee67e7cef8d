"""Devices and dtypes as users name them, and the memory of this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def as_device(device: torch.device | str | None) -> torch.device:
    """The device of that name, the CPU for None. Raise if PyTorch cannot use it here.

    >>> as_device("cpu")
    device(type='cpu')
    """
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f'`device` must be one that PyTorch can use here, such as "cpu" or "cuda". Got {device!r}: {reason}'
        ) from error
    return place


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype of that name, float64 for None.

    >>> as_dtype("float32")
    torch.float32
    """
    found = torch.float64 if dtype is None else _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ValueError(f'`dtype` must be "float32" or "float64". Got {dtype!r}.')
    return found  # type: ignore[return-value]


def physical_memory() -> int:
    """The memory of this machine, or of the container it is, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [2**36]
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found)


def gpu_memory(device: torch.device | str | None) -> int | None:
    """The memory of a CUDA device in bytes; None for other devices."""
    place = torch.device("cpu" if device is None else device)
    return int(torch.cuda.mem_get_info(place)[1]) if place.type == "cuda" else None


def check_max_bytes(max_bytes: int) -> None:
    """Raise unless `max_bytes` is positive."""
    if not max_bytes > 0:
        raise ValueError(f"`max_bytes` must be positive. Got {max_bytes}.")
