"""Graphs from other descriptions: grids of any dimension, edge lists, networkx, label images; named variables."""

import itertools
import pickle

import numpy as np
import pytest
import torch

import riskfield as rf


def pairs(graph):
    return [graph.scope(factor) for factor in range(graph.num_factors)]


@pytest.mark.parametrize(
    ("shape", "connectivity"), [((5,), None), ((3, 4), 8), ((2, 3, 4), 6), ((2, 3, 4), 26), ((2,) * 4, 80)]
)
def test_a_grid_joins_each_pair_of_neighbours_once(shape, connectivity):
    pixels = list(itertools.product(*(range(n) for n in shape)))
    nearest = connectivity in (None, 2 * len(shape))
    wanted = {}
    for (a, first), (b, second) in itertools.combinations(enumerate(pixels), 2):
        step = tuple(q - p for p, q in zip(first, second, strict=True))
        size = [abs(each) for each in step]
        if max(size) == 1 and (sum(size) == 1 or not nearest):
            wanted[a, b] = step
    graph = rf.grid(shape, num_states=2, connectivity=connectivity, tied=True)
    assert sorted(pairs(graph)) == sorted(wanted)
    table_of = dict(zip(pairs(graph), graph.factor_groups[0].tables.tolist(), strict=True))
    for one, other in itertools.pairwise(wanted):
        assert (table_of[one] == table_of[other]) == (wanted[one] == wanted[other])
    assert graph.theta_size == 2 * len(pixels) + 4 * len(set(wanted.values()))


def test_both_spellings_of_a_grid_agree():
    for settings in ({}, {"connectivity": 8}, {"tied": True}):
        old, new = rf.grid(3, 4, 2, **settings), rf.grid((3, 4), num_states=2, **settings)
        assert pairs(old) == pairs(new)
        assert old.theta_size == new.theta_size


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((3,), {"num_states": 2}, "`columns` must be a positive integer. Got None"),
        (((3, 4), 2), {}, "`columns` must not be given when `shape` is a tuple. Got 2"),
        (((3, 0),), {"num_states": 2}, r"`shape\[1\]` must be a positive integer. Got 0"),
        (((),), {"num_states": 2}, "`shape` must have at least one axis"),
        (((3, 4),), {}, "`num_states` must be a positive integer. Got None"),
        (((3, 4, 5),), {"num_states": 2, "connectivity": 8}, "`connectivity` must be 6 or 26. Got 8"),
    ],
)
def test_grids_that_are_refused(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        rf.grid(*arguments, **settings)


def test_tied_edges_share_a_table():
    graph = rf.from_edges([2, 3, 2, 3], [(0, 1), (2, 3), (2, 1)], tied=True)
    assert graph.theta_size == 10 + 6
    with pytest.raises(ValueError, match=r"`tables`: factors tied to 0 have shapes \(2, 3\) and \(3, 2\)"):
        rf.from_edges([2, 3, 2], [(0, 1), (1, 2)], tied=True)


def test_networkx():
    networkx = pytest.importorskip("networkx")
    network = networkx.DiGraph([("c", "a"), ("a", "b"), (7, "c")])
    graph = rf.graph.from_networkx(network, 3)
    assert graph.names == ("c", "a", "b", "7")
    assert pairs(graph) == [(graph.variable(a), graph.variable(b)) for a, b in [("c", "a"), ("a", "b"), ("7", "c")]]
    networkx.set_node_attributes(network, {"a": 2, "b": 3, "c": 4, 7: 5}, "states")
    assert rf.graph.from_networkx(network, "states").num_states.tolist() == [4, 2, 3, 5]
    assert rf.graph.from_networkx(network, {"a": 2, "b": 3, "c": 4, 7: 5}).num_states.tolist() == [4, 2, 3, 5]
    assert rf.graph.from_networkx(network, 2, tied=True).theta_size == 12
    with pytest.raises(ValueError, match=r"`num_states` must give a number of states for every node. Node 'c'"):
        rf.graph.from_networkx(network, "colour")
    network.add_edge("b", "b")
    with pytest.raises(ValueError, match=r"`network` must not join a node with itself. Node 'b'"):
        rf.graph.from_networkx(network, 2)


def test_superpixels():
    labels = np.array([[0, 0, 1, 1], [0, 2, 2, 1], [3, 3, 2, 4]])
    graph = rf.graph.from_superpixels(labels, 2)
    assert pairs(graph) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 3), (2, 4)]
    assert pairs(rf.graph.from_superpixels(labels[:2], 2, connectivity=8)) == [(0, 1), (0, 2), (1, 2)]
    assert rf.graph.from_superpixels(labels, 2, tied=True).theta_size == 14
    assert rf.graph.from_superpixels(np.zeros((2, 2), int), 2).num_factors == 0
    cube = rf.graph.from_superpixels(np.arange(8).reshape(2, 2, 2), 2)
    assert pairs(cube) == sorted(pairs(rf.grid((2, 2, 2), num_states=2)))
    with pytest.raises(ValueError, match=r"`labels` must number the regions .* without gaps. Got no region 0"):
        rf.graph.from_superpixels(labels + 1, 2)


def test_named_variables():
    graph = rf.FactorGraph([2, 3], [(0, 1)], names=["rain", "road"])
    theta = graph.zeros()
    graph.node(theta, "road")[2] = 1.0
    assert theta.tolist()[2:5] == [0, 0, 1]
    by_name, by_number = (rf.infer(graph, theta, evidence=given).mu for given in ({"road": 1}, {1: 1}))
    assert torch.equal(by_name, by_number)
    assert rf.sample(graph, theta, 3, evidence={"rain": 1}, seed=0)[..., 0].eq(1).all()
    assert pickle.loads(pickle.dumps(graph)).names == ("rain", "road")
    assert rf.FactorGraph([2] * 3, [(0, 1), (1, 2)], tables=[0, 0], names="abc").untied.names == ("a", "b", "c")
    assert rf.chain(2, 2).names is None
    with pytest.raises(ValueError, match=r"`variable` must be the name of a variable. Got 'rian'. Did you mean 'rain'"):
        graph.node(theta, "rian")
    with pytest.raises(ValueError, match=r"Got 'rain'. The graph has no names"):
        rf.infer(rf.chain(2, 2), rf.chain(2, 2).zeros(), evidence={"rain": 1})


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["a"], ValueError, r"`names` must hold one name per variable \(2\). Got 1"),
        (["a", "a"], ValueError, "`names` must be distinct. Variables 0 and 1 are both 'a'"),
        (["a", 1], TypeError, "`names` must hold strings. Got 1 for variable 1"),
    ],
)
def test_names_that_are_refused(names, error, message):
    with pytest.raises(error, match=message):
        rf.FactorGraph([2, 2], names=names)


def test_a_large_dense_table_is_announced():
    rf.FactorGraph([2] * 24, [tuple(range(24))])
    with pytest.warns(rf.errors.PerformanceWarning, match=r"Factor 1 joins 25 variables with 33,554,432 joint states"):
        rf.FactorGraph([2] * 25, [(0, 1), tuple(range(25))])
