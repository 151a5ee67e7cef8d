"""When a run with a tolerance has converged. `cpp/convergence.hpp` has the same rule for the native engine.

A run has converged to `tol` when its marginals, those of factors included, and each message's part in the log-partition
value are within about `tol` of the fixed point. Two measurements tell:

- The *change* is the largest undamped change of a node marginal in a sweep. Every sweep gives it, almost for nothing.
- The *gap* is measured on the present state, and only once the change is at most `tol`: for message passing the largest
  inconsistency between a factor marginal and the marginals of its variables. It sees what the node marginals hide:
  messages whose changes cancel at a variable, and damping.

Neither is the distance to the fixed point. If the gap shrinks by the factor r per sweep, what is left is about
gap (1 - damping) / (1 - r); r is taken from the last two measurements. While the gap is too large, the next one
waits until half-way to where it would meet the tolerance at this rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# While some log-message, even to an improbable state, still moves by more than this, a run has not converged: marginals
# near 0 or 1 hide messages that have yet to reach other variables.
SETTLED = 0.1
# Steps of log-messages below this many units in the last place are rounding. The unit is that of the numbers a message
# is the sum of.
ROUNDING = 4.0

_UNKNOWN_RATE = 10.0  # the factor from gap to distance before there are two gaps to compare
_SLOWEST = 1000.0  # the largest such factor
_LONGEST_WAIT = 16  # sweeps


@dataclass(frozen=True, eq=False)
class Gap:
    """How far the state of each batch item is from a fixed point. Both have shape (batch,)."""

    marginals: Tensor  # largest inconsistency of marginals, also weighted by its part in the log-partition value
    messages: Tensor  # largest undamped step of a log-message


class Convergence:
    """Judges every batch item of a run after each of its sweeps; `residual`, of shape (batch,), is the judgement."""

    def __init__(self, items: int, damping: float):
        self.residual = torch.full((items,), math.inf, dtype=torch.float64)
        self._damping = damping
        self._last = torch.full((items,), math.nan, dtype=torch.float64)  # the gap measured last; NaN if there is none
        self._since = torch.zeros(items, dtype=torch.int64)  # sweeps since then
        self._wait = torch.zeros(items, dtype=torch.int64)  # sweeps until the next measurement

    def done(self, tol: float) -> Tensor:
        """Which items need no more sweeps: those that converged, and impossible models, whose residual is NaN."""
        return (self.residual <= tol) | torch.isnan(self.residual)

    def judge(self, items: Tensor, change: Tensor, sweeps: int, tol: float, measure: Callable[[], Gap]) -> None:
        """Update the residuals of `items`, a mask, after `sweeps` more sweeps of which the last made `change`.

        `change` and what `measure` returns have an entry for every item.
        """
        moving = items & ~(change <= tol)
        self.residual[moving] = change[moving]
        self._last[moving], self._wait[moving] = math.nan, 0
        resting = items & ~moving
        self._since[resting] += sweeps
        self._wait[resting] -= sweeps
        due = resting & (self._wait <= 0)
        if due.any():
            gap = measure()
            marginals, messages = (values.detach().to("cpu", torch.float64) for values in (gap.marginals, gap.messages))
            for k in due.nonzero().flatten().tolist():
                self._estimate(k, float(change[k]), float(marginals[k]), float(messages[k]), tol)

    def _estimate(self, item: int, change: float, marginals: float, messages: float, tol: float) -> None:
        last, since = float(self._last[item]), int(self._since[item])
        unsettled = tol * (messages / SETTLED)
        gap = max(marginals, unsettled)
        rate = math.nan if math.isnan(last) else (gap / last) ** (1 / since) if last > 0 else 0.0
        factor = _UNKNOWN_RATE
        if not math.isnan(rate):
            factor = min(max((1 - self._damping) / max(1 - rate, 1e-9), 1.0), _SLOWEST)
        distance = max(change, marginals * factor, unsettled)
        self.residual[item] = distance
        self._last[item], self._since[item], self._wait[item] = gap, 0, 1
        if 0 < tol < distance and 0 < rate < 1:
            half_way = 0.5 * math.log(tol / distance) / math.log(rate)
            self._wait[item] = min(max(int(half_way), 1), _LONGEST_WAIT)
