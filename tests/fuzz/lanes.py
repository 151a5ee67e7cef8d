"""Batches on the native kernels, with level lanes and with batch lanes, against the torch kernels, to 1e-10."""

from __future__ import annotations

import torch

import riskfield as rf
from cases import CASES, lanes
from fuzz.models import random_evidence, random_graph, random_theta
from riskfield import kernels

ALGORITHMS = [case for case in CASES if case.iterative and case.kernels]
TOLERANCE = 1e-10


def example(rng):
    graph = random_graph(rng, forest=False, max_variables=9)
    batch = int(rng.integers(1, 20))
    theta, evidence = random_theta(graph, rng, batch), random_evidence(graph, rng, batch)
    theta[rng.random(batch) < 0.1] *= 50  # needs logarithms
    theta = theta if evidence is None else rf.inference.clamp(graph, theta, evidence)
    case = ALGORITHMS[rng.integers(len(ALGORITHMS))]
    problem = case.make(graph, tuple(rng.permutation(graph.num_variables).tolist())).problem(graph)
    sweeps = int(rng.integers(1, 5))
    weights = torch.from_numpy(rng.normal(size=(batch, graph.mu_size)))
    expected, gradient = _reference(problem, theta, sweeps, weights)
    possible = ~expected.isnan().any(1)
    # Mean field with large potentials may double a difference many times in a sweep, so rounding theta is no error.
    moved = _reference(problem, theta * (1 + 4e-16 * torch.from_numpy(rng.normal(size=theta.shape))), sweeps, weights)
    scale = 1 + theta[theta.isfinite()].abs().max() if theta.isfinite().any() else 1.0
    for batch_lanes in (False, True):
        with lanes(batch_lanes):
            run = kernels.start(
                problem, theta, record=kernels.EVERY_SWEEP if case.marginals else None, kernels="native"
            )
            run.advance(sweeps, -1.0)
            mu = run.marginals()
            assert torch.equal(mu.isnan().any(1), ~possible), f"impossible models, {case.name}"
            _close(
                mu[possible], expected[possible], moved[0][possible], scale, f"marginals, {case.name}, {batch_lanes=}"
            )
            if case.marginals:
                found = run.backward(torch.where(possible[:, None], weights, 0.0))
                # Moving a state that is impossible means nothing.
                use = possible[:, None] & theta.isfinite()
                _close(found[use], gradient[use], moved[1][use], scale, f"gradients, {case.name}, {batch_lanes=}")


def _reference(problem, theta, sweeps, weights):
    leaf = theta.clone().requires_grad_()
    run = kernels.start(problem, leaf, kernels="torch")
    run.advance(sweeps, -1.0)
    mu = run.marginals()
    possible = ~mu.detach().isnan().any(1, keepdim=True)
    (gradient,) = torch.autograd.grad(torch.where(possible, mu * weights, 0.0).sum(), leaf)
    return mu.detach(), gradient


def _close(actual, expected, moved, scale, what):
    if not actual.numel():
        return
    error, rounding = (float((found - expected).abs().max()) for found in (actual, moved))
    size = float(scale) * (1 + float(expected.abs().max()))
    assert error <= TOLERANCE * size + 100 * rounding, f"{what}: off by {error:.3g}"
