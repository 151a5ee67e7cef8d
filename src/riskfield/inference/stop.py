"""When inference stops: `Stop`, and the only loop over sweeps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.kernels import Run

_LARGEST = float(np.finfo(np.float64).max)
# How long one slice of sweeps may take before the loop looks up: short enough for Ctrl-C and a smooth progress bar.
_SLICE_SECONDS = 0.1


@dataclass(frozen=True)
class Stop:
    """When inference ends: after `sweeps` sweeps, or as soon as a run has converged to `tol`.

    Converged to `tol` means that the marginals, those of factors included, and each message's part in the log-partition
    value are within about `tol` of the fixed point. The distance is estimated from the inconsistency of the marginals
    and the rate at which it shrinks, so neither damping nor slow convergence is mistaken for convergence.

    Arguments:
        sweeps: the maximum number of sweeps, by default 1000.
        tol: the tolerance, by default 1e-6. None runs exactly `sweeps` sweeps, as truncated fitting does; convergence
            is then not checked.
    """

    sweeps: int = 1000
    tol: float | None = 1e-6

    def __post_init__(self) -> None:
        if not isinstance(self.sweeps, int | np.integer) or isinstance(self.sweeps, bool) or self.sweeps < 0:
            raise ValueError(f"`sweeps` must be a non-negative integer. Got {self.sweeps!r}.")
        if self.sweeps >= 2**63:
            raise ValueError(f"`sweeps` must be below 2**63. Got {self.sweeps!r}.")
        tol = self.tol.item() if isinstance(self.tol, np.generic) else self.tol  # NumPy would overflow
        if tol is not None and (not isinstance(tol, Real) or not 0 <= tol <= _LARGEST):
            raise ValueError(f"`tol` must be a non-negative number or None. Got {self.tol!r}.")


def advance(
    run: Run, stop: Stop, items: int, progress: bool, first: int, *, throw: bool
) -> tuple[Tensor, Tensor, bool]:
    """Sweep until `stop`, in slices, the first of `first` sweeps.

    Returns sweeps and residuals of shape (items,), and whether all residuals are at most the tolerance. With `throw`,
    an impossible item ends the run for all.
    """
    if stop.sweeps == 0:
        return torch.zeros(items, dtype=torch.int64), torch.full((items,), math.inf, dtype=torch.float64), items == 0
    tol = -1.0 if stop.tol is None else float(stop.tol)  # no residual is at most -1
    left, slice_, sweeps = stop.sweeps, first, None
    with _progress_bar(stop.sweeps, progress) as bar:
        while left > 0:
            began = time.perf_counter()
            count = min(slice_, left)
            residual, ran = run.advance(count, tol)
            sweeps = ran if sweeps is None else sweeps + ran
            left -= count
            if progress:
                bar.set_postfix(residual=f"{float(residual.max()):.2g}" if items else "0", refresh=False)
                bar.update(count)
            # The NaN of an impossible item stays, however many sweeps follow.
            unfinished = [r for r in residual.tolist() if not r <= tol]
            impossible = sum(map(math.isnan, unfinished))
            if len(unfinished) == impossible or (throw and impossible):
                break
            if time.perf_counter() - began < _SLICE_SECONDS / 2:
                slice_ *= 2
    assert sweeps is not None
    return sweeps, residual, not unfinished


def _progress_bar(total: int, shown: bool) -> Any:
    if not shown:
        return _NO_BAR
    from tqdm import tqdm

    return tqdm(total=total, unit="sweep", leave=False, delay=0.5)


class _NoBar:
    """A progress bar that shows nothing, and does not load tqdm."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *error: object) -> None: ...

    def set_postfix(self, **shown: object) -> None: ...

    def update(self, count: int) -> None: ...


_NO_BAR = _NoBar()
