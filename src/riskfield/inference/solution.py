"""What inference returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph

if TYPE_CHECKING:
    from riskfield.inference.algorithm import AbstractAlgorithm


class Deferred:
    """A tensor that is computed once, when it is first needed."""

    def __init__(self, compute: Callable[[], Tensor]):
        self._compute = compute
        self._tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        """The tensor, always the same one."""
        if self._tensor is None:
            self._tensor = self._compute()
        return self._tensor


Lazy: TypeAlias = Tensor | Deferred


def evaluated(value: Lazy) -> Tensor:
    """The tensor, computed if need be."""
    return value if isinstance(value, Tensor) else value()


@dataclass(frozen=True, eq=False)
class JointMode:
    """A joint state of all variables, how it scores, and whether it is known to be the most probable one.

    Scores and bounds are float64 whatever the dtype of theta: in float32 the rounding of a large model's score can
    exceed the lead of the best state.
    """

    states: Tensor  # (*batch, variable)
    score: Tensor  # (*batch)  theta . f(x); -inf for an impossible state
    upper_bound: Tensor  # (*batch)  no joint state scores higher; +inf where no bound is known
    _penalty: Tensor  # (*batch)  what the score is below the sum of the maxima of all tables

    @property
    def possible(self) -> Tensor:
        """Whether the state has a probability above 0, of shape (*batch)."""
        return self.score > float("-inf")

    @property
    def certified(self) -> Tensor:
        """Whether no state scores higher, up to rounding, of shape (*batch)."""
        # Messages in float32 leave the bound that far above a score it should meet. A constant added to a whole table
        # does not make them less accurate, since messages are normalised.
        rounding = torch.finfo(torch.float32).eps * (1 + self._penalty)
        return self.possible.logical_and(self.upper_bound - self.score <= rounding)


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """Approximate marginals of one model, or of a batch of models on one graph.

    The diagnostics are tensors of the batch's shape (0-dimensional without a batch). Printed, a solution shows the
    largest of them.

    >>> from riskfield import Stop, chain, infer
    >>> graph = chain(3, num_states=2)
    >>> infer(graph, graph.zeros())
    Solution(3 variables, 2 factors, sweeps 1, residual 0, converged)
    >>> infer(graph, graph.zeros(4), stop=Stop(sweeps=5, tol=None))
    Solution(batch (4,), 3 variables, 2 factors, sweeps 5, residual 0, converged 0 of 4)
    """

    graph: FactorGraph
    theta: Tensor  # (*batch, theta)  evidence included
    _mu: Lazy  # (*batch, mu)
    _sweeps: Tensor  # with one batch axis, as is the residual
    _residual: Tensor
    _messages: Lazy | None
    _value: Lazy | Callable[[FactorGraph, Tensor, Tensor], Tensor]  # log-partition, or (graph, theta, mu) -> it
    _algorithm: AbstractAlgorithm  # how joint states are decoded and bounded
    _tol: float | None  # the tolerance that was asked for
    _nodes: Lazy | None = None  # (*batch, node_size)  the node part of mu, if it can be had without the rest
    _statistics: Callable[[], Tensor] | None = None  # (*batch, theta)  mu summed over tied tables, without gradients

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", version_of(self.theta))

    def __repr__(self) -> str:
        batch, converged = tuple(self.theta.shape[:-1]), self.converged.flatten().tolist()
        shown = [f"batch {batch}"] if batch else []
        shown += [f"{self.graph.num_variables} variables", f"{self.graph.num_factors} factors"]
        if converged:
            shown += [f"sweeps {int(self._sweeps.max())}", f"residual {float(self._residual.max()):.2g}"]
        if batch:
            shown.append(f"converged {sum(converged)} of {len(converged)}")
        else:
            shown.append("converged" if converged[0] else "not converged")
        return f"Solution({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy take: everything computed, since a run cannot be taken along."""
        self._check_theta()
        value = self.log_partition if isinstance(self._value, Deferred) else self._value
        computed = {"_mu": self.mu, "_messages": self.messages, "_value": value, "_nodes": None, "_statistics": None}
        return self.__dict__ | computed

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def _check_theta(self) -> None:
        """Refuse to combine marginals with another theta than theirs."""
        if version_of(self.theta) != self.__dict__["_version"]:
            raise RuntimeError(
                "`theta` was changed in place after inference, so its log-partition value and joint states are lost. "
                "Read them before the change, or give `infer` a copy: `theta.clone()`."
            )

    @cached_property
    def sweeps(self) -> Tensor:
        """How many sweeps ran, of shape (*batch)."""
        return self._sweeps.reshape(self.theta.shape[:-1])

    @cached_property
    def residual(self) -> Tensor:
        """The number that was compared with the tolerance, of shape (*batch).

        It is the largest change of a node marginal in the last sweep, corrected for damping, or, once that is small,
        the estimated distance to the fixed point. It is NaN if every joint state is impossible.
        """
        return self._residual.reshape(self.theta.shape[:-1])

    @cached_property
    def converged(self) -> Tensor:
        """Whether the residual is at most the tolerance, of shape (*batch); False if there was no tolerance."""
        return self.residual <= (-1.0 if self._tol is None else self._tol)

    @cached_property
    def mu(self) -> Tensor:
        """The marginals of all variables and factors, of shape (*batch, mu)."""
        return evaluated(self._mu)

    @cached_property
    def messages(self) -> Tensor | None:
        """The algorithm's state, to warm-start the next run; None if it has none."""
        return None if self._messages is None else evaluated(self._messages)

    @cached_property
    def node_mu(self) -> Tensor:
        """The node part of mu, of shape (*batch, node_size)."""
        if self._nodes is None or "mu" in self.__dict__:
            return self.mu[..., : self.graph.node_size]
        return evaluated(self._nodes)

    @property
    def lazy(self) -> bool:
        """Whether the parts of mu and the statistics can each be computed without the rest."""
        return self._statistics is not None

    def statistics(self) -> Tensor:
        """The expected statistics of theta, of shape (*batch, theta): mu, summed over factors with one table."""
        return self.graph.collapse(self.mu) if self._statistics is None else self._statistics()

    def with_mu(self, mu: Tensor, **changes: Any) -> Solution:
        """The same solution with other marginals, and with some fields replaced."""
        return self.replaced(_mu=mu, _nodes=None, _statistics=None, **changes)

    def replaced(self, **changes: Any) -> Solution:
        """The same solution with some fields replaced, in a fraction of the time that `dataclasses.replace` takes."""
        state = {name: self.__dict__[name] for name in _FIELDS} | changes
        if len(state) > len(_FIELDS):
            raise TypeError(f"A `Solution` has no {', '.join(state.keys() - set(_FIELDS))}.")
        other = object.__new__(Solution)
        other.__setstate__(state)
        return other

    @cached_property
    def log_partition(self) -> Tensor:
        """The algorithm's value of the log-partition function, theta . mu + H(mu), of shape (*batch).

        It is -inf for items whose every joint state is impossible.
        """
        value = self._value
        if isinstance(value, Tensor | Deferred):
            value = evaluated(value)
            if self.lazy:
                return value  # of an exact run, whose value says so itself
        else:
            self._check_theta()
            value = value(self.graph, self.theta, self.mu)
        impossible = self.residual.isnan()
        return torch.where(impossible.to(value.device), float("-inf"), value) if impossible.any() else value

    @property
    def reasons(self) -> list[str]:
        """Why each batch item did not converge, in the order of `converged.flatten()`; empty for those that did.

        >>> from riskfield import Stop, chain, infer
        >>> graph = chain(2, num_states=2)
        >>> infer(graph, graph.zeros(), stop=Stop(sweeps=3, tol=None)).reasons
        ['no tolerance was set']
        """
        items = zip(self.converged.flatten().tolist(), self.residual.flatten().tolist(), strict=True)
        return ["" if converged else self._reason(residual) for converged, residual in items]

    def _reason(self, residual: float) -> str:
        if math.isnan(residual):
            return "every joint state has probability zero"
        if self._tol is None:
            return "no tolerance was set"
        return f"the residual is {residual:.2g} and the tolerance {self._tol:g}"

    @property
    def node_marginals(self) -> tuple[Tensor, ...]:
        """Views of the node marginals, one per node group, of shape (*batch, node, state)."""
        return self.graph.node_views(self.node_mu)

    @property
    def factor_marginals(self) -> tuple[Tensor, ...]:
        """Views of the factor marginals, one per factor group, of shape (*batch, factor, *shape)."""
        return self.graph.factor_views(self.mu)

    def mode(self) -> Tensor:
        """Return a state for every variable, of shape (*batch, variable).

        After `MaxProduct` and `ExactMAP` it is the most probable joint state that they found (see `joint_mode`). After
        any other algorithm it is the most probable state of each variable under its own marginal (MPM).
        """
        if self._algorithm.nonsmooth_because:  # joint maximisers decode with theta
            self._check_theta()
        return self._algorithm.mode(self.graph, self.theta, self.mu)

    def joint_mode(self) -> JointMode:
        """`mode()` with its score, and whether it is known to be the most probable joint state."""
        self._check_theta()
        with torch.no_grad():
            states = self.mode()
            bound = self._algorithm.upper_bound(self.graph, self.theta, self.mu, self.messages)
            theta = self.theta.double()
            score = self.graph.score(theta, states)
            return JointMode(states, score, bound, sum_of_maxima(self.graph, theta) - score)


