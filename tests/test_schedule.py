"""Orders, levels and colours."""

import numpy as np
import pytest
from hypothesis import given, settings

import riskfield as rf
from strategies import graphs, seeds


@settings(max_examples=150)
@given(graphs(max_variables=7, max_factors=9), seeds)
def test_levels_are_longest_paths_of_earlier_neighbours(graph, seed):
    order = np.random.default_rng(seed).permutation(graph.num_variables)
    levels = rf.compile_levels(graph, order)
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
    colour = rf.colours(graph)
    neighbours = {v: set() for v in range(graph.num_variables)}
    for a, b in graph.neighbour_pairs().tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    for v in range(graph.num_variables):
        used = {int(colour[u]) for u in neighbours[v]}
        earlier = {int(colour[u]) for u in neighbours[v] if u < v}
        assert int(colour[v]) not in used
        assert int(colour[v]) == next(c for c in range(len(earlier) + 1) if c not in earlier)
    assert sorted(rf.colour_order(graph)) == list(range(graph.num_variables))
    assert rf.compile_levels(graph, rf.colour_order(graph)).count <= colour.max() + 1


def test_levels_of_a_grid_are_its_antidiagonals():
    levels = rf.compile_levels(rf.grid(4, 6, 2)).level.reshape(4, 6)
    assert np.array_equal(levels, np.add.outer(np.arange(4), np.arange(6)))


@pytest.mark.parametrize(("connectivity", "colours"), [(4, 2), (8, 4)])
def test_grids_need_few_colours(connectivity, colours):
    assert rf.colours(rf.grid(7, 8, 2, connectivity=connectivity)).max() == colours - 1


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
            TypeError, match=r"`schedule` must be `Sequential\(...\)` or `Parallel\(\)`. Got 'parallel'"
        ):
            kind(schedule="parallel")
