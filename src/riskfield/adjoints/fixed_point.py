r"""`FixedPoint`: back-propagation at convergence, without a tape.

Converged messages m are a fixed point m = F(m, theta) of a sweep, and mu = G(m, theta). For a loss with gradient g in
mu the implicit function theorem gives

    v = (dF/dm)^T v + (dG/dm)^T g,        dL/dtheta = (dF/dtheta)^T v + (dG/dtheta)^T g,

and the first equation is solved by iterating it: sweeping backwards, always at the same messages, until v settles. It
is what back TRW (Domke 2013, section 7.2) becomes with a threshold instead of a number of sweeps; with pairwise
factors and rho = 1, back belief propagation (Eaton & Ghahramani 2009). For mean field the state is the log node
marginals, and F a round of updates.

F may be any sweep with the same fixed points, whatever schedule and damping the run needed. The native and the GPU
kernels iterate the run's own last sweep, which was recorded; that takes about as many sweeps as inference did. For a
theta in float32 they record one more sweep, in float64. Where the iteration is too slow, for algorithms without such
kernels, and for gradients of other numbers than theta, autograd differentiates the sweeps that the algorithm offers in
torch (`AbstractAlgorithm.fixed_point_maps`). Messages are normalised, so the directions that only scale them are
mapped to zero and do no harm.

The gradient is linear in g. Its derivative in g, for mixed second derivatives, is the derivative of mu along a
direction (p, q) of theta and the other numbers, by the same theorem: u = (dF/dm) u + (dF/dtheta) p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from riskfield.adjoints._attach import Jacobian, attach
from riskfield.adjoints._refusals import require_convergence, require_finite, require_fixed_point
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.fixed_point_solvers import AbstractLinearSolver, Iterate, LinearSolution
from riskfield.errors import AdjointError, AdjointWarning, warn, warn_slow
from riskfield.inference.request import Request
from riskfield.inference.solution import Solution
from riskfield.kernels import LAST_SWEEP, RecordingRun, is_differentiated, runs_at_once

# A gradient whose equation is solved no better than this is not returned.
_WORTHLESS = 1e-4
# Relative to mu g, gradients of messages that need not be known to the tolerance. The native kernels use it, too.
_NEGLIGIBLE = 1e-8
# Backward sweeps in torch at messages that are no fixed point: enough where they nearly are one, and soon over.
_UNCONVERGED_STEPS = 100
# Log-messages or marginals that change by more in a sweep are no fixed point.
_UNSETTLED = 1e-2


@dataclass(frozen=True)
class FixedPoint(AbstractAdjoint):
    """Differentiate the converged marginals by sweeping backwards at the fixed point, to its own tolerance.

    Memory does not grow with the number of sweeps, and inference itself runs on the native kernels. Gradients reach
    theta and the counting numbers of the entropy. They are those of the fixed point, so run inference to a tight
    tolerance: an error in the marginals becomes an error in the gradient, magnified where convergence is slow. For
    runs that stop before convergence use `Unroll`.

    Arguments:
        tol: stop once the relative change of a backward sweep, |v_new - v| / |v_new|, is this small. It is computed in
            float64 whatever the dtype of theta.
        max_steps: the maximum number of native backward sweeps, and of backward sweeps in torch after those.
        solver: `Iterate()` sweeps backwards until the gradient converges, and switches to GMRES if that is slow or
            diverges; `GMRES()` uses it from the start; `Iterate(fallback=None)` never does.

    Raises:
        ValueError: on use, for a run without a tolerance and for algorithms without sweeps to iterate.
        AdjointError: in the backward pass, if the iteration fails.

    Warns:
        AdjointWarning: in the backward pass, if the iteration falls short of its tolerance, or if inference did not
            converge.

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
    solver: AbstractLinearSolver = field(default_factory=Iterate)

    def __post_init__(self) -> None:
        if isinstance(self.tol, str) or not 0 < self.tol < 1:
            raise ValueError(f"`tol` must lie in (0, 1). Got {self.tol!r}.")
        if not isinstance(self.max_steps, int | np.integer) or self.max_steps < 1:
            raise ValueError(f"`max_steps` must be a positive integer. Got {self.max_steps!r}.")
        if not isinstance(self.solver, AbstractLinearSolver):
            raise TypeError(f"`solver` must be an object such as `Iterate()` or `GMRES()`. Got {self.solver!r}.")

    def apply(self, request: Request) -> Solution:
        """Run without gradients, on any kernels, and attach the gradient of the fixed point."""
        require_convergence(request, "FixedPoint")
        numbers = request.algorithm.parameters(request.graph)
        require_fixed_point(request, "FixedPoint", request.flat_theta().detach(), numbers)
        on_kernels = isinstance(self.solver, Iterate) and is_differentiated(request.theta)
        double = request.theta.dtype == torch.float64
        run = request.start_recording(LAST_SWEEP) if on_kernels and double else None
        solution = request.solve(run)
        assert solution.messages is not None
        point = _Point(self, request, numbers, on_kernels, run, solution.messages.clone(), solution)
        return attach(request, solution, Jacobian(point.vjp, point.jvp), numbers)


