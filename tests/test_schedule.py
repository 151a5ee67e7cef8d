"""Orders, levels and colours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from riskfield.graph.schedule import coloured_order
from strategies import graphs, seeds


@settings(max_examples=150)
@given(graphs(max_variables=7, max_factors=9), seeds)
def test_levels_are_longest_paths_of_earlier_neighbours(graph, seed):
    order = np.random.default_rng(seed).permutation(graph.num_variables)
    levels = rf.graph.compile_levels(graph, order)
    assert levels.rank[order].tolist() == list(range(graph.num_variables))
    neighbours = {v: set() for v in range(graph.num_variables)}
    for a, b in graph.neighbour_pairs().tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    expected = {}
    for v in order.tolist():
        expected[v] = max((expected[u] + 1 for u in neighbours[v] if u in expected), default=0)
    assert levels.level.tolist() == [expected[v] for v in range(graph.num_variables)]
    assert levels.count == max(expected.values()) + 1


@settings(max_examples=150)
@given(graphs(max_variables=7, max_factors=9))
def test_colours_are_greedy_and_proper(graph):
    colour = rf.graph.colours(graph)
    neighbours = {v: set() for v in range(graph.num_variables)}
    for a, b in graph.neighbour_pairs().tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    for v in range(graph.num_variables):
        used = {int(colour[u]) for u in neighbours[v]}
        earlier = {int(colour[u]) for u in neighbours[v] if u < v}
        assert int(colour[v]) not in used
        assert int(colour[v]) == next(c for c in range(len(earlier) + 1) if c not in earlier)
    assert sorted(rf.graph.colour_order(graph)) == list(range(graph.num_variables))
    assert rf.graph.compile_levels(graph, rf.graph.colour_order(graph)).count <= colour.max() + 1


def test_levels_of_a_grid_are_its_antidiagonals():
    levels = rf.graph.compile_levels(rf.grid(4, 6, 2)).level.reshape(4, 6)
    assert np.array_equal(levels, np.add.outer(np.arange(4), np.arange(6)))


@pytest.mark.parametrize(("connectivity", "colours"), [(4, 2), (8, 4)])
def test_grids_need_few_colours(connectivity, colours):
    assert rf.graph.colours(rf.grid(7, 8, 2, connectivity=connectivity)).max() == colours - 1


# A cycle numbered so that a greedy colouring takes three colours.
SIX = [(0, 2), (2, 3), (3, 1), (1, 4), (4, 5), (5, 0)]


@pytest.mark.parametrize(
    ("edges", "variables", "greedy", "levels"),
    [(SIX, 6, 3, 2), ([*SIX, (6, 7)], 9, 3, 2), ([(0, 1), (1, 2), (2, 0)], 3, 3, 3), ([], 3, 1, 1)],
)
def test_bipartite_graphs_need_two_colours(edges, variables, greedy, levels):
    graph = rf.FactorGraph([2] * variables, edges)
    assert rf.graph.colours(graph).max() + 1 == greedy
    assert rf.graph.compile_levels(graph, coloured_order(graph)).count == levels


@settings(max_examples=100)
@given(graphs(max_variables=7, max_factors=9))
def test_levels_of_a_coloured_schedule_are_at_most_the_greedy_colours(graph):
    order = coloured_order(graph)
    assert sorted(order) == list(range(graph.num_variables))
    assert rf.graph.compile_levels(graph, order).count <= rf.graph.colours(graph).max() + 1


def test_coloured_is_the_sequential_schedule_of_its_order(kernels):
    graph = rf.FactorGraph([2, 3, 2, 2, 3, 2], [*SIX, (0, 1, 5)])
    theta = torch.randn(2, graph.theta_size, dtype=torch.float64)
    coloured, ordered = (
        rf.infer(graph, theta, rf.MessagePassing(schedule=schedule), stop=rf.Stop(3, tol=None), kernels=kernels).mu
        for schedule in (rf.Coloured(), rf.Sequential(coloured_order(graph)))
    )
    torch.testing.assert_close(coloured, ordered, rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    "make", [lambda o: rf.MessagePassing(schedule=rf.Sequential(o)), rf.MeanField], ids=["messages", "mean field"]
)
def test_orders_must_be_permutations(kernels, make, order):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match="`order` must be a permutation of the 3 variables"):
        rf.infer(graph, graph.zeros(), make(order), kernels=kernels)


def test_settings_of_message_passing_are_checked():
    for kind in (rf.MessagePassing, rf.MaxProduct):
        for damping in (-0.1, 1.0, float("nan")):
            with pytest.raises(ValueError, match=r"`damping` must lie in \[0, 1\)"):
                kind(damping=damping)
        with pytest.raises(TypeError, match=r"`entropy` must be an entropy such as `TRW\(0.5\)`. Got 0.5"):
            kind(0.5)
        with pytest.raises(
            TypeError, match=r"`schedule` must be `Sequential\(...\)`, `Coloured\(\)` or `Parallel\(\)`. Got 'parallel'"
        ):
            kind(schedule="parallel")


def random_forest(seed):
    """Factors of one to four variables that never close a cycle, on variables numbered at random."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    name, factors, size = rng.permutation(n), [], 1
    while size < n:
        arity = min(int(rng.integers(2, 5)), n - size + 1)
        first = [] if rng.random() < 0.2 else [rng.integers(size)]  # now and then another tree begins
        scope = [*first, *range(size, size + arity - len(first))] if first else [*range(size, size + 1)]
        factors.append(rng.permutation(name[scope]).tolist())
        size += arity - 1 if first else 1
    return rf.FactorGraph(rng.integers(2, 4, n), factors)


@pytest.mark.parametrize("seed", range(40))
def test_one_sweep_is_exact_on_any_forest(seed):
    graph = random_forest(seed)
    assert graph.is_forest
    theta = 3 * torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    once = rf.Stop(sweeps=1, tol=None)
    exact = rf.infer(graph, theta, rf.Exact())
    found = rf.infer(graph, theta, rf.MessagePassing(), stop=once)
    torch.testing.assert_close(found.mu, exact.mu, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.log_partition, exact.log_partition, rtol=1e-12, atol=1e-12)
    longer = rf.infer(graph, theta, rf.MaxProduct(), stop=rf.Stop(sweeps=50, tol=None))
    assert rf.infer(graph, theta, rf.MaxProduct(), stop=once).mode().tolist() == longer.mode().tolist()


def test_the_default_order_keeps_a_numbering_from_the_leaves():
    for graph in (rf.chain(6, 2), rf.grid(3, 4, 2), rf.from_edges(2, [(0, 2), (1, 2), (2, 3)], num_variables=4)):
        assert rf.graph.compile_levels(graph).rank.tolist() == list(range(graph.num_variables))
