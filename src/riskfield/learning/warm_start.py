"""Warm starts: inference in `fit` begins from the messages that the same examples ended with last time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from riskfield.adjoints.unroll import Unroll
from riskfield.infer import ExactOnForests, InferenceChoice, Role
from riskfield.inference.algorithm import AbstractAlgorithm

Store: TypeAlias = dict[tuple[int, Role, type], Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """The messages of some rows of one block of examples, in a store of those of all blocks."""

    store: Store
    block: int
    rows: Tensor
    num_rows: int  # of the whole block

    def recall(self, algorithm: AbstractAlgorithm, role: Role, shared: bool) -> Tensor | None:
        """The messages to begin with: a row per example, or one for all if they share theta; None in the first run."""
        kept = self.store.get((self.block, role, type(algorithm)))
        return None if kept is None else kept if shared else kept[self.rows.to(kept.device)]

    def keep(self, algorithm: AbstractAlgorithm, role: Role, shared: bool, messages: Tensor) -> None:
        """Remember the messages that a run ended with."""
        key = (self.block, role, type(algorithm))
        if shared:
            self.store[key] = messages.detach().clone()
            return
        if key not in self.store:  # zeros are where a cold run begins
            self.store[key] = messages.new_zeros(self.num_rows, messages.shape[-1])
        self.store[key][self.rows.to(messages.device)] = messages.detach()


def check_warm_start(inference: InferenceChoice | None) -> None:
    """Raise unless runs of `inference` may begin anywhere: they end at a tolerance, and so does their gradient."""
    loopy = inference.loopy if isinstance(inference, ExactOnForests) else inference
    if loopy is None:
        raise ValueError("`warm_start` needs `inference`. Got None.")
    if loopy.stop.tol is None:
        raise ValueError("`warm_start` needs an `inference` that stops at a tolerance. Got a fixed number of sweeps.")
    if loopy.adjoint is None or isinstance(loopy.adjoint, Unroll):
        # Unroll would take the messages it starts from for constants, and lose most of the gradient.
        raise ValueError(
            "`warm_start` needs an `inference` whose adjoint holds at convergence, such as `FixedPoint()` or "
            f"`Envelope()`. Got {loopy.adjoint!r}."
        )
