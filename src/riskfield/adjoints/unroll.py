r"""`Unroll`: the exact gradient of the sweeps that ran.

Reverse-mode differentiation of the recorded sweeps: truncated fitting, back mean field and back TRW of Domke (2013,
section 7), for any algorithm, schedule and arity. It needs no convergence: the loss is a function of what inference
really computed. Memory grows with the number of sweeps, or with checkpoints as its square root.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.entropy import AbstractEntropy, Counting
from riskfield.errors import ConvergenceWarning
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import RecordingRun
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.request import Request, Stop
from riskfield.inference.solution import Solution
from riskfield.kernels import EVERY_SWEEP, LAST_SWEEP, is_differentiated


@dataclass(frozen=True)
class Unroll(AbstractAdjoint):
    """Differentiate the sweeps that ran, to any order.

    Use it for runs of a fixed number of sweeps, and whenever convergence is in doubt. The log-partition value is
    differentiated through the sweeps too: theta . mu_N + H(mu_N) after N sweeps (the truncated log-partition).

    Arguments:
        checkpoint: by default every sweep keeps what it was made from, about as much as all messages. A number k keeps
            the messages before every k-th sweep instead, and runs the k sweeps from there again on the way back: memory
            for N/k + k sweeps in place of N, for the time of one more run. True takes the square root of the most
            sweeps that `stop` allows. Second derivatives and the torch kernels (other devices) keep everything.

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

    checkpoint: int | bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint, int) or self.checkpoint < 0:
            got = repr(self.checkpoint)
            raise ValueError(f"`checkpoint` must be a positive number of sweeps, True or False. Got {got}.")

    def apply(self, request: Request) -> Solution:
        """Run on the native kernels with a tape where they can record one, else on the torch kernels.

        Nothing is recorded where nothing requires a gradient.
        """
        theta, counting = request.theta, _factor_counting(request)
        if not (is_differentiated(theta) or is_differentiated(counting)):
            return request.run()
        on_torch = replace(request, kernels=request.kernels or "torch")
        if request.kernels == "torch" or is_functorch_wrapped_tensor(theta):
            return on_torch.run()
        primal, tangent = forward_ad.unpack_dual(theta)
        if tangent is not None:
            plain = not (primal.requires_grad or is_differentiated(counting))
            return _forward_mode(request, primal, tangent) if plain else on_torch.run()
        # A start from messages that were made with other counting numbers, or checkpoints, are for autograd to follow.
        wants_counting = is_differentiated(counting)
        if wants_counting and (request.messages is not None or self.checkpoint or theta.dtype != torch.float64):
            return on_torch.run()
        recording = self._start(request)
        if recording is None:
            return on_torch.run()
        solution = request.solve(recording)
        mu = _Recorded.apply(theta, counting, solution.mu, request, solution.sweeps, recording)
        return replace(solution, theta=theta, mu=mu, _value=request.algorithm.log_partition)

    def _start(self, request: Request) -> RecordingRun | None:
        every = int(self.checkpoint) or EVERY_SWEEP
        if self.checkpoint is True:
            every = max(1, math.isqrt(request.stop.sweeps))
        return request.start_recording(every)


def _factor_counting(request: Request) -> Tensor:
    """The counting numbers of factors, which native runs go back to; nothing for algorithms without."""
    if isinstance(request.algorithm, MessagePassing):
        return request.algorithm.entropy.counting(request.graph).factor
    return torch.empty(0)


def _dual(request: Request, theta: Tensor, slope: Tensor) -> Request:
    """The same on dual numbers, theta with a slope: what depends on theta has its slope for an imaginary part."""
    return replace(request, theta=torch.complex(theta.detach().double(), slope.detach().double()))


