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
from torch.autograd import forward_ad

from riskfield.errors import ConvergenceWarning
from riskfield.inference.algorithm import RecordingRun
from riskfield.inference.infer import AbstractAdjoint, Request
from riskfield.inference.solution import Solution
from riskfield.kernels import EVERY_SWEEP


@dataclass(frozen=True)
class Unroll(AbstractAdjoint):
    """Differentiate the sweeps that ran, to any order.

    Use it for runs of a fixed number of sweeps, and whenever convergence is in doubt. The log-partition value is
    differentiated through the sweeps too: theta . mu_N + H(mu_N) after N sweeps (the truncated log-partition).

    Arguments:
        checkpoint: by default every sweep keeps what it was made from, about as much as all messages. A number k keeps
            the messages before every k-th sweep instead, and runs the k sweeps from there again on the way back: memory
            for N/k + k sweeps in place of N, for the time of one more run. True takes the square root of the most
            sweeps that `stop` allows. The torch kernels (other devices, second derivatives) keep everything.

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
            raise ValueError(f"`checkpoint` must be a positive number of sweeps, True or False. Got {self.checkpoint!r}.")

    def apply(self, request: Request) -> Solution:
        """Run natively with a tape where only first derivatives of theta are asked for, else on the torch kernels."""
        if not (request.theta.requires_grad and torch.is_grad_enabled()):
            return request.run()
        recording = None if request.kernels == "torch" or _is_transformed(request.theta) else self._start(request)
        if recording is None:
            return replace(request, kernels="torch").run()
        solution = request.solve(recording)
        mu = _Recorded.apply(request.theta, solution.mu, request, recording)
        return replace(solution, theta=request.theta, mu=mu, _value=request.algorithm.log_partition)

    def _start(self, request: Request) -> RecordingRun | None:
        every = int(self.checkpoint) or EVERY_SWEEP
        if self.checkpoint is True:
            every = max(1, math.isqrt(request.stop.sweeps))
        return request.start_recording(every)


def _is_transformed(theta: Tensor) -> bool:
    """Whether forward-mode or `torch.func` derivatives are under way, which native code does not follow."""
    if forward_ad.unpack_dual(theta).tangent is not None:
        return True
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(theta))


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, mu: Tensor, request: Request, recording: RecordingRun) -> Tensor:
        ctx.save_for_backward(theta)
        ctx.request, ctx.recording = request, recording
        return mu.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (theta,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: go through the same sweeps where autograd follows
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                mu = replace(ctx.request, theta=theta, kernels="torch").run().mu
            return torch.autograd.grad(mu, theta, grad, create_graph=True)[0], None, None, None
        flat = grad.reshape(-1, grad.shape[-1])
        return ctx.recording.backward(flat).reshape(theta.shape), None, None, None
