r"""`Unroll`: the exact gradient of the sweeps that ran.

Reverse-mode differentiation of the recorded sweeps: truncated fitting, back mean field and back TRW of Domke (2013,
section 7), for any algorithm, schedule and arity. It needs no convergence: the loss is a function of what inference
really computed. Memory grows with the number of sweeps, or with checkpoints as its square root.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from riskfield.adjoints._attach import graph_is_kept
from riskfield.adjoints._refusals import require_sweeps
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.devices import check_max_bytes
from riskfield.errors import ConvergenceWarning, warn_slow
from riskfield.inference.request import Request, in_batch
from riskfield.inference.solution import Deferred, Lazy, Solution, evaluated
from riskfield.inference.stop import Stop
from riskfield.kernels import (
    EVERY_SWEEP,
    LAST_SWEEP,
    CountingRun,
    ExactRun,
    RecordingRun,
    has_tangent,
    is_differentiated,
    is_transformed,
)


@dataclass(frozen=True)
class Unroll(AbstractAdjoint):
    """Differentiate the sweeps that ran, to any order.

    Use it for runs of a fixed number of sweeps, and whenever convergence is in doubt. The log-partition value is
    differentiated through the sweeps too: theta . mu_N + H(mu_N) after N sweeps (the truncated log-partition).

    The tape is freed as soon as `backward` has used it, unless it is told to retain the graph.

    Arguments:
        checkpoint: False keeps a tape of every sweep, each about as large as all messages. A number k keeps the
            messages before every k-th sweep instead, and the backward pass repeats the k sweeps from there: memory for
            N/k + k sweeps instead of N, at the cost of one more run. True chooses k as the square root of the most
            sweeps that `stop` allows. By default the whole tape is kept if it fits into `max_bytes`, and checkpoints as
            with True if it does not. Gradients are the same. Second derivatives, gradients of counting numbers and the
            torch kernels (other devices) keep the whole tape.
        max_bytes: the largest tape that is kept whole by default: a quarter of the memory of the machine, or of the
            GPU, unless a number is given. A run to a tolerance that turns out to need a larger one starts again.

    >>> import torch
    >>> from riskfield import MessagePassing, Stop, TRW, Unroll, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(sweeps=3, tol=None), adjoint=Unroll())
    >>> loss = -graph.node(solution.mu, 4)[1].log()
    >>> loss.backward()
    >>> graph.node(theta.grad, 4)
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    checkpoint: int | bool | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and (not isinstance(self.checkpoint, int | np.integer) or self.checkpoint < 0):
            got = repr(self.checkpoint)
            raise ValueError(f"`checkpoint` must be a positive number of sweeps, True, False or None. Got {got}.")
        if self.max_bytes is not None:
            check_max_bytes(self.max_bytes)

    def apply(self, request: Request) -> Solution:
        """Run with a tape on kernels that can record one, else on the torch kernels, recorded by autograd.

        Nothing is recorded where nothing requires a gradient.
        """
        theta, algorithm = request.theta, request.algorithm
        numbers = algorithm.parameters(request.graph)
        if not any(map(is_differentiated, (theta, *numbers))):
            return request.run()
        require_sweeps(request)
        if is_transformed(theta):
            return _on_torch(request)
        recorded = numbers[: algorithm.recorded_parameters]
        if has_tangent(theta):
            primal, tangent = forward_ad.unpack_dual(theta)
            if any(number.requires_grad for number in (primal, *recorded)):
                return _on_torch(request)
            return _forward_mode(request, primal, tangent) or _on_torch(request)
        # Without sweeps there is nothing to record.
        found = self._record(request) if request.stop.sweeps > 0 else None
        if found is None:
            if algorithm.nonsmooth_because and algorithm.iterative and request.kernels is None:
                warn_slow(
                    f"`{type(algorithm).__name__}` with a `theta` that requires a gradient runs on the torch kernels, "
                    "which are much slower. Without need of a gradient, use `theta.detach()` or `torch.no_grad()`."
                )
            return _on_torch(request)
        recording, solution = found
        if isinstance(recording, ExactRun):
            return _exact(request, recording, solution)
        tape = _Tape(request, solution._sweeps, recording)
        with_numbers = any(map(is_differentiated, recorded))
        mu = _Recorded.apply(tape, solution.mu, theta, *(recorded if with_numbers else ()))
        return solution.with_mu(mu, theta=theta, _value=algorithm.log_partition)

    def _record(self, request: Request) -> _Record | None:
        """Run with a tape, whole or with checkpoints; None if no kernels can record this."""
        stop = request.stop
        root = max(1, math.isqrt(stop.sweeps))
        if self.checkpoint is not None:
            return _finished(request, root if self.checkpoint is True else int(self.checkpoint) or EVERY_SWEEP)
        fits = request.sweeps_on_tape(self.max_bytes)
        found = None
        if stop.sweeps > fits:
            found = _finished_within(request, int(fits)) if stop.tol is not None and fits >= 1 else None
            found = found or _finished(request, root)
        return found or _finished(request, EVERY_SWEEP)