@dataclass(frozen=True, eq=False)
class _Point:
    """The fixed point of one run, and products with the Jacobian of mu there."""

    adjoint: FixedPoint
    request: Request
    numbers: tuple[Tensor, ...]  # the algorithm's parameters
    on_kernels: bool  # whether to sweep backwards through a recorded run, if the kernels have one
    run: RecordingRun | None  # the recorded run, in float64
    state: Tensor  # the messages it converged to
    solution: Solution  # for how far inference came

    def vjp(self, grad: Tensor) -> tuple[Tensor, ...]:
        """dL/dtheta, and dL/dnumber for each of the algorithm's parameters, from grad = dL/dmu."""
        require_finite(grad, "FixedPoint")
        theta = self.request.theta
        if not theta.numel():
            return tuple(torch.zeros_like(number) for number in (theta, *self.numbers))
        if self.on_kernels and not any(number.requires_grad for number in self.numbers):
            run = self.run if theta.dtype == torch.float64 else self._run_in_double()
            found = None if run is None else self._vjp_of_run(run, grad.double())
            if found is not None:
                found = found.reshape(theta.shape).to(grad.dtype)
                return found, *(torch.zeros_like(number) for number in self.numbers)
        rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1]).double()
        found_theta, *others = self._best(lambda linear, steps: linear.vjp(rows, self.adjoint, steps))
        return found_theta.reshape(theta.shape).to(grad.dtype), *others

    def jvp(self, v: tuple[Tensor, ...]) -> Tensor:
        """The derivative of mu along v, a direction for theta and one for each of the parameters."""
        if not v[0].numel():
            return torch.zeros_like(self.solution.mu)
        along_theta = v[0].reshape(v[0].shape[:-1].numel(), v[0].shape[-1]).double()
        (slope,) = self._best(lambda linear, steps: linear.jvp([along_theta, *v[1:]], self.adjoint, steps))
        return slope.reshape(*self.request.theta.shape[:-1], slope.shape[-1]).to(v[0].dtype)

    def _run_in_double(self) -> RecordingRun | None:
        """One sweep in float64 from messages that converged in another precision."""
        theta = self.request.theta.detach().double()
        run = replace(self.request, theta=theta, messages=self.state.double()).start_recording(LAST_SWEEP)
        if run is not None:
            run.advance(1, -1.0)
        return run

    def _vjp_of_run(self, run: RecordingRun, grad: Tensor) -> Tensor | None:
        adjoint = self.adjoint
        rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
        found, residual, steps = run.backward_fixed_point(rows, adjoint.max_steps, adjoint.tol)
        worst = float(residual.max()) if len(residual) else 0.0
        if worst <= adjoint.tol or adjoint.solver == Iterate(fallback=None):
            self._check(worst, int(steps.max()) if len(steps) else 0)
            return found
        return None

    def _best(self, solve: Callable[[_Linearised, int], tuple[LinearSolution, list[Tensor]]]) -> list[Tensor]:
        """The result by the first of the algorithm's sweeps that reaches the tolerance, else by the best of them."""
        max_steps = self.adjoint.max_steps
        if not self.solution.converged.all():
            max_steps = min(max_steps, _UNCONVERGED_STEPS)
        found: list[Tensor] = []
        least, steps = float("inf"), 0
        for linear in self._linearised():
            if not found and self.solution.converged.all():
                _warn_if_unsettled(linear.state.detach(), linear.swept.detach())
            solved, result = solve(linear, max_steps - steps)
            steps += solved.steps
            if not found or solved.residual < least:
                found, least = result, solved.residual
            if least <= self.adjoint.tol or steps >= max_steps:
                break
        self._check(least, steps)
        return found

    def _linearised(self) -> Iterator[_Linearised]:
        if self.request.kernels is None and runs_at_once(self.request.theta):
            warn_slow(
                "`FixedPoint` differentiates sweeps with the torch kernels here, which are much slower than those of "
                "the GPU. These compute the gradient of `theta`, but not of counting numbers, if `Iterate` converges."
            )
        theta = self.request.flat_theta().detach().double().requires_grad_()
        state = self.state.reshape(len(theta), self.state.shape[-1]).double().requires_grad_()
        numbers = [number.detach().requires_grad_(number.requires_grad) for number in self.numbers]
        for sweep in require_fixed_point(self.request, "FixedPoint", theta, tuple(numbers)):
            with torch.enable_grad():
                mu, swept = sweep(state)
            yield _Linearised(state, (theta, *numbers), mu, swept)

    def _check(self, residual: float, steps: int) -> None:
        """Warn of a gradient that is less accurate than it should be; raise where it is worthless."""
        advice, converged = "Allow more steps, or a larger `tol`.", bool(self.solution.converged.all())
        if not converged:
            advice = (
                f"Inference did not converge: its residual is {float(self.solution.residual.max()):.2g} after "
                f"{int(self.solution.sweeps.max())} sweeps, and the gradient is meant for a fixed point. Allow more "
                "sweeps, damp the messages, use a concave entropy such as `TRW(0.5)`, or `Unroll`, which "
                "differentiates the sweeps that ran."
            )
        if residual <= self.adjoint.tol:
            if not converged and float(self.solution.residual.max()) > _UNSETTLED:
                warn(f"`FixedPoint`: {advice}", AdjointWarning)
            return
        message = (
            f"The backward sweeps of `FixedPoint` still change the gradient by {residual:.2g} (relative) after "
            f"{steps} steps; the tolerance is {self.adjoint.tol:g}. "
        )
        if residual <= _WORTHLESS:
            warn(message + advice, AdjointWarning)
        elif converged:
            raise AdjointError(message + "Allow more steps, use `Unroll`, or a concave entropy such as `TRW(0.5)`.")
        else:
            raise AdjointError(message + advice)


