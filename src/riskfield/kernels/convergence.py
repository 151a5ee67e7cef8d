"""The convergence rule of runs with a tolerance. `cpp/convergence.hpp` has the same rule for the native engine.

A run has converged to `tol` when its marginals, including those of factors, and the contribution of each message to the
log-partition value are within about `tol` of the fixed point. This is judged from two measurements:

- The *change* is the largest undamped change of a node marginal in a sweep. Every sweep computes it at almost no cost.
- The *gap* is computed from the current state, and only if the change is at most `tol`. For message passing it is the
  largest inconsistency between a factor marginal and the marginals of its variables. It detects what the change of the
  node marginals does not show: messages whose changes cancel at a variable, and damping.

Neither is the distance to the fixed point. If both shrink by the factor r per sweep, the remaining distance is about
f gap, or r f change, with f = (1 - damping) / (1 - r): a gap is an undamped step from the current state, a change the
undamped step before it. The last two gaps give r. While the distance is too large, the next measurement is made halfway
to the sweep at which it would reach the tolerance at this rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A run has not converged while some log-message, even to an improbable state, still moves by more than this: marginals
# near 0 or 1 hide changes of messages that have not reached other variables yet.
SETTLED = 0.1
# Steps of log-messages below this many units in the last place count as rounding errors. The unit is that of the
# numbers whose sum a message is.
ROUNDING = 4.0

_UNKNOWN_RATE = 10.0  # the ratio of the distance to gap and change while there is only one measurement
_SLOWEST = 1000.0  # the largest such ratio
_LONGEST_WAIT = 16  # sweeps


@dataclass(frozen=True, eq=False)
class Gap:
    """How far the state of each batch item is from a fixed point. Both have shape (batch,)."""

    marginals: Tensor  # largest inconsistency of marginals, also weighted by its effect on the log-partition value
    messages: Tensor  # largest undamped step of a log-message


class Convergence:
    """Computes the residual of every batch item of a run, of shape (batch,), after each of its sweeps."""

    def __init__(self, items: int, damping: float):
        self.residual = torch.full((items,), math.inf, dtype=torch.float64)
        self._damping = damping
        self._last = torch.full((items,), math.nan, dtype=torch.float64)  # the last measured gap; NaN if there is none
        self._since = torch.zeros(items, dtype=torch.int64)  # sweeps since then
        self._wait = torch.zeros(items, dtype=torch.int64)  # sweeps until the next measurement

    def done(self, tol: float) -> Tensor:
        """Which items need no more sweeps: converged items, and impossible models, whose residual is NaN."""
        return (self.residual <= tol) | torch.isnan(self.residual)

    def judge(self, items: Tensor, change: Tensor, sweeps: int, tol: float, measure: Callable[[], Gap]) -> None:
        """Update the residuals of `items`, a mask, after `sweeps` more sweeps. The last of them made `change`.

        `change` and the gap that `measure` returns have one entry for every item.
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
        of_gap = of_change = _UNKNOWN_RATE
        if not math.isnan(rate):
            of_gap = min(max((1 - self._damping) / max(1 - rate, 1e-9), 1.0), _SLOWEST)
            of_change = max(min(rate, 1.0) * of_gap, 1.0)
        # Without a gap, this is a fixed point, however large the last change was.
        distance = max(change * of_change, marginals * of_gap, unsettled) if gap > 0 else change
        self.residual[item] = distance
        self._last[item], self._since[item], self._wait[item] = gap, 0, 1
        if 0 < tol < distance and 0 < rate < 1:
            half_way = 0.5 * math.log(tol / distance) / math.log(rate)
            self._wait[item] = min(max(int(half_way), 1), _LONGEST_WAIT)
