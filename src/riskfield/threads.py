"""How many threads the native engine uses."""

from __future__ import annotations

import os

_num_threads: int | None = None


def set_num_threads(count: int) -> None:
    """Let the native engine use `count` threads: over the items of a batch, or over the levels of one large graph.

    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    """
    most = 16 * _usable_processors()
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise ValueError(f"`count` must be an integer from 1 to {most}, 16 per processor. Got {count!r}.")
    global _num_threads
    _num_threads = count


def get_num_threads() -> int:
    """The number of threads in use: the one set, else `OMP_NUM_THREADS`, else the processors this process may use."""
    if _num_threads is not None:
        return _num_threads
    wished = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    usable = _usable_processors()
    return min(int(wished), usable) if wished.isdigit() and int(wished) > 0 else usable


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
