"""Adjoints, losses, models and truths that the tests of gradients share. A new adjoint is one row here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import riskfield as rf
from cases import CASES, Case
from strategies import potentials

TRUNCATED = rf.Stop(sweeps=3, tol=None)
CONVERGED = rf.Stop(sweeps=20_000, tol=1e-14)

# Arities 1 to 4, mixed states, a variable of one state, a tied pair, an isolated variable.
MIXED = rf.FactorGraph(
    [2, 3, 2, 4, 1, 2],
    [(0, 1), (1, 2), (2, 0), (2, 1, 0), (3,), (3, 0, 1, 2), (4, 3)],
    tables=[0, 1, 2, 3, 4, 5, 6],
)
TIED = rf.FactorGraph([2, 2, 2, 3], [(0, 1), (1, 2), (2, 0), (3, 1)], tables=[0, 0, 0, 1])


def random_graph(seed):
    """Arities 1 to 4, two factors of each, on five variables of one to three states."""
    rng = np.random.default_rng(seed)
    scopes = [tuple(rng.permutation(5)[:arity].tolist()) for arity in (1, 2, 3, 4) for _ in range(2)]
    return rf.FactorGraph(rng.integers(1, 4, size=5), [scopes[k] for k in rng.permutation(8)])


@dataclass(frozen=True)
class Method:
    """One adjoint with its settings, and the algorithms it is offered for."""

    name: str
    adjoint: rf.adjoints.AbstractAdjoint
    offers: Callable[[Case], bool]
    accuracy: float  # relative, on tame models

    @property
    def converges(self) -> bool:
        """Whether what it differentiates is the converged marginals, not the sweeps that ran."""
        return not isinstance(self.adjoint, rf.Unroll)


def _marginals(case):
    return case.marginals


def _sweeps(case):
    return case.marginals and case.iterative


def _passes_messages(case):
    return _sweeps(case) and case.name != "mean-field"


METHODS = [
    Method("Unroll", rf.Unroll(), lambda case: True, 1e-8),
    Method("Unroll-2", rf.Unroll(checkpoint=2), lambda case: True, 1e-8),
    Method("FixedPoint", rf.FixedPoint(), _sweeps, 1e-8),
    Method("Perturb-1", rf.Perturb(1), _marginals, 1e-5),
    Method("Perturb-2", rf.Perturb(2), _marginals, 1e-7),
    Method("Perturb-4", rf.Perturb(4), _marginals, 1e-8),
    Method("KKT-Direct", rf.KKT(rf.adjoints.Direct()), _passes_messages, 1e-8),
    Method("KKT-Minres", rf.KKT(rf.adjoints.Minres()), _passes_messages, 1e-8),
]


def pairs(select=lambda case, method: method.offers(case) and case.marginals):
    """Run a test over pairs of an algorithm and a method, by default all that are offered and give marginals."""
    chosen = [(case, method) for case in CASES if case.kernels for method in METHODS if select(case, method)]
    return pytest.mark.parametrize(("case", "method"), chosen, ids=[f"{c.name}-{m.name}" for c, m in chosen])


SETTLED = rf.Stop(200, None)  # for the models here


def run(graph, theta, algorithm, method, **options):
    """What a method differentiates: three sweeps for `Unroll`, for all others a run that has settled.

    A tolerance looks at node marginals, and the marginals of factors may take twice as long. So there are many sweeps
    first, whatever the residual says.
    """
    if not method.converges:
        return solve(graph, theta, algorithm, TRUNCATED, method.adjoint, **options)
    start = solve(graph, theta.detach(), algorithm, SETTLED, None, **options).messages
    stop = rf.Stop(2000, 1e-13 if theta.dtype == torch.float64 else 1e-6)
    return solve(graph, theta, algorithm, stop, method.adjoint, messages=start, **options)


def objective(graph, theta, algorithm, converges, **options):
    """The marginals of `run`, without a gradient."""
    return solve(graph, theta, algorithm, SETTLED if converges else TRUNCATED, None, **options).mu


def solve(graph, theta, algorithm, stop, adjoint, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint, **options)


def losses(graph, mu, seed, states=None):
    """Univariate logistic, clique logistic and a random quadratic of all marginals, of shape (*batch, 3)."""
    rng = np.random.default_rng(seed)
    drawn = [int(rng.integers(n)) for n in graph.num_states] if states is None else states
    univariate = sum(-graph.node(mu, v)[..., x].log() for v, x in enumerate(drawn))
    clique = torch.zeros_like(univariate)
    for group, view in zip(graph.factor_groups, graph.factor_views(mu), strict=True):
        for row, scope in enumerate(group.variables.tolist()):
            clique = clique - view[(..., row, *(drawn[v] for v in scope))].log()
    directions = torch.from_numpy(rng.normal(size=(2, graph.mu_size))).to(mu)
    quadratic = ((mu @ directions.T) ** 2).sum(-1)
    return torch.stack([univariate, clique, quadratic], -1)


def loss_gradient(graph, theta, algorithm, method, *, seed=0, states=None, **options):
    """d/dtheta of the sum of `losses` after `run`."""
    theta = theta.detach().clone().requires_grad_()
    solution = run(graph, theta, algorithm, method, **options)
    return torch.autograd.grad(losses(graph, solution.mu, seed, states).sum(), theta)[0]


def gradient(graph, theta, algorithm, stop, adjoint, *, seed=0, states=None, **options):
    """d/dtheta of the sum of `losses`."""
    theta = theta.detach().clone().requires_grad_()
    solution = solve(graph, theta, algorithm, stop, adjoint, **options)
    return torch.autograd.grad(losses(graph, solution.mu, seed, states).sum(), theta)[0]


def finite_differences(loss, x, step=3e-4):
    """dL/dx by four-sided differences in every entry, for a loss of batches."""
    with torch.no_grad():
        moves = step * torch.eye(len(x), dtype=x.dtype)
        far, near, back, farthest = loss(x + torch.stack([2 * moves, moves, -moves, -2 * moves]))
    return (-far + 8 * near - 8 * back + farthest) / (12 * step)


def free_entries(theta):
    """The finite entries of theta as a vector, and the way back from such vectors."""
    finite = torch.isfinite(theta)
    places = finite.nonzero().ravel()
    return theta[finite].clone(), lambda x: theta.expand(*x.shape[:-1], -1).index_copy(-1, places, x)


def hard_theta(graph, kind, seed):
    """Impossible joint states (x = 0 everywhere stays possible), or potentials of +-200."""
    theta = potentials(graph, seed)
    rng = np.random.default_rng(seed)
    if kind == "impossible":
        theta[torch.from_numpy(rng.random(theta.shape) < 0.2)] = -math.inf
        for v in range(graph.num_variables):
            graph.node(theta, v)[0] = 0.3
        for f in range(graph.num_factors):
            graph.factor(theta, f).view(-1)[0] = 0.1
    else:
        theta = theta + torch.from_numpy(rng.choice([-200.0, 0.0, 200.0], size=theta.shape))
    return theta
