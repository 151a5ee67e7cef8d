r"""`SMD`: stochastic meta-descent (Schraudolph 1999), as used by Stoyanov, Ropson & Eisner (2011, section 4.2).

Every parameter has a gain eta of its own. With g the gradient and H the Hessian of the objective on a batch,

    eta    <-  eta * max(1/2, 1 - meta_gain * g * v)
    gamma  <-  gamma - eta * g
    v      <-  decay * v - eta * (g + decay * H v),

entry by entry. v is the derivative of gamma by log eta over an exponentially fading past: where moves keep their
direction gains grow, where they turn back gains shrink. H v is exact, by differentiating the gradient once more
(Pearlmutter 1994), so that inference needs an adjoint with second derivatives, `Unroll()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from riskfield.learning.objective import Evaluation, Objective, assign, flat
from riskfield.learning.optimiser import AbstractOptimiser, Step, check_counts, check_positive, check_saved
from riskfield.learning.stochastic import EpochRun


@dataclass(frozen=True)
class SMD(AbstractOptimiser):
    """Stochastic meta-descent: gradient descent on batches, with a gain per parameter that adapts by curvature.

    Arguments:
        gain: eta at the start, for all parameters.
        meta_gain: how fast gains adapt; 0 leaves them as they are. It works on products of gradients, so the smaller
            the gradients (those of a risk per variable are), the larger it may be.
        decay: how slowly the past fades, below 1.
        batch_size: how many examples to look at before each move.
        epochs: how many passes through the data to do at most.
        tol: stop when a pass lowers the objective by less than this share of it; 0 for all passes. The objective is
            the mean over the pass, during which the parameters move.

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

    def start(self, objective: Objective, seed: int) -> _Run:
        """Begin with equal gains and no past."""
        return _Run(self, objective, seed)


class _Run(EpochRun):
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
            return replace(step, converged=f"a pass lowered the objective by less than {tol:g} of it")
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
