"""Min-fill orders."""

import numpy as np
import pytest
from hypothesis import given, settings

import riskfield as rf
from counting import lines_run
from riskfield.graph.elimination import min_fill
from strategies import graphs


def naive_min_fill(graph):
    """The same order by counting all missing pairs anew at every step."""
    neighbours = {v: set() for v in range(graph.num_variables)}
    for a, b in graph.neighbour_pairs().tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    order, later = [], []

    def cost(v):
        around = sorted(neighbours[v])
        missing = sum(b not in neighbours[a] for k, a in enumerate(around) for b in around[:k])
        return missing, len(around), v

    while neighbours:
        v = min(neighbours, key=cost)
        clique = neighbours.pop(v)
        order.append(v)
        later.append(clique)
        for a in clique:
            neighbours[a] = (neighbours[a] | clique) - {a, v}
    return order, later


@settings(max_examples=200)
@given(graphs(max_variables=10, max_factors=20, max_arity=3))
def test_order_and_cliques_are_those_of_the_definition(graph):
    elimination = min_fill(graph)
    order, later = naive_min_fill(graph)
    assert list(elimination.order) == order
    assert [set(clique) for clique in elimination.later] == later
    assert elimination.width == max(map(len, later))
    position = {v: k for k, v in enumerate(order)}
    for clique in elimination.later:
        assert list(clique) == sorted(clique, key=position.get)


@pytest.mark.parametrize(
    ("graph", "width"),
    [
        (rf.chain(200, 3), 1),
        (rf.FactorGraph([2] * 6, [(0, 1, 2, 3), (3, 4, 5)]), 3),
        (rf.from_edges(2, [(k, (k + 1) % 9) for k in range(9)], num_variables=9), 2),
        (rf.grid(3, 30, 2), 3),
        (rf.from_edges(2, [(a, b) for a in range(7) for b in range(a)], num_variables=7), 6),
        (rf.FactorGraph([2, 3, 4]), 0),
        (rf.FactorGraph([]), 0),
    ],
    ids=["chain", "cliques", "cycle", "strip", "complete", "no factors", "nothing"],
)
def test_known_treewidths(graph, width):
    assert min_fill(graph).width == width


def test_known_variables_join_nothing():
    graph = rf.grid(9, 9, 2)
    left_out = np.arange(81) % 9 == 4
    elimination = min_fill(graph, left_out)
    assert set(elimination.order) == set(np.flatnonzero(~left_out).tolist())
    assert elimination.width <= 5


def test_gives_up_at_the_width_it_is_told():
    graph = rf.grid(12, 12, 2)
    assert min_fill(graph).complete
    early = min_fill(graph, max_width=4)
    assert not early.complete
    assert early.width == 4


def test_the_work_on_sparse_graphs_is_linear_in_their_size():
    def lines(n, parents):
        graph = rf.from_edges(2, np.stack([np.arange(1, n), parents], axis=1), num_variables=n)
        assert min_fill(graph).width == 1
        return lines_run(lambda: min_fill(graph))

    def random_parents(n):
        return (np.random.default_rng(0).random(n - 1) * np.arange(1, n)).astype(int)

    assert lines(3000, random_parents(3000)) < 12 * lines(300, random_parents(300))
    assert lines(3000, np.zeros(2999, int)) < 12 * lines(300, np.zeros(299, int))
