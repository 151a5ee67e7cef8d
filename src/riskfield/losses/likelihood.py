r"""Likelihoods with an approximate log-partition function.

    surrogate likelihood   A(theta) - theta . f(x)           gradient  mu - f(x)       (Domke 2013, eqs. 19 and 20)
    surrogate EM           A(theta) - A(theta, z)            z the observed, the rest hidden          (eq. 21)

as losses, so with the sign of the negative likelihood. A is the value of whatever algorithm runs, A(theta, z) that of
the same model with z clamped. At convergence only the value is differentiated, dA/dtheta = mu. After a fixed number of
sweeps A is the truncated log-partition theta . mu_N + H(mu_N) (section 7.3), differentiated through the sweeps. That is
no bound any more, and with too few sweeps the loss may fall without limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.unroll import Unroll
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.exact import Exact
from riskfield.inference.settings import Inference, Role
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class SurrogateLikelihood(AbstractLoss):
    """A(theta) - theta . f(x): minus the log-likelihood, with inference's value of A.

    Exact maximum likelihood where inference is exact. It is convex in theta where inference maximises a concave
    function; above minus the true log-likelihood where A is an upper bound (tree-reweighting with suitable rho), below
    it with mean field. Every variable must be labelled or given; `SurrogateEM` allows for hidden ones.

    The adjoint of `inference` decides what is differentiated: `Unroll` the sweeps that ran; any other, at convergence,
    the value alone, by dA/dtheta = mu, which needs no backward pass.

    >>> import torch
    >>> from riskfield import Exact, Inference, SurrogateLikelihood, chain
    >>> graph = chain(3, num_states=2)
    >>> SurrogateLikelihood()(graph, graph.zeros(), torch.tensor([0, 1, 1]), Inference(Exact()))  # 3 log 2
    tensor(2.0794, dtype=torch.float64)
    """

    @property
    def lower_bound(self) -> float:
        """0: A is the maximum of theta . mu + H(mu), and f(x) is among the mu."""
        return 0.0

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """One run, with the evidence clamped."""
        if not target.complete:
            raise ValueError(
                "`SurrogateLikelihood` needs a label for every variable that is not given as evidence. Got labels that "
                "are -1 or masked: use `SurrogateEM`, which sums over hidden variables."
            )
        free = value_inference(self.require(inference))(graph, theta, evidence=target.evidence)
        return free.log_partition - graph.score(theta, target.known)


@dataclass(frozen=True)
class SurrogateEM(AbstractLoss):
    """A(theta) - A(theta, z): minus the log-likelihood of the observed z, the hidden variables summed over.

    Without hidden variables it is `SurrogateLikelihood`, at the price of one run; else of two.

    Arguments:
        clamped: the algorithm for A(theta, z); by default that of `inference`. `MeanField()` there and tree-reweighting
            with suitable rho in `inference` give an upper bound of minus the true log-likelihood.

    >>> import torch
    >>> from riskfield import Exact, Inference, SurrogateEM, chain
    >>> graph = chain(3, num_states=2)
    >>> SurrogateEM()(graph, graph.zeros(), torch.tensor([0, -1, 1]), Inference(Exact()))  # 2 log 2
    tensor(1.3863, dtype=torch.float64)
    """

    clamped: AbstractAlgorithm | None = None

    @property
    def lower_bound(self) -> float:
        """0, as for `SurrogateLikelihood`."""
        return 0.0

    def __post_init__(self) -> None:
        if self.clamped is not None and not isinstance(self.clamped, AbstractAlgorithm):
            raise TypeError(f"`clamped` must be an algorithm such as `MeanField()`, or None. Got {self.clamped!r}.")

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """A free run and, where something is hidden, a clamped one."""
        inference = self.require(inference)
        free = value_inference(inference)(graph, theta, evidence=target.evidence)
        return free.log_partition - clamped_value(graph, theta, target, inference, self.clamped)


def clamped_value(
    graph: FactorGraph, theta: Tensor, target: Target, inference: Inference, algorithm: AbstractAlgorithm | None = None
) -> Tensor:
    """A(theta, z), of shape (*batch): theta . f(x) where nothing is hidden."""
    if target.complete:
        return graph.score(theta, target.known)
    chosen = inference if algorithm is None else replace(inference, algorithm=algorithm)
    return value_inference(chosen)(graph, theta, evidence=target.known, role=Role.CLAMPED).log_partition


def value_inference(inference: Inference) -> Inference:
    """`inference` with the cheapest adjoint that is right for the log-partition value."""
    if isinstance(inference.adjoint, Unroll | Envelope):
        return inference
    if inference.stop.tol is None and not isinstance(inference.algorithm, Exact):
        return replace(inference, adjoint=inference.adjoint or Unroll())
    return replace(inference, adjoint=Envelope())
