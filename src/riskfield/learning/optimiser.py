"""The interface of optimisers: settings that start a run, and a run that updates the parameters step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from riskfield.learning.objective import Evaluation, Objective


@dataclass(frozen=True)
class Step:
    """The outcome of one iteration."""

    at: Evaluation  # at the end of the iteration, or the mean over its batches
    restarted: bool = False  # whether the memory of earlier iterations was discarded
    converged: str | None = None  # why the optimiser considers itself converged
    stalled: bool = False  # no decrease along the gradient


class OptimiserRun(Protocol):
    """The state of an optimiser during one fit. The parameters are those of the objective's model."""

    def step(self, iteration: int) -> Step:
        """Run iteration number `iteration`.

        Raises:
            Diverged: if the optimiser cannot avoid points where the objective diverges.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for further steps, without the parameters, as nested dicts, lists, tensors and numbers."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`. The model must have the parameters that belong to it."""
        ...


class AbstractOptimiser(ABC):
    """An optimiser and its settings."""

    @property
    @abstractmethod
    def max_iterations(self) -> int:
        """The maximum number of iterations."""

    @abstractmethod
    def start(self, objective: Objective, seed: int) -> OptimiserRun:
        """Start at the current parameters of the model. All random numbers derive from `seed`."""


def seed_of(seed: int, iteration: int) -> int:
    """Return a seed for one iteration that does not depend on earlier iterations."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)[0] >> 1)


def reseed(seed: int, like: Tensor) -> None:
    """Seed the random numbers of torch on the device of `like`."""
    if like.device == torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes milliseconds
    else:
        torch.manual_seed(seed)


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
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Got {value!r}.")
