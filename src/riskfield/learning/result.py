"""The result of a fit: one record per iteration, and the reason why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum
from typing import Any


class Reason(Enum):
    """Why a fit ended."""

    CONVERGED = "converged"
    ITERATIONS = "iterations"  # the maximum number was reached
    VALIDATION = "validation"  # no improvement on the validation set
    STALLED = "stalled"  # no decrease along the gradient
    DIVERGED = "diverged"
    CALLBACK = "callback"  # a callback returned True
    INTERRUPTED = "interrupted"  # by Ctrl-C


@dataclass(frozen=True)
class Record:
    """One iteration of a fit.

    Arguments:
        iteration: the number of the iteration, from 1.
        objective: the risk plus penalties at the end of the iteration; with batches, the mean over them.
        risk: the same without penalties.
        gradient_norm: the largest absolute value of an entry of the gradient of the objective.
        evaluations: how often the objective was evaluated, on all examples or a batch, since the fit began.
        seconds: the time since the fit began, without interruptions.
        validation: the risk on the validation set, or None (the default) if it was not evaluated.
        restarted: whether the optimiser discarded its memory after a bad search direction; by default False.
    """

    iteration: int
    objective: float
    risk: float
    gradient_norm: float
    evaluations: int
    seconds: float
    validation: float | None = None
    restarted: bool = False


@dataclass(frozen=True, repr=False)
class Fit:
    """The result of a fit.

    Arguments:
        reason: why the fit ended.
        explanation: the same in words.
        history: one `Record` for each iteration.
        best: the record of the iteration whose parameters the model has, or None if it has the initial ones.
    """

    reason: Reason
    explanation: str
    history: tuple[Record, ...]
    best: Record | None

    def __repr__(self) -> str:
        found = "" if self.best is None else f"objective {self.best.objective:.6g}, "
        return f"Fit({len(self.history)} iterations, {found}{self.reason.value}: {self.explanation})"


_KINDS = {"int": int, "float": float, "bool": bool, "float | None": float}  # of the fields of a record


def dump_history(history: Sequence[Record]) -> list[list[Any]]:
    """Convert records to rows of plain values for saving."""
    return [list(astuple(record)) for record in history]


def load_history(rows: Any) -> list[Record]:
    """Convert the rows of `dump_history` back to records.

    Raises:
        TypeError, ValueError: if `rows` do not have the format of `dump_history`.
    """
    if not isinstance(rows, list):
        raise TypeError(f"`history` must be a list. Got {rows!r:.80}.")
    return [_record(row, k + 1) for k, row in enumerate(rows)]


def dump_fit(fit: Fit) -> dict[str, Any]:
    """Convert a result to plain values for saving."""
    return {
        "reason": fit.reason.value,
        "explanation": fit.explanation,
        "best": fit.best and fit.best.iteration,
        "history": dump_history(fit.history),
    }


def load_fit(saved: Any) -> Fit:
    """Convert what `dump_fit` returned back to a result.

    Raises:
        KeyError, TypeError, ValueError: if `saved` does not have the format of `dump_fit`.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"a fit must be a dictionary. Got {saved!r:.80}.")
    history = load_history(saved["history"])
    return Fit(Reason(saved["reason"]), str(saved["explanation"]), tuple(history), find_best(history, saved["best"]))


def find_best(history: Sequence[Record], iteration: Any) -> Record | None:
    """Return the record of an iteration, or None for None.

    Raises:
        ValueError: if there is no such iteration.
    """
    if iteration is None:
        return None
    if type(iteration) is not int or not 1 <= iteration <= len(history):
        raise ValueError(f"`best` must be one of {len(history)} iterations. Got {iteration!r:.80}.")
    return history[iteration - 1]


def _record(row: Any, iteration: int) -> Record:
    columns = fields(Record)
    if not isinstance(row, list) or len(row) != len(columns):
        raise ValueError(f"a record must be a list of {len(columns)} values. Got {row!r:.80}.")
    for column, value in zip(columns, row, strict=True):
        optional = str(column.type).endswith("None")
        if type(value) is not _KINDS[str(column.type)] and not (optional and value is None):
            raise TypeError(f"`{column.name}` must be of type {column.type}. Got {value!r:.80}.")
    if row[0] != iteration:
        raise ValueError(f"`iteration` must be {iteration}. Got {row[0]}.")
    return Record(*row)
