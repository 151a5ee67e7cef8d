"""`n_jobs`: how many threads an estimator uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from riskfield.threads import num_processors, num_threads


def check_n_jobs(n_jobs: int | None) -> None:
    """Raise unless `n_jobs` is None or an integer other than 0."""
    if n_jobs is not None and (not isinstance(n_jobs, int | np.integer) or isinstance(n_jobs, bool) or n_jobs == 0):
        raise ValueError(f"`n_jobs` must be a positive integer, -1 for all processors, or None. Got {n_jobs!r}.")


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Use this number of threads in the native engine and in torch, and the previous number afterwards.

    Both are settings of the whole process. None changes nothing. As in joblib, -1 stands for all usable processors, -2
    for all but one, and so on.
    """
    if n_jobs is None:
        yield
        return
    check_n_jobs(n_jobs)
    before = torch.get_num_threads()
    count = int(n_jobs) if n_jobs > 0 else max(num_processors() + 1 + int(n_jobs), 1)
    with num_threads(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
