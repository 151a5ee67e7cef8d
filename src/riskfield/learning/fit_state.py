"""The state of one fit, which checkpoints save."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.nn import Module

from riskfield.errors import FileFormatError
from riskfield.learning.checkpoint import Checkpoints, Content
from riskfield.learning.objective import Diverged, Objective
from riskfield.learning.optimiser import OptimiserRun, Step
from riskfield.learning.result import Fit, Reason, Record, dump_history

# Training has diverged if the objective exceeds its first value by this many times that value (or 1).
_GROWTH = 100.0
# A run that ended for one of these reasons is not continued when it is resumed.
_FINAL = (Reason.CONVERGED, Reason.STALLED, Reason.VALIDATION)


class FitState:
    """The history of a fit, the best parameters so far, and the reason to stop.

    Arguments:
        objective: the objective, with its model.
        run: the run of the optimiser.
        patience: stop after this many evaluations of the validation set without an improvement; None without a set.
        identity: settings that must be the same when the fit is resumed.
    """

    def __init__(
        self,
        objective: Objective,
        run: OptimiserRun,
        *,
        patience: int | None,
        identity: Mapping[str, Any],
    ):
        self.model, self.objective, self.run = objective.model, objective, run
        self.patience, self.identity = patience, dict(identity)
        self.history: list[Record] = []
        self.reason: Reason | None = None
        self.explanation = ""
        self._best: tuple[float, Record | None, dict[str, Tensor]] = (math.inf, None, _copy(self.model))
        self._looks_since_best = 0
        self._began = time.perf_counter()

    @property
    def iteration(self) -> int:
        """The number of iterations so far."""
        return len(self.history)

    def goes_on(self, max_iterations: int) -> bool:
        """Whether to run another iteration."""
        if self.reason is None and self.iteration >= max_iterations:
            self.end(Reason.ITERATIONS, f"the maximum of {max_iterations} iterations was reached")
        return self.reason is None

    def end(self, reason: Reason, explanation: str) -> None:
        """End the fit."""
        self.reason, self.explanation = reason, explanation

    def add(self, step: Step, validation: float | None) -> Record:
        """Record an iteration, and decide whether to stop."""
        at, first = step.at, self.history[0].objective if self.history else step.at.value
        if at.value > first + _GROWTH * max(1.0, abs(first)):
            raise Diverged(f"the objective has grown from {first:.3g} to {at.value:.3g}")
        record = Record(
            self.iteration + 1,
            at.value,
            at.risk,
            at.gradient_norm,
            self.objective.evaluations,
            time.perf_counter() - self._began,
            validation,
            step.restarted,
        )
        self.history.append(record)
        self._compare(record)
        if step.converged is not None:
            self.end(Reason.CONVERGED, step.converged)
        elif step.stalled:
            self.end(
                Reason.STALLED, "the objective does not decrease along its gradient: is inference accurate enough?"
            )
        elif self.patience is not None and self._looks_since_best >= self.patience:
            self.end(Reason.VALIDATION, f"{self.patience} evaluations of the validation set found no improvement")
        return record

    def restore_best(self) -> None:
        """Load the best parameters into the model, and clear its gradients."""
        self.model.load_state_dict(self._best[2])
        self.model.zero_grad(set_to_none=True)

    def result(self) -> Fit:
        """Return the result."""
        assert self.reason is not None
        return Fit(self.reason, self.explanation, tuple(self.history), self._best[1])

    def _compare(self, record: Record) -> None:
        lowest, best, _ = self._best
        if record.validation is not None:
            self._looks_since_best += 1
            if record.validation < lowest:
                self._best, self._looks_since_best = (record.validation, record, _copy(self.model)), 0
                return
        # The training objective decides as long as the validation set has had no finite risk.
        if self.patience is None or lowest == math.inf:
            newest = not self.objective.loss.comparable
            if best is None or newest or record.objective < best.objective:
                self._best = (math.inf, record, _copy(self.model))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint, on rank 0."""
        value, best, parameters = self._best
        state = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimiser": self.run.state(),
            "history": dump_history(self.history),
            "best": {"value": value, "iteration": best and best.iteration, "model": parameters},
            "looks_since_best": self._looks_since_best,
            "reason": self.reason and self.reason.value,
            "explanation": self.explanation,
        }
        if self.objective.ranks.rank == 0:
            checkpoints.save(self.iteration, state)

    def resume(self, checkpoints: Checkpoints) -> None:
        """Continue from the newest checkpoint that rank 0 finds, if there is one.

        Raises:
            FileFormatError: if the checkpoint is damaged.
            ValueError: if it is that of a run with other settings or another model.
        """
        ranks, newest = self.objective.ranks, checkpoints.newest()
        content = ranks.broadcast_bytes(newest.read_bytes() if newest is not None and ranks.rank == 0 else b"")
        if newest is not None and not content and ranks.rank == 0:
            raise FileFormatError(f"{newest} is empty.")
        if content:
            source = str(newest or Path(checkpoints.folder))
            self._load(Content.decode(content, source), source)

    def _load(self, saved: Content, source: str) -> None:
        for name, value in self.identity.items():
            was = saved.identity.get(name)
            if was != value:
                raise ValueError(f"`{name}` was {was!r} in the run to be resumed. Got {value!r}.")
        _check_same(self.model, saved.model)
        self.model.load_state_dict(saved.model)
        try:
            self.run.load(saved.optimiser)
        except Exception as error:  # whatever an optimiser makes of a state that nobody has checked
            self.restore_best()
            raise FileFormatError(f"{source} holds no state of this optimiser: {error!r}") from error
        self.history = saved.history
        self._best = (saved.best_value, saved.best, saved.best_model)
        self._looks_since_best = saved.looks_since_best
        if self.history:
            self.objective.evaluations = self.history[-1].evaluations
            self._began -= self.history[-1].seconds
        if saved.reason in _FINAL:
            self.end(saved.reason, saved.explanation)


def describe(setting: Any) -> str:
    """A setting in words that are the same in another process, with its own settings other than None.

    >>> from riskfield.losses import SmoothedClassification
    >>> describe(SmoothedClassification(alpha=5.0, class_weight=(1, 2.5)))
    'SmoothedClassification(alpha=5, class_weight=(1, 2.5))'
    """
    if is_dataclass(setting):
        values = {own.name: getattr(setting, own.name) for own in fields(setting)}
        parts = ", ".join(f"{name}={describe(value)}" for name, value in values.items() if value is not None)
        return f"{type(setting).__name__}({parts})" if parts else type(setting).__name__
    if isinstance(setting, tuple | list):
        return f"({', '.join(map(describe, setting))})"
    if isinstance(setting, Tensor | np.ndarray):
        array = np.ascontiguousarray(setting.detach().cpu().numpy() if isinstance(setting, Tensor) else setting)
        return f"array of shape {array.shape} with checksum {crc32(array.tobytes()):08x}"
    if isinstance(setting, np.generic):
        return describe(setting.item())
    if isinstance(setting, float):
        return repr(float(setting)).removesuffix(".0")
    if isinstance(setting, bool | int | str):
        return repr(setting)
    return str(getattr(setting, "__name__", type(setting).__name__))  # of a function, or of the class of an object


def _copy(model: Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _check_same(model: Module, saved: Mapping[str, Tensor]) -> None:
    here = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    there = {name: (tuple(t.shape), t.dtype) for name, t in saved.items()}
    if here != there:
        name = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        raise ValueError(
            f"`model` must be the same as in the run to be resumed. Its {name!r} is {here.get(name)}, and in the run "
            f"it is {there.get(name)}."
        )
