r"""`KKT`: the gradient of a loss from the optimality conditions of inference, as one sparse linear system.

Message passing ends at a stationary point of theta . mu + H(mu) under the constraints B mu = d of the local polytope,
and a `ConvexFreeEnergy` at one with H(mu) = -sum_f w_f . f(mu),

    theta + dH/dmu + B^T lambda = 0,        B mu = d                                               (Domke 2010, eq. 20)

and differentiating these gives dmu/dtheta as minus the upper left block of the inverse below (Domke 2010, eq. 22;
Domke 2008, claim 2). With g = dL/dmu, dL/dtheta is the x of

    [ D  B^T ] [ x ]   [ -g ]
    [ B  0   ] [ y ] = [  0 ],        D = d^2H/dmu^2, diagonal: -c_c / mu_c and -c_i / mu_i, or -sum_f w_f f''(mu).

Where D is regular this is (D^-1 B^T (B D^-1 B^T)^-1 B D^-1 - D^-1) g (Domke 2010, eq. 13; Domke 2013, the theorem of
section 5); solved whole, it also serves counting numbers c_i = 0. States of probability 0 stay at 0 and are left out.
The gradient in the weights of a free energy is -x f'(mu) (Domke 2008, eq. 19).

The rows of B: one per message (factor, slot, state), sum_{x_c \ i} mu_c - mu_i = 0, and one per variable, sum mu_i = 1.
Of every slot of a factor but the first one row is dropped, since all of them repeat that mu_c sums to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.adjoints._attach import Jacobian, attach
from riskfield.adjoints._refusals import (
    require_convergence,
    require_finite,
    require_optimality,
    require_theta_only,
)
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.kkt_solvers import AbstractSolver, Direct, FloatArray, System
from riskfield.errors import AdjointWarning, warn
from riskfield.graph._scopes import IntArray
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.convex.newton import Newton
from riskfield.inference.convex.polytope import polytope
from riskfield.inference.request import Request
from riskfield.inference.solution import Solution

_SMALLEST = 1e-300  # the inverse of smaller marginals, times a counting number, may not be finite
# A warning is due where the marginals disagree by this share.
_UNSETTLED = 1e-2
_ENOUGH = 1e-12  # how right a solution by elimination has to be


@dataclass(frozen=True)
class KKT(AbstractAdjoint):
    """Differentiate converged marginals on the local polytope by a sparse linear solve.

    For `MessagePassing` with any entropy, and for `ConvexFreeEnergy`, where gradients reach theta and all weights. The
    run itself must converge: its error enters the gradient. Memory does not grow with the number of sweeps, but
    `Direct` needs memory that grows faster than the graph.

    Arguments:
        solver: `Direct()` or `Minres()`.

    Raises:
        ValueError: on use, for a run without a tolerance and for other algorithms; the message names the alternative.
        AdjointError: in the backward pass, if the solve fails; the message has its residual. It fails at a stationary
            point that is about to split or vanish, where there is no gradient.

    Warns:
        AdjointWarning: in the backward pass, if marginals have not converged, or if a belief is so close to 0 that a
            `ConvexFreeEnergy` without a steep function may not be differentiable there.

    >>> import torch
    >>> from riskfield import KKT, MessagePassing, Stop, TRW, grid, infer
    >>> graph = grid(3, 3, num_states=2)
    >>> theta = graph.zeros().requires_grad_()
    >>> solution = infer(graph, theta, MessagePassing(TRW(0.5)), stop=Stop(tol=1e-10), adjoint=KKT())
    >>> loss = -graph.node(solution.mu, 4)[1].log()
    >>> loss.backward()
    >>> graph.node(theta.grad, 4)
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    solver: AbstractSolver = field(default_factory=Direct)

    def __post_init__(self) -> None:
        if not isinstance(self.solver, AbstractSolver):
            raise TypeError(f"`solver` must be `Direct()` or `Minres()`. Got {self.solver!r}.")

    def apply(self, request: Request) -> Solution:
        """Run without gradients; the backward pass solves the system."""
        require_convergence(request, "KKT")
        conditions = require_optimality(request, "KKT")
        if not conditions.differentiates_parameters:
            require_theta_only(request, "KKT")
        graph, solution = request.graph, request.solve()
        mu, undecided = solution.mu.clone(), conditions.undecided(solution)
        slopes = conditions.parameter_slopes(mu)

        def product(grad: Tensor) -> Tensor:
            if undecided is not None and undecided.any():
                warn(
                    f"`KKT`: {int(undecided.sum())} beliefs are at 0 and about to leave it, where they are not "
                    "differentiable: the gradient is one-sided. Give these configurations some NEGATIVE_ENTROPY.",
                    AdjointWarning,
                )
            return self._product(graph, mu, conditions.curvature(mu.double()), grad, conditions.remedy)

        def vjp(grad: Tensor) -> tuple[Tensor, ...]:
            found = product(grad)
            return graph.collapse(found), *(slope * found for slope in slopes)

        def jvp(v: tuple[Tensor, ...]) -> Tensor:
            along = graph.expand(v[0])
            for slope, part in zip(slopes, v[1:], strict=True):
                along = along + slope * part
            return product(along)

        numbers = request.algorithm.parameters(graph) if conditions.differentiates_parameters else ()
        return attach(request, solution, Jacobian(vjp, jvp), [number.to(mu).expand_as(mu) for number in numbers])

    def _product(self, graph: FactorGraph, mu: Tensor, curvature: Tensor, grad: Tensor, remedy: str) -> Tensor:
        """The symmetric dmu/dtheta times `grad`, in the layout of mu, at marginals where -D is diag(curvature)."""
        require_finite(grad, "KKT")
        if not mu.numel():
            return torch.zeros_like(grad)
        smallest = max(torch.finfo(mu.dtype).tiny, _SMALLEST)
        items, curvatures, grads = (t.reshape(-1, graph.mu_size).double().cpu() for t in (mu, curvature, grad))
        out, left = torch.zeros_like(grads), torch.ones(len(items), dtype=torch.bool)
        # Where all counting numbers are positive elimination is several times faster, and checked.
        if isinstance(self.solver, Direct) and (curvatures >= 0).all() and _factors_curve(graph, items, curvatures):
            out, solved = solve_convex(graph, items, curvatures, grads, smallest)
            left, unsettled = ~solved, unsettled_convex(graph, items, grads, smallest)
        else:
            unsettled = 0.0
        if left.any():
            conditions = _Conditions(graph, remedy)
            for k in left.nonzero().ravel().tolist():
                item, item_curvature, item_grad = (t[k].numpy() for t in (items, curvatures, grads))
                found = conditions.solve(item, item_curvature, item_grad, self.solver, smallest)
                out[k] = torch.from_numpy(found)
                unsettled = max(unsettled, conditions.unsettled(item, item_grad, smallest))
        if unsettled > _UNSETTLED:
            warn(
                f"`KKT`: marginals that the loss depends on are consistent only to {unsettled:.2g} of their size. The "
                f"relative error of the gradient may be as large. {remedy}",
                AdjointWarning,
            )
        return out.reshape(grad.shape).to(grad)