_FIELDS = tuple(field.name for field in fields(Solution))


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, which those made in inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def sum_of_maxima(graph: FactorGraph, theta: Tensor) -> Tensor:
    """The sum of the maxima of all tables, 0 for those without a possible entry: of shape (*batch), float64."""
    dim = theta.ndim - 1
    parts = [view.amax(-1) for view in graph.node_views(theta)]
    for group, view in zip(graph.factor_groups, graph.factor_views(theta), strict=True):
        parts.append(view.flatten(dim + 1).amax(-1)[..., index_tensor(group.tables, theta.device)])
    total = theta.new_zeros(theta.shape[:-1], dtype=torch.float64)
    for part in parts:
        total = total + torch.where(part == float("-inf"), 0.0, part).double().sum(-1)
    return total


def modes(graph: FactorGraph, mu: Tensor) -> Tensor:
    """The largest entry of every node marginal, of shape (*batch, variable)."""
    states = torch.empty(*mu.shape[:-1], graph.num_variables, dtype=torch.int64, device=mu.device)
    for group, view in zip(graph.node_groups, graph.node_views(mu), strict=True):
        states[..., index_tensor(group.variables, mu.device)] = view.argmax(-1)
    return states


def inner_product(theta: Tensor, mu: Tensor) -> Tensor:
    """theta . mu where impossible states (theta = -inf) of probability 0 contribute nothing, nor any gradient."""
    return (torch.where(mu == 0, 0, theta) * mu).sum(-1)
