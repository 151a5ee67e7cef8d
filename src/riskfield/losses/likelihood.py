r"""Likelihoods with an approximate log-partition function.

    surrogate likelihood   A(theta) - theta . f(x)           gradient  mu - f(x)       (Domke 2013, eqs. 19 and 20)
    surrogate EM           A(theta) - A(theta, z)            z the known states, the rest hidden      (eq. 21)

Both are negative log-likelihoods. A is the log-partition value of the chosen algorithm; A(theta, z) is its value with z
clamped. At convergence dA/dtheta = mu, so there is no backward pass through inference. After a fixed number N of sweeps
A is the truncated value theta . mu_N + H(mu_N) (section 7.3), differentiated through the sweeps. The truncated value is
not a bound, and with too few sweeps the loss may be unbounded below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.forward_backward import chain_log_partition
from riskfield.adjoints.unroll import Unroll
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, Role
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.evidence import clamp
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class SurrogateLikelihood(AbstractLoss):
    """A(theta) - theta . f(x): the negative log-likelihood, with A as computed by inference.

    A is the log-partition value. theta . f(x) is the score of the labels x: the sum of the entries of theta that they
    select, as `graph.score` computes it.

    With exact inference this is maximum likelihood. The loss is convex in theta if inference maximises a concave
    function. It is an upper bound of the true negative log-likelihood if A is an upper bound (TRW with valid rho), and
    a lower bound with mean field. Every variable must have a label or be given as evidence; `SurrogateEM` allows hidden
    variables.

    The adjoint of `inference` decides what is differentiated. `Unroll` differentiates the sweeps that ran. Any other
    adjoint, at convergence, uses dA/dtheta = mu, which needs no backward pass.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import SurrogateLikelihood
    >>> graph = chain(3, num_states=2)
    >>> SurrogateLikelihood()(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))  # 3 log 2
    tensor(2.0794, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    @property
    def lower_bound(self) -> float:
        """0: A is the maximum of theta . mu + H(mu), and mu = f(x) is feasible with H = 0."""
        return 0.0

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Run inference once, with the evidence clamped."""
        if not target.complete:
            raise ValueError(
                "`SurrogateLikelihood` needs a label for every variable that is not given as evidence. Got labels that "
                "are -1 or masked: use `SurrogateEM`, which sums over hidden variables."
            )
        free = _log_partition(graph, theta, target.evidence, self.require(inference))
        return free - graph.score(theta, target.known)


@dataclass(frozen=True)
class SurrogateEM(AbstractLoss):
    """A(theta) - A(theta, z): the negative log-likelihood of the known states z, with hidden variables summed out.

    A(theta) is the log-partition value, and A(theta, z) its value with the known states clamped. Without hidden
    variables the loss equals `SurrogateLikelihood` and runs inference once. Otherwise it runs inference twice.

    Arguments:
        clamped: the algorithm for A(theta, z); by default that of `inference`. `MeanField()` here and TRW with valid
            rho in `inference` give an upper bound of the true negative log-likelihood.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import SurrogateEM
    >>> graph = chain(3, num_states=2)
    >>> SurrogateEM()(graph, graph.zeros(), torch.tensor([0, -1, 1]), Inference(Exact()))  # 2 log 2
    tensor(1.3863, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    clamped: AbstractAlgorithm | None = None

    @property
    def lower_bound(self) -> float:
        """0, as for `SurrogateLikelihood`."""
        return 0.0

    def __post_init__(self) -> None:
        if self.clamped is not None and not isinstance(self.clamped, AbstractAlgorithm):
            raise TypeError(f"`clamped` must be an algorithm such as `MeanField()`, or None. Got {self.clamped!r}.")

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Run inference free and, if there are hidden variables, once more with the known states clamped."""
        inference = self.require(inference)
        free = _log_partition(graph, theta, target.evidence, inference)
        return free - clamped_value(graph, theta, target, inference, self.clamped)


def clamped_value(
    graph: FactorGraph, theta: Tensor, target: Target, inference: Inference, algorithm: AbstractAlgorithm | None = None
) -> Tensor:
    """Return A(theta, z), of shape (*batch). Without hidden variables it is theta . f(x)."""
    if target.complete:
        return graph.score(theta, target.known)
    chosen = inference if algorithm is None else replace(inference, algorithm=algorithm)
    return value_inference(chosen)(graph, theta, evidence=target.known, role=Role.CLAMPED).log_partition


def _log_partition(graph: FactorGraph, theta: Tensor, evidence: Tensor | None, inference: Inference) -> Tensor:
    """Return A(theta), of shape (*batch). Many chains with one table go through forward-backward if A is exact."""
    if inference.algorithm.value_is(graph, sweeps=inference.stop.sweeps, converged=False) == "exact":
        clamped = theta if evidence is None else clamp(graph, theta, evidence)
        value = chain_log_partition(graph, clamped, inference.algorithm, inference.stop)
        if value is not None:
            return value
    return value_inference(inference)(graph, theta, evidence=evidence).log_partition


def value_inference(inference: Inference) -> Inference:
    """Return `inference` with the cheapest adjoint that is right for the log-partition value.

    At convergence that is `Envelope`, unless the sweeps themselves are to be differentiated.
    """
    truncated = inference.stop.tol is None and inference.algorithm.iterative
    if truncated or isinstance(inference.adjoint, Unroll | Envelope):
        return inference
    return replace(inference, adjoint=Envelope())
