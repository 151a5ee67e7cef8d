"""Exact inference on forests by the native kernels, against the torch reference and finite differences."""

import itertools
import random

import pytest
import torch

import riskfield as rf
from riskfield.kernels import native_available
from riskfield.kernels.problem import ForestProblem, Task
from strategies import potentials

pytestmark = pytest.mark.skipif(not native_available(), reason="the compiled extension is not installed")


def random_forest(seed):
    """A forest of factors of any arity, some of them tied, joining variables of 1 to 4 states in any order."""
    draw = random.Random(seed)
    num_states = [draw.choice([1, 2, 2, 3, 4]) for _ in range(draw.randint(1, 9))]
    factors, reached = [], [0]
    for variable in range(1, len(num_states)):
        if draw.random() < 0.2:
            pass  # the first variable of another tree
        elif factors and draw.random() < 0.3 and len(factors[-1]) < 4:
            factors[-1].insert(draw.randint(0, len(factors[-1])), variable)
        else:
            scope = [variable, draw.choice(reached)]
            draw.shuffle(scope)
            factors.append(scope)
        reached.append(variable)
    factors += [[draw.choice(reached)] for _ in range(draw.randint(0, 2))]
    draw.shuffle(factors)
    tables = list(range(len(factors)))
    for a, b in itertools.combinations(range(len(factors)), 2):
        if [num_states[v] for v in factors[a]] == [num_states[v] for v in factors[b]] and draw.random() < 0.6:
            tables[b] = tables[a]
    return rf.FactorGraph(num_states, factors, tables=tables)


