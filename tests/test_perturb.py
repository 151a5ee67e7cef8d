"""`Perturb` against differences of the converged objective, and what it refuses and warns of."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from cases import by_arity, rows
from differences import LOSSES, TIGHT, clique_logistic, differences, error, gradient, univariate_logistic
from strategies import graphs, potentials, seeds

DIFFERENTIABLE = rows(lambda case: case.marginals and case.kernels)
TWO_SIDED = 1e-6


def solved(compute):
    """What `compute` returns, or None where the model is impossible, does not converge or rounds badly."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return compute()
        except (rf.errors.ImpossibleEvidenceError, rf.errors.ConvergenceWarning, rf.errors.AdjointWarning):
            return None


@DIFFERENTIABLE
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=8)
@given(graph=graphs(), seed=seeds, kind=st.sampled_from(["mild", "impossible"]))
def test_equals_differences_of_the_objective(case, loss, graph, seed, kind):
    theta = 0.7 * potentials(graph, seed, kind)
    algorithm = case.make(graph, None)
    stop = rf.Stop(sweeps=500, tol=1e-14)
    actual = solved(lambda: gradient(graph, theta, algorithm, loss, rf.Perturb(), stop))
    if actual is None:
        return
    expected, converged = differences(graph, theta, algorithm, loss, stop)
    if converged:
        assert error(actual, expected) < TWO_SIDED
    assert (actual[theta == -torch.inf] == 0).all()


@pytest.mark.parametrize(("sides", "accuracy"), [(1, 1e-4), (2, 1e-7), (4, 1e-9)])
@pytest.mark.parametrize("loss", LOSSES)
def test_more_sides_are_more_accurate(sides, accuracy, loss):
    graph = rf.grid(3, 3, 3)
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    expected, converged = differences(graph, theta, algorithm, loss)
    assert converged
    assert error(gradient(graph, theta, algorithm, loss, rf.Perturb(sides)), expected) < accuracy


@pytest.mark.parametrize(
    "algorithm", [rf.MessagePassing(), rf.MeanField(), rf.Exact()], ids=["bp", "mean-field", "exact"]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_tied_tables(algorithm, loss):
    """Each factor of a table is perturbed by its own part of the gradient; the groups are not in the factors' order."""
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 2), (1, 0), (2, 3), (1, 3), (3, 0), (2,)], tables=[0, 1, 0, 1, 0, 2])
    theta = 0.5 * potentials(graph, 1)
    expected, converged = differences(graph, theta, algorithm, loss)
    assert converged
    assert error(gradient(graph, theta, algorithm, loss, rf.Perturb()), expected) < 1e-7
    grid = rf.grid(3, 3, 2, tied=True)
    theta = 0.5 * potentials(grid, 2)
    expected, _ = differences(grid, theta, algorithm, loss)
    assert error(gradient(grid, theta, algorithm, loss, rf.Perturb()), expected) < 1e-7


@pytest.mark.parametrize("tied", [False, True])
def test_a_batch_is_separate_gradients(tied):
    graph = rf.grid(3, 2, 2, tied=tied)
    theta = potentials(graph, 0, "mild", 2, 3)
    theta[0, 1] *= 0.01
    evidence = torch.full((2, 3, graph.num_variables), -1)
    evidence[0, 0, 1], evidence[1, 2, 4] = 1, 0
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    scale = torch.tensor([[1.0, 1e-8, 0.0], [1e8, 1.0, 1.0]], dtype=torch.float64)

    def weighted(weights):
        return lambda graph, mu: (weights * (mu**2).sum(-1)).sum()

    batch = gradient(graph, theta, algorithm, weighted(scale), rf.Perturb(), evidence=evidence)
    for k in np.ndindex(2, 3):
        single = gradient(graph, theta[k], algorithm, weighted(scale[k]), rf.Perturb(), evidence=evidence[k])
        torch.testing.assert_close(batch[k], single, rtol=1e-6, atol=1e-9 * float(scale[k]))
    assert (batch[0, 2] == 0).all()


