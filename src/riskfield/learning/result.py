"""What a fit reports: one record per iteration, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a fit ended."""

    CONVERGED = "converged"
    ITERATIONS = "iterations"  # as many as were allowed
    VALIDATION = "validation"  # no better on the validation set for a while
    STALLED = "stalled"  # no decrease, though the gradient promises one
    DIVERGED = "diverged"
    CALLBACK = "callback"
    INTERRUPTED = "interrupted"  # by Ctrl-C


@dataclass(frozen=True)
class Record:
    """One iteration."""

    iteration: int  # from 1
    objective: float  # risk plus ridge, at the end of the iteration; for batches, their mean
    risk: float
    gradient_norm: float  # the largest entry of the gradient
    evaluations: int  # of the objective, on all examples or a batch, since the fit began
    seconds: float  # since the fit began, interruptions left out
    validation: float | None = None  # the risk on the validation set, where it was looked at
    restarted: bool = False  # whether the optimiser forgot earlier iterations after a bad search direction


@dataclass(frozen=True, repr=False)
class Fit:
    """How a fit went. The model has the parameters of the iteration `best`, or its first ones if that is None."""

    reason: Reason
    explanation: str
    history: tuple[Record, ...]
    best: Record | None

    def __repr__(self) -> str:
        found = "" if self.best is None else f", objective {self.best.objective:.6g}"
        return f"Fit({self.reason.value} after {len(self.history)} iterations{found}: {self.explanation})"
