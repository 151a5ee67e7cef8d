"""Gradients by `Unroll`, `FixedPoint` and `Envelope`: every pair with an algorithm, against what it claims."""

import math

import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from cases import CASES, rows
from gradient_cases import (
    CONVERGED,
    MIXED,
    TIED,
    TRUNCATED,
    finite_differences,
    free_entries,
    gradient,
    hard_theta,
    losses,
    solve,
)
from strategies import brute_force, forests, graphs, potentials, seeds

marginals = lambda case: case.marginals  # noqa: E731
sweeping = lambda case: case.marginals and case.iterative  # noqa: E731
small = graphs(max_variables=4, max_factors=4)


def close(actual, expected, tolerance):
    assert torch.isfinite(actual).all()
    scale = 1 + float(expected.abs().max()) if expected.numel() else 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def check(loss, theta):
    assert torch.autograd.gradcheck(loss, theta.clone().requires_grad_(), fast_mode=True)


# -- every pair that is offered -------------------------------------------------------------------------------------


@rows(marginals)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_unroll_differentiates_the_sweeps_that_ran(case, graph, seed):
    algorithm = case.make(graph, None)
    solution = lambda t: solve(graph, t, algorithm, TRUNCATED, rf.Unroll())  # noqa: E731
    check(lambda t: losses(graph, solution(t).mu, seed), potentials(graph, seed))


@rows(marginals)
@pytest.mark.parametrize("graph", [MIXED, TIED], ids=["mixed", "tied"])
def test_unroll_differentiates_the_truncated_log_partition(case, graph):
    """theta . mu_N + H(mu_N), through the N sweeps."""
    algorithm = case.make(graph, None)
    check(lambda t: solve(graph, t, algorithm, TRUNCATED, rf.Unroll()).log_partition, potentials(graph, 1))


@rows(lambda case: not case.marginals)
def test_unroll_differentiates_max_marginals(case):
    """Away from ties, where the maximiser stays the same."""
    algorithm = case.make(MIXED, None)
    check(lambda t: solve(MIXED, t, algorithm, TRUNCATED, rf.Unroll()).mu, potentials(MIXED, 1))


@rows(sweeping)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_fixed_point_differentiates_the_converged_marginals(case, graph, seed):
    algorithm = case.make(graph, None)
    solution = lambda t: solve(graph, t, algorithm, CONVERGED, rf.FixedPoint())  # noqa: E731
    theta = 0.5 * potentials(graph, seed)
    check(lambda t: losses(graph, solution(t).mu, seed), theta)
    check(lambda t: solution(t).log_partition, theta)


@rows(marginals)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_envelope_differentiates_the_log_partition(case, graph, seed):
    algorithm = case.make(graph, None)
    check(
        lambda t: solve(graph, t, algorithm, CONVERGED, rf.Envelope()).log_partition.clone(),
        0.5 * potentials(graph, seed),
    )


@rows(marginals)
def test_three_sweeps_against_finite_differences(case):
    graph, stop = rf.grid(3, 3, 3), TRUNCATED
    theta, algorithm = potentials(graph, 2), case.make(graph, None)

    def loss(t):
        return losses(graph, solve(graph, t, algorithm, stop, None).mu, 5).sum(-1)

    expected = finite_differences(loss, theta)
    close(gradient(graph, theta, algorithm, stop, rf.Unroll(), seed=5), expected, 1e-7)


@rows(sweeping)
def test_unroll_tends_to_fixed_point(case):
    theta, algorithm = 0.5 * potentials(MIXED, 3), case.make(MIXED, None)
    unrolled, solved = (
        gradient(MIXED, theta, algorithm, rf.Stop(400, 1e-13), adjoint) for adjoint in (rf.Unroll(), rf.FixedPoint())
    )
    close(solved, unrolled, 1e-8)


# -- pairs that are not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", [rf.FixedPoint(), rf.Envelope()], ids=["FixedPoint", "Envelope"])
@rows()
def test_pairs_not_offered_name_the_alternative(case, adjoint):
    graph, name = rf.grid(2, 2, 2), type(adjoint).__name__
    algorithm = case.make(graph, None)
    theta = graph.zeros().requires_grad_()
    if not case.marginals:
        with pytest.raises(ValueError, match=f"`{name}` cannot differentiate MaxProduct.*Use MessagePassing"):
            rf.infer(graph, theta, algorithm, adjoint=adjoint)
    elif case.iterative:
        with pytest.raises(ValueError, match=f"`{name}` needs a run to convergence.*use `Unroll`"):
            rf.infer(graph, theta, algorithm, stop=TRUNCATED, adjoint=adjoint)
    elif name == "FixedPoint":
        with pytest.raises(ValueError, match=r"Exact has none\. Use `Unroll`"):
            rf.infer(graph, theta, algorithm, adjoint=adjoint)


def test_envelope_leaves_the_marginals_alone():
    graph = rf.grid(2, 2, 2)
    assert not rf.infer(graph, graph.zeros().requires_grad_(), adjoint=rf.Envelope()).mu.requires_grad


