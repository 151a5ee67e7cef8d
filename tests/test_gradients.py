"""Gradients by `Unroll`, `FixedPoint` and `Envelope` on any graph, against what each claims."""

import math

import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from cases import rows
from gradient_cases import (
    CONVERGED,
    MIXED,
    TIED,
    TRUNCATED,
    finite_differences,
    gradient,
    hard_theta,
    losses,
    solve,
)
from strategies import brute_force, forests, graphs, potentials, seeds

marginals = lambda case: case.marginals and case.kernels  # noqa: E731
sweeping = lambda case: case.marginals and case.iterative and case.kernels  # noqa: E731
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


@pytest.mark.filterwarnings("ignore:.MaxProduct. with a .theta.:riskfield.errors.PerformanceWarning")
@rows(lambda case: not case.marginals and case.kernels)
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


@rows(lambda case: case.kernels)
def test_envelope_names_the_alternative(case):
    graph = rf.grid(2, 2, 2)
    algorithm = case.make(graph, None)
    theta = graph.zeros().requires_grad_()
    if not case.marginals:
        with pytest.raises(ValueError, match=r"`Envelope` cannot differentiate MaxProduct.*Use MessagePassing"):
            rf.infer(graph, theta, algorithm, adjoint=rf.Envelope())
    elif case.iterative:
        with pytest.raises(ValueError, match=r"`Envelope` needs a run to convergence.*use `Unroll`"):
            rf.infer(graph, theta, algorithm, stop=TRUNCATED, adjoint=rf.Envelope())


# -- impossible states and large potentials ---------------------------------------------------------------------------


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


def test_the_value_does_not_follow_marginals_changed_in_place():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, stop=rf.Stop(tol=1e-10), adjoint=rf.Envelope())
    value = solution.log_partition
    solution.mu.mul_(2)
    with pytest.raises(rf.errors.AdjointError, match="were changed in place"):
        value.backward()
