r"""Inference as the minimisation of any convex function of the beliefs (Domke 2008).

    b = argmin  -theta . b + sum_f sum_r sum_{x_r} w_f(x_r) f(b_r(x_r))    over the local polytope      (eqs. 1-8)

where the regions r are variables and factors, the functions f convex and their weights w_f, one per configuration of
every region, not negative. Theta is minus the paper's weight of f(b) = b, so that -inf marks impossible states here as
everywhere. With f(b) = b log b alone and weights that do not vary within a region these are counting numbers, and the
beliefs those of message passing, which then computes them; this also serves negative ones such as Bethe's. All others
are found by a primal-dual interior-point method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.entropy import CountingNumbers
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference._interior import InteriorPointRun
from riskfield.inference.algorithm import AbstractAlgorithm, Run
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.optimality import AbstractOptimality
from riskfield.inference.solution import Solution, inner_product

Elementwise = Callable[[Tensor], Tensor]

# The beliefs at which functions are asked whether they are convex.
_PROBES = (1e-6, 1e-3, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
# A bound with a belief and a multiplier below this is about to become active, or to cease to be.
_UNDECIDED = 1e-5


@dataclass(frozen=True)
class ConvexFunction:
    """A convex function of a belief in (0, 1], with two derivatives; all three act on tensors entry by entry.

    Arguments:
        value: f.
        slope: f'.
        curvature: f''.
        steep: whether f' falls to -infinity at 0, as those of b log b and -log b do: a belief with a positive weight on
            such a function cannot be 0.

    Raises:
        TypeError: if one of them is not callable.
        ValueError: if f'' is negative, or one of them not finite, somewhere in (0, 1].

    >>> cube = ConvexFunction(lambda b: b**3, lambda b: 3 * b**2, lambda b: 6 * b)
    """

    value: Elementwise
    slope: Elementwise
    curvature: Elementwise
    steep: bool = False

    def __post_init__(self) -> None:
        probes = torch.tensor(_PROBES, dtype=torch.float64)
        for name in ("value", "slope", "curvature"):
            function = getattr(self, name)
            if not callable(function):
                raise TypeError(f"`{name}` must be a function of a tensor. Got {function!r}.")
            found = function(probes)
            if not (isinstance(found, Tensor) and found.shape == probes.shape and torch.isfinite(found).all()):
                raise ValueError(f"`{name}` must give a finite number for every belief in (0, 1]. Got {found!r}.")
        if (self.curvature(probes) < 0).any():
            raise ValueError("`curvature` must not be negative in (0, 1]: the function has to be convex.")


def _x_log_x(b: Tensor) -> Tensor:
    return torch.xlogy(b, b)


def _one_plus_log(b: Tensor) -> Tensor:
    return 1 + b.log()


def _minus_log(b: Tensor) -> Tensor:
    return -b.log()


def _minus_inverse(b: Tensor) -> Tensor:
    return -b.reciprocal()


def _inverse_square(b: Tensor) -> Tensor:
    return b.reciprocal().square()


def _double(b: Tensor) -> Tensor:
    return 2 * b


def _two(b: Tensor) -> Tensor:
    return torch.full_like(b, 2.0)


NEGATIVE_ENTROPY = ConvexFunction(_x_log_x, _one_plus_log, torch.reciprocal, steep=True)
"""b log b."""
NEGATIVE_LOG = ConvexFunction(_minus_log, _minus_inverse, _inverse_square, steep=True)
"""-log b."""
SQUARE = ConvexFunction(torch.square, _double, _two)
"""b^2."""


@dataclass(frozen=True, eq=False)
class Term:
    """A convex function and its weights.

    Arguments:
        function: `NEGATIVE_ENTROPY`, `NEGATIVE_LOG`, `SQUARE`, or a `ConvexFunction` of your own.
        weight: one number for all configurations, or a tensor of shape (*batch, mu) in the layout of mu, one per
            configuration of every variable and factor. Its batch axes are the last ones of theta, or none. It may
            require a gradient, which `KKT` gives.

    >>> import torch
    >>> log_weight = torch.zeros(3, requires_grad=True)
    >>> Term.from_log(NEGATIVE_ENTROPY, log_weight).weight
    tensor([1., 1., 1.], grad_fn=<ExpBackward0>)
    """

    function: ConvexFunction
    weight: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.function, ConvexFunction):
            raise TypeError(f"`function` must be a ConvexFunction such as NEGATIVE_ENTROPY. Got {self.function!r}.")
        if not isinstance(self.weight, Tensor | float | int):
            raise TypeError(f"`weight` must be a number or a tensor. Got {type(self.weight).__name__}.")

    @classmethod
    def from_log(cls, function: ConvexFunction, log_weight: Tensor) -> Term:
        """A term whose weights are the exponentials of free parameters, and so stay positive while these are learned.

        Zeros are weights of 1, where learning may begin.
        """
        return cls(function, log_weight.exp())

    def weights(self, graph: FactorGraph) -> Tensor:
        """The weights of shape (*batch, mu), in float64 on the CPU, checked to be finite. Differentiable."""
        weight = torch.as_tensor(self.weight, dtype=torch.float64, device="cpu")
        weight = weight.expand(graph.mu_size) if weight.ndim == 0 else weight
        if weight.shape[-1] != graph.mu_size:
            raise ValueError(
                f"`weight` must be one number or have shape (*batch, {graph.mu_size}), the layout of mu. "
                f"Got {tuple(weight.shape)}."
            )
        bad = ~torch.isfinite(weight)
        if bad.any():
            where = tuple(int(k) for k in bad.nonzero()[0])
            raise ValueError(f"`weight` must be finite. Got {float(weight[where])} at {where}.")
        return weight


@dataclass(frozen=True, eq=False)
class ConvexFreeEnergy(AbstractAlgorithm):
    """Beliefs that minimise -theta . b + sum_f w_f . f(b) over the local polytope.

    A sweep is a Newton step of an interior-point method, in float64 on the CPU whatever the dtype and device of theta;
    ten to twenty-five are enough as a rule. Where the weights are counting numbers message passing runs instead, and a
    sweep is one of its. Gradients reach theta and the weights by `KKT`, theta alone by `Perturb` and `Envelope`.

    Arguments:
        terms: what is added to the linear term -theta . b. By default b log b with weights 1.
        message_passing: run it where the weights are counting numbers. Where potentials are so strong that it needs
            thousands of sweeps the interior-point method is faster, and serves weights that are not negative.

    Raises:
        ValueError: on use, if a weight is negative (unless the weights are counting numbers, see `CountingNumbers`), if
            a configuration has no strictly convex term, or if weights do not fit the graph or the batch.

    >>> import torch
    >>> from riskfield import NEGATIVE_ENTROPY, SQUARE, ConvexFreeEnergy, Term, grid, infer
    >>> graph = grid(2, 2, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.node(theta, 0)[1] = 2.0
    >>> energy = ConvexFreeEnergy([Term(NEGATIVE_ENTROPY, torch.linspace(0.5, 2, graph.mu_size)), Term(SQUARE, 0.1)])
    >>> graph.node(infer(graph, theta, energy).mu, 0).round(decimals=4)
    tensor([0.3541, 0.6459], dtype=torch.float64)
    """

    unrolls: ClassVar[bool] = False
    symmetric_jacobian: ClassVar[bool] = True
    parameter_name: ClassVar[str] = "weights"
    convergence_advice: ClassVar[str] = (
        "Allow more sweeps. Where the weights are counting numbers message passing ran; if none is negative, "
        "`message_passing=False` takes Newton steps instead. If these have become infinite or stopped falling, weights "
        "differ by too many orders of magnitude for the tolerance: make the smallest larger, or the tolerance."
    )

    terms: Sequence[Term] = (Term(NEGATIVE_ENTROPY),)
    message_passing: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        for k, term in enumerate(self.terms):
            if not isinstance(term, Term):
                raise TypeError(f"`terms[{k}]` must be a Term, such as `Term(NEGATIVE_ENTROPY, 1.0)`. Got {term!r}.")
        if not self.terms:
            raise ValueError("`terms` must hold at least one Term: theta alone has no unique minimiser.")

    def check(self, graph: FactorGraph, batch: torch.Size) -> None:
        """Refuse weights that do not fit, or under which the problem is not convex."""
        for weight in self.weights(graph):
            extra = weight.shape[:-1]
            if extra and extra != batch[len(batch) - len(extra) :]:
                raise ValueError(
                    f"`weight` must have no batch axes, or the last ones of theta's batch shape {tuple(batch)}. "
                    f"Got shape {tuple(weight.shape)}."
                )
        if self.counting_numbers(graph) is None:
            _check_convex(graph, self.terms)

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Begin from uniform beliefs, or from `messages`.

        The state is that of message passing, followed by that of the interior-point method, the one not in use 0: so
        weights may become counting numbers, or cease to be, between two runs.
        """
        if kernels not in (None, "native", "torch"):
            raise ValueError(f'`kernels` must be "native", "torch" or None. Got {kernels!r}.')
        size = graph.message_size + 2 * graph.mu_size
        if messages is not None and messages.shape[-1] != size:
            raise ValueError(f"`messages` must have shape (*batch, {size}). Got {tuple(messages.shape)}.")
        counting = self.counting_numbers(graph)
        if counting is not None:
            own = None if messages is None else messages[:, : graph.message_size]
            return _Padded(MessagePassing(counting).start(graph, theta, own, kernels), 0, 2 * graph.mu_size)
        _check_convex(graph, self.terms)
        own = None if messages is None else messages[:, graph.message_size :]
        energy = _Energy(graph, self.terms, theta)
        return _Padded(InteriorPointRun(graph, energy, own), graph.message_size, 0, theta)

    def weights(self, graph: FactorGraph) -> tuple[Tensor, ...]:
        """The weights of every term, of shape (*batch, mu)."""
        return tuple(term.weights(graph) for term in self.terms)

    def counting_numbers(self, graph: FactorGraph) -> CountingNumbers | None:
        """The weights of b log b as counting numbers for message passing.

        None if they are not valid ones, if other terms take part, or if it is not wanted.
        """
        if not self.message_passing:
            return None
        total = torch.zeros(graph.mu_size, dtype=torch.float64)
        for term, weight in zip(self.terms, self.weights(graph), strict=True):
            first = weight.detach().flatten()[: graph.mu_size]
            if term.function == NEGATIVE_ENTROPY and weight.numel() and torch.equal(weight, first.expand_as(weight)):
                total = total + first
            elif (weight != 0).any():
                return None
        node = torch.empty(graph.num_variables, dtype=torch.float64)
        factor = torch.empty(graph.num_factors, dtype=torch.float64)
        views = [(node, g.variables, v) for g, v in zip(graph.node_groups, graph.node_views(total), strict=True)]
        views += [(factor, g.factors, v) for g, v in zip(graph.factor_groups, graph.factor_views(total), strict=True)]
        for numbers, places, view in views:
            table = view.flatten(1)
            if not torch.equal(table, table[:, :1].expand_as(table)):
                return None
            numbers[index_tensor(places)] = table[:, 0]
        found = CountingNumbers(factor, node)
        try:
            found.counting(graph)
        except ValueError:
            return None
        return found

    def parameters(self, graph: FactorGraph) -> tuple[Tensor, ...]:
        """The weights."""
        return self.weights(graph)

    def optimality(self, graph: FactorGraph) -> AbstractOptimality:
        """Those of theta . b - sum_f w_f . f(b) on the local polytope."""
        return _Optimality(graph, self)

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """theta . b - sum_f w_f . f(b): minus the minimum, a convex function of theta whose gradient is b."""
        total = inner_product(graph.expand(theta), mu)
        possible = graph.expand(theta) > -torch.inf
        for term, weight in zip(self.terms, self.weights(graph), strict=True):
            counted = possible if not term.function.steep else possible & (mu > 0)
            value = torch.where(counted, term.function.value(torch.where(counted, mu, 1)), 0)
            total = total - (weight.to(mu) * value).sum(-1)
        return total


@dataclass(frozen=True, eq=False)
class _Optimality(AbstractOptimality):
    """The derivatives of -sum_f w_f . f(b)."""

    remedy: ClassVar[str] = "Run inference to a smaller tolerance, or give all configurations more NEGATIVE_ENTROPY."
    differentiates_parameters: ClassVar[bool] = True

    graph: FactorGraph
    algorithm: ConvexFreeEnergy

    def curvature(self, mu: Tensor) -> Tensor:
        """D of Domke (2008, eq. 18): sum_f w_f f''(b), 0 where a belief is 0."""
        safe = torch.where(mu > 0, mu, 1)
        total = torch.zeros_like(mu)
        for term, weight in zip(self.algorithm.terms, self.algorithm.weights(self.graph), strict=True):
            total = total + weight.detach().to(mu) * term.function.curvature(safe)
        return torch.where(mu > 0, total, 0)

    def parameter_slopes(self, mu: Tensor) -> tuple[Tensor, ...]:
        """-f'(b) of every term (Domke 2008, eq. 19), 0 where a belief is 0 and stays so."""
        safe = torch.where(mu > 0, mu, 1)
        return tuple(torch.where(mu > 0, -term.function.slope(safe), 0) for term in self.algorithm.terms)

    def undecided(self, solution: Solution) -> Tensor:
        """Which beliefs are 0, or very small, with a multiplier that is as small."""
        assert solution.messages is not None
        b, z = solution.messages[..., self.graph.message_size :].exp().chunk(2, dim=-1)
        return (z > 0) & (torch.maximum(b, z) < _UNDECIDED)


class _Energy:
    """-theta . b + sum_f w_f . f(b) for a batch of thetas of shape (batch, theta)."""

    def __init__(self, graph: FactorGraph, terms: Sequence[Term], theta: Tensor):
        linear = graph.expand(theta.detach().to("cpu", torch.float64))
        self.possible = linear > -torch.inf
        self.linear = torch.where(self.possible, linear, 0.0)
        self.functions = [term.function for term in terms]
        self.weights = []
        for term in terms:
            weight = term.weights(graph).detach().reshape(-1, graph.mu_size)
            # The batch axes of a weight are the last ones of theta, whose batch is a multiple of them.
            self.weights.append(weight.repeat(len(linear) // max(len(weight), 1), 1))
        self.steep = torch.zeros_like(self.possible)
        for function, weight in zip(self.functions, self.weights, strict=True):
            self.steep |= (weight > 0) & function.steep

    def derivatives(self, b: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes and curvatures at b, for some items of the batch."""
        slope, curvature = -self.linear[items], torch.zeros_like(b)
        for function, weight in zip(self.functions, self.weights, strict=True):
            slope = slope + weight[items] * function.slope(b)
            curvature = curvature + weight[items] * function.curvature(b)
        return slope, curvature


class _Padded:
    """A run whose state stands in a longer one, zeros before and behind it; its beliefs follow theta's dtype."""

    def __init__(self, run: Run, before: int, behind: int, theta: Tensor | None = None):
        self.run, self.before, self.behind, self.theta = run, before, behind, theta

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Advance the run."""
        return self.run.advance(sweeps, tol)

    def marginals(self) -> Tensor:
        """Mu, of shape (batch, mu)."""
        mu = self.run.marginals()
        return mu if self.theta is None else mu.to(self.theta)

    def messages(self) -> Tensor | None:
        """The state of the run among zeros."""
        state = self.run.messages()
        return None if state is None else torch.nn.functional.pad(state, (self.before, self.behind))


def _check_convex(graph: FactorGraph, terms: Sequence[Term]) -> None:
    curvature = torch.zeros(graph.mu_size, dtype=torch.float64)
    half = torch.full((graph.mu_size,), 0.5, dtype=torch.float64)
    for k, term in enumerate(terms):
        weight = term.weights(graph).detach()
        bad = weight < 0
        if bad.any():
            where = tuple(int(k) for k in bad.nonzero()[0])
            raise ValueError(
                f"`weight` of terms[{k}] must not be negative, or the free energy may not be convex. "
                f"Got {float(weight[where])} at {where}. Only weights of NEGATIVE_ENTROPY that are one number per "
                "region, with those of factors and c_i + sum of c_c above 0, may be negative."
            )
        curvature = curvature + (weight * term.function.curvature(half)).reshape(-1, graph.mu_size).amin(0)
    # Beliefs of a variable follow from those of its factors: they need no term of their own.
    joined = torch.zeros(graph.mu_size, dtype=torch.bool)
    for group in graph.factor_groups:
        for slot in range(group.arity):
            joined[index_tensor(graph.node_entries(group.variables[:, slot]))] = True
    flat = ~joined & ~(curvature > 0)
    if flat.any():
        raise ValueError(
            "`terms` must give every configuration of a factor, and of a variable without factors, a strictly convex "
            f"function with a weight above 0. Entry {int(flat.nonzero()[0])} of mu has none."
        )
