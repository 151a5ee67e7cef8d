"""Losses, models and truths that the tests of gradients share."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch

import riskfield as rf
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


def solve(graph, theta, algorithm, stop, adjoint, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.ConvergenceWarning)
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
    """The finite entries of theta as a vector, and the way back from such a vector."""
    finite = torch.isfinite(theta)
    return theta[finite].clone(), lambda x: theta.masked_scatter(finite, x)


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
