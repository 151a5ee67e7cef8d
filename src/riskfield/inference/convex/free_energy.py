r"""Inference as the minimisation of any convex function of the beliefs (Domke 2008).

    b = argmin  -theta . b + sum_f sum_r sum_{x_r} w_f(x_r) f(b_r(x_r))    over the local polytope      (eqs. 1-8)

where the regions r are variables and factors, the functions f convex and their weights w_f, one per configuration of
every region, not negative. Theta is minus the paper's weight of f(b) = b, so that -inf marks impossible states here as
everywhere. With f(b) = b log b alone and weights that do not vary within a region these are counting numbers, and the
beliefs those of message passing, which can then compute them (`SumProduct`), also for negative ones such as Bethe's.
All others are found by a primal-dual interior-point method (`InteriorPoint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.entropy import CountingNumbers
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.algorithm import AbstractAlgorithm, AbstractOptimality
from riskfield.inference.convex.interior_point import InteriorPointRun
from riskfield.inference.convex.terms import NEGATIVE_ENTROPY, Term
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.solution import Solution, inner_product
from riskfield.kernels import Run

# A bound with a belief and a multiplier below this is about to become active, or to cease to be.
_UNDECIDED = 1e-5


@dataclass(frozen=True)
class InteriorPoint:
    """A primal-dual interior-point method, for any convex terms with weights that are not negative.

    A sweep is a Newton step, in float64 on the CPU whatever the dtype and device of theta. Ten to twenty-five steps are
    usually enough, however strong the potentials.
    """


@dataclass(frozen=True)
class SumProduct:
    """Message passing, for terms of b log b alone whose weights are counting numbers, negative ones included.

    A sweep is a sweep of messages, and cheaper than a Newton step. With strong potentials it may take thousands.
    """


Solver = InteriorPoint | SumProduct


@dataclass(frozen=True, eq=False)
class ConvexFreeEnergy(AbstractAlgorithm):
    """Beliefs that minimise -theta . b + sum_f w_f . f(b) over the local polytope.

    Gradients reach theta and the weights by `KKT`, theta alone by `Perturb` and `Envelope`.

    Arguments:
        terms: what is added to the linear term -theta . b. By default b log b with weights 1.
        solver: `InteriorPoint()` or `SumProduct()`. By default message passing where the weights are counting numbers,
            and the interior-point method elsewhere.

    Raises:
        ValueError: on use, if a weight is negative (unless the weights are counting numbers, see `CountingNumbers`), if
            a configuration has no strictly convex term, if weights do not fit the graph or the batch, or if the solver
            is `SumProduct()` and the weights are not counting numbers.

    >>> import torch
    >>> from riskfield import ConvexFreeEnergy, grid, infer
    >>> from riskfield.inference import NEGATIVE_ENTROPY, SQUARE, Term
    >>> graph = grid(2, 2, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.node(theta, 0)[1] = 2.0
    >>> energy = ConvexFreeEnergy([Term(NEGATIVE_ENTROPY, torch.linspace(0.5, 2, graph.mu_size)), Term(SQUARE, 0.1)])
    >>> graph.node(infer(graph, theta, energy).mu, 0).round(decimals=4)
    tensor([0.3541, 0.6459], dtype=torch.float64)
    """

    unrolls: ClassVar[bool] = False
    any_kernels: ClassVar[bool] = True
    symmetric_jacobian: ClassVar[bool] = True
    parameter_name: ClassVar[str] = "weights"
    convergence_advice: ClassVar[str] = (
        "Allow more sweeps. Where the weights are counting numbers message passing ran; if none is negative, "
        "`solver=InteriorPoint()` takes Newton steps instead. If these have become infinite or stopped falling, "
        "weights differ by too many orders of magnitude for the tolerance: make the smallest larger, or the tolerance."
    )

    terms: Sequence[Term] = (Term(NEGATIVE_ENTROPY),)
    solver: Solver | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        for k, term in enumerate(self.terms):
            if not isinstance(term, Term):
                raise TypeError(f"`terms[{k}]` must be a Term, such as `Term(NEGATIVE_ENTROPY, 1.0)`. Got {term!r}.")
        if not self.terms:
            raise ValueError("`terms` must hold at least one Term: theta alone has no unique minimiser.")
        if self.solver is not None and not isinstance(self.solver, Solver):
            raise TypeError(f"`solver` must be `InteriorPoint()`, `SumProduct()` or None. Got {self.solver!r}.")

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
            if isinstance(self.solver, SumProduct):
                raise ValueError(
                    "`solver=SumProduct()` needs weights of NEGATIVE_ENTROPY alone that are valid counting numbers, "
                    "one per region and the same for all batch items. Use `InteriorPoint()`."
                )
            _check_convex(graph, self.terms)

    def start(self, graph: FactorGraph, theta: Tensor, messages: Tensor | None, kernels: str | None) -> Run:
        """Begin from uniform beliefs, or from `messages`.

        The state is that of message passing, followed by that of the interior-point method, the one not in use 0: so
        weights may become counting numbers, or cease to be, between two runs.
        """
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
        if isinstance(self.solver, InteriorPoint):
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
        """The optimality conditions of theta . b - sum_f w_f . f(b) on the local polytope."""
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
