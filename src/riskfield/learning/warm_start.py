"""`WarmStart`: begin each run of inference from the messages the same examples ended with last time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from riskfield.adjoints.unroll import Unroll
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, Role, infer
from riskfield.inference.solution import Solution

Memory: TypeAlias = dict[tuple[int, Role, type], Tensor]


@dataclass(frozen=True)
class WarmStart(Inference):
    """Inference to a tolerance, which `fit` starts from the messages of its last evaluation.

    Between iterations parameters change little, so that far fewer sweeps are needed. Where inference has
    one fixed point, as with `TRW` or a convex free energy, the answer is the same to within the tolerance. Mean field
    and loopy belief propagation may have several: a run from the last messages stays near the one it came from, and
    training may stall. Start these afresh, with `Inference`.

    The messages are let go at every checkpoint, so that a run that is resumed goes on bit by bit as one that was not
    interrupted.

    Only for runs to a tolerance with an adjoint that holds at convergence, such as `FixedPoint()` or `Envelope()`:
    `Unroll` would take the messages it starts from for constants, and all but forget how marginals depend on theta.

    >>> from riskfield import FixedPoint, MessagePassing, Stop, TRW
    >>> WarmStart(MessagePassing(TRW(0.5)), Stop(tol=1e-6), FixedPoint()).stop
    Stop(sweeps=1000, tol=1e-06)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop.tol is None:
            raise ValueError("`stop` must have a tolerance for warm starts: a fixed number of sweeps starts afresh.")
        if self.adjoint is None or isinstance(self.adjoint, Unroll):
            raise ValueError(
                "`adjoint` must be one that holds at convergence, such as `FixedPoint()` or `Envelope()`, for warm "
                f"starts. Got {self.adjoint!r}."
            )


@dataclass(frozen=True)
class Remembering(Inference):
    """Inference on some rows of one block of examples, from the messages in `memory` and back into it."""

    memory: Memory = field(default_factory=dict)
    block: int = 0
    rows: Tensor = field(default_factory=lambda: torch.arange(0))
    num_rows: int = 0

    def __call__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        *,
        evidence: Tensor | Mapping[int, int] | None = None,
        role: Role = Role.FREE,
    ) -> Solution:
        """Run it and remember the messages: one row per example, or one for all if they share theta."""
        given = evidence.shape[:-1] if isinstance(evidence, Tensor) else ()
        shared = not torch.broadcast_shapes(theta.shape[:-1], given)
        rows = slice(None) if shared else self.rows.to(theta.device)
        key = (self.block, role, type(self.algorithm))
        kept = self.memory.get(key)
        messages = None if kept is None else kept[rows]
        solution = infer(
            graph, theta, self.algorithm, stop=self.stop, evidence=evidence, messages=messages, adjoint=self.adjoint
        )
        if solution.messages is not None:
            if kept is None:  # zeros are where a cold run starts
                number = () if shared else (self.num_rows,)
                kept = self.memory[key] = solution.messages.new_zeros(*number, solution.messages.shape[-1])
            kept[rows] = solution.messages
        return solution
