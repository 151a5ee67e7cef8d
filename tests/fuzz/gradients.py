"""Graphs x algorithms x adjoints: gradients against finite differences, and native against torch."""

from __future__ import annotations

import torch

import riskfield as rf
from cases import CASES
from fuzz import Uninteresting
from fuzz.models import random_graph, random_theta
from gradient_cases import METHODS, SETTLED, finite_differences, free_entries, objective, run

PAIRS = [(case, method) for case in CASES for method in METHODS if case.kernels and case.marginals]
PAIRS = [(case, method) for case, method in PAIRS if method.offers(case)]


def example(rng):
    case, method = PAIRS[rng.integers(len(PAIRS))]
    graph = random_graph(rng, max_variables=5, max_states=3)
    if graph.theta_size > 120:
        raise Uninteresting
    kinds = ("mild", "impossible") if not method.converges else ("mild",)
    theta = random_theta(graph, rng, kinds=kinds)
    algorithm = case.make(graph, tuple(rng.permutation(graph.num_variables).tolist()))
    free, fill = free_entries(theta)
    weights = torch.from_numpy(rng.normal(size=(2, graph.mu_size)))

    def loss(mu):
        return (mu @ weights[0]) ** 2 + mu @ weights[1]

    try:
        if method.converges:
            _require_convergence(graph, theta, algorithm)
        leaf = free.clone().requires_grad_()
        solution = run(graph, fill(leaf), algorithm, method)
    except (rf.errors.ImpossibleEvidenceError, rf.errors.AdjointError) as error:
        raise Uninteresting from error
    (gradient,) = torch.autograd.grad(loss(solution.mu), leaf)
    expected = finite_differences(lambda x: loss(objective(graph, fill(x), algorithm, method.converges)), free)
    scale = 1 + float(expected.abs().max()) if expected.numel() else 1.0
    error = float((gradient - expected).abs().max()) if expected.numel() else 0.0
    allowed = 20 * max(method.accuracy, 1e-7) * scale
    assert error <= allowed, f"{case.name}, {method.name}: off by {error:.3g}, allowed {allowed:.3g}"


def _require_convergence(graph, theta, algorithm):
    """Whether finite differences of the converged marginals mean anything: far from a bifurcation, that is."""
    first = rf.infer(graph, theta, algorithm, stop=SETTLED)
    if not (first.residual < 1e-14).all():
        raise Uninteresting
