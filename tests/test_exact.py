"""Exact inference against enumeration, and where it refuses. `test_uai.py` has the competition's answers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from strategies import brute_force, graphs, kinds, potentials, seeds


@settings(max_examples=200)
@given(graphs(max_states=4), seeds, kinds)
def test_equals_enumeration(graph, seed, kind):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, rf.Exact())
        return
    solution = rf.infer(graph, theta, rf.Exact())
    torch.testing.assert_close(solution.mu, truth.mu, rtol=0, atol=1e-10)
    assert float(solution.log_partition) == pytest.approx(truth.log_partition, rel=1e-12, abs=1e-10)
    assert solution.converged
    assert solution.sweeps == 1
    assert solution.residual == 0
    assert solution.messages is None


@settings(max_examples=60)
@given(graphs(max_states=4), seeds, st.sampled_from(["mild", "impossible"]))
def test_marginals_are_the_gradient_of_the_log_partition_function(graph, seed, kind):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        return
    theta.requires_grad_()
    solution = rf.infer(graph, theta, rf.Exact())
    (gradient,) = torch.autograd.grad(solution.log_partition, theta, retain_graph=True)
    torch.testing.assert_close(gradient, graph.collapse(truth.mu), rtol=0, atol=1e-10)
    torch.testing.assert_close(solution.mu.detach(), truth.mu, rtol=0, atol=1e-10)
    (through_mu,) = torch.autograd.grad(solution.mu.square().sum(), theta)
    assert torch.isfinite(through_mu).all()


def test_gradients_of_marginals_pass_gradcheck_twice():
    graph = rf.FactorGraph([2, 3, 2, 1], [(0, 1), (1, 2, 3), (2, 0)], tables=[0, 1, 2])
    theta = potentials(graph, 0).requires_grad_()

    def mu(theta):
        return rf.infer(graph, theta, rf.Exact()).mu

    assert torch.autograd.gradcheck(mu, theta)
    assert torch.autograd.gradgradcheck(mu, theta)


def test_float32_is_computed_in_float64():
    graph = rf.grid(4, 4, 3)
    theta = potentials(graph, 0, "extreme", dtype=torch.float32)
    single, double = (rf.infer(graph, t, rf.Exact()) for t in (theta, theta.double()))
    assert single.mu.dtype == single.log_partition.dtype == torch.float32
    torch.testing.assert_close(single.mu, double.mu.float(), rtol=0, atol=0)
    torch.testing.assert_close(single.log_partition, double.log_partition.float(), rtol=0, atol=0)


def test_batches_are_worked_off_in_parts_that_fit():
    graph = rf.grid(3, 4, 2)
    theta = potentials(graph, 0, "mild", 2, 3)
    whole = rf.infer(graph, theta, rf.Exact())
    parts = rf.infer(graph, theta, rf.Exact(max_bytes=3000))
    torch.testing.assert_close(parts.mu, whole.mu, rtol=0, atol=1e-14)
    torch.testing.assert_close(parts.log_partition, whole.log_partition, rtol=1e-14, atol=0)


def test_log_partition_can_be_had_from_theta_alone():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0, "mild", 2, 2)
    solution = rf.infer(graph, theta, rf.Exact())
    alone = rf.Exact().log_partition(graph, theta, solution.mu)
    torch.testing.assert_close(alone, solution.log_partition, rtol=1e-14, atol=0)


def test_refuses_with_treewidth_memory_and_limit():
    graph = rf.grid(20, 20, 2)
    with pytest.raises(rf.errors.TreewidthError, match=r"treewidth 2\d .* needs .* GiB; `max_bytes` allows 1 MiB"):
        rf.infer(graph, graph.zeros(), rf.Exact(max_bytes=2**20))


def test_refuses_hopeless_graphs_soon():
    graph = rf.grid(80, 80, 5)
    with pytest.raises(rf.errors.TreewidthError, match=r"treewidth more than 64 .* needs more than 2\^67 bytes"):
        rf.infer(graph, graph.zeros(), rf.Exact())


def test_gradients_count_towards_the_memory():
    graph = rf.grid(6, 6, 2)
    limited = rf.Exact(max_bytes=20_000)
    rf.infer(graph, graph.zeros(), limited)
    with pytest.raises(rf.errors.TreewidthError):
        rf.infer(graph, graph.zeros().requires_grad_(), limited)


def test_observed_variables_cut_the_treewidth():
    graph = rf.grid(20, 20, 2)
    theta = potentials(graph, 0)
    observed = {20 * r + c: (r + c) % 2 for r in range(20) for c in range(0, 20, 2)}
    exact = rf.infer(graph, theta, rf.Exact(max_bytes=20_000), evidence=observed)
    # Chains are left, on which message passing is exact.
    by_messages = rf.infer(graph, theta, evidence=observed, stop=rf.Stop(tol=1e-13), kernels="torch")
    torch.testing.assert_close(exact.mu, by_messages.mu, rtol=0, atol=1e-10)


def test_long_chains_do_not_recurse():
    graph = rf.chain(5000, 2, tied=True)
    theta = graph.zeros()
    graph.factor_views(theta)[0][0, 0, 1] = -math.inf  # once 1, always 1
    solution = rf.infer(graph, theta, rf.Exact())
    assert float(solution.log_partition) == pytest.approx(math.log(5001), rel=1e-12)


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_memory_limit_must_be_positive(max_bytes):
    with pytest.raises(ValueError, match="`max_bytes` must be positive"):
        rf.Exact(max_bytes=max_bytes)


def test_has_nothing_to_start_from():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match="`messages` must be None"):
        rf.infer(graph, graph.zeros(), rf.Exact(), messages=torch.zeros(8, dtype=torch.float64))
