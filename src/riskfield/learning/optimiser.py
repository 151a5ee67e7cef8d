"""What every optimiser provides: settings that start a run, and a run that moves the parameters step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from riskfield.learning.objective import Evaluation, Objective


@dataclass(frozen=True)
class Step:
    """What one iteration did."""

    at: Evaluation  # where the iteration ended, or over its batches
    restarted: bool = False  # whether what was remembered of earlier iterations was thrown away
    converged: str | None = None  # how one sees that there is nothing left to gain
    stalled: bool = False  # nothing was gained, though the gradient promises something


class OptimiserRun(Protocol):
    """The state of one fit; the parameters are those of the objective's model."""

    def step(self, iteration: int) -> Step:
        """Do iteration number `iteration`.

        Raises:
            Diverged: if there is no way around points where the objective diverges.
        """
        ...

    def state(self) -> dict[str, Any]:
        """All that the next steps depend on, besides the parameters: a nest of dicts, lists, tensors and numbers."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`, with the parameters it belongs to."""
        ...


class AbstractOptimiser(ABC):
    """A frozen choice of optimiser and its settings."""

    @property
    @abstractmethod
    def max_iterations(self) -> int:
        """How many iterations to do at most."""

    @abstractmethod
    def start(self, objective: Objective, seed: int) -> OptimiserRun:
        """Begin at the parameters the model has, with all randomness from `seed`."""


def seed_of(seed: int, iteration: int) -> int:
    """A seed for one iteration, so that it does not matter what happened before."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)[0] >> 1)


def check_saved(state: Any, name: str, num_entries: int) -> None:
    """Raise unless all tensors in a saved state are floating, with one entry or `num_entries`."""
    if isinstance(state, Tensor):
        if not state.is_floating_point() or state.numel() not in (1, num_entries):
            raise ValueError(
                f"`{name}` must have 1 or {num_entries} floating entries. Got {state.numel()} of type {state.dtype}."
            )
    elif isinstance(state, dict | list):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, entry in pairs:
            check_saved(entry, f"{name}/{key}", num_entries)
    elif state is not None and not isinstance(state, bool | int | float):
        raise TypeError(f"`{name}` must hold tensors and numbers. Got {state!r:.80}.")


def check_positive(**settings: float) -> None:
    """Raise unless all settings are positive numbers."""
    for name, value in settings.items():
        if isinstance(value, bool | str) or not 0 < value < float("inf"):
            raise ValueError(f"`{name}` must be a positive number. Got {value!r}.")


def check_counts(**settings: int) -> None:
    """Raise unless all settings are positive integers."""
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Got {value!r}.")
