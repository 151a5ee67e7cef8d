"""`check_gradients`: every adjoint against finite differences and the others, with times.

The differences are of the objective an adjoint claims to differentiate: for `Unroll` the loss after the sweeps that
ran, for all others the loss at convergence. They are four-sided, (8 L(h) - 8 L(-h) - L(2h) + L(-2h)) / 12h entry by
entry of theta (the scheme of Domke 2013, section 6), in float64 whatever the dtype of theta. Where the loss bends
sharply the step that suits a smooth one is too large: three are tried for each entry, and the change from one to the
next says which to take and how far the differences themselves are to be trusted.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.kkt import KKT
from riskfield.adjoints.kkt_solvers import Direct, Minres
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.unroll import Unroll
from riskfield.errors import AdjointError, AdjointWarning, ConvergenceWarning
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import infer
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.evidence import Evidence, clamp
from riskfield.inference.solution import Deferred, Solution
from riskfield.inference.stop import Stop

Loss = Callable[[Solution], Tensor]

_STEP = torch.finfo(torch.float64).eps ** (1 / 5)  # balances truncation against rounding, as in `Perturb(4)`
_SHRINK = 6.0  # from one step to the next
_SHIFTS = torch.tensor([2.0, 1.0, -1.0, -2.0], dtype=torch.float64)
_WEIGHTS = torch.tensor([-1.0, 8.0, -8.0, 1.0], dtype=torch.float64) / 12
_TIGHT = 1e-13  # tolerance of the runs that differences are taken of
_MANY = 10_000  # sweeps they may take
_NUMBERS_AT_ONCE = 2**22  # entries of theta in one batch of them


def default_adjoints() -> tuple[AbstractAdjoint, ...]:
    """What `check_gradients` tries."""
    perturbations = tuple(Perturb(sides) for sides in (1, 2, 4))
    return (Unroll(), FixedPoint(), *perturbations, KKT(Direct()), KKT(Minres()), Envelope())


@dataclass(frozen=True, eq=False)
class GradientRow:
    """One adjoint: its gradient and how good that is, or why there is none."""

    adjoint: AbstractAdjoint
    gradient: Tensor | None  # (theta,); None if it was refused or failed
    abs_error: float | None  # the largest difference from finite differences
    rel_error: float | None  # the same in units of the largest difference quotient
    seconds: float | None  # inference and the backward pass
    note: str  # why there is no gradient, or a warning that came with it


@dataclass(frozen=True, eq=False)
class GradientReport:
    """What `check_gradients` found; its `str` is a table."""

    rows: tuple[GradientRow, ...]
    num_checked: int  # entries of theta that differences were taken of
    num_entries: int  # finite entries of theta
    residual: float  # the worst last change of a marginal, in those runs for differences that were to converge
    uncertainty: float  # of the differences, in units of the largest quotient: smaller errors say nothing

    @property
    def worst(self) -> float:
        """The largest relative error of any adjoint that gave a gradient; NaN if none did."""
        errors = [row.rel_error for row in self.rows if row.rel_error is not None]
        return float(torch.tensor(errors, dtype=torch.float64).max()) if errors else float("nan")

    @property
    def disagreement(self) -> float:
        """The largest difference between the gradients of two adjoints, in all entries, relative to the largest entry.

        For a run without a tolerance there is only one to compare.
        """
        gradients = [row.gradient.double() for row in self.rows if row.gradient is not None]
        if len(gradients) < 2:
            return 0.0
        stacked = torch.stack(gradients)
        gap = (stacked.amax(0) - stacked.amin(0)).max()
        size = stacked.abs().max()
        return float(gap / size) if size > 0 else 0.0

    def __str__(self) -> str:
        names = [str(row.adjoint) for row in self.rows]
        width = max(map(len, names), default=0)
        lines = [f"{'adjoint':{width}}  abs error  rel error  seconds"]
        for name, row in zip(names, self.rows, strict=True):
            if row.gradient is None:
                lines.append(f"{name:{width}}  {row.note}")
            else:
                note = f"  {row.note}" if row.note else ""
                lines.append(f"{name:{width}}  {row.abs_error:9.1e}  {row.rel_error:9.1e}  {row.seconds:7.3f}{note}")
        settled = f", of runs that settled to {self.residual:.1e}" if self.residual else ""
        lines.append(
            f"errors against finite differences in {self.num_checked} of {self.num_entries} entries of theta, good to "
            f"{self.uncertainty:.1e}{settled}; the adjoints differ by {self.disagreement:.1e}"
        )
        return "\n".join(lines)


def check_gradients(
    graph: FactorGraph,
    theta: Tensor,
    algorithm: AbstractAlgorithm,
    loss: Loss,
    *,
    stop: Stop | None = None,
    evidence: Evidence | None = None,
    adjoints: Sequence[AbstractAdjoint] | None = None,
    max_entries: int = 100,
    seed: int = 0,
    kernels: str | None = None,
) -> GradientReport:
    """Compare the gradients of `loss` by every adjoint with finite differences and with each other.

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (graph.theta_size,), without batch axes.
        algorithm: the algorithm to differentiate.
        loss: a function of a `Solution` that returns a scalar. For a loss with labels pass
            `lambda solution: loss(solution, labels, mask)`.
        stop: when inference ends; by default at a tolerance near rounding. Without a tolerance only `Unroll` applies.
        evidence: as for `infer`.
        adjoints: what to try; by default all there are, each with its standard settings.
        max_entries: the number of entries of theta, drawn at random, for which differences are taken.
        seed: for that draw.
        kernels: as for `infer`.

    Returns:
        A `GradientReport`; print it. An adjoint that refuses or fails has its message there instead of an error.

    Raises:
        ValueError: if theta has batch axes, or the loss is not a finite scalar that depends on the solution.
        TypeError: if the loss is not a function of one argument.

    >>> import torch
    >>> from riskfield import MessagePassing, TRW, check_gradients, grid
    >>> graph = grid(3, 3, num_states=2)
    >>> theta = torch.linspace(-1, 1, graph.theta_size, dtype=torch.float64)
    >>> report = check_gradients(graph, theta, MessagePassing(TRW(0.5)), lambda solution: (solution.mu**2).sum())
    >>> report.worst < 1e-6, report.disagreement < 1e-6
    (True, True)
    >>> print(report.rows[-1].note)
    the loss depends on the marginals, of which `Envelope` has no gradient
    """
    theta = _checked(graph, theta, evidence)
    _check_loss(loss)
    if max_entries < 1:
        raise ValueError(f"`max_entries` must be at least 1. Got {max_entries!r}.")
    stop = Stop(sweeps=_MANY, tol=_TIGHT if theta.dtype == torch.float64 else 1e-6) if stop is None else stop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report has the residual
        base = infer(graph, theta, algorithm, stop=stop, kernels=kernels)
        uses_mu = _uses_marginals(base, loss)
        finite = torch.isfinite(theta).nonzero().ravel()
        generator = torch.Generator().manual_seed(seed)
        entries = finite[torch.randperm(len(finite), generator=generator)[:max_entries].sort().values]
        truth = _Differences(graph, theta.double(), algorithm, loss, entries, kernels)
        rows = []
        for adjoint in default_adjoints() if adjoints is None else adjoints:
            if uses_mu and isinstance(adjoint, Envelope):
                note = "the loss depends on the marginals, of which `Envelope` has no gradient"
                rows.append(GradientRow(adjoint, None, None, None, None, note))
                continue
            gradient, seconds, note = _attempt(graph, theta, algorithm, loss, stop, kernels, adjoint)
            if gradient is None:
                rows.append(GradientRow(adjoint, None, None, None, None, note))
                continue
            expected = truth.of(base, stop, converged=not isinstance(adjoint, Unroll))
            gap = float((gradient.double()[entries] - expected).abs().max()) if len(entries) else 0.0
            size = float(expected.abs().max()) if len(entries) else 0.0
            rows.append(GradientRow(adjoint, gradient, gap, gap / size if size else gap, seconds, note))
    return GradientReport(tuple(rows), len(entries), len(finite), truth.residual, truth.uncertainty)


class _Differences:
    """Difference quotients of the loss, computed once for each objective that is asked for."""

    def __init__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        algorithm: AbstractAlgorithm,
        loss: Loss,
        entries: Tensor,
        kernels: str | None,
    ):
        self.graph, self.theta, self.algorithm, self.loss = graph, theta, algorithm, loss
        self.entries, self.kernels = entries, kernels
        self.residual = self.uncertainty = 0.0
        self._known: dict[Stop, Tensor] = {}

    def of(self, base: Solution, stop: Stop, converged: bool) -> Tensor:
        """dL/dtheta in the entries, of shape (entry,), at convergence or after the sweeps of `base`."""
        messages = None
        if stop.tol is not None and (converged or stop.tol <= 10 * _TIGHT):
            # The start of a converged run does not matter, save that a non-concave entropy has several optima.
            stop, messages = Stop(max(stop.sweeps, _MANY), min(stop.tol, _TIGHT)), base.messages
        elif stop.tol is not None:
            stop = Stop(sweeps=int(base.sweeps), tol=None)
        if stop not in self._known:
            self._known[stop] = self._compute(stop, messages, abs(float(self.loss(base))))
        return self._known[stop]

    def _compute(self, stop: Stop, messages: Tensor | None, size_of_loss: float) -> Tensor:
        at_once = max(1, _NUMBERS_AT_ONCE // (4 * max(self.graph.mu_size, 1)))
        chunks = self.entries.split(at_once) if len(self.entries) else ()
        with torch.no_grad():
            scales = (1.0, 1 / _SHRINK, 1 / _SHRINK**2)
            found = [torch.cat([self._quotients(c, s, stop, messages) for c in chunks]) for s in scales if chunks]
        if not found:
            return self.theta[:0]
        coarse, middle, fine = found
        # A step that is too large shows in a change to the next smaller one that is far above the change after that (in
        # theory by the fourth power of the ratio of the steps) and above rounding, which small steps make worse.
        changes = torch.stack([(coarse - middle).abs(), (middle - fine).abs()])
        rounding = 10 * torch.finfo(torch.float64).eps * size_of_loss * _SHRINK / _STEP
        bends = [changes[0] > torch.clamp(_SHRINK**power * changes[1], min=rounding) for power in (1, 3)]
        best = torch.where(bends[1], fine, torch.where(bends[0], middle, coarse))
        size = float(best.abs().max())
        uncertainty = float(torch.where(bends[0], changes[1], changes[0]).max())
        self.uncertainty = max(self.uncertainty, uncertainty / size if size else uncertainty)
        return best

    def _quotients(self, entries: Tensor, scale: float, stop: Stop, messages: Tensor | None) -> Tensor:
        steps = scale * _STEP * (1 + self.theta[entries].abs())
        shifted = self.theta.repeat(len(entries), 4, 1)
        shifted[torch.arange(len(entries), device=entries.device), :, entries] += steps[:, None] * _SHIFTS.to(shifted)
        start = None if messages is None else messages.double().expand(len(entries), 4, -1)
        runs = infer(self.graph, shifted, self.algorithm, stop=stop, messages=start, kernels=self.kernels)
        values = [[self.loss(_item(runs, (k, side))) for side in range(4)] for k in range(len(entries))]
        if stop.tol is not None:
            self.residual = max(self.residual, float(runs.residual.max()))
        quotients: Tensor = (torch.tensor(values, dtype=torch.float64) @ _WEIGHTS).to(steps) / steps
        return quotients


def _checked(graph: FactorGraph, theta: Tensor, evidence: Evidence | None) -> Tensor:
    graph.check_values(theta)
    theta = theta.detach() if evidence is None else clamp(graph, theta.detach(), evidence)
    if theta.ndim != 1:
        raise ValueError(
            f"`theta` must have shape ({graph.theta_size},), without batch axes. Got {tuple(theta.shape)}."
        )
    return theta


def _check_loss(loss: Loss) -> None:
    try:
        inspect.signature(loss).bind(None)
    except TypeError:
        raise TypeError(
            "`loss` must be a function of one argument, the solution. For a loss with labels pass "
            f"`lambda solution: loss(solution, labels, mask)`. Got {loss!r}."
        ) from None
    except ValueError:  # a callable in C, whose arguments are unknown
        pass


def _uses_marginals(base: Solution, loss: Loss) -> bool:
    mu, theta = base.mu.clone().requires_grad_(), base.theta.clone().requires_grad_()
    value = base.log_partition.clone().requires_grad_()
    result = loss(base.with_mu(mu, theta=theta, _value=value))
    if not isinstance(result, Tensor) or result.ndim != 0 or not result.requires_grad:
        raise ValueError(
            "`loss` must return a scalar tensor that depends on the mu, log_partition or theta of the solution. Got "
            f"{result!r}."
        )
    if not torch.isfinite(result):
        raise ValueError(f"`loss` must be finite at the solution. Got {float(result.detach())}.")
    (grad,) = torch.autograd.grad(result, mu, allow_unused=True)
    return grad is not None and bool((grad != 0).any())


def _attempt(
    graph: FactorGraph,
    theta: Tensor,
    algorithm: AbstractAlgorithm,
    loss: Loss,
    stop: Stop,
    kernels: str | None,
    adjoint: AbstractAdjoint,
) -> tuple[Tensor | None, float, str]:
    """The gradient by `adjoint` or None, the seconds it took, and what there is to say about it."""
    leaf = theta.clone().requires_grad_()
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AdjointWarning)
        try:
            solution = infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint, kernels=kernels)
        except ValueError as error:
            return None, 0.0, str(error)
        try:
            (gradient,) = torch.autograd.grad(loss(solution), leaf)
        except AdjointError as error:
            return None, 0.0, str(error)
    seconds = time.perf_counter() - began
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, AdjointWarning)]
    return gradient, seconds, " ".join(notes)


def _item(solution: Solution, index: tuple[int, ...]) -> Solution:
    """One item of a batch, as if it had run alone."""
    value = solution.log_partition if isinstance(solution._value, Deferred) else solution._value
    return solution.with_mu(
        solution.mu[index],
        theta=solution.theta[index],
        _sweeps=solution.sweeps[index],
        _residual=solution.residual[index],
        _messages=None if solution.messages is None else solution.messages[index],
        _value=value[index] if isinstance(value, Tensor) else value,
    )
