"""`Inference`: everything that says how marginals are computed, as one object to hand around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.infer import AbstractAdjoint, Stop, infer
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.solution import Solution


class Role(Enum):
    """Which of a loss's runs this is: some compare the model as it is with the model clamped to the labels."""

    FREE = "free"
    CLAMPED = "clamped"


@dataclass(frozen=True)
class Inference:
    """How marginals are computed: the algorithm, when it stops, and how it is differentiated.

    Called on a graph and its theta it runs `infer`. A subclass may keep `solution.messages` and start the next run
    from them; they belong to one batch of thetas, one role and one algorithm.

    Arguments:
        algorithm: `MessagePassing(...)` (the default: loopy belief propagation), `MeanField()`, `Exact()`, ...
        stop: when a run ends.
        adjoint: how gradients reach theta. By default, where theta requires a gradient, through the sweeps that ran.

    >>> from riskfield import TRW, Inference, MessagePassing, Stop, Unroll, grid
    >>> truncated = Inference(MessagePassing(TRW(0.5)), Stop(sweeps=5, tol=None), Unroll())
    >>> graph = grid(3, 3, num_states=2)
    >>> truncated(graph, graph.zeros()).mu.shape
    torch.Size([66])
    """

    algorithm: AbstractAlgorithm = field(default_factory=MessagePassing)
    stop: Stop = field(default_factory=Stop)
    adjoint: AbstractAdjoint | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, AbstractAlgorithm):
            raise TypeError(f"`algorithm` must be an object such as `MessagePassing()`. Got {self.algorithm!r}.")
        if not isinstance(self.stop, Stop):
            raise TypeError(f"`stop` must be an object such as `Stop(sweeps=100, tol=1e-6)`. Got {self.stop!r}.")
        if self.adjoint is not None and not isinstance(self.adjoint, AbstractAdjoint):
            raise TypeError(f"`adjoint` must be an object such as `Unroll()`, or None. Got {self.adjoint!r}.")

    def __call__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        *,
        evidence: Tensor | Mapping[int, int] | None = None,
        role: Role = Role.FREE,
    ) -> Solution:
        """Run it on `theta`, of shape (*batch, theta), with `evidence` clamped."""
        return infer(graph, theta, self.algorithm, stop=self.stop, evidence=evidence, adjoint=self.adjoint)

    def on(self, graph: FactorGraph) -> Inference:
        """The inference to use on `graph`: this one, whatever the graph."""
        return self


@dataclass(frozen=True)
class ExactOnForests:
    """Exact inference on graphs without cycles, and another inference on all others.

    On a forest one sweep of belief propagation, from the leaves to the roots and back, gives the exact marginals and
    log-partition function. The graph alone decides, however it was described.

    Arguments:
        loopy: the inference on graphs with cycles.

    >>> from riskfield import TRW, Inference, MessagePassing, Stop, chain, grid
    >>> choice = ExactOnForests(Inference(MessagePassing(TRW(0.5)), Stop(sweeps=10, tol=None)))
    >>> choice.on(chain(3, num_states=2)).stop
    Stop(sweeps=1, tol=None)
    >>> choice.on(grid(3, 3, num_states=2)).stop
    Stop(sweeps=10, tol=None)
    """

    loopy: Inference

    def __post_init__(self) -> None:
        if not isinstance(self.loopy, Inference):
            raise TypeError(f"`loopy` must be an object such as `Inference(MessagePassing())`. Got {self.loopy!r}.")

    def on(self, graph: FactorGraph) -> Inference:
        """The inference to use on `graph`."""
        return Inference(MessagePassing(), Stop(sweeps=1, tol=None)) if graph.is_forest else self.loopy


InferenceChoice: TypeAlias = Inference | ExactOnForests
