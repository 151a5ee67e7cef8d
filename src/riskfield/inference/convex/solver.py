"""How a convex free energy is minimised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InteriorPoint:
    """A primal-dual interior-point method, for any convex terms with weights that are not negative.

    A sweep is a Newton step, in float64 on the CPU whatever the dtype and device of theta. Ten to twenty-five steps are
    usually enough, however strong the potentials.
    """


@dataclass(frozen=True)
class SumProduct:
    """Message passing, for terms of b log b alone whose weights are counting numbers, negative ones included.

    A sweep is a sweep of messages, and cheaper than a Newton step. With strong potentials it may take thousands.
    """


Solver = InteriorPoint | SumProduct
