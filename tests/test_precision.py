"""Large potentials: right as long as the floating-point type resolves them, refused beyond."""

import math
import pickle
from fractions import Fraction
from itertools import product

import pytest
import torch

import riskfield as rf
from riskfield.inference.precision import largest_conflict
from strategies import potentials

ALGORITHMS = [
    rf.MessagePassing(),
    rf.MessagePassing(schedule=rf.Parallel(), damping=0.3),
    rf.MessagePassing(rf.TRW(0.5)),
    rf.MeanField(),
    rf.MaxProduct(),
    rf.Exact(),
    rf.ExactMAP(),
]
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
all_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
TIGHT = rf.Stop(tol=1e-5)


def rational_marginals(graph, theta):
    """Node marginals from exact sums: potentials are rational numbers, and only differences are exponentiated."""
    scores = {}
    for states in product(*(range(int(n)) for n in graph.num_states)):
        entries = [float(graph.node(theta, v)[states[v]]) for v in range(graph.num_variables)]
        for f in range(graph.num_factors):
            entries.append(float(graph.factor(theta, f)[tuple(states[v] for v in graph.scope(f))]))
        if -math.inf not in entries:
            scores[states] = sum(map(Fraction, entries))
    best = max(scores.values())
    mu = [torch.zeros(int(n), dtype=torch.float64) for n in graph.num_states]
    for states, score in scores.items():
        for v, state in enumerate(states):
            mu[v][state] += math.exp(float(score - best))
    return [m / m.sum() for m in mu]


@both_types
@all_algorithms
def test_constants_change_nothing(kernels, algorithm, dtype):
    """A constant in a table cancels, however large: the numbers are those of a model without it."""
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0,)])
    plain = torch.randint(-3, 4, (graph.theta_size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    graph.node(plain, 0)[0] = graph.factor(plain, 1)[0, 0] = -math.inf
    large = plain.clone()
    constant = 2.0**20 if dtype == torch.float32 else 2.0**50  # representable with integers added
    graph.node(large, 1).add_(constant)
    graph.factor(large, 1).sub_(constant)
    expected = rf.infer(graph, plain, algorithm, stop=TIGHT, kernels=kernels)
    solution = rf.infer(graph, large, algorithm, stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(solution.mu, expected.mu, rtol=0, atol=1e-5)
    assert torch.equal(solution.theta, large)
    assert float(solution.log_partition) == pytest.approx(float(expected.log_partition), abs=1e-4)


@both_types
@all_algorithms
@pytest.mark.parametrize("size", [1e5, 1e17, 1e30])
def test_equal_potentials_give_equal_marginals(kernels, algorithm, dtype, size):
    graph = rf.chain(3, 3)
    theta = torch.full((graph.theta_size,), size, dtype=dtype)
    solution = rf.infer(graph, theta, algorithm, kernels=kernels)
    if not isinstance(algorithm, rf.ExactMAP):
        torch.testing.assert_close(solution.mu[:9], torch.full((9,), 1 / 3, dtype=dtype), rtol=0, atol=1e-6)
    assert float(solution.log_partition) == pytest.approx(5 * size, rel=1e-5)


@both_types
@all_algorithms
def test_masks_that_nobody_pays_are_harmless(kernels, algorithm, dtype):
    """-1e9 in place of -inf, as many write it, in float32 too."""
    graph = rf.chain(4, 3)
    theta = potentials(graph, 0, dtype=dtype)
    for variable in range(4):
        graph.node(theta, variable)[variable % 3] = -1e9
    masked = torch.where(theta < -1e8, -math.inf, theta)
    expected = rf.infer(graph, masked, algorithm, stop=TIGHT, kernels=kernels)
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(solution.mu, expected.mu, rtol=0, atol=1e-5)


def conflict(size, dtype):
    """A node and a factor that disagree by about `size`: both states pay, and the difference is of order 1."""
    graph = rf.FactorGraph([2, 2], [(0, 1)])
    theta = graph.zeros(dtype=dtype)
    graph.node(theta, 0)[1] = -size
    graph.factor(theta, 0)[0] = torch.tensor([-size + 1, -size - 0.5], dtype=dtype)
    return graph, theta


@pytest.mark.filterwarnings("ignore::riskfield.errors.ConvergenceWarning")  # rounding keeps some from settling
@both_types
@all_algorithms
def test_conflicts_just_below_the_limit_are_resolved(kernels, algorithm, dtype):
    graph, theta = conflict(largest_conflict(dtype) * 0.7, dtype)
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)
    if isinstance(algorithm, rf.MaxProduct | rf.ExactMAP):
        best = [int(m.argmax()) for m in rational_marginals(graph, theta)]
        assert solution.mode().tolist() == best
    elif not isinstance(algorithm, rf.MeanField) and not isinstance(getattr(algorithm, "entropy", None), rf.TRW):
        for variable, expected in enumerate(rational_marginals(graph, theta)):
            torch.testing.assert_close(graph.node(solution.mu, variable).double(), expected, rtol=0, atol=3e-3)


@pytest.mark.filterwarnings("ignore::riskfield.errors.ConvergenceWarning")
@both_types
@all_algorithms
@pytest.mark.parametrize("factor", [3.0, 1e4, 1e15])
def test_conflicts_above_the_limit_are_refused(kernels, algorithm, dtype, factor):
    graph, theta = conflict(largest_conflict(dtype) * factor, dtype)
    with pytest.raises(
        ValueError, match=r"`theta` is too large for torch.float\d\d: probable states pay .* variable 0"
    ):
        rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)


def test_gradients_pass_through_the_shift():
    graph = rf.chain(3, 2)
    plain = potentials(graph, 0)
    large = (plain + 2.0**50).requires_grad_()
    plain = (large.detach() - 2.0**50).requires_grad_()  # as large as its rounding left it
    for theta in (plain, large):
        solution = rf.infer(graph, theta, rf.MessagePassing())
        (solution.mu.square().sum() + solution.log_partition).backward()
    torch.testing.assert_close(large.grad, plain.grad, rtol=1e-9, atol=1e-9)


def test_solutions_of_shifted_potentials_can_be_pickled():
    graph = rf.chain(3, 2)
    solution = rf.infer(graph, potentials(graph, 0) + 2.0**50)
    loaded = pickle.loads(pickle.dumps(solution))
    assert torch.equal(loaded.log_partition, solution.log_partition)
    assert torch.equal(loaded.mu, solution.mu)
    assert torch.equal(loaded.statistics(), solution.statistics())
