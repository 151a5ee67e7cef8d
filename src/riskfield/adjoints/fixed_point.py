r"""`FixedPoint`: back-propagation at convergence, without a tape.

Converged messages m are a fixed point m = F(m, theta) of a sweep, and mu = G(m, theta). For a loss with gradient g in
mu the implicit function theorem gives

    v = (dF/dm)^T v + (dG/dm)^T g,        dL/dtheta = (dF/dtheta)^T v + (dG/dtheta)^T g,

and the first equation is solved by iterating it: sweeping backwards, always at the same messages, until v settles. It
is what back TRW (Domke 2013, section 7.2) becomes with a threshold in place of a number of sweeps; with pairwise
factors and rho = 1, back belief propagation (Eaton & Ghahramani 2009). State and F of mean field: the log node
marginals, and a round of updates.

F may be any sweep with the same fixed points, whatever schedule and damping the run needed. The native kernels iterate
the run's own, of which the last one was recorded; it converges in about as many sweeps as inference did. Where that is
too slow, and for gradients of other numbers than theta, autograd goes through an undamped sweep of the torch kernels:
of the one that sends all messages at once, which is a handful of large tensor operations, then of the run's own
schedule; on a GPU where that is fused, the other way round. Messages are normalised, so the directions that only scale
them are mapped to nothing and do no harm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from riskfield.adjoints._attach import first_order_only, require_convergence, require_finite
from riskfield.adjoints._linear import LinearSolution, solve_fixed_point
from riskfield.entropy import Counting
from riskfield.errors import AdjointError, AdjointWarning
from riskfield.graph.schedule import Parallel
from riskfield.inference.algorithm import RecordingRun
from riskfield.inference.infer import AbstractAdjoint, Request
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.solution import Solution
from riskfield.kernels import LAST_SWEEP, fused, is_differentiated
from riskfield.kernels.logspace import NEG_INF
from riskfield.kernels.problem import MessagePassingProblem
from riskfield.kernels.torch_reference import MeanFieldRun, MessagePassingRun

# A gradient whose equation is solved no better than this is not handed out.
_WORTHLESS = 1e-4
# Relative to mu g, gradients of messages that need not be known to the tolerance. The native kernels know it too.
_NEGLIGIBLE = 1e-8
# Log-messages that change by more in a sweep are no fixed point, whatever the marginals say.
_UNSETTLED = 1e-2


@dataclass(frozen=True)
class FixedPoint(AbstractAdjoint):
    """Differentiate the converged marginals by sweeping backwards at the fixed point, to a tolerance of its own.

    Memory does not grow with the number of sweeps, and inference itself runs on the native kernels. Gradients reach
    theta and the counting numbers of the entropy. They are those of the fixed point, so run inference to a tight
    tolerance: an error of the marginals becomes one of the gradient, magnified where convergence is slow. For runs
    that stop short of convergence use `Unroll`.

    Arguments:
        tol: how small the relative change of a backward sweep must become, |v_new - v| / |v_new|. It is computed in
            float64 whatever the dtype of theta.
        max_steps: the most backward sweeps to make, of each kind that is tried.
        accelerate: True to solve the same linear system by GMRES, False to iterate only, None to change to GMRES where
            the iteration turns out slow or, as it may where inference needed damping, diverges.

    Raises:
        ValueError: on use, for a run without a tolerance and for algorithms without messages to iterate.
        AdjointError: in the backward pass, if the iteration fails. It warns (`AdjointWarning`) if it only falls short.

    >>> import torch
    >>> from riskfield import FixedPoint, MessagePassing, Stop, TRW, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(tol=1e-10), adjoint=FixedPoint())
    >>> loss = -graph.node(solution.mu, 4)[1].log()
    >>> loss.backward()
    >>> graph.node(theta.grad, 4)
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    tol: float = 1e-10
    max_steps: int = 1000
    accelerate: bool | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tol < 1:
            raise ValueError(f"`tol` must lie in (0, 1). Got {self.tol!r}.")
        if not isinstance(self.max_steps, int) or self.max_steps < 1:
            raise ValueError(f"`max_steps` must be a positive integer. Got {self.max_steps!r}.")
        if self.accelerate not in (True, False, None):
            raise ValueError(f"`accelerate` must be True, False or None. Got {self.accelerate!r}.")

    def apply(self, request: Request) -> Solution:
        """Run without gradients, on any kernels, and attach the gradient of the fixed point."""
        algorithm = request.algorithm
        require_convergence(request, "FixedPoint", theta_only=False)
        if not isinstance(algorithm, MessagePassing | MeanField):
            raise ValueError(
                f"`FixedPoint` sweeps backwards over messages, and {type(algorithm).__name__} has none. Use `Unroll`, "
                "which differentiates what ran."
            )
        run = None
        native = request.theta.dtype == torch.float64 and request.kernels != "torch" and self.accelerate is not True
        if native and is_differentiated(request.theta):
            run = request.start_recording(LAST_SWEEP)
        solution = request.solve(run)
        numbers: tuple[Tensor, ...] = ()
        if isinstance(algorithm, MessagePassing):
            counting = algorithm.entropy.counting(request.graph)
            numbers = (counting.factor, counting.node_total)
        mu = _AtFixedPoint.apply(self, request, run, solution, request.theta, *numbers)
        return replace(solution, theta=request.theta, mu=mu, _value=algorithm.log_partition)

    def vjp(
        self, request: Request, run: RecordingRun | None, state: Tensor, numbers: tuple[Tensor, ...], grad: Tensor
    ) -> list[Tensor]:
        """dL/dtheta, and dL/dnumber for each of the counting numbers, from grad = dL/dmu.

        Arguments:
            request: what was run.
            run: the native run in float64, if there was one.
            state: the messages it converged to.
            numbers: c_c and c^_i for message passing, nothing for mean field.
            grad: of the shape of mu.
        """
        require_finite(grad, "FixedPoint")
        if run is not None and not any(number.requires_grad for number in numbers):
            flat = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
            found, residual, steps = run.backward_fixed_point(flat, self.max_steps, self.tol)
            worst = float(residual.max()) if len(residual) else 0.0
            if worst <= self.tol or self.accelerate is False:
                self._check(worst, int(steps.max()) if len(steps) else 0)
                return [found, *(torch.zeros_like(number) for number in numbers)]
        theta = request.theta.detach().reshape(-1, request.graph.theta_size).double().requires_grad_()
        state = state.detach().reshape(len(theta), state.shape[-1]).double().requires_grad_()
        leaves = [theta, *(number.detach().requires_grad_(number.requires_grad) for number in numbers)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        g = grad.detach().reshape(len(theta), request.graph.mu_size).double()
        # Zero messages stay zero, whatever else changes. A gradient in them would leak into their neighbours.
        possible = state.detach() != NEG_INF
        best: tuple[float, LinearSolution, list[Tensor]] | None = None
        for reference in _reference_runs(request, theta, leaves[1:]):
            with torch.enable_grad():
                reference.begin_from(state)
                mu = reference.marginals()
                reference.advance(1, -1.0)
                swept = reference.messages()
            if best is None:
                _warn_if_unsettled(state.detach(), swept.detach())
            b, *direct = torch.autograd.grad(mu, [state, *wanted], g, retain_graph=True, materialize_grads=True)

            def sweep_backwards(v: Tensor, swept: Tensor = swept) -> Tensor:
                (out,) = torch.autograd.grad(swept, state, v, retain_graph=True)
                return torch.where(possible, out, 0.0)

            b = torch.where(possible, b, 0.0)
            # The gradient is to be right beside mu g; what a saturated model makes of it may be far less than rounding.
            floor = _NEGLIGIBLE * (mu.detach() * g).norm(dim=1)
            solved = solve_fixed_point(sweep_backwards, b, floor, self.tol, self.max_steps, self.accelerate)
            through = torch.autograd.grad(swept, wanted, solved.value, materialize_grads=True)
            rank = solved.residual if solved.residual == solved.residual else float("inf")
            if best is None or rank < best[0]:
                best = rank, solved, [a + b for a, b in zip(direct, through, strict=True)]
            if rank <= self.tol:
                break
        assert best is not None
        self._check(best[1].residual, best[1].steps)
        found_for = iter(best[2])
        return [next(found_for) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]

    def _check(self, residual: float, steps: int) -> None:
        if residual <= self.tol:
            return
        message = (
            f"The backward sweeps of `FixedPoint` still change the gradient by {residual:.2g} (relative) after "
            f"{steps} steps; the tolerance is {self.tol:g}. "
        )
        if residual <= _WORTHLESS:
            warnings.warn(message + "Allow more steps, or ask for less.", AdjointWarning, stacklevel=2)
        else:
            raise AdjointError(message + "Allow more steps, use `Unroll`, or a concave entropy such as `TRW(0.5)`.")


def _warn_if_unsettled(state: Tensor, swept: Tensor) -> None:
    """Saturated marginals can stand still while their log-messages are far from a fixed point."""
    finite = (state != NEG_INF) & (swept != NEG_INF)
    change = float(torch.where(finite, swept - state, 0.0).abs().max()) if state.numel() else 0.0
    if change > _UNSETTLED:
        warnings.warn(
            f"The log-messages still change by {change:.2g} in a sweep although the marginals have settled: the "
            "gradient of `FixedPoint` may be wrong. Use a tighter tolerance, less damping, or `Unroll`.",
            AdjointWarning,
            stacklevel=2,
        )


def _reference_runs(
    request: Request, theta: Tensor, numbers: list[Tensor]
) -> Iterator[MessagePassingRun | MeanFieldRun]:
    """The runs whose sweeps to try, the fastest first."""
    algorithm, graph = request.algorithm, request.graph
    if isinstance(algorithm, MeanField):
        yield MeanFieldRun(graph, algorithm.visits(graph), theta, None)
    elif isinstance(algorithm, MessagePassing):
        schedules = dict.fromkeys((Parallel(), algorithm.schedule))
        problems = [MessagePassingProblem(graph, Counting(*numbers), schedule, 0.0, False) for schedule in schedules]
        for problem in sorted(problems, key=lambda problem: not fused.available(problem, theta)):
            yield MessagePassingRun(problem, theta, None)


class _AtFixedPoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        adjoint: FixedPoint,
        request: Request,
        run: RecordingRun | None,
        solution: Solution,
        theta: Tensor,
        *numbers: Tensor,
    ) -> Tensor:
        assert solution.messages is not None
        ctx.adjoint, ctx.request, ctx.run = adjoint, request, run
        ctx.save_for_backward(theta, solution.messages, *numbers)
        return solution.mu.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        theta, state, *numbers = ctx.saved_tensors
        with torch.no_grad():
            found, *others = ctx.adjoint.vjp(ctx.request, ctx.run, state, tuple(numbers), grad.detach())
        gradients = [found.reshape(theta.shape).to(grad.dtype), *others]
        for number in (theta, *numbers):
            gradients = [first_order_only(gradient, number, "`FixedPoint`") for gradient in gradients]
        return None, None, None, None, *gradients
