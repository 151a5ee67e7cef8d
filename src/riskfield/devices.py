"""Devices and dtypes as users name them, and the memory of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
    except (RuntimeError, TypeError):  # they list all devices of all builds
        raise ValueError(f"{_usable()} Got {device!r}.") from None
    try:
        torch.empty(0, device=place)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{_usable()} Got {device!r}: {_reason(place, error)}") from None
    return place


def _usable() -> str:
    """What a device must be."""
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    names = " or ".join(f'"{name}"' for name, is_there in found.items() if is_there)
    return f"`device` must be one that PyTorch can use here: {names}."


def _reason(place: torch.device, error: Exception) -> str:
    """Why PyTorch cannot use a device, in a sentence."""
    if place.type == "cuda" and not torch.backends.cuda.is_built():
        return 'this PyTorch was built without CUDA. See "One GPU" in docs/scaling.md.'
    if isinstance(error, NotImplementedError):  # its message is a list of all devices with an operation
        return f"this PyTorch was built without {place.type}."
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
    """The memory that this process may use, in bytes.

    It is that of the machine, or less if a container, a cgroup or `ulimit -v` limits it.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [2**36]
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        found += [limit] if limit != resource.RLIM_INFINITY else []
    for file in _memory_limits():
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
            found.append(int(file.read_text(encoding="ascii")))
    return min(found)


def _memory_limits(process: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """The files with the memory limits of this process: those of its cgroups and of the groups they are in."""
    yield mounted / "memory.max"  # in a container, the path below may be that of the host
    with contextlib.suppress(OSError):
        for line in process.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = mounted, "memory.max"  # version 2
            if controllers:
                root, name = mounted / "memory", "memory.limit_in_bytes"  # version 1
            if not controllers or "memory" in controllers.split(","):
                group = root / path.lstrip("/")
                yield from (folder / name for folder in (group, *group.parents) if folder.is_relative_to(root))


def check_max_bytes(max_bytes: int) -> None:
    """Raise unless `max_bytes` is positive."""
    if not max_bytes > 0:
        raise ValueError(f"`max_bytes` must be positive. Got {max_bytes}.")
