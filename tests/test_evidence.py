"""Evidence and impossible states."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from strategies import brute_force, graphs, potentials, seeds


def conditional(graph, theta, states):
    """The truth given `states` (-1: unobserved): enumerate with the other states taken out."""
    clamped = theta.clone()
    for v, x in enumerate(states):
        if x >= 0:
            keep = graph.node(theta, v)[x].clone()
            graph.node(clamped, v)[:] = -math.inf
            graph.node(clamped, v)[x] = keep
    return brute_force(graph, clamped)


@settings(max_examples=100)
@given(graphs(), seeds)
def test_each_item_may_observe_other_variables(graph, seed):
    rng = np.random.default_rng(seed)
    theta = potentials(graph, seed)
    states = rng.integers(-1, graph.num_states, size=(3, graph.num_variables))
    solution = rf.infer(graph, theta, rf.Exact(), evidence=torch.from_numpy(states))
    for k in range(3):
        truth = conditional(graph, theta, states[k])
        torch.testing.assert_close(solution.mu[k], truth.mu, rtol=0, atol=1e-10)
        assert float(solution.log_partition[k]) == pytest.approx(truth.log_partition, abs=1e-10)


@settings(max_examples=50)
@given(graph=graphs(forest=True), seed=seeds)
def test_message_passing_conditions_too(kernels, graph, seed):
    rng = np.random.default_rng(seed)
    theta = potentials(graph, seed, "mild", 2)
    states = torch.from_numpy(rng.integers(-1, graph.num_states, size=(2, graph.num_variables)))
    exact = rf.infer(graph, theta, rf.Exact(), evidence=states)
    solution = rf.infer(graph, theta, evidence=states, stop=rf.Stop(tol=1e-12), kernels=kernels)
    torch.testing.assert_close(solution.mu, exact.mu, rtol=0, atol=1e-9)
    torch.testing.assert_close(solution.log_partition, exact.log_partition, rtol=0, atol=1e-9)


def test_a_dict_is_a_row_of_states():
    graph = rf.grid(2, 2, 3)
    theta = potentials(graph, 0, "mild", 2)
    row = torch.tensor([-1, 2, -1, 0])
    by_dict, by_row = (rf.infer(graph, theta, rf.Exact(), evidence=e) for e in ({1: 2, 3: 0}, row))
    assert torch.equal(by_dict.mu, by_row.mu)
    assert torch.equal(graph.node(by_dict.mu, 1), torch.tensor([[0.0, 0.0, 1.0]] * 2).double())


def test_the_solution_holds_the_clamped_theta_and_leaves_the_given_one():
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    solution = rf.infer(graph, theta, rf.Exact(), evidence={0: 1})
    assert float(graph.node(solution.theta, 0)[0]) == -math.inf
    assert float(theta.min()) == 0


def test_probability_of_the_evidence_is_a_difference_of_log_partitions():
    graph = rf.grid(2, 3, 2)
    theta = potentials(graph, 0)
    free, clamped = rf.infer(graph, theta, rf.Exact()), rf.infer(graph, theta, rf.Exact(), evidence={4: 1})
    probability = (clamped.log_partition - free.log_partition).exp()
    torch.testing.assert_close(probability, graph.node(free.mu, 4)[1], rtol=1e-12, atol=0)


def test_clamping_is_differentiable():
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, rf.Exact(), evidence={1: 0})
    (gradient,) = torch.autograd.grad(solution.log_partition, theta)
    torch.testing.assert_close(gradient, solution.mu.detach())


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({3: 0}, r"`evidence` must name variables in 0..2. Got 3"),
        ({-1: 0}, r"`evidence` must name variables in 0..2. Got -1"),
        ({0: -1}, r"`evidence` of variable 0 must lie in 0..1. Got -1"),
        ({1: 2}, r"`evidence` of variable 1 must lie in 0..1. Got 2"),
        (torch.tensor([0, 0]), r"`evidence` must have shape \(\*batch, 3\). Got \(2,\)"),
        (torch.tensor([0, 0, -2]), r"`evidence` of variable 2 must lie in -1..1. Got -2"),
    ],
)
def test_bad_evidence_is_refused(evidence, message):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros(), evidence=evidence)


def test_evidence_must_be_integers():
    graph = rf.chain(3, 2)
    with pytest.raises(TypeError, match="`evidence` must be integers"):
        rf.infer(graph, graph.zeros(), evidence=torch.zeros(3))


@pytest.mark.parametrize(
    "algorithm",
    [
        rf.MessagePassing(),
        rf.MessagePassing(rf.TRW(0.5), rf.Parallel(), 0.5),
        rf.MaxProduct(),
        rf.MeanField(),
        rf.Exact(),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_contradictory_evidence_is_refused(kernels, algorithm):
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, 1, 0] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="Every joint state has probability zero"):
        rf.infer(graph, theta, algorithm, evidence={0: 1, 2: 0}, kernels=kernels)
    batch = torch.tensor([[0, -1, 1], [1, -1, 0]])
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match=r"batch item 1"):
        rf.infer(graph, theta, algorithm, evidence=batch, kernels=kernels)


def test_a_variable_without_possible_states_is_refused(kernels):
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.node(theta, 1)[:] = -math.inf
    for algorithm in (rf.MessagePassing(), rf.MeanField(), rf.Exact()):
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, algorithm, stop=rf.Stop(0, tol=None), kernels=kernels)


def test_impossible_models_are_found_out_soon(kernels):
    """Without going through all the sweeps that were allowed."""
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError):
        rf.infer(graph, theta, stop=rf.Stop(10**9, tol=None), kernels=kernels)


def test_mean_field_says_that_hard_constraints_are_not_for_it(kernels):
    graph = rf.chain(2, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [1, 0]] = -math.inf  # both alike
    assert rf.infer(graph, theta, kernels=kernels).converged
    with pytest.raises(
        rf.errors.ImpossibleEvidenceError, match="mean field is not for hard constraints between variables"
    ):
        rf.infer(graph, theta, rf.MeanField(), kernels=kernels)