@dataclass(frozen=True, eq=False)
class _Linearised:
    """A sweep at the fixed point as autograd recorded it: mu = G(state, inputs), swept = F(state, inputs)."""

    state: Tensor
    inputs: tuple[Tensor, ...]
    mu: Tensor
    swept: Tensor

    def vjp(self, grad: Tensor, adjoint: FixedPoint, max_steps: int) -> tuple[LinearSolution, list[Tensor]]:
        """Solve for v, and differentiate in those inputs that require a gradient; zeros for the others."""
        wanted = [number for number in self.inputs if number.requires_grad]
        b, *direct = torch.autograd.grad(
            self.mu, [self.state, *wanted], grad, retain_graph=True, materialize_grads=True
        )

        def sweep_backwards(v: Tensor) -> Tensor:
            (out,) = torch.autograd.grad(self.swept, self.state, v, retain_graph=True)
            return self._possible(out)

        # The gradient is to be right beside mu g; what a saturated model makes of it may be far less than rounding.
        floor = _NEGLIGIBLE * (self.mu.detach() * grad).norm(dim=1)
        solved = adjoint.solver.solve(sweep_backwards, self._possible(b), floor, adjoint.tol, max_steps)
        through = torch.autograd.grad(self.swept, wanted, solved.value, retain_graph=True, materialize_grads=True)
        found = (a + b for a, b in zip(direct, through, strict=True))
        return solved, [next(found) if number.requires_grad else torch.zeros_like(number) for number in self.inputs]

    def jvp(self, v: list[Tensor], adjoint: FixedPoint, max_steps: int) -> tuple[LinearSolution, list[Tensor]]:
        """Solve for the derivative u of the state along v, and follow it to mu."""
        sweep, marginals = _pushforward(self.swept, self.state), _pushforward(self.mu, self.state)
        b, direct = torch.zeros_like(self.state), torch.zeros_like(self.mu)
        for number, along in zip(self.inputs, v, strict=True):
            if number.requires_grad:
                b = b + _pushforward(self.swept, number)(along)
                direct = direct + _pushforward(self.mu, number)(along)
        floor = _NEGLIGIBLE * v[0].norm(dim=1)
        solved = adjoint.solver.solve(
            lambda u: self._possible(sweep(u)), self._possible(b), floor, adjoint.tol, max_steps
        )
        return solved, [direct + marginals(solved.value)]

    def _possible(self, x: Tensor) -> Tensor:
        """Zero messages stay zero, whatever else changes. A gradient in them would leak into their neighbours."""
        return torch.where(self.state.detach() == -torch.inf, 0.0, x)


def _pushforward(output: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of the Jacobian of `output` in `source` with a vector, as the derivative of J^T w in w."""
    w = torch.zeros_like(output).requires_grad_()
    with torch.enable_grad():
        (pulled,) = torch.autograd.grad(output, source, w, create_graph=True, materialize_grads=True)

    def product(v: Tensor) -> Tensor:
        if not pulled.requires_grad:
            return torch.zeros_like(output)
        (found,) = torch.autograd.grad(pulled, w, v, retain_graph=True, materialize_grads=True)
        return found

    return product


def _warn_if_unsettled(state: Tensor, swept: Tensor) -> None:
    """Saturated marginals can stand still while their log-messages are far from a fixed point."""
    finite = (state != -torch.inf) & (swept != -torch.inf)
    change = float(torch.where(finite, swept - state, 0.0).abs().max()) if state.numel() else 0.0
    if change > _UNSETTLED:
        warn(
            f"The log-messages still change by {change:.2g} in a sweep although the marginals have settled: the "
            "gradient of `FixedPoint` may be wrong. Use a tighter tolerance, less damping, or `Unroll`.",
            AdjointWarning,
        )