def test_evidence():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    for algorithm in (rf.MessagePassing(), rf.MeanField(), rf.Exact()):
        evidence = {0: 1, 4: 0}
        expected, _ = differences(graph, theta, algorithm, univariate_logistic, evidence=evidence)
        actual = gradient(graph, theta, algorithm, univariate_logistic, rf.Perturb(), evidence=evidence)
        assert error(actual, expected) < 1e-7
        assert actual[0] == 0  # of an excluded state
        assert abs(actual[1]) < 1e-9  # of the observed one: rounding


@pytest.mark.parametrize("algorithm", [rf.MessagePassing(rf.TRW(0.5)), rf.MeanField(), rf.Exact()])
def test_float32(algorithm):
    graph = rf.grid(4, 4, 3)
    theta = potentials(graph, 0)
    expected = gradient(graph, theta, algorithm, univariate_logistic, rf.Perturb(4))
    stop = rf.Stop(sweeps=2000, tol=1e-6)
    actual = gradient(graph, theta.float(), algorithm, univariate_logistic, rf.Perturb(), stop)
    assert actual.dtype == torch.float32
    assert error(actual.double(), expected) < 1e-2


@pytest.mark.parametrize("states", [2, 5])
@pytest.mark.parametrize(
    "entropy", [rf.Bethe(), rf.TRW(0.5), rf.CountingNumbers(0.5, 0.0)], ids=["bethe", "trw", "zero"]
)
def test_agrees_with_unrolled_sweeps(states, entropy):
    graph = rf.grid(4, 4, states)
    theta = 0.5 * potentials(graph, 1)
    algorithm = rf.MessagePassing(entropy)
    unrolled = gradient(graph, theta, algorithm, clique_logistic, rf.Unroll(), rf.Stop(2000, 1e-13))
    assert error(gradient(graph, theta, algorithm, clique_logistic, rf.Perturb()), unrolled) < 1e-6


def test_potentials_of_200():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    theta[: graph.node_size] += 200.0 * torch.from_numpy(np.random.default_rng(0).choice([-1, 1], graph.node_size))
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    loss = LOSSES[2]
    expected, _ = differences(graph, theta, algorithm, loss)
    actual = gradient(graph, theta, algorithm, loss, rf.Perturb())
    assert torch.isfinite(actual).all()
    assert error(actual, expected) < 1e-5


def test_the_log_partition_keeps_its_gradient():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    for algorithm in (rf.MessagePassing(rf.TRW(0.5)), rf.MeanField(), rf.Exact()):
        solution = rf.infer(graph, theta, algorithm, stop=TIGHT, adjoint=rf.Perturb())
        (actual,) = torch.autograd.grad(solution.log_partition, theta)
        torch.testing.assert_close(actual, solution.mu.detach(), rtol=0, atol=1e-8)


def test_runs_at_the_default_tolerance_are_as_accurate_as_it():
    graph = rf.grid(5, 5, 2)
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    exact = gradient(graph, theta, algorithm, univariate_logistic, rf.Perturb(4))
    for sides in (1, 2, 4):
        loose = gradient(graph, theta, algorithm, univariate_logistic, rf.Perturb(sides), rf.Stop())
        assert error(loose, exact) < 1e-4


def test_counting_numbers_per_factor():
    graph = rf.FactorGraph([2, 3, 2], [(0, 1, 2), (0, 1), (2, 1), (0,)], tables=[0, 1, 2, 3])
    algorithm = rf.MessagePassing(rf.CountingNumbers(by_arity(graph, [0.5, 0.8, 1.2]), torch.tensor([0.3, 0.0, -0.5])))
    theta = potentials(graph, 5)
    for loss in LOSSES:
        expected, _ = differences(graph, theta, algorithm, loss)
        assert error(gradient(graph, theta, algorithm, loss, rf.Perturb()), expected) < 1e-7


