"""`infer`, which stands above algorithms and adjoints, and `Inference`, its settings as one object."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from numpy import broadcast_shapes  # torch's imports sympy, which takes a second
from torch import Tensor

from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.unroll import Unroll
from riskfield.errors import ConvergenceWarning, KernelError
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.evidence import Evidence, clamp
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.precision import is_resolved, recentred
from riskfield.inference.request import Request
from riskfield.inference.solution import Solution
from riskfield.inference.stop import Stop
from riskfield.kernels import check_kernels, is_differentiated

_ALGORITHM, _STOP, _ADJOINT = MessagePassing(), Stop(), Unroll()  # the defaults


def infer(
    graph: FactorGraph,
    theta: Tensor,
    algorithm: AbstractAlgorithm | None = None,
    *,
    stop: Stop | None = None,
    evidence: Evidence | None = None,
    messages: Tensor | None = None,
    adjoint: AbstractAdjoint | None = None,
    kernels: str | None = None,
    progress: bool = False,
    throw: bool = True,
) -> Solution:
    """Approximate marginals and log-partition function of p(x) proportional to exp(theta . f(x)).

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (*batch, graph.theta_size), float32 or float64; -inf marks impossible states.
        algorithm: `MessagePassing(...)` (the default: loopy belief propagation), `MeanField()`, `Exact()`, ...
        stop: when to end; by default `Stop()`: after 1000 sweeps, or at a tolerance of 1e-6.
        evidence: observed states, a dict {variable: state} or an integer tensor of shape (*batch, variable) with -1 for
            unobserved variables; by default none. The batch items may observe different variables.
        messages: `solution.messages` of an earlier run to start from; theta may have changed since. By default the run
            starts from uniform messages.
        adjoint: how gradients of the marginals and of the log-partition value are computed: `Unroll()`,
            `FixedPoint(...)`, `Perturb(...)`, `KKT(...)`, `Envelope()`. By default `Unroll()`. If nothing requires a
            gradient, nothing is recorded.
        kernels: "native", "gpu" or "torch" to require these; by default the fastest that can run. Only the torch
            kernels run on every device and have every derivative.
        progress: show a progress bar; by default False.
        throw: raise if the algorithm finds that every joint state of a batch item has probability zero (the default).
            With False, such items have NaN for marginals, -inf for `log_partition`, gradients of 0 and False for
            `converged`, `solution.reasons` says why, and the other items are as they would be alone.

    Returns:
        A `Solution`. If a tolerance was asked for and some batch item did not reach it, a `ConvergenceWarning` says so
        and `solution.converged` is False there.

    Raises:
        ImpossibleEvidenceError: if the algorithm finds that every joint state has probability zero.
        ValueError: if an algorithm of your own returns NaN for a model that is not impossible.
        KernelError: if `kernels` names kernels that cannot run this.
        PrecisionError: if potentials that conflict are too large for the precision of theta (see the inference page).

    >>> from riskfield import TRW, MessagePassing, Stop, grid, infer
    >>> graph = grid(10, 10, num_states=3)
    >>> theta = graph.zeros()
    >>> solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(tol=1e-8), evidence={0: 2})
    >>> bool(solution.converged), graph.node(solution.mu, 0)
    (True, tensor([0., 0., 1.], dtype=torch.float64))
    """
    if not isinstance(graph, FactorGraph):
        raise TypeError(f"`graph` must be a FactorGraph. Got {type(graph).__name__}.")
    if stop is None:
        stop = _STOP
    elif not isinstance(stop, Stop):
        raise TypeError(f"`stop` must be an object such as `Stop(sweeps=100, tol=1e-6)`. Got {stop!r}.")
    if messages is not None and not isinstance(messages, Tensor):
        raise TypeError(f"`messages` must be a tensor such as `solution.messages`. Got {type(messages).__name__}.")
    if algorithm is None:
        algorithm = _ALGORITHM
    elif not isinstance(algorithm, AbstractAlgorithm):
        raise TypeError(f"`algorithm` must be an object such as `MessagePassing()`. Got {algorithm!r}.")
    low, high = graph.check_values(theta)
    if evidence is not None:
        theta = clamp(graph, theta, evidence)  # in the same range, but for -inf
    algorithm.check(graph, theta.shape[:-1])
    if adjoint is None:
        adjoint = _ADJOINT
    elif not isinstance(adjoint, AbstractAdjoint):
        raise TypeError(f"`adjoint` must be an object such as `Unroll()`. Got {adjoint!r}.")
    check_kernels(kernels)
    if kernels not in (None, "torch") and not algorithm.any_kernels and algorithm.problem(graph) is None:
        raise KernelError(
            f"The {kernels} kernels cannot run `{type(algorithm).__name__}`, which has sweeps of its own: leave out "
            "`kernels`."
        )
    request = Request(graph, theta, algorithm, stop, messages, kernels, progress, throw)
    solve = adjoint.apply
    if not is_resolved(graph, theta, low, high):
        solve = partial(recentred, solve=adjoint.apply)
    solution = solve(request)
    return solution if throw else _without_impossible(request, solve, solution)


def _without_impossible(request: Request, solve: Callable[[Request], Solution], solution: Solution) -> Solution:
    """The same solution with gradients in which impossible items take no part: theirs is 0.

    Derivatives of their NaN would be NaN even for a loss that ignores them. So inference runs once more with zeros for
    their potentials.
    """
    impossible = solution.residual.isnan().to(request.theta.device)
    if not (impossible.any() and is_differentiated(solution.mu)):
        return solution
    rows = impossible.unsqueeze(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the first run has warned
        finite = solve(replace(request, theta=torch.where(rows, 0.0, request.theta)))
    mu = torch.where(rows, float("nan"), finite.mu)
    value = torch.where(impossible, float("-inf"), finite.log_partition)
    return solution.with_mu(mu, _value=value)


class Role(Enum):
    """Which run of a loss this is: some losses compare the free model with the model clamped to the labels."""

    FREE = "free"
    CLAMPED = "clamped"


@runtime_checkable
class MessageMemory(Protocol):
    """Where an `Inference` keeps the messages that a run ended with. They belong to one algorithm and one role.

    `shared` says that all examples share one theta and one evidence, so that there is one set of messages for them.
    """

    def recall(self, algorithm: AbstractAlgorithm, role: Role, shared: bool) -> Tensor | None:
        """The messages to start from; None for a cold start."""
        ...

    def keep(self, algorithm: AbstractAlgorithm, role: Role, shared: bool, messages: Tensor) -> None:
        """Keep the messages that a run ended with."""
        ...


@dataclass(frozen=True)
class Inference:
    """How marginals are computed: the algorithm, when it stops, and how it is differentiated.

    Called on a graph and its theta it runs `infer`.

    Arguments:
        algorithm: `MessagePassing(...)` (the default: loopy belief propagation), `MeanField()`, `Exact()`, ...
        stop: when a run ends.
        adjoint: how gradients with respect to theta are computed. By default `Unroll()`: through the sweeps that ran.
        memory: the messages of earlier runs on the same examples, to start from. `fit(..., warm_start=True)` sets it.

    >>> from riskfield import TRW, Inference, MessagePassing, Stop, Unroll, grid
    >>> truncated = Inference(MessagePassing(TRW(0.5)), Stop(sweeps=5, tol=None), Unroll())
    >>> graph = grid(3, 3, num_states=2)
    >>> truncated(graph, graph.zeros()).mu.shape
    torch.Size([66])
    """

    algorithm: AbstractAlgorithm = field(default_factory=MessagePassing)
    stop: Stop = field(default_factory=Stop)
    adjoint: AbstractAdjoint | None = None
    memory: MessageMemory | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, AbstractAlgorithm):
            raise TypeError(f"`algorithm` must be an object such as `MessagePassing()`. Got {self.algorithm!r}.")
        if not isinstance(self.stop, Stop):
            raise TypeError(f"`stop` must be an object such as `Stop(sweeps=100, tol=1e-6)`. Got {self.stop!r}.")
        if self.adjoint is not None and not isinstance(self.adjoint, AbstractAdjoint):
            raise TypeError(f"`adjoint` must be an object such as `Unroll()`, or None. Got {self.adjoint!r}.")
        if self.memory is not None and not isinstance(self.memory, MessageMemory):
            raise TypeError(
                "`memory` must be an object with the methods `recall` and `keep`, such as `fit(..., warm_start=True)` "
                f"passes. Got {self.memory!r}."
            )

    def __call__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        *,
        evidence: Evidence | None = None,
        role: Role = Role.FREE,
    ) -> Solution:
        """Run it on `theta`, of shape (*batch, theta), with `evidence` clamped."""
        messages, shared = None, False
        if self.memory is not None:
            observed = evidence.shape[:-1] if isinstance(evidence, Tensor) else ()
            shared = not broadcast_shapes(theta.shape[:-1], observed)
            messages = self.memory.recall(self.algorithm, role, shared)
        solution = infer(
            graph, theta, self.algorithm, stop=self.stop, evidence=evidence, messages=messages, adjoint=self.adjoint
        )
        if self.memory is not None and solution.messages is not None:
            self.memory.keep(self.algorithm, role, shared, solution.messages)
        return solution

    def on(self, graph: FactorGraph) -> Inference:
        """The inference to use on `graph`: this one, whatever the graph."""
        return self


@dataclass(frozen=True)
class ExactOnForests:
    """Exact inference on graphs without cycles, and another inference on all others.

    On a forest one sweep of belief propagation, from the leaves to the roots and back, gives the exact marginals and
    log-partition function. Only the graph itself matters, not the function that built it.

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


def as_inference(inference: Inference | AbstractAlgorithm) -> Inference:
    """The inference, or that of an algorithm with the default stop and adjoint."""
    if isinstance(inference, Inference):
        return inference
    if not isinstance(inference, AbstractAlgorithm):
        raise TypeError(
            "`inference` must be an algorithm such as `MessagePassing()`, or an object such as "
            f"`Inference(MessagePassing(), Stop(sweeps=5, tol=None))`. Got {inference!r}."
        )
    return Inference(inference)