def _dual_run(request: Request, theta: Tensor, slope: Tensor) -> tuple[Solution, RecordingRun] | None:
    dual = _dual(request, theta, slope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # was said when it ran before
        run = dual.start_recording(EVERY_SWEEP)
        return None if run is None else (dual.solve(run), run)


def _forward_mode(request: Request, primal: Tensor, tangent: Tensor) -> Solution:
    dual = _dual(request, primal, tangent)
    run = dual.start_recording(LAST_SWEEP)  # keeps next to nothing, and says whether there is a native run
    if run is None:
        return replace(request, kernels="torch").run()
    solution = dual.solve(run)
    mu = solution.mu.to(primal.dtype.to_complex())
    assert solution.messages is not None
    return replace(
        solution,
        theta=request.theta,
        mu=forward_ad.make_dual(mu.real.contiguous(), mu.imag.contiguous()),
        messages=solution.messages.real.to(primal.dtype),
        _value=request.algorithm.log_partition,
    )


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        theta: Tensor,
        counting: Tensor,
        mu: Tensor,
        request: Request,
        sweeps: Tensor,
        recording: RecordingRun,
    ) -> Tensor:
        ctx.save_for_backward(theta, counting)
        ctx.request, ctx.sweeps, ctx.recording = request, sweeps, recording
        return mu.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, counting = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            gradient = _RecordedGradient.apply(theta, grad, ctx.request, ctx.sweeps, ctx.recording)
            return gradient, None, None, None, None, None
        if torch.is_grad_enabled():  # second derivatives of counting numbers, where autograd follows
            theta, counting = theta.view_as(theta), counting.view_as(counting)  # neither made from the other
            mu = _run_on_torch(_with_counting(ctx.request, counting), theta, ctx.sweeps)
            return *_gradients(mu, (theta, counting), grad), None, None, None, None
        gradient, of_counting = ctx.recording.backward_counting(_flat(grad))
        return gradient.reshape(theta.shape), of_counting, None, None, None, None


class _RecordedGradient(torch.autograd.Function):
    """The gradient (dmu/dtheta)^T g as a function of theta and g.

    Its product with a vector v is the slope of g . mu along v. So the slope of the gradient along v is its derivative
    in theta (a matrix of second derivatives is symmetric), and the slope of mu its derivative in g.
    """

    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, grad: Tensor, request: Request, sweeps: Tensor, recording: RecordingRun
    ) -> Tensor:
        ctx.save_for_backward(theta, grad)
        ctx.request, ctx.sweeps = request, sweeps
        return recording.backward(_flat(grad)).reshape(theta.shape)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        theta, grad = ctx.saved_tensors
        found = None if torch.is_grad_enabled() else _dual_run(ctx.request, theta, v)
        if found is None:  # for third derivatives, go through the sweeps where autograd follows
            return *_through_torch(ctx.request, theta, ctx.sweeps, grad, v), None, None, None
        solution, run = found
        slope = run.backward(_flat(grad).to(torch.complex128)).imag.reshape(theta.shape).to(theta.dtype)
        return slope, solution.mu.imag.to(grad.dtype), None, None, None


def _gradients(output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of those inputs that require one."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True, materialize_grads=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)


def _run_on_torch(request: Request, theta: Tensor, sweeps: Tensor) -> Tensor:
    """Mu after as many sweeps as each item ran before; where to stop may be a matter of rounding."""
    request = replace(request, theta=theta, kernels="torch")
    ran, rows = sweeps.reshape(-1), request.flat_theta()
    messages = request.flat_messages()
    mu = rows.new_empty(len(rows), request.graph.mu_size)
    for count in ran.unique().tolist():
        chosen = (ran == count).nonzero()[:, 0]
        start = None if messages is None else messages[chosen]
        part = replace(request, theta=rows[chosen], messages=start, stop=Stop(count, tol=None))
        mu = mu.index_copy(0, chosen, part.run().mu)
    return mu.reshape(*theta.shape[:-1], request.graph.mu_size)


def _with_counting(request: Request, factor: Tensor) -> Request:
    """The same with these very numbers for factors, so that gradients find them."""
    assert isinstance(request.algorithm, MessagePassing)
    node_total = request.algorithm.entropy.counting(request.graph).node_total
    return replace(request, algorithm=replace(request.algorithm, entropy=_Given(Counting(factor, node_total))))


@dataclass(frozen=True)
class _Given(AbstractEntropy):
    """Counting numbers as they are."""

    numbers: Counting

    def counting(self, graph: FactorGraph) -> Counting:
        return self.numbers


def _flat(grad: Tensor) -> Tensor:
    """With one batch axis."""
    return grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])


def _through_torch(
    request: Request, theta: Tensor, sweeps: Tensor, grad: Tensor, v: Tensor
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        theta, grad = theta.view_as(theta), grad.view_as(grad)  # of which neither is made from the other
        mu = _run_on_torch(request, theta, sweeps)
        (gradient,) = torch.autograd.grad(mu, theta, grad, create_graph=True)
        return _gradients(gradient, (theta, grad), v)