# -- impossible states, evidence, large potentials ------------------------------------------------------------------

OFFERED = [(case, rf.Unroll()) for case in CASES if case.marginals]
OFFERED += [(case, rf.FixedPoint()) for case in CASES if sweeping(case)]
pairs = pytest.mark.parametrize(
    ("case", "adjoint"), OFFERED, ids=[f"{case.name}-{type(adjoint).__name__}" for case, adjoint in OFFERED]
)


@pairs
def test_impossible_states_and_evidence(case, adjoint):
    stop = CONVERGED if isinstance(adjoint, rf.FixedPoint) else TRUNCATED
    graph, algorithm = MIXED, case.make(MIXED, None)
    theta = hard_theta(graph, "impossible", 7)
    if case.name == "mean-field":  # products cannot meet constraints between variables
        theta[graph.node_size :] = potentials(graph, 7)[graph.node_size :]
    x, whole = free_entries(0.5 * theta)
    states = [0] * graph.num_variables

    def loss(t):
        mu = solve(graph, whole(t), algorithm, stop, adjoint, evidence={1: 0, 5: 0}).mu
        return losses(graph, mu, 7, states)

    check(loss, x)
    found = gradient(graph, whole(x), algorithm, stop, adjoint, seed=7, states=states, evidence={1: 0, 5: 0})
    assert torch.isfinite(found).all()
    assert (found[torch.isinf(theta)] == 0).all()


@pairs
def test_large_potentials(case, adjoint):
    """Saturated marginals: the gradient is still that of the objective."""
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0, 3), (3,)])
    algorithm = case.make(graph, None)
    for seed in range(4):
        theta = hard_theta(graph, "large", seed)
        stop = rf.Stop(1000, 1e-13) if isinstance(adjoint, rf.FixedPoint) else TRUNCATED
        states = solve(graph, theta, algorithm, stop, None).mode().tolist()
        try:
            found = gradient(graph, theta, algorithm, stop, adjoint, seed=seed, states=states)
        except rf.AdjointWarning:  # messages may lag far behind marginals that have saturated, and that is said
            assert isinstance(adjoint, rf.FixedPoint)
            continue

        def loss(t, seed=seed, stop=stop, states=states):
            return losses(graph, solve(graph, t, algorithm, stop, None).mu, seed, states).sum(-1)

        if isinstance(adjoint, rf.Unroll) or bool(solve(graph, theta, algorithm, stop, None).converged):
            close(found, finite_differences(loss, theta), 1e-6)


@pytest.mark.parametrize("adjoint", [rf.Unroll(), rf.FixedPoint()], ids=["Unroll", "FixedPoint"])
@pytest.mark.parametrize("kind", ["impossible", "large"])
@settings(max_examples=10)
@given(graph=forests(max_variables=4, max_factors=4), seed=seeds)
def test_belief_propagation_on_forests_has_the_exact_gradient(adjoint, kind, graph, seed):
    theta = hard_theta(graph, kind, seed)
    truth = brute_force(graph, theta)
    states = [int(graph.node(truth.mu, v).argmax()) for v in range(graph.num_variables)]
    # The modes of marginals need not be jointly possible.
    if math.isinf(float(losses(graph, truth.mu, seed, states).sum())):
        return
    stop = rf.Stop(50, 1e-13)
    exact = gradient(graph, theta, rf.Exact(), stop, rf.Unroll(), seed=seed, states=states)
    close(gradient(graph, theta, rf.MessagePassing(), stop, adjoint, seed=seed, states=states), exact, 1e-8)


# -- batches and precision ------------------------------------------------------------------------------------------


@pairs
def test_batches_are_loops(case, adjoint):
    stop = rf.Stop(5000, 1e-13) if isinstance(adjoint, rf.FixedPoint) else TRUNCATED
    graph, algorithm = TIED, case.make(TIED, None)
    theta = 0.5 * potentials(graph, 4, "mild", 2, 2)
    evidence = torch.tensor([[0, -1, -1, -1], [-1, 1, -1, 2]])
    states = [0, 1, 0, 2]
    batch = gradient(graph, theta, algorithm, stop, adjoint, states=states, evidence=evidence)
    for j in range(2):
        for k in range(2):
            alone = gradient(graph, theta[j, k], algorithm, stop, adjoint, states=states, evidence=evidence[k])
            close(batch[j, k], alone, 1e-8)
    if isinstance(adjoint, rf.FixedPoint):
        empty = torch.zeros(0, graph.theta_size, dtype=torch.float64)
        assert gradient(graph, empty, algorithm, stop, adjoint).shape == empty.shape


@pairs
def test_float32_gradients_are_near_float64(case, adjoint):
    stop = rf.Stop(1000, 1e-6) if isinstance(adjoint, rf.FixedPoint) else TRUNCATED
    algorithm = case.make(MIXED, None)
    theta = (0.5 * potentials(MIXED, 6)).float()
    single, double = (gradient(MIXED, t, algorithm, stop, adjoint) for t in (theta, theta.double()))
    assert single.dtype == torch.float32
    close(single.double(), double, 2e-4)
