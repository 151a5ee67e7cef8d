"""The memory of a run on a GPU."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from riskfield.entropy import Counting
from riskfield.kernels.gpu.incidences import Kind


@dataclass(frozen=True, eq=False)
class State:
    """Messages and beliefs of all items, in the storage of a plan."""

    messages: Tensor
    beliefs: Tensor

    def copy(self) -> State:
        """The same in memory of its own."""
        return State(self.messages.clone(), self.beliefs.clone())


@dataclass(eq=False)
class Buffers:
    """The numbers of one run. They stay where they are, so that launches can be replayed for another run."""

    theta: Tensor  # in columns: (theta, batch)
    tables: dict[Kind, Tensor]
    node_theta: Tensor
    counting: dict[Kind, Tensor]
    table_rates: dict[Kind, Tensor]
    rates: dict[int, Tensor]
    damping: Tensor
    messages: list[Tensor]  # where all are sent at once there are two, and `current` is the one to read
    beliefs: list[Tensor]
    accumulator: Tensor
    residual: Tensor
    live: Tensor  # int8 (batch,): 0 for items that are not swept any more
    mu: Tensor  # in columns: (mu, batch)
    columns: Tensor  # messages in columns: (message, batch)
    sizes: Tensor  # one number for each message
    gap: Tensor  # (2, batch): see `Gap`
    tape: Tensor
    stage_messages: Tensor  # for gradients of counting numbers, all messages after each stage of the sweeps on the tape
    given: weakref.ref[Counting] | None = None  # constants that `counting` and `rates` were made from
    settled: bool = False  # whether there are such items
    current: int = 0
    recorded: int = 0  # sweeps on the tape
    graphs: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # launches that can be replayed
    backward: Any = None  # buffers of the backward pass

    def state(self) -> State:
        """The state now. It changes with the next sweep."""
        return State(self.messages[self.current], self.beliefs[self.current])

    def restore(self, state: State) -> None:
        """Go back to a state."""
        self.messages[self.current].copy_(state.messages)
        self.beliefs[self.current].copy_(state.beliefs)