_Record: TypeAlias = tuple[RecordingRun, Solution]


def _finished(request: Request, record: int) -> _Record | None:
    run = request.start_recording(record)
    return None if run is None else (run, request.run(run))


def _finished_within(request: Request, sweeps: int) -> _Record | None:
    """A run with a whole tape, if it ends within so many sweeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = _finished(replace(request, stop=replace(request.stop, sweeps=sweeps)), EVERY_SWEEP)
    if found is None:
        return None
    _, solution = found
    ended = solution.converged | solution.residual.isnan()  # by convergence, or since it is impossible
    return found if ended.all() else None


def _on_torch(request: Request) -> Solution:
    """Run on kernels that autograd can follow."""
    return replace(request, kernels=request.kernels or "torch").run()


def _exact(request: Request, run: RecordingRun, solution: Solution) -> Solution:
    """The solution of an exact run, whose results are computed, with their gradients, when they are needed."""
    theta = request.theta.clone()  # as it is now: the caller may change it before the results are read
    tape = _Tape(request, Deferred(lambda: solution._sweeps.clamp(max=1)), run)  # one is exact, however many ran

    def attached(value: Callable[[], Tensor]) -> Deferred:
        def attach() -> Tensor:
            with torch.enable_grad():
                return _Recorded.apply(tape, value(), theta)  # type: ignore[no-any-return]

        return Deferred(attach)

    def log_partition() -> Tensor:
        with torch.enable_grad():
            return _ExactValue.apply(theta, solution, mu)  # type: ignore[no-any-return]

    mu, nodes = attached(lambda: evaluated(solution._mu)), attached(lambda: solution.node_mu)
    return solution.replaced(theta=request.theta, _mu=mu, _nodes=nodes, _value=Deferred(log_partition))


class _ExactValue(torch.autograd.Function):
    """log Z, whose gradient is the expectation of the statistics."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, solution: Solution, mu: Callable[[], Tensor]) -> Tensor:
        ctx.solution, ctx.mu = solution, mu
        return solution.log_partition.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # For second derivatives the expectation itself is differentiated.
        if torch.is_grad_enabled():
            return grad.unsqueeze(-1) * ctx.solution.graph.collapse(ctx.mu()), None, None
        statistics, grad = ctx.solution.statistics(), grad.unsqueeze(-1)
        if is_transformed(grad):  # a batch of gradients
            return grad * statistics, None, None
        return statistics.mul_(grad), None, None  # in place: they are computed anew


def _forward_mode(request: Request, primal: Tensor, tangent: Tensor) -> Solution | None:
    """Marginals with their derivative along the tangent; None if no kernels have tangents.

    A plain run finds out how many sweeps there are, so that asking for a derivative does not change the answer.
    """
    plain = replace(request, theta=primal)
    if not _has_tangents(plain, tangent):
        return None
    solution = plain.solve()
    mu = solution.mu
    slope = mu.new_empty(mu.shape).reshape(-1, mu.shape[-1])
    for rows, run in _dual_runs(plain, tangent, solution.sweeps, LAST_SWEEP):
        slope[rows] = run.marginals().imag.to(mu.dtype)
    return solution.with_mu(
        forward_ad.make_dual(mu, slope.reshape(mu.shape)),
        theta=request.theta,
        _value=request.algorithm.log_partition,
    )


def _has_tangents(request: Request, tangent: Tensor) -> bool:
    """Whether the kernels for this request also compute derivatives along a tangent of theta."""
    return request.start_recording(LAST_SWEEP, _flat(tangent)) is not None


def _dual_runs(request: Request, tangent: Tensor, sweeps: Lazy, record: int) -> Iterator[tuple[Tensor, RecordingRun]]:
    """Runs with a tangent of theta, for the sweeps that ran: which rows of the batch, and their run, at its end."""
    for rows, part in _by_sweeps(request, sweeps):
        run = part.start_recording(record, _flat(tangent)[rows])
        assert run is not None
        run.advance(part.stop.sweeps, -1.0)
        yield rows, run


def _by_sweeps(request: Request, sweeps: Lazy) -> Iterator[tuple[Tensor, Request]]:
    """The items of a batch by how many sweeps they ran: their rows, and a request for just these sweeps of them."""
    ran, theta, messages = evaluated(sweeps).reshape(-1), request.flat_theta(), request.flat_messages()
    for count in ran.unique().tolist():
        rows = (ran == count).nonzero()[:, 0].to(theta.device)
        start = None if messages is None else messages[rows]
        yield rows, replace(request, theta=theta[rows], messages=start, stop=Stop(count, tol=None))


