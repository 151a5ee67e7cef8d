"""What fills the lanes of vectors, the members of a level or the models of a batch, does not change the results."""

import math

import pytest
import torch

import riskfield as rf
from cases import NEEDS_NATIVE, lanes
from riskfield import kernels
from strategies import potentials

pytestmark = NEEDS_NATIVE

GRAPHS = {
    "grid": rf.grid(3, 5, 2),
    "tied": rf.grid(3, 4, 3, tied=True),
    "mixed": rf.FactorGraph([2, 3, 2, 4, 1], [(0, 1), (1, 2), (2, 0, 3), (3,), (4, 3), (0, 3)]),
    "no factors": rf.FactorGraph([2, 3], []),
}
ALGORITHMS = {
    "Bethe": rf.MessagePassing(),
    "TRW": rf.MessagePassing(rf.TRW(0.5)),
    "damped": rf.MessagePassing(rf.TRW(0.7), damping=0.2),
    "parallel": rf.MessagePassing(rf.TRW(0.6), schedule=rf.Parallel()),
    "max-product": rf.MaxProduct(),
    "mean field": rf.MeanField(),
}
BATCH = 19  # whole vectors and a rest, for every instruction set and both precisions
over_graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


def over_algorithms(*without):
    names = [name for name in ALGORITHMS if name not in without]
    return pytest.mark.parametrize("algorithm", [ALGORITHMS[name] for name in names], ids=names)


def on_both(function):
    """Call a function with level lanes and with batch lanes."""
    results = []
    for batch_lanes in (False, True):
        with lanes(batch_lanes):
            results.append(function())
    return results


def models(graph, dtype=torch.float64):
    """Models that converge at different speeds; some need logarithms, one of them is impossible."""
    theta = potentials(graph, 3, "mild", BATCH) * torch.linspace(0, 3, BATCH, dtype=torch.float64)[:, None]
    theta[5] *= 300
    theta[11] = potentials(graph, 4, "impossible")
    theta[12, : graph.num_states[0]] = -math.inf
    return theta.to(dtype)


def possible(graph):
    theta = models(graph)
    theta[11:13] = potentials(graph, 5, "mild", 2)
    return theta


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def on(graph, algorithm, theta, messages=None, **options):
    return kernels.start(algorithm.problem(graph), theta, messages, kernels="native", **options)


@over_graphs
@over_algorithms()
@pytest.mark.parametrize("tol", [-1.0, 1e-3], ids=["three sweeps", "tolerance"])
def test_lanes_do_not_change_solutions(graph, algorithm, tol):
    theta = models(graph)

    def solve():
        run = on(graph, algorithm, theta)
        results = [*run.advance(3, tol), *run.advance(20, 10 * tol), run.marginals(), run.messages().exp()]
        warm = on(graph, algorithm, theta, run.messages())
        return [*results, *warm.advance(2, tol), warm.marginals()]

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-9)
    assert {12} <= set(level[4].isnan().any(1).nonzero().flatten().tolist()) <= {11, 12}


@over_graphs
@over_algorithms("max-product")
def test_single_precision_does_not_depend_on_lanes(graph, algorithm):
    theta = potentials(graph, 0, "mild", BATCH, dtype=torch.float32)
    grad = potentials(graph, 0, "mild", BATCH)[:, :1].float() * torch.ones(graph.mu_size)

    def solve():
        run = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP)
        run.advance(3, -1.0)
        return run.marginals(), run.backward(grad)

    (level, level_grad), (batch, batch_grad) = on_both(solve)
    torch.testing.assert_close(batch, level, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch_grad, level_grad, rtol=0, atol=1e-4)


@over_graphs
@over_algorithms("max-product")
@pytest.mark.parametrize("record", [kernels.EVERY_SWEEP, 2], ids=["tape", "checkpoints"])
def test_lanes_do_not_change_gradients(graph, algorithm, record):
    """Models of one vector that stop after different numbers of sweeps are differentiated through these alone."""
    theta = possible(graph)
    grad = potentials(graph, 1, "mild", BATCH).mean(1, keepdim=True) * torch.linspace(-1, 1, graph.mu_size)

    def solve():
        run = on(graph, algorithm, theta, record=record)
        _, first = run.advance(2, 1e-2)
        _, second = run.advance(9, 1e-4)  # those that had stopped go on
        return first + second, run.marginals(), run.backward(grad.double()), run.backward(grad.double())

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)
    close(batch[3], batch[2], 0.0)


@over_graphs
@over_algorithms("max-product", "parallel")
def test_lanes_do_not_change_gradients_at_fixed_points(graph, algorithm):
    theta = 0.3 * potentials(graph, 2, "mild", BATCH)
    theta[3:6] = 0.0
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)

    def solve():
        run = on(graph, algorithm, theta, record=kernels.LAST_SWEEP)
        run.advance(50, 1e-8)
        return run.marginals(), *run.backward_fixed_point(grad, 30, 1e-6)

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


@over_graphs
@over_algorithms("max-product")
def test_lanes_do_not_change_derivatives_along_directions(graph, algorithm):
    theta, tangent = possible(graph), potentials(graph, 6, "mild", BATCH)
    steps = torch.linspace(-0.2, 0.3, 2 * BATCH, dtype=torch.float64).reshape(2, BATCH)
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)

    def solve():
        dual = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP, tangent=tangent)
        dual.advance(3, -1.0)
        along = on(graph, algorithm, theta, along=(tangent, steps))
        along.advance(3, -1.0)
        return dual.marginals(), dual.backward(grad), along.marginals(), along.marginals(1 + steps)

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


@over_graphs
def test_lanes_do_not_change_gradients_of_counting_numbers(graph):
    theta = possible(graph)
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)
    rho = torch.linspace(0.4, 0.9, graph.num_factors, dtype=torch.float64)

    def solve():
        algorithm = rf.MessagePassing(rf.TRW(rho.clone().requires_grad_()), damping=0.1)
        run = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP)
        run.advance(6, 1e-2)
        return run.backward_counting(grad)

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


def test_one_saturated_model_leaves_the_others_in_probabilities():
    """The logarithms of one model would change the last bits of those that share its vector."""
    graph = GRAPHS["grid"]
    theta = potentials(graph, 0, "mild", BATCH)
    saturated = theta.clone()
    saturated[2] *= 1000
    algorithm = rf.MessagePassing(rf.TRW(0.7))

    def solve(given):
        run = on(graph, algorithm, given)
        run.advance(5, -1.0)
        return run.marginals()

    _, alone = on_both(lambda: solve(theta))
    _, together = on_both(lambda: solve(saturated))
    others = [k for k in range(BATCH) if k != 2]
    assert torch.equal(together[others], alone[others])
    _, logarithms = on_both(lambda: solve(1000 * theta))
    close(together[2], logarithms[2], 0.0)


def test_small_graphs_in_batches_get_batch_lanes(monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_batch_lanes", None)

    def batch_lanes(graph, batch):
        theta = torch.zeros(batch, graph.theta_size, dtype=torch.float64)
        native.MessagePassingRun(rf.MessagePassing().problem(graph), theta, None)
        return list(graph.derived("plans", dict))[-1][-2]

    small, large = rf.grid(6, 6, 2), rf.grid(120, 160, 2)
    assert batch_lanes(small, 256)
    assert not batch_lanes(small, 1)
    assert not batch_lanes(large, 2)