def random_theta(graph, batch, seed, *, kind="soft", dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(batch, graph.theta_size, dtype=torch.float64, generator=generator)
    if kind == "saturated":
        theta[::2] *= 400
    if kind == "impossible":
        theta[torch.rand(theta.shape, generator=generator) < 0.15] = -torch.inf
    if kind == "shared":
        theta[:, graph.node_size :] = theta[0, graph.node_size :].clone()
    return theta.to(dtype)


def forest_run(graph, theta):
    from riskfield.kernels import native

    run = native.start(Task(ForestProblem(graph), theta))
    run.advance(1, -1.0)
    return run


def reference(graph, theta):
    """Log Z and mu by elimination in torch, with gradients."""
    solution = rf.infer(graph, theta, rf.Exact(), kernels="torch", throw=False)
    return solution.log_partition, solution.mu


def check_model(graph, theta, tol=1e-10):
    """All results of one run against elimination in torch."""
    leaf = theta.clone().requires_grad_()
    log_z, mu = reference(graph, leaf)
    possible = log_z > -torch.inf
    run = forest_run(graph, theta)
    assert torch.equal(run.log_partition() > -torch.inf, possible)
    scale = 1 + theta.masked_fill(theta == -torch.inf, 0).abs().amax(1)[possible]
    assert ((run.log_partition() - log_z)[possible].abs() <= tol * scale * (1 + graph.num_variables)).all()
    found = run.marginals()
    assert found[~possible].isnan().all()
    close = dict(rtol=tol, atol=tol * float(scale.max()) if possible.any() else tol)
    torch.testing.assert_close(found[possible], mu[possible].detach(), **close)
    torch.testing.assert_close(run.node_marginals()[possible], mu[possible, : graph.node_size].detach(), **close)
    torch.testing.assert_close(run.statistics()[possible], graph.collapse(mu[possible].detach()), **close)
    if not possible.all():
        return
    g = torch.randn(mu.shape, dtype=mu.dtype, generator=torch.Generator().manual_seed(7))
    (gradient,) = torch.autograd.grad(mu, leaf, g, retain_graph=True)
    close["atol"] *= 10
    torch.testing.assert_close(run.backward(g), gradient, **close)
    nodes = g[:, : graph.node_size].contiguous()
    (gradient,) = torch.autograd.grad(mu[:, : graph.node_size], leaf, nodes)
    torch.testing.assert_close(run.backward(nodes), gradient, **close)


@pytest.mark.parametrize("wide", [False, True], ids=["doubles", "wide"])
@pytest.mark.parametrize("kind", ["soft", "shared", "saturated", "impossible"])
@pytest.mark.parametrize("seed", range(6))
def test_all_results_equal_those_of_elimination_in_torch(seed, kind, wide, monkeypatch):
    from riskfield.kernels import forest

    monkeypatch.setattr(forest, "_wide", wide)
    graph = random_forest(seed)
    check_model(graph, random_theta(graph, [1, 3, 9, 16][seed % 4], seed, kind=kind))


def test_only_saturated_items_need_numbers_of_unlimited_range():
    """A potential of 1e4 in one item of a batch changes the others by no bit."""
    graph = rf.chain(6, 3, tied=True)
    theta = random_theta(graph, 16, 0)
    alone = forest_run(graph, theta)
    theta = theta.clone()
    theta[5, 2] = 1e4
    theta[5, 9] = -1e4
    together = forest_run(graph, theta)
    others = torch.arange(16) != 5
    assert torch.equal(together.marginals()[others], alone.marginals()[others])
    check_model(graph, theta)


@pytest.mark.parametrize("algorithm", [rf.Exact(), rf.MessagePassing()], ids=lambda a: type(a).__name__)
def test_deterministic_chains_longer_than_the_range_of_doubles(algorithm):
    """States that never change add up evidence of e^4000 along the chain."""
    graph = rf.chain(400, 2, tied=True)
    theta = graph.zeros(2)
    graph.factor_views(theta)[0][..., [0, 1], [1, 0]] = -torch.inf
    graph.node_views(theta)[0][..., 0] = 10.0
    graph.node_views(theta)[0][:, 399, 1] = torch.tensor([4000.0, 4001.0], dtype=torch.float64)
    solution = rf.infer(graph, theta, algorithm)
    odds = torch.tensor([0.0, 1.0], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(solution.node_marginals[0][:, :, 1], odds[:, None].expand(2, 400), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        solution.log_partition, 4000 + torch.tensor([2.0, 1 + torch.e], dtype=torch.float64).log(), rtol=1e-14, atol=0
    )


def test_message_passing_on_a_forest_takes_one_sweep_whatever_the_tolerance():
    graph = random_forest(3)
    theta = random_theta(graph, 5, 0)
    solution = rf.infer(graph, theta, stop=rf.Stop(tol=0.0))
    assert solution.sweeps.tolist() == [1] * 5
    assert solution.converged.all()
    slow = rf.infer(graph, theta, kernels="torch", stop=rf.Stop(tol=1e-13))
    torch.testing.assert_close(solution.mu, slow.mu, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(solution.messages, slow.messages, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(solution.log_partition, slow.log_partition, rtol=1e-12, atol=1e-12)


def test_results_that_are_not_read_are_not_computed(monkeypatch):
    """Neither the likelihood nor a loss on node marginals computes the marginals of factors."""
    from riskfield.kernels.forest import ForestRun

    graph = rf.chain(5, 3, tied=True)
    theta = random_theta(graph, 4, 0).requires_grad_()
    labels = torch.zeros(4, 5, dtype=torch.int64)

    def refuse(self):
        raise AssertionError

    monkeypatch.setattr(ForestRun, "marginals", refuse)
    monkeypatch.setattr(ForestRun, "messages", refuse)
    for loss in (rf.losses.SurrogateLikelihood(), rf.losses.UnivariateLogistic()):
        for algorithm in (rf.Exact(), rf.MessagePassing()):
            loss(graph, theta, labels, rf.Inference(algorithm)).sum().backward()


@pytest.mark.parametrize("adjoint", [None, rf.Envelope(), rf.Envelope(curvature=rf.Unroll())], ids=str)
def test_the_value_and_its_derivatives(adjoint):
    """Log Z to the first and, where the adjoint offers them, second derivatives."""
    graph = random_forest(8)
    theta = random_theta(graph, 2, 0).requires_grad_()

    def value(theta):
        return rf.infer(graph, theta, rf.Exact(), adjoint=adjoint).log_partition

    assert torch.autograd.gradcheck(value, theta)
    if adjoint != rf.Envelope():
        assert torch.autograd.gradgradcheck(value, theta)


def test_node_marginals_have_second_derivatives():
    graph = random_forest(5)
    theta = random_theta(graph, 2, 0).requires_grad_()

    def nodes(theta):
        return rf.infer(graph, theta, rf.MessagePassing()).node_mu

    assert torch.autograd.gradcheck(nodes, theta)
    assert torch.autograd.gradgradcheck(nodes, theta)


def test_marginals_read_without_gradients_still_have_them():
    graph = rf.chain(3, 2)
    theta = random_theta(graph, 2, 0).requires_grad_()
    solution = rf.infer(graph, theta, rf.Exact())
    with torch.no_grad():
        assert solution.mu.sum() > 0
    assert solution.mu.requires_grad


def test_float32_is_computed_in_double_precision():
    graph = random_forest(4)
    theta = random_theta(graph, 9, 0, dtype=torch.float32)
    run, exact = forest_run(graph, theta), forest_run(graph, theta.double())
    assert torch.equal(run.statistics(), exact.statistics().float())
    assert torch.equal(run.log_partition(), exact.log_partition().float())


def test_threads_do_not_change_the_answer():
    graph = rf.chain(7, 3, tied=True)
    theta = random_theta(graph, 50, 0, kind="saturated")
    alone = forest_run(graph, theta)
    g = torch.randn(50, graph.mu_size, dtype=torch.float64)
    try:
        rf.set_num_threads(3)
        together = forest_run(graph, theta)
        assert torch.equal(together.marginals(), alone.marginals())
        assert torch.equal(together.backward(g), alone.backward(g))
    finally:
        rf.set_num_threads(1)


def test_plans_of_graphs_with_cycles_are_refused():
    from riskfield.kernels.forest import ForestRun

    graph = rf.grid(2, 2, num_states=2)
    with pytest.raises(ValueError, match="the graph has a cycle"):
        ForestRun(graph, graph.zeros(1), None, None)


def test_theta_may_change_between_inference_and_reading_its_results():
    graph = rf.chain(4, 3)
    base = potentials(graph, 0).requires_grad_()
    weights = torch.arange(graph.mu_size, dtype=torch.float64)
    expected = torch.autograd.grad((rf.infer(graph, base).mu * weights).sum(), base)[0]
    theta = base * 1.0
    solution = rf.infer(graph, theta)
    theta.mul_(3.0)
    found = torch.autograd.grad((solution.mu * weights).sum(), base)[0]
    torch.testing.assert_close(found, expected)


def test_changed_statistics_do_not_change_the_gradient():
    graph = rf.chain(4, 3)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta)
    solution.statistics().zero_()
    gradient = torch.autograd.grad(solution.log_partition, theta)[0]
    torch.testing.assert_close(gradient, rf.infer(graph, theta.detach()).statistics())


def test_no_sweep_gives_the_value_of_the_marginals_it_gives():
    graph = rf.chain(4, 3)
    theta = potentials(graph, 0)
    native, torch_ = (
        rf.infer(graph, theta, stop=rf.Stop(0, None), kernels=k).log_partition for k in ("native", "torch")
    )
    torch.testing.assert_close(native, torch_)
