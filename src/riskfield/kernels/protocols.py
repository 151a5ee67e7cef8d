"""What a run of the kernels provides."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor


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


class ExactRun:
    """A `Run` that computes the exact log-partition function. It computes each of its results only when asked.

    It is a plain class: `isinstance` takes several times longer with an `ABC`, and far longer with a protocol.
    """

    has_messages: bool  # whether `messages` returns some

    @abstractmethod
    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """See `Run`."""

    @abstractmethod
    def marginals(self) -> Tensor:
        """See `Run`."""

    @abstractmethod
    def log_partition(self) -> Tensor:
        """log Z, of shape (batch,); -inf for an impossible model."""

    @abstractmethod
    def statistics(self) -> Tensor:
        """The expected statistics d log Z / dtheta, of shape (batch, theta): mu, summed over factors with one table."""

    @abstractmethod
    def node_marginals(self) -> Tensor:
        """The node part of mu, of shape (batch, node_size)."""

    @abstractmethod
    def messages(self) -> Tensor:
        """The state; only if `has_messages`."""


class RecordingRun(Run, Protocol):
    """A run with a tape of its sweeps, which can be differentiated backwards.

    If it was started with a tangent of theta, marginals and gradients are complex tensors: the imaginary part is the
    derivative along the tangent.
    """

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta through all sweeps, of shape (batch, theta).

        An `ExactRun` also takes the cotangents of its node marginals alone.
        """
        ...

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as if the last sweep, whose tape was kept, had been repeated for ever.

        It differentiates that sweep backwards up to `steps` times, or until one more time adds at most the share `tol`
        to the cotangents of the messages. Returns the gradient and, for each item, the last share and the number of
        backward sweeps.
        """
        ...


class CountingRun(RecordingRun, Protocol):
    """A recording run of message passing with counting numbers that require a gradient."""

    def backward_counting(self, grad_mu: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`backward`, and d(grad_mu . mu) / dc_c of every factor and / dc^_i of every variable, summed over the batch.

        The last is None from kernels that lack it (see `Task.differentiates_node_counting`).
        """
        ...


class SteppedRun(Run, Protocol):
    """A run of theta + step direction for several steps, one step after the other along the batch."""

    def marginals(self, weights: Tensor | None = None) -> Tensor:
        """Mu; with weights of shape (step, batch of theta) their sum over the steps, of shape (batch of theta, mu)."""
        ...
