"""Counting numbers: values, validity, concavity, spanning trees."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from strategies import brute_force, forests, graphs, pairwise, potentials, seeds


@settings(max_examples=60)
@given(forests(), seeds)
def test_bethe_entropy_is_the_entropy_of_a_tree(graph, seed):
    theta = potentials(graph, seed)
    truth = brute_force(graph, theta)
    probabilities = np.exp(truth.scores - truth.log_partition)
    entropy = -(probabilities * np.log(probabilities)).sum()
    assert float(rf.Bethe().counting(graph).value(graph, truth.mu)) == pytest.approx(entropy, abs=1e-10)


@settings(max_examples=60)
@given(graphs(), seeds)
def test_values_follow_the_definition(graph, seed):
    rng = np.random.default_rng(seed)
    factor, node = rng.uniform(0.5, 1.0, graph.num_factors), rng.uniform(0.5, 1.0, graph.num_variables)
    counting = rf.CountingNumbers(torch.tensor(factor), torch.tensor(node)).counting(graph)
    np.testing.assert_allclose(counting.node(graph).numpy(), node, atol=1e-12)
    mu = brute_force(graph, potentials(graph, seed)).mu

    def entropy(block):
        p = block.numpy().ravel()
        return -(p * np.log(p)).sum()

    expected = sum(node[v] * entropy(graph.node(mu, v)) for v in range(graph.num_variables))
    for group, view in zip(graph.factor_groups, graph.factor_views(mu), strict=True):
        if graph.theta_size == graph.mu_size or view.shape[0] == group.num_factors:
            expected += sum(factor[f] * entropy(view[row]) for row, f in enumerate(group.factors))
    assert float(counting.value(graph, mu)) == pytest.approx(expected, abs=1e-10)
    batch = torch.stack([mu, mu])
    assert counting.value(graph, batch).shape == (2,)


# -- concavity -------------------------------------------------------------------------------------------------------


def cycle(n):
    return rf.from_edges(2, [(k, (k + 1) % n) for k in range(n)], num_variables=n)


@pytest.mark.parametrize(
    ("graph", "entropy", "concave"),
    [
        (rf.chain(6, 2), rf.Bethe(), True),
        (cycle(5), rf.Bethe(), True),  # one loop is allowed
        (rf.grid(2, 3, 2), rf.Bethe(), False),
        (rf.grid(3, 3, 2), rf.TRW(0.5), True),
        (rf.grid(3, 3, 2, connectivity=8), rf.TRW(0.9), False),
        (rf.grid(3, 3, 2), rf.CountingNumbers(1.0, 0.0), True),
        (rf.grid(3, 3, 2), rf.CountingNumbers(1.0, -0.9), True),
        (rf.grid(3, 3, 2), rf.CountingNumbers(1.0, -1.9), False),
        (rf.FactorGraph([2] * 3, [(0, 1, 2), (0, 1, 2)]), rf.Bethe(), False),
        (rf.FactorGraph([2, 2]), rf.Bethe(), True),
    ],
)
def test_known_cases_of_concavity(graph, entropy, concave):
    assert entropy.is_concave(graph) is concave


@settings(max_examples=60)
@given(pairwise(), seeds)
def test_is_concave_implies_midpoint_concavity(graph, seed):
    """The value at the midpoint of two feasible points is at least the mean of their values."""
    entropy = rf.CountingNumbers(1.0, 0.2 - float(np.random.default_rng(seed).uniform(0, 1)))
    try:
        counting = entropy.counting(graph)
    except ValueError:
        return
    if not entropy.is_concave(graph):
        return
    ends = [brute_force(graph, 3 * potentials(graph, seed + k)).mu for k in range(2)]
    values = [float(counting.value(graph, mu)) for mu in (*ends, (ends[0] + ends[1]) / 2)]
    assert values[2] >= (values[0] + values[1]) / 2 - 1e-10


# -- spanning trees --------------------------------------------------------------------------------------------------


def spanning_forests(n, edges):
    """All maximal acyclic sets of edges."""
    best, found = -1, []
    for size in range(len(edges), -1, -1):
        if best >= 0:
            break
        for chosen in itertools.combinations(range(len(edges)), size):
            component = list(range(n))
            for k in chosen:
                a, b = (component[v] for v in edges[k])
                if a == b:
                    break
                component = [a if c == b else c for c in component]
            else:
                best = size
                found.append(chosen)
    return found


@settings(max_examples=80)
@given(pairwise(max_variables=5, max_factors=7))
def test_spanning_tree_rho_counts_spanning_trees(graph):
    rho = rf.entropy.spanning_tree_rho(graph)
    numbers = [f for f in range(graph.num_factors) if len(graph.scope(f)) == 2]
    edges = [graph.scope(f) for f in numbers]
    trees = spanning_forests(graph.num_variables, edges)
    for k, f in enumerate(numbers):
        assert float(rho[f]) == pytest.approx(sum(k in tree for tree in trees) / len(trees), abs=1e-9)
    for f in set(range(graph.num_factors)) - set(numbers):
        assert rho[f] == 1


def test_spanning_tree_rho_sums_to_the_size_of_the_forest():
    union = rf.Union([rf.grid(5, 6, 2), rf.grid(4, 4, 3, connectivity=8), rf.chain(7, 2)]).graph
    rho = rf.entropy.spanning_tree_rho(union)
    assert float(rho.sum()) == pytest.approx(union.num_variables - 3, abs=1e-8)
    assert ((rho > 0) & (rho <= 1 + 1e-12)).all()
    assert rf.TRW(rho).is_concave(union)


def test_spanning_trees_need_pairs():
    with pytest.raises(ValueError, match=r"need pairwise factors. Got a factor of arity 3"):
        rf.entropy.spanning_tree_rho(rf.FactorGraph([2] * 3, [(0, 1, 2)]))


# -- invalid arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entropy", "message"),
    [
        (rf.TRW(0.0), "`rho` must be above 0 and finite. Got 0.0"),
        (rf.TRW(-0.5), "`rho` must be above 0 and finite. Got -0.5"),
        (rf.TRW(math.nan), "`rho` must be above 0 and finite. Got nan"),
        (rf.TRW(math.inf), "`rho` must be above 0 and finite. Got inf"),
        (rf.TRW(torch.tensor([0.5, 0.0])), r"`rho`: c_c must be above 0 and finite. Got 0.0 at 1"),
        (rf.TRW(torch.tensor([0.5])), r"`rho` must be one number or have shape \(2,\). Got shape \(1,\)"),
        (rf.CountingNumbers(0.0, 1.0), r"`factor`: c_c must be above 0 and finite. Got 0.0 at 0"),
        (rf.CountingNumbers(1.0, -1.0), r"c_i \+ sum of c_c must be above 0 and finite. Got 0.0 at 0"),
        (rf.CountingNumbers(1.0, torch.ones(2)), r"`node` must be one number or have shape \(3,\). Got shape \(2,\)"),
        (rf.CountingNumbers(torch.ones(3), 1.0), r"`factor` must be one number or have shape \(2,\). Got shape \(3,\)"),
    ],
)
def test_invalid_counting_numbers_are_refused(kernels, entropy, message):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros(), rf.MessagePassing(entropy), kernels=kernels)


def test_a_rho_is_not_rounded():
    graph = rf.grid(2, 2, 2)
    assert rf.TRW(0.6).counting(graph).factor.tolist() == [0.6] * 4
    rho = torch.tensor(0.6, requires_grad=True)
    rf.TRW(rho).counting(graph).factor.sum().backward()
    assert rho.grad == 4


@pytest.mark.parametrize("make", [rf.TRW, lambda value: rf.CountingNumbers(value, 0.0)])
@pytest.mark.parametrize("value", [{}, "half", None, [[0.5], 1]])
def test_numbers_are_checked_when_they_are_given(make, value):
    with pytest.raises(TypeError, match="must be a number or a tensor of numbers"):
        make(value)


def test_counting_numbers_of_plain_numbers_are_made_once_for_a_graph():
    graph = rf.grid(2, 3, num_states=2)
    for entropy in (rf.Bethe(), rf.TRW(0.7), rf.CountingNumbers(0.8, -0.5)):
        first = entropy.counting(graph)
        assert first.constant
        assert entropy.counting(graph) is first
    for k in range(1, 30):  # few of them are kept
        assert rf.TRW(k / 30).counting(graph).factor[0] == k / 30
    assert len(graph.derived("counting numbers", dict)) < 10
    rho = torch.full((graph.num_factors,), 0.7, dtype=torch.float64)
    assert not rf.TRW(rho).counting(graph).constant
    rho[0] = 0.9
    assert rf.TRW(rho).counting(graph).factor[0] == 0.9
