"""The base classes of losses, and the empirical risk that training minimises.

A loss maps theta and labels to one number per example. Every variable has one of three roles. A *target* has a known
label, and the loss scores how well the model predicts it. An *observed* variable is given as evidence, and the model is
conditioned on it. A *hidden* variable (label -1, or masked out) is summed out; neither it nor a clique that contains it
is scored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import ClassVar

import torch
from numpy import broadcast_shapes  # torch's imports sympy, which takes a second
from torch import Tensor

from riskfield.adjoints.envelope import require_marginal_gradient
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.inference.solution import Solution


@dataclass(frozen=True, eq=False)
class Target:
    """The labels and the evidence of some examples, after validation."""

    labels: Tensor  # (*batch, variable)  -1 where hidden or observed
    evidence: Tensor | None  # (*batch, variable)  -1 where not observed

    @property
    def mask(self) -> Tensor:
        """Which variables are targets, of shape (*batch, variable)."""
        return self.labels >= 0

    @cached_property
    def known(self) -> Tensor:
        """The states of all targets and observed variables; -1 where hidden."""
        return self.labels if self.evidence is None else torch.maximum(self.labels, self.evidence)

    @cached_property
    def complete(self) -> bool:
        """Whether no variable is hidden."""
        return not bool((self.known < 0).any())


def make_target(graph: FactorGraph, labels: Tensor, evidence: Tensor | None, mask: Tensor | None) -> Target:
    """Check labels, evidence and mask against the graph and each other."""
    labels = graph.check_states(labels, "labels", allow_unobserved=True)
    if evidence is not None:
        evidence = graph.check_states(evidence, "evidence", allow_unobserved=True).to(labels.device)
        _check_broadcast("evidence", evidence, labels)
        given = evidence >= 0
        if mask is None:
            labels = torch.where(given, -1, labels)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"`mask` must be a bool tensor. Got {mask.dtype if isinstance(mask, Tensor) else mask!r}.")
        mask = mask.to(labels.device)
        _check_broadcast("mask", mask, labels)
        if evidence is not None and (mask & given).any():
            raise ValueError("`mask` must be False for variables that `evidence` observes.")
        if (mask & (labels < 0)).any():
            raise ValueError("`mask` must be False for variables whose label is -1.")
        labels = torch.where(mask, labels, -1)
    return Target(labels, evidence)


def num_counted(
    graph: FactorGraph, labels: Tensor, *, evidence: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the number of targets of each example, of shape (*batch). Risks "per variable" are divided by it.

    >>> import torch
    >>> from riskfield import chain
    >>> num_counted(chain(3, num_states=2), torch.tensor([[0, 1, 1], [1, -1, -1]]))
    tensor([3, 1])
    """
    return make_target(graph, labels, evidence, mask).mask.sum(-1)


class AbstractLoss(ABC):
    """The base class of losses: one number per example, which training minimises."""

    # Whether the loss of a disjoint union of graphs is the sum of the losses of its parts.
    additive: ClassVar[bool] = False

    @property
    def lower_bound(self) -> float:
        """The smallest possible value if inference is accurate. A smaller value means that training exploits errors."""
        return -math.inf

    @property
    def comparable(self) -> bool:
        """Whether a smaller value at another theta means a better theta."""
        return True

    def __call__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        labels: Tensor,
        inference: Inference | None = None,
        *,
        evidence: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each example.

        Arguments:
            graph: the structure.
            theta: log-potentials of shape (*batch, theta), or (theta,) if all examples share one model.
            labels: the true states, an integer tensor of shape (*batch, variable); -1 where hidden.
            inference: how marginals are computed. Losses that need no inference ignore it.
            evidence: the states of observed variables; -1 elsewhere. Its shape must broadcast to that of labels.
            mask: bool: which variables are targets. Its shape must broadcast to that of labels. By default all
                variables whose label is known and that are not observed. All other unobserved variables are hidden.

        Returns:
            A tensor of shape (*batch).
        """
        if not isinstance(graph, FactorGraph):
            raise TypeError(f"`graph` must be a FactorGraph. Got {type(graph).__name__}.")
        if inference is not None and not isinstance(inference, Inference):
            raise TypeError(f"`inference` must be an object such as `Inference(MessagePassing())`. Got {inference!r}.")
        graph.check_theta(theta)
        target = make_target(graph, torch.as_tensor(labels).to(theta.device), evidence, mask)
        if theta.ndim > 1 and theta.shape[:-1] != target.labels.shape[:-1]:
            raise ValueError(
                f"`labels` must have the batch shape {tuple(theta.shape[:-1])} of theta. "
                f"Got shape {tuple(target.labels.shape)}."
            )
        return self.evaluate(graph, theta, target, inference)

    @abstractmethod
    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Return the loss of each example, of shape (*batch). The arguments have been validated."""

    def require(self, inference: Inference | None) -> Inference:
        """Return `inference`, or raise an error if it is None."""
        if inference is None:
            raise ValueError(
                f"`{type(self).__name__}` needs `inference`, such as `Inference(MessagePassing(TRW(0.5)))`. Got None."
            )
        return inference


class AbstractMarginalLoss(AbstractLoss):
    """A loss that is a function of the marginals."""

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Run inference once and score its solution."""
        solution = marginals(graph, theta, target, self.require(inference))
        return self.of_solution(solution, target.known, target.mask)

    @abstractmethod
    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of each example, of shape (*batch).

        Arguments:
            solution: its mu has shape (*batch, mu), or (mu,) if all examples share one model.
            labels: of shape (*batch, variable): the states of targets and observed variables, -1 where hidden.
            mask: of the same shape: which variables are targets.
        """