def test_degenerate_graphs():
    for graph in (rf.FactorGraph([]), rf.FactorGraph([3, 1, 2]), rf.FactorGraph([1, 1], [(0, 1), (1,)])):
        theta = potentials(graph, 0)
        loss = lambda graph, mu: (mu**2).sum()  # noqa: E731
        out = gradient(graph, theta, rf.MessagePassing(), loss, rf.Perturb())
        assert out.shape == theta.shape
        assert torch.isfinite(out).all()
    assert gradient(graph, graph.zeros(0), rf.MessagePassing(), loss, rf.Perturb()).shape == (0, graph.theta_size)


# -- refusals and warnings --------------------------------------------------------------------------------------------


def test_what_it_refuses():
    graph = rf.chain(3, 2)
    theta = graph.zeros().requires_grad_()
    with pytest.raises(ValueError, match=r"`Perturb` needs a run to convergence: .* use `Unroll`"):
        rf.infer(graph, theta, stop=rf.Stop(5, tol=None), adjoint=rf.Perturb())
    with pytest.raises(ValueError, match=r"`Perturb` cannot differentiate MaxProduct.* Use MessagePassing"):
        rf.infer(graph, theta, rf.MaxProduct(), adjoint=rf.Perturb())
    with pytest.raises(ValueError, match=r"`sides` must be 1, 2 or 4. Got 3."):
        rf.Perturb(3)
    with pytest.raises(ValueError, match="`multiplier` must be above 0"):
        rf.Perturb(multiplier=0)
    with pytest.raises(ValueError, match="`multiplier` must be above 0 and finite"):
        rf.Perturb(multiplier="1")
    with pytest.raises(ValueError, match="`tol` must be a non-negative number"):
        rf.Perturb(tol=-1)


def test_a_gradient_of_the_loss_that_is_not_finite_is_an_error():
    graph = rf.chain(3, 2)
    theta = graph.zeros().requires_grad_()
    mu = rf.infer(graph, theta, adjoint=rf.Perturb(), evidence={0: 1}).mu
    with pytest.raises(
        rf.errors.AdjointError, match=r"the gradient of the loss with respect to the marginals is -inf at \(0,\)"
    ):
        (-mu[0].log()).backward()


def test_perturbed_runs_that_do_not_converge_warn():
    graph = rf.grid(4, 4, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, stop=rf.Stop(5, 1e-3), adjoint=rf.Perturb(tol=0.0))
    with pytest.warns(rf.errors.AdjointWarning, match=r"the perturbed marginals still change by .* after 5 sweeps"):
        (solution.mu**2).sum().backward()


def test_improbable_states_warn():
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.node(theta, 0)[0] = 40.0
    theta.requires_grad_()
    mu = rf.infer(graph, theta, adjoint=rf.Perturb()).mu
    loss = -graph.node(mu, 0)[1].log() - graph.node(mu, 2)[1].log()
    with pytest.warns(rf.errors.AdjointWarning, match="rounding errors may be .* of the gradient.* Raise `multiplier`"):
        loss.backward()


def test_second_derivatives_are_refused():
    graph = rf.chain(3, 2)
    theta = graph.zeros().requires_grad_()
    mu = rf.infer(graph, theta, adjoint=rf.Perturb()).mu
    (first,) = torch.autograd.grad((mu**2).sum(), theta, create_graph=True)
    with pytest.raises(rf.errors.AdjointError, match=r"has first derivatives only\. Use `Unroll`"):
        first.sum().backward()


@pytest.mark.parametrize("adjoint", [rf.Perturb(), rf.KKT(), rf.FixedPoint(), rf.Unroll()], ids=repr)
def test_marginals_changed_in_place(adjoint):
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()

    def solve():
        return rf.infer(graph, theta, stop=rf.Stop(tol=1e-10), adjoint=adjoint).mu

    (expected,) = torch.autograd.grad(solve().log().square().sum(), theta)
    for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        with hooks:
            loss = solve().log_().square().sum()
        torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], expected)
