r"""Optimisers that use one batch of examples per update. One iteration is one pass through all examples.

`SMD` is stochastic meta-descent (Schraudolph 1999), as used by Stoyanov, Ropson & Eisner (2011, section 4.2). Every
parameter has its own gain eta. With g the gradient and H the Hessian of the objective on a batch,

    eta    <-  eta * max(1/2, 1 - meta_gain * g * v)
    gamma  <-  gamma - eta * g
    v      <-  decay * v - eta * (g + decay * H v),

entry by entry. v is the derivative of gamma with respect to log eta, with exponentially fading memory. Gains grow while
updates keep their direction, and shrink when they reverse it. H v is exact: the gradient is differentiated once more
(Pearlmutter 1994). Inference therefore needs an adjoint with second derivatives, `Unroll()`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from riskfield.learning.objective import Evaluation, Objective, assign, flat, unflatten
from riskfield.learning.optimiser import (
    AbstractOptimiser,
    Step,
    check_counts,
    check_positive,
    check_saved,
    seed_of,
)


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
        optimiser: the class of the optimiser, by default `torch.optim.Adam`.
        settings: its arguments, such as the learning rate; by default those of PyTorch.
        batch_size: the number of examples per update, by default 32.
        epochs: the maximum number of passes through the data, by default 10.

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

    def start(self, objective: Objective, seed: int) -> _TorchRun:
        """Start with the initial state of the torch optimiser."""
        return _TorchRun(self, objective, seed)


class _TorchRun(EpochRun):
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
                raise ValueError(f"`torch` must hold states of {len(parameters)} parameters. Got number {number!r}.")
            check_saved(own, f"torch/{number}", parameters[number].numel())
        self.torch.load_state_dict({**self.torch.state_dict(), "state": kept})


@dataclass(frozen=True)
class SMD(AbstractOptimiser):
    """Stochastic meta-descent: gradient descent on batches, with one gain per parameter that adapts to the curvature.

    A gain is the step size of one parameter (Schraudolph 1999). It grows while updates keep their direction, and
    shrinks when they reverse it. Inference needs an adjoint with second derivatives, `Unroll()`.

    Arguments:
        gain: the initial gain of all parameters, by default 0.1.
        meta_gain: how fast gains adapt, by default 1; with 0 they are constant. It multiplies products of gradients, so
            it may be larger if gradients are small, as those of a risk per variable are.
        decay: how long earlier updates influence the gains, in [0, 1); by default 0.99. A larger value means longer.
        batch_size: the number of examples per update, by default 16.
        epochs: the maximum number of passes through the data, by default 25.
        tol: stop if a pass lowers the objective by less than this fraction; by default 0, which runs all passes. The
            objective is the mean over the pass, during which the parameters change.

    >>> SMD(gain=0.05)
    SMD(gain=0.05, meta_gain=1.0, decay=0.99, batch_size=16, epochs=25, tol=0.0)
    """

    gain: float = 0.1
    meta_gain: float = 1.0
    decay: float = 0.99
    batch_size: int = 16
    epochs: int = 25
    tol: float = 0.0

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size, epochs=self.epochs)
        check_positive(gain=self.gain)
        if not 0 <= self.meta_gain < float("inf"):
            raise ValueError(f"`meta_gain` must be a non-negative number. Got {self.meta_gain!r}.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"`decay` must lie in [0, 1). Got {self.decay!r}.")
        if not 0 <= self.tol < 1:
            raise ValueError(f"`tol` must lie in [0, 1). Got {self.tol!r}.")

    @property
    def max_iterations(self) -> int:
        """One per epoch."""
        return self.epochs

    def start(self, objective: Objective, seed: int) -> _SMDRun:
        """Start with equal gains and v = 0."""
        return _SMDRun(self, objective, seed)


class _SMDRun(EpochRun):
    def __init__(self, settings: SMD, objective: Objective, seed: int):
        super().__init__(objective, seed, settings.batch_size)
        self.settings = settings
        self.gains = torch.full_like(flat(objective.parameters).detach(), settings.gain)
        self.past = torch.zeros_like(self.gains)  # v
        self.lowest = math.inf  # objective of a pass

    def step(self, iteration: int) -> Step:
        step, lowest = super().step(iteration), self.lowest
        self.lowest = min(lowest, step.at.value)
        tol = self.settings.tol
        if tol > 0 and step.at.value > lowest - tol * abs(lowest):
            return replace(step, converged=f"a pass lowered the objective by less than a fraction of {tol:g}")
        return step

    def update(self, batch: Tensor) -> Evaluation:
        settings, past = self.settings, self.past
        at = self.objective(batch, along=past)
        assert at.product is not None
        self.gains = self.gains * (1 - settings.meta_gain * at.gradient * past).clamp(min=0.5)
        gamma = flat(self.objective.parameters).detach()
        assign(self.objective.parameters, gamma - self.gains * at.gradient)
        self.past = settings.decay * past - self.gains * (at.gradient + settings.decay * at.product)
        return at

    def state(self) -> dict[str, Any]:
        return {"gains": self.gains, "past": self.past, "lowest": self.lowest}

    def load(self, state: dict[str, Any]) -> None:
        check_saved(state, "optimiser", self.gains.numel())
        self.gains, self.past = (state[name].to(self.gains).view_as(self.gains) for name in ("gains", "past"))
        self.lowest = float(state["lowest"])