@dataclass(eq=False)
class _Tape:
    """What the backward pass of a recorded run needs besides its inputs."""

    request: Request
    sweeps: Lazy  # that ran
    run: RecordingRun


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: _Tape, mu: Tensor, theta: Tensor, *numbers: Tensor) -> Tensor:
        ctx.save_for_backward(theta, *numbers)
        ctx.tape = tape
        return mu.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, *numbers = ctx.saved_tensors  # which raises if the tape is gone
        if numbers and any(ctx.needs_input_grad[3:]):
            gradients = _gradients_with_numbers(ctx.tape, grad, theta, numbers)
        else:
            gradients = _gradient(ctx.tape, grad, theta), *[None] * len(numbers)
        if not graph_is_kept():
            ctx.tape = None
        return None, None, *gradients


def _gradient(tape: _Tape, grad: Tensor, theta: Tensor) -> Tensor:
    """The gradient of theta, from that of mu."""
    if torch.is_grad_enabled():  # for second derivatives
        return _RecordedGradient.apply(theta, grad, tape)  # type: ignore[no-any-return]
    return in_batch(tape.run.backward(_flat(grad)), theta.shape[:-1])


def _gradients_with_numbers(
    tape: _Tape, grad: Tensor, theta: Tensor, numbers: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of theta and of the numbers, from that of mu."""
    if torch.is_grad_enabled():  # second derivatives of parameters: by autograd through the torch kernels
        request = tape.request
        theta, *numbers = (number.view_as(number) for number in (theta, *numbers))  # none made from another
        others = request.algorithm.parameters(request.graph)[len(numbers) :]
        algorithm = request.algorithm.with_parameters(request.graph, (*numbers, *others))
        mu = _run_on_torch(replace(request, algorithm=algorithm), theta, tape.sweeps)
        return _gradients(mu, (theta, *numbers), grad)
    run = cast(CountingRun, tape.run)  # since the numbers require a gradient
    gradient, *of_numbers = run.backward_counting(_flat(grad))
    return gradient.reshape(theta.shape), *of_numbers


class _RecordedGradient(torch.autograd.Function):
    """The gradient (dmu/dtheta)^T g as a function of theta and g.

    Its product with a vector v is the slope of g . mu along v. So the slope of the gradient along v is its derivative
    in theta (a matrix of second derivatives is symmetric), and the slope of mu its derivative in g.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, grad: Tensor, tape: _Tape) -> Tensor:
        ctx.save_for_backward(theta, grad)
        ctx.request, ctx.sweeps = tape.request, tape.sweeps
        return tape.run.backward(_flat(grad)).reshape(theta.shape)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        theta, grad = ctx.saved_tensors
        request = replace(ctx.request, theta=theta.detach())
        # Third derivatives, and second ones on kernels without tangents: by autograd through the torch kernels.
        if torch.is_grad_enabled() or not _has_tangents(request, v):
            return *_through_torch(request, theta, ctx.sweeps, grad, v), None
        cotangents, width = _flat(grad), grad.shape[-1]  # of all marginals, or of the node part
        slope, slope_of_mu = torch.empty_like(_flat(theta)), torch.empty_like(cotangents)
        cotangents = torch.nn.functional.pad(cotangents, (0, request.graph.mu_size - width))
        for rows, run in _dual_runs(request, v, ctx.sweeps, EVERY_SWEEP):
            slope[rows] = run.backward(cotangents[rows]).imag.to(theta.dtype)
            slope_of_mu[rows] = run.marginals()[:, :width].imag.to(grad.dtype)
        return slope.reshape(theta.shape), slope_of_mu.reshape(grad.shape), None


def _gradients(output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of those inputs that require one."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True, materialize_grads=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)


def _run_on_torch(request: Request, theta: Tensor, sweeps: Lazy) -> Tensor:
    """Mu after as many sweeps as each item ran before; where to stop may be a matter of rounding."""
    request = replace(request, theta=theta, kernels="torch")
    mu = theta.new_empty(theta.shape[:-1].numel(), request.graph.mu_size)
    for rows, part in _by_sweeps(request, sweeps):
        mu = mu.index_copy(0, rows, part.run().mu)
    return mu.reshape(*theta.shape[:-1], request.graph.mu_size)


def _flat(grad: Tensor) -> Tensor:
    """The same with one batch axis."""
    if grad.ndim == 1:
        return grad.unsqueeze(0)
    return grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])


def _through_torch(request: Request, theta: Tensor, sweeps: Lazy, grad: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        theta, grad = theta.view_as(theta), grad.view_as(grad)  # of which neither is made from the other
        mu = _run_on_torch(request, theta, sweeps)[..., : grad.shape[-1]]
        (gradient,) = torch.autograd.grad(mu, theta, grad, create_graph=True)
        return _gradients(gradient, (theta, grad), v)
