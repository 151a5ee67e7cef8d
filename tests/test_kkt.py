"""`KKT` against differences of the converged objective and the other adjoints, and what it refuses."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from cases import by_arity, rows
from differences import (
    LOSSES,
    TIGHT,
    clique_logistic,
    differences,
    error,
    gradient,
    random_quadratic,
    univariate_logistic,
)
from riskfield.adjoints.kkt import unsettled_convex
from strategies import graphs, potentials, seeds

MESSAGE_PASSING = rows(lambda case: case.marginals and case.kernels and case.name not in ("mean-field", "exact"))
SOLVERS = pytest.mark.parametrize("solver", [rf.adjoints.Direct(), rf.adjoints.Minres()], ids=["direct", "minres"])


@MESSAGE_PASSING
@SOLVERS
@settings(max_examples=10)
@given(graph=graphs(), seed=seeds, kind=st.sampled_from(["mild", "impossible"]), loss=st.sampled_from(LOSSES))
def test_equals_differences_of_the_objective(case, solver, graph, seed, kind, loss):
    theta = 0.7 * potentials(graph, seed, kind)
    algorithm = case.make(graph, None)
    # A number of sweeps, not a tolerance: that looks at node marginals, and those of factors may take twice as long to
    # settle. Runs that stop at different sweeps then differ by more than the differences are to resolve.
    stop = rf.Stop(sweeps=300, tol=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            start = rf.infer(graph, theta, algorithm, stop=stop).messages
            actual = gradient(graph, theta, algorithm, loss, rf.KKT(solver), rf.Stop(300, 1e-14), messages=start)
        except (rf.errors.ImpossibleEvidenceError, rf.errors.ConvergenceWarning, rf.errors.AdjointWarning):
            return
        except rf.errors.AdjointError:
            assert kind == "impossible"  # a state whose probability falls to 0 for ever
            return
    expected, converged = differences(graph, theta, algorithm, loss, stop)
    if converged:
        assert error(actual, expected) < 1e-8
    assert (actual[theta == -torch.inf] == 0).all()


@SOLVERS
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("node", [0.0, 0.3, -0.4], ids=["D singular", "concave", "negative"])
def test_counting_numbers_of_any_sign(solver, loss, node):
    graph = rf.FactorGraph([2, 3, 2, 4], [(0, 1, 2), (0, 1), (2, 1), (0,), (3, 2, 1, 0)])
    numbers = torch.full((4,), node, dtype=torch.float64)
    numbers[1] = 0.0
    algorithm = rf.MessagePassing(rf.CountingNumbers(by_arity(graph, [0.5, 0.8, 1.2, 1.0]), numbers))
    theta = potentials(graph, 5)
    expected, converged = differences(graph, theta, algorithm, loss)
    assert converged
    assert error(gradient(graph, theta, algorithm, loss, rf.KKT(solver)), expected) < 1e-8


@SOLVERS
@pytest.mark.parametrize("loss", LOSSES)
def test_tied_tables(solver, loss):
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 2), (1, 0), (2, 3), (1, 3), (3, 0), (2,)], tables=[0, 1, 0, 1, 0, 2])
    theta = 0.5 * potentials(graph, 1)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    expected, _ = differences(graph, theta, algorithm, loss)
    assert error(gradient(graph, theta, algorithm, loss, rf.KKT(solver)), expected) < 1e-8


@SOLVERS
def test_a_batch_is_separate_gradients(solver):
    graph = rf.grid(3, 2, 2, tied=True)
    theta = potentials(graph, 0, "mild", 2, 3)
    evidence = torch.full((2, 3, graph.num_variables), -1)
    evidence[0, 0, 1], evidence[1, 2, 4] = 1, 0
    scale = torch.tensor([[1.0, 1e-8, 0.0], [1e8, 1.0, 1.0]], dtype=torch.float64)
    algorithm = rf.MessagePassing(rf.TRW(0.5))

    def weighted(weights):
        return lambda graph, mu: (weights * (mu**2).sum(-1)).sum()

    batch = gradient(graph, theta, algorithm, weighted(scale), rf.KKT(solver), evidence=evidence)
    for k in np.ndindex(2, 3):
        single = gradient(graph, theta[k], algorithm, weighted(scale[k]), rf.KKT(solver), evidence=evidence[k])
        torch.testing.assert_close(batch[k], single, rtol=1e-7, atol=1e-9 * float(scale[k]))
    assert (batch[0, 2] == 0).all()


@SOLVERS
def test_evidence(solver):
    graph = rf.grid(3, 3, 3)
    theta = potentials(graph, 0)
    evidence = {0: 1, 4: 2}
    expected, _ = differences(graph, theta, rf.MessagePassing(), clique_logistic, evidence=evidence)
    actual = gradient(graph, theta, rf.MessagePassing(), clique_logistic, rf.KKT(solver), evidence=evidence)
    assert error(actual, expected) < 1e-8
    assert actual[0] == 0


@SOLVERS
def test_float32(solver):
    graph = rf.grid(4, 4, 3)
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    expected = gradient(graph, theta, algorithm, univariate_logistic, rf.KKT())
    stop = rf.Stop(sweeps=2000, tol=1e-6)
    actual = gradient(graph, theta.float(), algorithm, univariate_logistic, rf.KKT(solver), stop)
    assert actual.dtype == torch.float32
    assert error(actual.double(), expected) < 1e-4


@pytest.mark.parametrize("strength", [20.0, 70.0, 200.0])
def test_very_improbable_states(strength):
    """The loss is about a state of probability exp(-strength), and about all others."""
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    graph.node(theta, 4)[0] += strength
    algorithm = rf.MessagePassing(rf.TRW(0.5))

    def loss(graph, mu):
        return (mu**2).sum() - graph.node(mu, 4)[1].log() - graph.node(mu, 0)[1].log()

    expected, _ = differences(graph, theta, algorithm, loss)
    assert error(gradient(graph, theta, algorithm, loss, rf.KKT()), expected) < 1e-8
    if strength < 100:
        assert error(gradient(graph, theta, algorithm, loss, rf.KKT(rf.adjoints.Minres())), expected) < 1e-8


@SOLVERS
def test_hard_constraints_that_repeat_each_other(solver):
    """Variables forced to be equal around a loop: the constraints on their marginals are redundant."""
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    theta = potentials(graph, 0)
    for table in graph.factor_views(theta)[0]:
        table[0, 1] = table[1, 0] = -torch.inf
    algorithm = rf.MessagePassing(rf.TRW(0.6))
    expected, converged = differences(graph, theta, algorithm, random_quadratic)
    assert converged
    assert error(gradient(graph, theta, algorithm, random_quadratic, rf.KKT(solver)), expected) < 1e-8


def test_the_log_partition_keeps_its_gradient():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=TIGHT, adjoint=rf.KKT())
    (actual,) = torch.autograd.grad(solution.log_partition, theta)
    torch.testing.assert_close(actual, solution.mu.detach(), rtol=0, atol=1e-10)


def test_degenerate_graphs():
    def loss(graph, mu):
        return (mu**2).sum()

    for graph in (rf.FactorGraph([]), rf.FactorGraph([3, 1, 2]), rf.FactorGraph([1, 1], [(0, 1), (1,)])):
        theta = potentials(graph, 0)
        out = gradient(graph, theta, rf.MessagePassing(), loss, rf.KKT())
        torch.testing.assert_close(out, differences(graph, theta, rf.MessagePassing(), loss)[0], rtol=0, atol=1e-9)
    assert gradient(graph, graph.zeros(0), rf.MessagePassing(), loss, rf.KKT()).shape == (0, graph.theta_size)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (rf.MaxProduct(), "`KKT` cannot differentiate MaxProduct"),
        (rf.MeanField(), "which MeanField does not offer. Use `FixedPoint`, `Perturb` or `Unroll`."),
        (rf.Exact(), "which Exact does not offer. Use `Perturb` or `Unroll`."),
    ],
)
def test_other_algorithms_are_refused(algorithm, message):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros().requires_grad_(), algorithm, adjoint=rf.KKT())


def test_what_it_refuses():
    graph = rf.chain(3, 2)
    theta = graph.zeros().requires_grad_()
    with pytest.raises(ValueError, match=r"`KKT` needs a run to convergence: .* use `Unroll`"):
        rf.infer(graph, theta, stop=rf.Stop(5, tol=None), adjoint=rf.KKT())
    with pytest.raises(TypeError, match=r"`solver` must be `Direct\(\)` or `Minres\(\)`. Got 'direct'"):
        rf.KKT("direct")
    with pytest.raises(ValueError, match="`tol` must lie between 0 and 1"):
        rf.adjoints.Direct(tol=0)
    with pytest.raises(ValueError, match="`max_steps` must be at least 1"):
        rf.adjoints.Minres(max_steps=0)
    mu = rf.infer(graph, theta, adjoint=rf.KKT(), evidence={0: 1}).mu
    with pytest.raises(
        rf.errors.AdjointError, match=r"`KKT`: the gradient of the loss with respect to the marginals is -inf at \(0,\)"
    ):
        (-mu[0].log()).backward()


def test_a_solve_that_stops_early_is_an_error():
    graph = rf.grid(4, 4, 2)
    theta = potentials(graph, 0)
    with pytest.raises(
        rf.errors.AdjointError, match=r"`KKT\(Minres\(max_steps=3\)\)`: .* relative residual of [0-9.e-]+;"
    ):
        gradient(graph, theta, rf.MessagePassing(), random_quadratic, rf.KKT(rf.adjoints.Minres(max_steps=3)))


@SOLVERS
def test_a_point_where_the_marginals_are_not_differentiable_is_an_error(solver):
    """On a symmetric torus of degree 4 the uniform fixed point of Bethe splits where (e^w - 1) / (e^w + 1) = 1 / 3."""
    n = 4
    edges = [(r * n + c, ((r + 1) % n) * n + c) for r in range(n) for c in range(n)]
    edges += [(r * n + c, r * n + (c + 1) % n) for r in range(n) for c in range(n)]
    graph = rf.from_edges(2, edges, num_variables=n * n)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = float(np.log(2.0))

    def loss(graph, mu):
        return mu[: graph.node_size : 2].sum()

    with pytest.raises(rf.errors.AdjointError, match="relative residual of"):
        gradient(graph, theta, rf.MessagePassing(), loss, rf.KKT(solver))


def test_marginals_that_have_not_settled_warn():
    graph = rf.grid(4, 4, 2)
    theta = potentials(graph, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        with pytest.warns(
            rf.errors.AdjointWarning, match=r"`KKT`: marginals .* are consistent only to 0\.\d+ of their size"
        ):
            gradient(graph, theta, rf.MessagePassing(), univariate_logistic, rf.KKT(), rf.Stop(1, 1e-13))


def test_large_potentials():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    theta[: graph.node_size] += 200.0 * torch.from_numpy(np.random.default_rng(0).choice([-1, 1], graph.node_size))
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    expected, _ = differences(graph, theta, algorithm, random_quadratic)
    actual = gradient(graph, theta, algorithm, random_quadratic, rf.KKT())
    assert error(actual, expected) < 1e-8


def test_second_derivatives_are_refused():
    graph = rf.chain(3, 2)
    theta = graph.zeros().requires_grad_()
    mu = rf.infer(graph, theta, adjoint=rf.KKT()).mu
    (first,) = torch.autograd.grad((mu**2).sum(), theta, create_graph=True)
    with pytest.raises(rf.errors.AdjointError, match=r"has first derivatives only\. Use `Unroll`"):
        first.sum().backward()


@pytest.mark.parametrize("flipped", [False, True])
def test_inconsistent_beliefs_are_noticed_in_every_state(flipped):
    graph = rf.chain(2, 2)
    node = torch.tensor([1 - 1e-6, 1e-6], dtype=torch.float64)
    pair = torch.tensor([[1 - 4e-6, 2e-6], [2e-6, 0.0]], dtype=torch.float64)
    if flipped:
        node, pair = node.flip(0), pair.flip(0, 1)
    mu = torch.cat([node, node, pair.flatten()])[None]
    grad = torch.where(mu < 1e-5, 1 / mu.clamp(min=1e-12), 0.0) * (torch.arange(8) < 4)
    assert unsettled_convex(graph, mu, grad, 1e-12) == pytest.approx(1.0)
