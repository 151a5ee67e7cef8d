"""The memory of a run on a GPU, which later runs use again, and the launches on it that can be replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from riskfield.entropy import Counting
from riskfield.kernels.gpu.incidences import Kind


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one of CUDA, to which launches go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current_stream(device: torch.device) -> Any:
    """The stream of CUDA on which launches wait their turn; None on other devices."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


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
    shifts: Tensor  # of the messages from canonical tables
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
    received: Tensor  # for gradients of counting numbers, the messages into the nodes of each launch on the tape
    stream: Any  # on which all work on them is done, so that a later run need not wait for it
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

    def replay(self, key: tuple[Any, ...], work: Callable[[], None]) -> None:
        """Do `work`, which only launches kernels on these buffers: from the third time on in one launch."""
        device = self.theta.device
        with on_device(device):
            if device.type != "cuda":
                work()
                return
            found = self.graphs.get(key)
            if found is None or torch.cuda.is_current_stream_capturing():
                work()
                self.graphs.setdefault(key, False)  # compiled now: the next one can be captured
                return
            if found is False:
                found = torch.cuda.CUDAGraph()
                with torch.cuda.graph(found, capture_error_mode="thread_local"):
                    work()
                self.graphs[key] = found
            found.replay()


_KEPT = 4  # sets of buffers that are kept for later runs
# Buffers of runs that are over, with their engines, oldest first. They hold a tape each, so there are few.
_spare: dict[int, tuple[weakref.ref[object], Buffers]] = {}


def reuse(engine: object) -> Buffers | None:
    """The buffers of a run of this engine on the present stream that is over, if some are kept."""
    for key, (owner, buffers) in _spare.copy().items():
        if owner() is not engine or buffers.stream != current_stream(buffers.theta.device):
            continue
        # Garbage collection, or another thread, may release and drop buffers at any moment.
        if _spare.pop(key, None) is not None:
            buffers.current = buffers.recorded = 0
            return buffers
    return None


def release(engine: object, buffers: Buffers) -> None:
    """Keep the buffers of a run of this engine for a later one."""
    _spare[id(buffers)] = weakref.ref(engine), buffers
    for key, (owner, _) in _spare.copy().items():  # the oldest first
        if owner() is None or len(_spare) > _KEPT:
            _spare.pop(key, None)
