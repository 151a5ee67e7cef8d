r"""`Unroll`: the exact gradient of the sweeps that ran.

Reverse-mode differentiation of the recorded sweeps: truncated fitting, back mean field and back TRW of Domke (2013,
section 7), for any algorithm, schedule and arity. It needs no convergence: the loss is a function of what inference
really computed. Memory grows with the number of sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from riskfield.inference.infer import AbstractAdjoint, Request
from riskfield.inference.solution import Solution


@dataclass(frozen=True)
class Unroll(AbstractAdjoint):
    """Differentiate the sweeps that ran, to any order.

    Use it for runs of a fixed number of sweeps, and whenever convergence is in doubt. The log-partition value is
    differentiated through the sweeps too: theta . mu_N + H(mu_N) after N sweeps (the truncated log-partition).

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

    def apply(self, request: Request) -> Solution:
        """Run on the torch kernels, which autograd follows."""
        return replace(request, kernels="torch").run()
