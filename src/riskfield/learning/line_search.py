"""A line search for the strong Wolfe conditions, the one of `torch.optim.LBFGS` (from minFunc by M. Schmidt).

Along a direction d, with phi(t) = f(x + t d), it looks for a step t with

    phi(t) <= phi(0) + c1 t phi'(0),        |phi'(t)| <= c2 |phi'(0)|           (Nocedal & Wright 2006, eqs. 3.7)

First it brackets such a step, then it shrinks the bracket by cubic interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_C1, _C2 = 1e-4, 0.9


@dataclass(frozen=True, eq=False)
class Trial:
    """A point along the search direction."""

    step: float
    value: float
    slope: float  # the derivative along the direction
    gradient: Tensor


def strong_wolfe(
    evaluate: Callable[[float], Trial], start: Trial, step: float, most_trials: int, smallest: float
) -> Trial:
    """Find a step that meets the strong Wolfe conditions, or the lowest point of the bracket.

    Arguments:
        evaluate: the function and its gradient at a step.
        start: the same at step 0, with a negative slope.
        step: the first step to try.
        most_trials: how many further steps to try.
        smallest: the width of a bracket that is not divided any more.
    """
    before, new = start, evaluate(step)
    trials, bracket = 0, [start, new]
    while trials < most_trials:
        if _is_high(new, start) or (trials > 1 and new.value >= before.value):
            bracket = [before, new]
            break
        if abs(new.slope) <= -_C2 * start.slope:
            return new
        if new.slope >= 0:
            bracket = [before, new]
            break
        bounds = new.step + 0.01 * (new.step - before.step), new.step * 10
        step = _interpolated(before, new, bounds)
        before, new = new, evaluate(step)
        trials += 1
        bracket = [start, new]
    return _zoom(evaluate, start, bracket, most_trials - trials, smallest)


def _is_high(trial: Trial, start: Trial) -> bool:
    return trial.value > start.value + _C1 * trial.step * start.slope


def _zoom(
    evaluate: Callable[[float], Trial], start: Trial, bracket: list[Trial], trials: int, smallest: float
) -> Trial:
    """Shrink a bracket around a step that meets the conditions."""
    low, high = (0, 1) if bracket[0].value <= bracket[1].value else (1, 0)
    stuck = False  # whether the last step was close to an end of the bracket
    for _ in range(trials):
        left, right = sorted(trial.step for trial in bracket)
        if right - left < smallest:
            break
        step = _interpolated(bracket[0], bracket[1], (left, right))
        margin = 0.1 * (right - left)
        if min(right - step, step - left) < margin:
            if stuck or step >= right or step <= left:
                step = right - margin if abs(step - right) < abs(step - left) else left + margin
                stuck = False
            else:
                stuck = True
        else:
            stuck = False
        new = evaluate(step)
        if _is_high(new, start) or new.value >= bracket[low].value:
            bracket[high] = new
            low, high = (0, 1) if bracket[0].value <= bracket[1].value else (1, 0)
            continue
        if abs(new.slope) <= -_C2 * start.slope:
            return new
        if new.slope * (bracket[high].step - bracket[low].step) >= 0:
            bracket[high] = bracket[low]
        bracket[low] = new
    return bracket[low]


def _interpolated(a: Trial, b: Trial, bounds: tuple[float, float]) -> float:
    """The minimum of the cubic polynomial through two points with their slopes, within bounds."""
    first, second = (a, b) if a.step <= b.step else (b, a)
    low, high = bounds
    try:
        d1 = a.slope + b.slope - 3 * (a.value - b.value) / (a.step - b.step)
        square = d1**2 - a.slope * b.slope
        if not square >= 0:
            return (low + high) / 2
        d2 = math.sqrt(square)
        width = second.step - first.step
        lowest = second.step - width * ((second.slope + d2 - d1) / (second.slope - first.slope + 2 * d2))
    except (ZeroDivisionError, OverflowError):
        return (low + high) / 2
    return min(max(lowest, low), high)