def _factors_curve(graph: FactorGraph, mu: Tensor, curvature: Tensor) -> bool:
    """Whether all curvatures of factors are above 0, where the marginals are."""
    return bool(((curvature > 0) | (mu <= 0))[:, graph.node_size :].all())


def solve_convex(
    graph: FactorGraph, mu: Tensor, curvature: Tensor, grad: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """x of curvature x - grad = B^T y, B x = 0, at beliefs of shape (item, mu), and for which items it was found.

    It is 0 where a belief is below `smallest`. Curvatures of factors must be above 0 elsewhere.
    """
    possible = mu >= smallest
    curvature = torch.where(possible, curvature, 1.0)
    newton = Newton(polytope(graph), mu, curvature, possible)
    # In units of what it would be without constraints and under an entropy, so that an error is a relative one.
    size = torch.where(possible, grad * mu, 0.0).abs().amax(1, keepdim=True)
    unit = torch.where(size > 0, size, 1.0)
    found, solved = newton.solve(-grad / unit, newton.polytope.missing(mu).nothing(), _ENOUGH)
    return torch.where(size > 0, found * unit, 0.0), solved


def unsettled_convex(graph: FactorGraph, mu: Tensor, grad: Tensor, smallest: float) -> float:
    """How inconsistent beliefs are, relative to each and weighed by its share in the gradient: see `_Conditions`."""
    local = polytope(graph)
    # The last states, whose constraints follow from the others', are to be the most probable ones.
    order = local.relabelling(mu)
    mu, grad = mu.gather(1, order), grad.gather(1, order)
    share = (mu * grad).abs()
    most = share.amax(1)
    share = share / torch.where(most > 0, most, 1.0)[:, None]
    free, free_share, worst = local.free(mu), local.free(share), 0.0
    for block, missing in zip(local.blocks, local.missing(mu).rows, strict=True):
        node = block.rows(free)
        weight = block.rows(free_share) + block.sums @ block.cells(share).T
        gap = torch.where(node >= smallest, missing.abs() / node * weight, 0.0)
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst


class _Conditions:
    """The constraints on one graph: what does not depend on mu."""

    def __init__(self, graph: FactorGraph, remedy: str):
        from scipy.sparse import coo_array

        self.graph, self.remedy = graph, remedy
        variable = np.repeat(np.arange(graph.num_variables), graph.num_states)
        state = np.arange(len(variable)) - np.repeat(np.cumsum(graph.num_states) - graph.num_states, graph.num_states)
        node_entry = graph.node_start[variable] + state
        first = graph.message_size
        rows, columns, values = [first + variable], [node_entry], [np.ones(len(variable))]
        self.entry_of_row = np.empty(first, np.int64)  # the node marginal that each message constraint is about
        self.ends: list[tuple[int, int, int]] = []  # rows of a slot other than the first: start, factors, states
        for group in graph.factor_groups:
            cells = np.arange(group.mu_start, group.mu_stop)
            table_states = np.unravel_index(np.arange(group.table_size), group.shape)
            for slot, size in enumerate(group.shape):
                start, stop = group.message_range(slot)
                of_factor = start + size * np.arange(group.num_factors)[:, None]
                entry = graph.node_entries(group.variables[:, slot]).ravel()
                rows += [(of_factor + table_states[slot]).ravel(), np.arange(start, stop)]
                columns += [cells, entry]
                values += [np.ones(len(cells)), -np.ones(len(entry))]
                self.entry_of_row[start:stop] = entry
                if slot:
                    self.ends.append((start, group.num_factors, size))
        triple: Any = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
        self.matrix = coo_array(triple, shape=(first + graph.num_variables, graph.mu_size)).tocsr()
        self.sums = self.matrix[:first].maximum(0)  # of the marginals of factors, for each message constraint

    def solve(
        self, mu: FloatArray, curvature: FloatArray, grad: FloatArray, solver: AbstractSolver, smallest: float
    ) -> FloatArray:
        """dL/dtheta in the layout of mu, for one item."""
        from scipy.sparse import block_array, diags_array

        graph = self.graph
        states = np.flatnonzero(mu >= smallest)
        # In the unknowns x / scale every entry of the matrix is at most 1 however improbable a state is: those of B
        # become square roots of conditional probabilities.
        scale = 1 / np.sqrt(self._total(mu, curvature, states)[states])
        right = -scale * grad[states]
        largest = np.abs(right).max(initial=0.0)
        out = np.zeros(graph.mu_size)
        if largest == 0:
            return out
        constraints = self.matrix[self._kept_rows(mu, smallest)][:, states] @ diags_array(scale)
        lengths = np.sqrt(constraints.multiply(constraints).sum(axis=1))
        constraints = diags_array(1 / lengths) @ constraints
        matrix = block_array(
            [[diags_array(-curvature[states] * scale**2), constraints.T], [constraints, None]], format="csr"
        )
        rhs = np.concatenate([right / largest, np.zeros(len(lengths))])
        system = System(matrix, rhs, len(states), np.concatenate([scale, lengths]), self.remedy)
        out[states] = largest * scale * solver.solve(system)[: len(states)]
        return out

    def _total(self, mu: FloatArray, curvature: FloatArray, states: IntArray) -> FloatArray:
        """The curvature of each marginal when its factors follow: c^_i / mu_i and c_c / mu_c for an entropy."""
        inverse = np.zeros_like(mu)
        own = states[curvature[states] > 0]
        inverse[own] = 1 / curvature[own]
        sums = self.sums @ inverse
        total = curvature.copy()
        np.add.at(total, self.entry_of_row[sums > 0], 1 / sums[sums > 0])
        # A scale is all it is for: where marginals have not settled, any positive number will do.
        return np.where(total > 0, total, 1 / np.maximum(mu, _SMALLEST))

    def unsettled(self, mu: FloatArray, grad: FloatArray, smallest: float) -> float:
        """How inconsistent the marginals are, relative to each and weighed by its share in the gradient.

        A tolerance on marginals says nothing about the ratios of very small ones, which a loss may depend on.
        """
        share = np.abs(mu * grad)
        if not share.any():
            return 0.0
        rows = self._kept_rows(mu, smallest)
        rows = rows[rows < self.graph.message_size]
        gap = np.abs(self.matrix @ mu)[rows] / mu[self.entry_of_row[rows]]
        return float((gap * (abs(self.matrix) @ share)[rows]).max(initial=0.0) / share.max())

    def _kept_rows(self, mu: FloatArray, smallest: float) -> IntArray:
        node = mu[self.entry_of_row]
        kept = node >= smallest
        for start, factors, size in self.ends:
            # The row of the most probable state is the one to drop: the others then fix it well.
            block = node[start : start + factors * size].reshape(factors, size)
            kept[start + size * np.arange(factors) + block.argmax(axis=1)] = False
        return np.flatnonzero(np.concatenate([kept, np.ones(self.graph.num_variables, bool)]))
