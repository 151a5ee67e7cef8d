"""What every inference algorithm provides; none of them owns the loop or knows how it is differentiated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from riskfield import kernels as kernel_choice
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.solution import Solution, modes
from riskfield.kernels import Problem, Run

# One sweep as a function of the state it begins from: the marginals there, of shape (batch, mu), and the next state.
FixedPointMap = Callable[[Tensor], tuple[Tensor, Tensor]]

ValueIs: TypeAlias = Literal["exact", "upper bound", "lower bound", "approximation"]


class AbstractAlgorithm(ABC):
    """A frozen choice of algorithm and its settings."""

    # Whether runs approach their answer sweep by sweep; if not, one sweep is the answer whatever the tolerance.
    iterative: ClassVar[bool] = True
    # Whether the sweeps can be differentiated: recorded by the kernels, or by autograd. For `Unroll`.
    unrolls: ClassVar[bool] = True
    # Whether converged marginals are the gradient of a value, so that dmu/dtheta is symmetric. For `Perturb`.
    symmetric_jacobian: ClassVar[bool] = False
    # Why converged marginals have no derivative, and what to use; the end of an error message. Empty if they have one.
    nonsmooth_because: ClassVar[str] = ""
    # What `parameters` are called, and how many of them, the first ones, the tape of a run also leads to.
    parameter_name: ClassVar[str] = "parameters"
    recorded_parameters: ClassVar[int] = 0
    # What else than an impossible model makes marginals NaN by the algorithm's nature; the end of an error message.
    impossible_caveat: ClassVar[str] = ""
    # Whether `infer` accepts kernels="native" and "gpu" although there is no `problem` for them to solve.
    any_kernels: ClassVar[bool] = False
    # What to do where a run does not converge; the end of a warning.
    convergence_advice: ClassVar[str] = (
        "Allow more sweeps, or see `docs/how-to-choose.md` on damping and tree-reweighting."
    )

    def check(self, graph: FactorGraph, batch: torch.Size) -> None:  # noqa: B027
        """Raise a `ValueError` if the settings do not fit the graph, or thetas of batch shape `batch`."""

    def problem(self, graph: FactorGraph) -> Problem | None:
        """What the kernels solve for this algorithm; None for an algorithm with runs of its own."""
        return None

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Set up a run for theta of shape (batch, theta), warm-started from `messages` where given.

        By default the kernels run `problem`. An algorithm without a problem must define this. Its `kernels` is None or
        "torch", unless it sets `any_kernels`.
        """
        problem = self.problem(graph)
        if problem is None:
            raise NotImplementedError(f"`{type(self).__name__}` must define `start` or `problem`.")
        return kernel_choice.start(problem, theta, messages, kernels=kernels)

    def parameters(self, graph: FactorGraph) -> tuple[Tensor, ...]:
        """The numbers besides theta that converged marginals depend on, such as counting numbers, for gradients."""
        return ()

    def with_parameters(self, graph: FactorGraph, parameters: tuple[Tensor, ...]) -> AbstractAlgorithm:
        """The same algorithm with these tensors as its `parameters`."""
        return self

    def fixed_point_maps(
        self, graph: FactorGraph, theta: Tensor, parameters: tuple[Tensor, ...]
    ) -> Iterable[FixedPointMap] | None:
        """Sweeps in torch whose fixed points are the states that runs converge to, the fastest first; None by default.

        `FixedPoint` needs one of them. They must be differentiable in the state, in theta of shape (batch, theta) and
        in `parameters`, which replace the algorithm's own. They should not be damped.
        """
        return None

    def optimality(self, graph: FactorGraph) -> AbstractOptimality | None:
        """The optimality conditions of converged marginals on the local polytope, for `KKT`; None by default."""
        return None

    @abstractmethod
    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """This algorithm's log-partition value at the marginals it returned, of shape (*batch)."""

    def value_is(self, graph: FactorGraph, *, sweeps: int, converged: bool) -> ValueIs:
        """How the log-partition value relates to the true one: exact, a bound, or an approximation."""
        return "approximation"

    def value(self, run: Run) -> Tensor | Callable[[], Tensor] | None:
        """The log-partition value that `run` knows, of shape (batch,), or a function that returns it without gradients.

        None to have it computed from the marginals when it is needed.
        """
        return None

    def mode(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """The states that `solution.mode()` returns, of shape (*batch, variable): by default each variable's best."""
        return modes(graph, mu)

    def upper_bound(self, graph: FactorGraph, theta: Tensor, mu: Tensor, messages: Tensor | None) -> Tensor:
        """A number that no joint state's score exceeds, of shape (*batch), float64; +inf where there is none."""
        return theta.new_full(theta.shape[:-1], float("inf"), dtype=torch.float64)


class AbstractOptimality(ABC):
    """What an algorithm offers for `KKT`: the derivatives of a sum H(mu) = sum_k h_k(mu_k).

    Its marginals maximise theta . mu + H(mu) under the constraints B mu = d of the local polytope, so that they satisfy

        theta + dH/dmu + B^T lambda = 0,        B mu = d.

    The constraints follow from the graph.
    """

    # What to do where the conditions cannot be solved or the marginals do not meet them; the end of an error message.
    remedy: ClassVar[str] = (
        "Run inference to a smaller tolerance, or use `Unroll`, which differentiates the sweeps that ran."
    )
    # Whether `parameter_slopes` has the derivatives in the algorithm's parameters.
    differentiates_parameters: ClassVar[bool] = False

    @abstractmethod
    def curvature(self, mu: Tensor) -> Tensor:
        """Compute -h_k''(mu_k), of the shape of mu: 1 / mu for the entropy -mu log mu. 0 where mu is 0."""

    def parameter_slopes(self, mu: Tensor) -> tuple[Tensor, ...]:
        """Compute the derivative of h_k'(mu_k) in each of the algorithm's parameters, each of the shape of mu."""
        return ()

    def undecided(self, solution: Solution) -> Tensor | None:
        """Which marginals are about to reach 0 or to leave it, where they are not differentiable; None if none is."""
        return None
