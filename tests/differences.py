"""Losses on marginals, and their gradients with respect to theta by finite differences of the converged objective."""

from __future__ import annotations

import warnings

import numpy as np
import torch

import riskfield as rf

TIGHT = rf.Stop(sweeps=5000, tol=1e-14)


def univariate_logistic(graph, mu, seed=0):
    """-sum_i log mu_i(x_i) at random states that are possible in every batch item."""
    rng = np.random.default_rng(seed)
    total = 0 * mu.sum()  # so that the loss depends on mu even if nothing is added
    for v in range(graph.num_variables):
        block = graph.node(mu, v)
        possible = torch.nonzero((block.detach() > 0).reshape(-1, block.shape[-1]).all(0)).ravel().tolist()
        if possible:
            total = total - block[..., int(rng.choice(possible))].log().sum()
    return total


def clique_logistic(graph, mu, seed=0):
    """-sum_c log mu_c(x_c) at random joint states that are possible in every batch item."""
    rng = np.random.default_rng(seed)
    total = 0 * mu.sum()  # so that the loss depends on mu even if nothing is added
    for group in graph.factor_groups:
        for row in range(group.num_factors):
            start = group.mu_start + row * group.table_size
            block = mu[..., start : start + group.table_size]
            possible = torch.nonzero((block.detach() > 0).reshape(-1, block.shape[-1]).all(0)).ravel().tolist()
            if possible:
                total = total - block[..., int(rng.choice(possible))].log().sum()
    return total


def random_quadratic(graph, mu, seed=0):
    """A quadratic function of mu that couples all entries."""
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.normal(size=(3, graph.mu_size))).to(mu)
    return ((mu @ weights.T) ** 2).sum() + (mu @ weights[0]).sum()


LOSSES = [univariate_logistic, clique_logistic, random_quadratic]


def gradient(graph, theta, algorithm, loss, adjoint, stop=TIGHT, **options):
    """dL/dtheta by `adjoint`."""
    theta = theta.clone().requires_grad_()
    solution = rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint, **options)
    (out,) = torch.autograd.grad(loss(graph, solution.mu), theta)
    return out


def differences(graph, theta, algorithm, loss, stop=TIGHT, step=1e-4, **options):
    """dL/dtheta by four-point central differences of L, and whether every run converged."""
    out, converged = torch.zeros_like(theta), True
    entries = torch.isfinite(theta).nonzero().tolist()
    for entry in map(tuple, entries):
        steps = step * torch.tensor([2.0, 1.0, -1.0, -2.0], dtype=theta.dtype)
        shifted = theta.expand(4, *theta.shape).clone()
        shifted[(slice(None), *entry)] += steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
            runs = rf.infer(graph, shifted, algorithm, stop=stop, **options)
        converged &= bool((runs.residual < 1e-12).all())
        values = torch.stack([loss(graph, mu) for mu in runs.mu])
        weights = torch.tensor([-1.0, 8.0, -8.0, 1.0], dtype=theta.dtype) / (12 * step)
        out[entry] = (weights * values).sum()
    return out, converged


def error(actual, expected):
    """The largest absolute error, divided by the largest expected entry or by 1, whichever is larger."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
