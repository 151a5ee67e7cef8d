"""Graphs x algorithms x kernels x precisions: against enumeration, against each other, and bounds that must hold."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch

import riskfield as rf
from cases import CASES
from fuzz.models import random_batch, random_evidence, random_graph, random_theta
from riskfield.kernels import native_available
from strategies import brute_force

LONG = rf.Stop(3000, 1e-11)


def example(rng):
    graph, batch = random_graph(rng), random_batch(rng)
    theta, evidence = random_theta(graph, rng, *batch), random_evidence(graph, rng, *batch)
    clamped = theta if evidence is None else rf.inference.clamp(graph, theta, evidence)
    flat = clamped.reshape(-1, graph.theta_size)
    truths = [brute_force(graph, row) for row in flat]
    possible = all(truth.log_partition > -math.inf for truth in truths)
    _check_exact(graph, theta, evidence, truths, possible)
    case = CASES[rng.integers(len(CASES))]
    order = tuple(rng.permutation(graph.num_variables).tolist())
    algorithm = case.make(graph, order)
    if case.iterative and case.kernels and native_available():
        _check_kernels(graph, theta, evidence, algorithm, int(rng.integers(0, 8)), case.marginals, rng)
    if possible and case.marginals:
        _check_converged(graph, clamped, algorithm, truths, rng)


def _infer(graph, theta, algorithm, stop, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(graph, theta, algorithm, stop=stop, **options)


def _check_exact(graph, theta, evidence, truths, possible):
    """`Exact` against the sum over all joint states."""
    if not possible:
        try:
            rf.infer(graph, theta, rf.Exact(), evidence=evidence)
        except rf.errors.ImpossibleEvidenceError:
            return
        raise AssertionError("a model without a possible state was accepted")
    solution = rf.infer(graph, theta, rf.Exact(), evidence=evidence)
    mu, value = solution.mu.reshape(-1, graph.mu_size), solution.log_partition.reshape(-1)
    for k, truth in enumerate(truths):
        value_of = torch.tensor(truth.log_partition, dtype=torch.float64)
        _close(mu[k], truth.mu, 1e-9, "marginals of Exact")
        _close(value[k], value_of, 1e-10 * (1 + abs(truth.log_partition)), "log Z of Exact")


def _check_kernels(graph, theta, evidence, algorithm, sweeps, marginals, rng):
    """The same sweeps on the native kernels as on the torch kernels, in both precisions."""
    single = rng.random() < 0.3
    theta = theta.float() if single else theta
    stop = rf.Stop(sweeps, None)
    try:
        reference = _infer(graph, theta.double(), algorithm, stop, evidence=evidence, kernels="torch")
    except rf.errors.ImpossibleEvidenceError:
        try:
            _infer(graph, theta, algorithm, stop, evidence=evidence, kernels="native")
        except rf.errors.ImpossibleEvidenceError:
            return
        raise AssertionError("the native kernels accept what the torch kernels find impossible") from None
    solution = _infer(graph, theta, algorithm, stop, evidence=evidence, kernels="native")
    finite = theta[torch.isfinite(theta)]
    scale = 1 + (float(finite.abs().max()) if finite.numel() else 0.0)
    tolerance = (1e-5 if single else 1e-11) * scale * (1 + sweeps)
    _close(solution.mu.double(), reference.mu, tolerance, "marginals, native and torch")
    if marginals:
        bound = tolerance * scale * (1 + graph.num_factors)
        _close(solution.log_partition.double(), reference.log_partition, bound, "log Z, native and torch")


def _check_converged(graph, theta, algorithm, truths, rng):
    """Fixed points: exact on forests, and bounds on everything."""
    try:
        solution = _infer(graph, theta, algorithm, LONG)
    except rf.errors.ImpossibleEvidenceError:
        assert isinstance(algorithm, rf.MeanField), "a possible model was found impossible"  # it cannot do constraints
        return
    mu = solution.mu.reshape(-1, graph.mu_size)
    values, converged = solution.log_partition.reshape(-1), solution.converged.reshape(-1)
    nodes = graph.node_views(mu)
    assert all(torch.allclose(view.sum(-1), torch.ones(()).to(view)) for view in nodes), "marginals sum to 1"
    bethe = isinstance(algorithm, rf.MessagePassing) and isinstance(algorithm.entropy, rf.Bethe)
    for k, truth in enumerate(truths):
        scale = 1e-7 * (1 + abs(truth.log_partition))
        if not converged[k]:
            continue
        if bethe and graph.is_forest:
            _close(mu[k], truth.mu, 1e-7, "marginals on a forest")
            _close(values[k], torch.tensor(truth.log_partition, dtype=torch.float64), scale, "log Z on a forest")
        if isinstance(algorithm, rf.MeanField):
            assert values[k] <= truth.log_partition + scale, "mean field is no lower bound"
    if bethe and rng.random() < 0.5 and _is_pairwise(graph):
        rho = rf.entropy.spanning_tree_rho(graph)
        bounded = _infer(graph, theta, replace(algorithm, entropy=rf.TRW(rho)), LONG)
        for value, done, truth in zip(
            bounded.log_partition.reshape(-1), bounded.converged.reshape(-1), truths, strict=True
        ):
            scale = 1e-7 * (1 + abs(truth.log_partition))
            assert not done or value >= truth.log_partition - scale, "TRW is no upper bound"


def _is_pairwise(graph):
    return graph.num_factors > 0 and all(group.arity == 2 for group in graph.factor_groups)


def _close(actual, expected, tolerance, what):
    expected = expected.to(actual)
    error = torch.where(actual == expected, 0.0, (actual - expected).abs())  # -inf is equal to -inf
    worst = float(error[~torch.isnan(error)].max()) if error.numel() else 0.0
    assert not torch.isnan(error).any(), f"{what}: NaN"
    assert worst <= tolerance, f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}"
