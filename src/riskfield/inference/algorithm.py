"""What every inference algorithm provides; none of them owns the loop or knows how it is differentiated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.optimality import AbstractOptimality
from riskfield.inference.solution import modes
from riskfield.kernels import EVERY_SWEEP


class Run(Protocol):
    """One run of an algorithm on a batch of thetas of shape (batch, theta), advanced by `infer`."""

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep each batch item up to `sweeps` times, or until its residual is at most `tol`.

        While it is above `tol`, the residual is the largest change of a node marginal that the updates of the last
        sweep would have made without damping: the step of every log-marginal divided by 1 - damping, then normalised
        and compared. Below, it is an estimate of the distance to the fixed point (see `kernels.convergence`). It is NaN
        for an impossible model. An item that reached `tol` in an earlier call is left as it is: it keeps its residual
        and runs no sweep.

        Returns the last residual of each item and how many sweeps it ran, both of shape (batch,).
        """
        ...

    def marginals(self) -> Tensor:
        """Mu, of shape (batch, mu). Rows of an impossible model are NaN."""
        ...

    def messages(self) -> Tensor | None:
        """The state, of shape (batch, ...), from which another run can be started."""
        ...


class RecordingRun(Run, Protocol):
    """A run with a tape of its sweeps, which can be differentiated backwards."""

    dual_numbers: bool  # whether its kernels also record runs on dual numbers, for second derivatives

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta through all sweeps, of shape (batch, theta)."""
        ...

    def backward_counting(self, grad_mu: Tensor) -> tuple[Tensor, Tensor]:
        """The same in float64, with a whole tape, and d(grad_mu . mu) / dc_c of every factor, summed over the batch."""
        ...

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as if the last sweep, whose tape was kept, had been repeated for ever.

        It differentiates that sweep backwards up to `steps` times, or until one more time adds at most the share `tol`
        to the cotangents of the messages. Returns the gradient and, for each item, the last share and the number of
        backward sweeps.
        """
        ...


class SteppedRun(Run, Protocol):
    """A run of theta + step direction for several steps, one step after the other along the batch."""

    def marginals(self, weights: Tensor | None = None) -> Tensor:
        """Mu; with weights of shape (step, batch of theta) their sum over the steps, of shape (batch of theta, mu)."""
        ...


# One sweep as a function of the state it begins from: the marginals there, of shape (batch, mu), and the next state.
FixedPointMap = Callable[[Tensor], tuple[Tensor, Tensor]]


class AbstractAlgorithm(ABC):
    """A frozen choice of algorithm and its settings."""

    # Whether runs approach their answer sweep by sweep; if not, one sweep is the answer whatever the tolerance.
    iterative: ClassVar[bool] = True
    # Whether the sweeps can be differentiated: recorded by the native kernels, or followed by autograd. For `Unroll`.
    unrolls: ClassVar[bool] = True
    # Whether converged marginals are the gradient of a value, so that dmu/dtheta is symmetric. For `Perturb`.
    symmetric_jacobian: ClassVar[bool] = False
    # Why converged marginals have no derivative, and what to use; the end of an error message. Empty if they have one.
    nonsmooth_because: ClassVar[str] = ""
    # What `parameters` are called, and how many of them, the first ones, a recorded run differentiates, too.
    parameter_name: ClassVar[str] = "parameters"
    recorded_parameters: ClassVar[int] = 0
    # What else than an impossible model can make the marginals NaN; the end of an error message.
    impossible_caveat: ClassVar[str] = ""
    # What to do where a run does not converge; the end of a warning.
    convergence_advice: ClassVar[str] = (
        "Allow more sweeps, or see `docs/how-to-choose.md` on damping and tree-reweighting."
    )

    def check(self, graph: FactorGraph, batch: torch.Size) -> None:  # noqa: B027
        """Raise a `ValueError` if the settings do not fit the graph, or thetas of batch shape `batch`."""

    @abstractmethod
    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Set up a run for theta of shape (batch, theta), warm-started from `messages` where given."""

    def start_recording(
        self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, every: int = EVERY_SWEEP
    ) -> RecordingRun | None:
        """Set up a native run with a tape; None where no native kernels can run.

        The tape holds every sweep; with `every` = LAST_SWEEP only the last one, for `backward_fixed_point`; with
        `every` > 0 the messages before every so many sweeps, and the backward pass repeats the sweeps between.
        """
        return None

    def start_steps(
        self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, direction: Tensor, steps: Tensor
    ) -> SteppedRun | None:
        """Set up a native run of theta + step direction for steps of shape (step, batch); None where there is none."""
        return None

    def parameters(self, graph: FactorGraph) -> tuple[Tensor, ...]:
        """The numbers besides theta that converged marginals depend on, such as counting numbers, for gradients."""
        return ()

    def with_parameters(self, graph: FactorGraph, parameters: tuple[Tensor, ...]) -> AbstractAlgorithm:
        """The same algorithm with these very tensors for `parameters`."""
        return self

    def fixed_point_maps(
        self, graph: FactorGraph, theta: Tensor, parameters: tuple[Tensor, ...]
    ) -> Iterable[FixedPointMap] | None:
        """Sweeps in torch whose fixed points are the states that runs converge to, the fastest first; None by default.

        `FixedPoint` needs one of them. They must be differentiable in the state, in theta of shape (batch, theta) and
        in `parameters`, which stand in place of the algorithm's own. They should not be damped.
        """
        return None

    def optimality(self, graph: FactorGraph) -> AbstractOptimality | None:
        """The optimality conditions of converged marginals on the local polytope, for `KKT`; None by default."""
        return None

    @abstractmethod
    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """This algorithm's log-partition value at the marginals it returned, of shape (*batch)."""

    def value(self, run: Run) -> Tensor | None:
        """Take the log-partition value, of shape (batch,), from `run`; None to have it computed when it is needed."""
        return None

    def mode(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """The states that `solution.mode()` returns, of shape (*batch, variable): by default each variable's best."""
        return modes(graph, mu)

    def upper_bound(self, graph: FactorGraph, theta: Tensor, mu: Tensor, messages: Tensor | None) -> Tensor:
        """A number that no joint state's score exceeds, of shape (*batch), float64; +inf where there is none."""
        return theta.new_full(theta.shape[:-1], float("inf"), dtype=torch.float64)