def marginals(graph: FactorGraph, theta: Tensor, target: Target, inference: Inference) -> Solution:
    """Run `inference` on the evidence of `target`; its adjoint must differentiate marginals."""
    if theta.requires_grad and torch.is_grad_enabled():
        require_marginal_gradient(inference.adjoint)
    return inference(graph, theta, evidence=target.evidence)


@dataclass(frozen=True)
class Custom(AbstractMarginalLoss):
    """Any function of the solution: `function(solution, labels, mask)` returns one number per example.

    Labels are -1 where hidden, and the mask is True for targets. Functions that take a loss also accept such a function
    directly.

    Arguments:
        function: is called with the `Solution`, the labels of shape (*batch, variable) and the mask of the same shape.
            It returns a tensor of shape (*batch).

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import Custom
    >>> graph = chain(2, num_states=2)
    >>> surprise = Custom(lambda solution, labels, mask: -graph.node(solution.mu, 0)[..., 1].log())
    >>> surprise(graph, graph.zeros(), torch.tensor([1, 1]), Inference(Exact()))
    tensor(0.6931, dtype=torch.float64)
    """

    function: Callable[[Solution, Tensor, Tensor], Tensor]

    def of_solution(self, solution: Solution, labels: Tensor, mask: Tensor) -> Tensor:
        """Call the function."""
        value, batch = self.function(solution, labels, mask), labels.shape[:-1]
        if not isinstance(value, Tensor) or value.shape != batch:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"The loss `{name_in_errors(self)}` must return one number per example, of shape {tuple(batch)}. Got "
                f"{got}."
            )
        return value


LossLike = AbstractLoss | Callable[[Solution, Tensor, Tensor], Tensor]


def as_loss(loss: LossLike) -> AbstractLoss:
    """Return `loss`, wrapped in `Custom` if it is a plain function."""
    if isinstance(loss, AbstractLoss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(
            "`loss` must be a loss such as `UnivariateLogistic()`, or a function of (solution, labels, mask). "
            f"Got {loss!r}.{_object_of(loss)}"
        )
    return Custom(loss)


def name_in_errors(loss: AbstractLoss) -> str:
    """The name of a loss as its user knows it: the name of its class, or of the function."""
    own = loss.function if isinstance(loss, Custom) else type(loss)
    return str(getattr(own, "__name__", type(own).__name__))


def _object_of(loss: object) -> str:
    """The end of an error: the object to pass instead of a class or a name."""
    if isinstance(loss, str):
        from riskfield.losses.names import LOSSES  # the names are for estimators and commands

        close = get_close_matches(loss, list(LOSSES), 1)
        return f" Pass the object `riskfield.losses.{type(LOSSES[close[0]]).__name__}()`." if close else ""
    return f" Pass an object of it, `{loss.__name__}()`." if isinstance(loss, type) else ""


def empirical_risk(
    loss: LossLike,
    graph: FactorGraph,
    theta: Tensor,
    labels: Tensor,
    inference: Inference | None = None,
    *,
    evidence: Tensor | None = None,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    per_variable: bool = False,
) -> Tensor:
    """Return the quantity that training minimises: the weighted sum of the losses of all examples.

    Arguments:
        loss: a loss such as `UnivariateLogistic()`, or a function of (solution, labels, mask).
        graph: the structure.
        theta: of shape (*batch, theta), or (theta,) if all examples share one model.
        labels: of shape (*batch, variable), -1 where hidden.
        inference: how marginals are computed. Losses that need no inference ignore it.
        evidence: the states of observed variables, of shape (*batch, variable), -1 elsewhere. By default none is
            observed.
        mask: bool, of shape (*batch, variable): which variables are targets. By default all variables whose label is
            known and that are not observed.
        weights: the weight of each example, of shape (*batch); by default 1.
        per_variable: divide the sum by the number of targets, `num_counted`, each weighted like its example. By default
            the sum is not divided.

    >>> import torch
    >>> from riskfield import Exact, Inference, chain
    >>> from riskfield.losses import UnivariateLogistic
    >>> graph = chain(3, num_states=2)
    >>> labels = torch.tensor([[0, 1, 1], [1, -1, -1]])
    >>> empirical_risk(UnivariateLogistic(), graph, graph.zeros(), labels, Inference(Exact()), per_variable=True)
    tensor(0.6931, dtype=torch.float64)
    """
    values = as_loss(loss)(graph, theta, labels, inference, evidence=evidence, mask=mask)
    if weights is not None:
        weights = _checked_weights(weights, values)
    total = values.sum() if weights is None else (weights * values).sum()
    if not per_variable:
        return total
    counted = num_counted(graph, labels, evidence=evidence, mask=mask).to(values)
    number = counted.sum() if weights is None else (weights * counted).sum()
    if not number > 0:
        raise ValueError("`per_variable` needs at least one target: an unmasked variable with a label. Got none.")
    return total / number


def _checked_weights(weights: Tensor, values: Tensor) -> Tensor:
    weights = torch.as_tensor(weights).to(values)
    if weights.shape != values.shape:
        raise ValueError(f"`weights` must have shape {tuple(values.shape)}. Got {tuple(weights.shape)}.")
    wrong = ~((weights >= 0) & torch.isfinite(weights))
    if wrong.any():
        raise ValueError(f"`weights` must be finite and not negative. Got {weights[wrong][0].item()}.")
    return weights


def _check_broadcast(name: str, tensor: Tensor, labels: Tensor) -> None:
    try:
        fits = broadcast_shapes(tensor.shape, labels.shape) == labels.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must broadcast to the shape {tuple(labels.shape)} of labels. Got {tuple(tensor.shape)}."
        )
