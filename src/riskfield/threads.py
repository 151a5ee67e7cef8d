"""The number of threads of the native engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

_num_threads: int | None = None


def set_num_threads(count: int) -> None:
    """Set the number of threads of the native engine. They share the items of a batch, or the levels of a large graph.

    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    """
    most = 16 * num_processors()
    if not isinstance(count, Integral) or isinstance(count, bool) or not 1 <= count <= most:
        raise ValueError(f"`count` must be an integer from 1 to {most} (16 per processor). Got {count!r}.")
    global _num_threads
    _num_threads = int(count)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Set the number of threads of the native engine for a while."""
    global _num_threads
    before = _num_threads
    set_num_threads(count)
    try:
        yield
    finally:
        _num_threads = before


def get_num_threads() -> int:
    """The number of threads: the one that was set, else `OMP_NUM_THREADS`, else the number of usable processors."""
    if _num_threads is not None:
        return _num_threads
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    usable = num_processors()
    return min(int(requested), usable) if requested.isdecimal() and int(requested) > 0 else usable


def num_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
