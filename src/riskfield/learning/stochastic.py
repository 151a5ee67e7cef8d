"""Optimisers that use one batch of examples per update. One iteration is one pass through all examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from riskfield.learning.objective import Evaluation, Objective, flat, unflatten
from riskfield.learning.optimiser import AbstractOptimiser, Step, check_counts, check_saved, seed_of


class EpochRun(ABC):
    """A run whose iterations are passes through the data, with one update per batch."""

    def __init__(self, objective: Objective, seed: int, batch_size: int):
        self.objective, self.seed, self.batch_size = objective, seed, batch_size

    def step(self, iteration: int) -> Step:
        """Run one pass through the batches, which are drawn by the seed of this iteration."""
        seed = seed_of(self.seed, iteration)
        torch.manual_seed(seed)
        value = risk = amount = 0.0
        gradient = torch.zeros_like(flat(self.objective.parameters))
        for batch in self.objective.batches(self.batch_size, seed):
            at = self.update(batch)
            value, risk = value + at.amount * at.value, risk + at.amount * at.risk
            gradient, amount = gradient + at.amount * at.gradient, amount + at.amount
        return Step(Evaluation(value / amount, risk / amount, gradient / amount))

    @abstractmethod
    def update(self, batch: Tensor) -> Evaluation:
        """Update the parameters once. Return the objective on the batch before the update."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all that further iterations depend on, except the parameters."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""


@dataclass(frozen=True)
class Torch(AbstractOptimiser):
    """Any optimiser of `torch.optim`, on batches. Use it for networks, and for data too large to evaluate as a whole.

    Arguments:
        optimiser: the class of the optimiser.
        settings: its arguments, such as the learning rate.
        batch_size: the number of examples per update.
        epochs: the maximum number of passes through the data.

    >>> Torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, batch_size=8).epochs
    10
    """

    optimiser: type[torch.optim.Optimizer] = torch.optim.Adam
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    epochs: int = 10

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size, epochs=self.epochs)
        if not (isinstance(self.optimiser, type) and issubclass(self.optimiser, torch.optim.Optimizer)):
            raise TypeError(f"`optimiser` must be a class such as `torch.optim.Adam`. Got {self.optimiser!r}.")
        if issubclass(self.optimiser, torch.optim.LBFGS):
            raise ValueError("`optimiser` must work on batches; use riskfield's own `LBFGS()` on the whole data.")

    @property
    def max_iterations(self) -> int:
        """One per epoch."""
        return self.epochs

    def start(self, objective: Objective, seed: int) -> _Run:
        """Start with the initial state of the torch optimiser."""
        return _Run(self, objective, seed)


class _Run(EpochRun):
    def __init__(self, settings: Torch, objective: Objective, seed: int):
        super().__init__(objective, seed, settings.batch_size)
        self.torch = settings.optimiser(objective.parameters, **settings.settings)

    def update(self, batch: Tensor) -> Evaluation:
        at, parameters = self.objective(batch), self.objective.parameters
        for parameter, gradient in zip(parameters, unflatten(at.gradient, parameters), strict=True):
            parameter.grad = gradient
        self.torch.step()
        return at

    def state(self) -> dict[str, Any]:
        return {"torch": self.torch.state_dict()["state"]}

    def load(self, state: dict[str, Any]) -> None:
        kept, parameters = state["torch"], self.objective.parameters
        for number, own in kept.items():
            if type(number) is not int or not 0 <= number < len(parameters):
                raise ValueError(f"`torch` must be of {len(parameters)} parameters. Got number {number!r}.")
            check_saved(own, f"torch/{number}", parameters[number].numel())
        self.torch.load_state_dict({**self.torch.state_dict(), "state": kept})
