"""Factor graphs: the layout, views, builders, unions, what is refused; schedules on them."""

import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from cases import lines_run
from riskfield.graph.schedule import coloured_levels
from strategies import brute_force, graphs, potentials, seeds

# Factor graphs: the layout, views, builders, unions, and what is refused.


# -- layout ----------------------------------------------------------------------------------------------------------


def test_theta_and_mu_tile_their_vectors():
    graph = rf.FactorGraph([2, 3, 2, 1], [(0, 1), (1, 2), (3,), (2, 0), (0, 1), (0, 1, 2)])
    assert graph.theta_size == graph.mu_size == 8 + 6 + 6 + 1 + 4 + 6 + 12
    marks = torch.zeros(graph.mu_size)
    for v in range(graph.num_variables):
        graph.node(marks, v).add_(1)
    for f in range(graph.num_factors):
        graph.factor(marks, f).add_(1)
    assert torch.equal(marks, torch.ones_like(marks))


def test_views_share_storage():
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 1)])
    theta = graph.zeros(2, 4)
    for view in (*graph.node_views(theta), *graph.factor_views(theta), graph.node(theta, 1), graph.factor(theta, 2)):
        assert view.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
        view.fill_(1.0)
    assert theta.min() == 1
    assert [tuple(v.shape) for v in graph.node_views(theta)] == [(2, 4, 2, 2), (2, 4, 1, 3)]
    assert [tuple(v.shape) for v in graph.factor_views(theta)] == [(2, 4, 2, 2, 3), (2, 4, 1, 3, 2)]


def test_structure_is_frozen():
    graph = rf.grid(2, 3, 2)
    group = graph.factor_groups[0]
    for array in (graph.num_states, graph.node_start, group.factors, group.variables, group.tables):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        graph.num_variables = 7
    with pytest.raises(AttributeError):
        group.shape = (1, 1)


def test_the_given_arrays_are_copied():
    states, edges = np.array([2, 2, 2]), np.array([[0, 1], [1, 2]])
    graph = rf.FactorGraph(states, edges)
    states[:], edges[:] = 9, 0
    assert graph.num_states.tolist() == [2, 2, 2]
    assert graph.scope(1) == (1, 2)


def test_node_entries_are_the_places_of_a_variables_states():
    graph = rf.FactorGraph([2, 3, 2, 3], [(0, 1)])
    vector = torch.arange(graph.mu_size)
    entries = graph.node_entries(np.array([[3, 1], [1, 3]]))
    assert entries.shape == (2, 2, 3)
    assert torch.equal(torch.from_numpy(entries[0, 0]), graph.node(vector, 3))
    assert torch.equal(torch.from_numpy(entries[1, 0]), graph.node(vector, 1))
    assert graph.node_entries(np.empty(0, np.int64)).size == 0
    with pytest.raises(ValueError, match=r"`variables` must all have the same number of states. Got \[2, 3\]"):
        graph.node_entries(np.array([0, 1]))


@given(graphs())
def test_a_forest_has_no_cycle(graph):
    # Leaves of the factor graph are peeled off one by one until nothing but cycles is left.
    links = {("factor", f, v) for f in range(graph.num_factors) for v in graph.scope(f)}
    while True:
        ends = [end for _, f, v in links for end in (("factor", f), ("variable", v))]
        kept = {link for link in links if ends.count(link[:2]) > 1 and ends.count(("variable", link[2])) > 1}
        if len(kept) == len(links):
            break
        links = kept
    assert graph.is_forest == (not links)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (rf.FactorGraph([], []), True),
        (rf.FactorGraph([2], [(0,), (0,)]), True),
        (rf.chain(100_000, 2), True),
        (rf.grid(2, 2, 2), False),
        (rf.grid(1, 5, 2), True),
        (rf.FactorGraph([2] * 3, [(0, 1, 2), (1, 0)]), False),
        (rf.FactorGraph([2] * 5, [(0, 1, 2), (2, 3, 4)]), True),
    ],
)
def test_forests(graph, expected):
    assert graph.is_forest is expected
    assert "is_forest" in vars(graph)  # computed once


def test_factors_keep_their_numbers():
    scopes = [(0, 1), (2,), (1, 0), (0, 1, 2), (2, 1), (0,)]
    graph = rf.FactorGraph([2, 3, 2], scopes)
    assert [graph.scope(f) for f in range(6)] == scopes
    assert [tuple(graph.factor(graph.zeros(), f).shape) for f in range(6)] == [
        (2, 3),
        (2,),
        (3, 2),
        (2, 3, 2),
        (2, 3),
        (2,),
    ]


def test_tied_factors_share_a_table():
    graph = rf.FactorGraph([2] * 4, [(0, 1), (1, 2), (2, 3)], tables=[5, 3, 5])
    assert graph.theta_size == 8 + 2 * 4
    assert graph.mu_size == 8 + 3 * 4
    theta = graph.zeros()
    graph.factor(theta, 0)[0, 1] = 7.0
    assert float(graph.factor(theta, 2)[0, 1]) == 7
    assert float(graph.factor(theta, 1)[0, 1]) == 0


def test_tied_grids_do_not_grow_their_theta():
    assert rf.grid(50, 60, 4, tied=True, connectivity=8).theta_size == 50 * 60 * 4 + 4 * 16


@settings(max_examples=60)
@given(graphs(), seeds)
def test_expand_and_collapse_are_adjoint(graph, seed):
    theta = potentials(graph, seed, "mild", 2)
    mu = torch.rand(2, graph.mu_size, dtype=torch.float64)
    left, right = (graph.expand(theta) * mu).sum(-1), (theta * graph.collapse(mu)).sum(-1)
    torch.testing.assert_close(left, right)


@settings(max_examples=60)
@given(graphs(), seeds)
def test_scores_are_sums_over_the_tables(graph, seed):
    theta = potentials(graph, seed)
    truth = brute_force(graph, theta)
    states = np.random.default_rng(seed).integers(0, graph.num_states, size=(5, graph.num_variables))
    expected = [truth.scores[tuple(row)] for row in states]
    np.testing.assert_allclose(graph.score(theta, torch.from_numpy(states)).numpy(), expected, atol=1e-12)


def test_assemble_is_the_inverse_of_the_views():
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0, 1)], tables=[0, 1, 0])
    theta = potentials(graph, 0, "mild", 3)
    assert torch.equal(graph.assemble(graph.node_views(theta), graph.factor_views(theta)), theta)
    with pytest.raises(ValueError, match=r"`nodes` must hold 2 tensors, one per group. Got 1"):
        graph.assemble(graph.node_views(theta)[:1], graph.factor_views(theta))
    with pytest.raises(ValueError, match=r"`factors\[0\]` must have shape"):
        graph.assemble(graph.node_views(theta), [v[..., :1] for v in graph.factor_views(theta)])


def test_neighbours_are_those_who_share_a_factor():
    pairs = rf.FactorGraph([2] * 5, [(0, 1, 2), (3,)]).neighbour_pairs()
    assert {tuple(sorted(p)) for p in pairs.tolist()} == {(0, 1), (0, 2), (1, 2)}


# -- builders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("connectivity", "edges"), [(4, 17), (8, 29)])
def test_grids_join_their_neighbours(connectivity, edges):
    graph = rf.grid(3, 4, 2, connectivity=connectivity)
    assert graph.num_factors == edges
    reach = 1 if connectivity == 4 else 2
    for f in range(edges):
        (r0, c0), (r1, c1) = (divmod(v, 4) for v in graph.scope(f))
        assert max(abs(r0 - r1), abs(c0 - c1)) == 1
        assert abs(r0 - r1) + abs(c0 - c1) <= reach
    assert len({frozenset(graph.scope(f)) for f in range(edges)}) == edges


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_thin_grids(shape):
    graph = rf.grid(*shape, 2, connectivity=8)
    assert graph.num_factors == max(shape) - 1


def test_a_factor_list_may_be_tuples_or_arrays():
    tuples = rf.FactorGraph([2] * 4, [(0, 1), (1, 2), (0, 1, 3)])
    arrays = rf.FactorGraph([2] * 4, [np.array([[0, 1], [1, 2]]), np.array([[0, 1, 3]])])
    assert [tuples.scope(f) for f in range(3)] == [arrays.scope(f) for f in range(3)]


def test_grids_are_built_without_loops_over_variables():
    assert rf.grid(1000, 1000, 2).num_factors == 2 * 1000 * 999
    assert lines_run(lambda: rf.grid(200, 300, 2)) == lines_run(lambda: rf.grid(20, 30, 2))


@settings(max_examples=40)
@given(graphs(max_variables=3), graphs(max_variables=3), seeds)
def test_union_joins_and_splits(first, second, seed):
    union = rf.Union([first, second, first])
    thetas = [potentials(part, seed + k, "mild", 2) for k, part in enumerate(union.parts)]
    joined = union.join(thetas)
    assert joined.shape == (2, union.graph.theta_size)
    for theta, back in zip(thetas, union.split(joined), strict=True):
        assert torch.equal(theta, back)
    states = [torch.zeros(part.num_variables, dtype=torch.int64) for part in union.parts]
    whole = union.graph.score(joined, torch.cat(states))
    parts = sum(p.score(t, s) for p, t, s in zip(union.parts, thetas, states, strict=True))
    torch.testing.assert_close(whole, parts)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, 0, 2],), "`num_states` must be at least 1. Got 0 for variable 1"),
        (([2, -1],), "`num_states` must be at least 1. Got -1 for variable 1"),
        (([2.5],), "`num_states` must hold integers. Got float64"),
        (([[2, 2]],), r"`num_states` must be one-dimensional. Got shape \(1, 2\)"),
        (([2, 2], [(0, 1), (1, 1)]), r"`factors\[1\]` names a variable twice: \(1, 1\)"),
        (([2, 2], [(0, 2)]), r"`factors\[0\]` must name variables in 0..1. Got \(0, 2\)"),
        (([2, 2], [(0,), (-1, 0)]), r"`factors\[1\]` must name variables in 0..1. Got \(-1, 0\)"),
        (([2, 2], [()]), r"`factors\[0\]` must name one or more variables"),
        (([2, 2], [(0.5, 1)]), r"`factors\[0\]` must name one or more variables by integers"),
        (([2, 2], [3]), r"`factors\[0\]` must be a tuple of variables. Got 3"),
        (([2, 2], "01"), "`factors` must be a sequence of tuples of variables. Got str"),
        (([2, 2], np.zeros((2, 2, 2), int)), r"`factors` must have shape \(factors, arity\)"),
    ],
)
def test_bad_structure_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rf.FactorGraph(*arguments)


def test_bad_ties_are_refused():
    with pytest.raises(ValueError, match=r"`tables` must hold one integer per factor \(2\). Got shape \(1,\)"):
        rf.FactorGraph([2, 2], [(0, 1), (1, 0)], tables=[0])
    with pytest.raises(ValueError, match=r"`tables` must tie factors of one shape. Table 4 has \(2, 3\) and \(3, 2\)"):
        rf.FactorGraph([2, 3], [(0, 1), (1, 0)], tables=[4, 4])
    with pytest.raises(ValueError, match="`tables` must hold integers"):
        rf.FactorGraph([2, 2], [(0, 1)], tables=[0.5])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: rf.grid(0, 3, 2), "`rows` must be a positive integer. Got 0"),
        (lambda: rf.grid(2, 2.5, 2), "`columns` must be a positive integer. Got 2.5"),
        (lambda: rf.grid(2, 2, 2, connectivity=6), "`connectivity` must be 4 or 8. Got 6"),
        (lambda: rf.chain(3, 0), "`num_states` must be a positive integer. Got 0"),
        (lambda: rf.from_edges(2, [(0, 1)]), "`num_variables` is needed"),
        (lambda: rf.from_edges([2, 2], [(0, 1, 1)]), r"`edges` must have shape \(edges, 2\)"),
        (lambda: rf.from_edges([2, 2], [(0, 1)], num_variables=3), "`num_variables` must be 2"),
        (lambda: rf.Union([rf.chain(2, 2)]).join([]), "`thetas` must hold 1 tensors"),
    ],
)
def test_bad_builds_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("theta", "error", "message"),
    [
        (torch.zeros(13).double(), ValueError, r"`theta` must have shape \(\*batch, 14\). Got \(13,\)"),
        (torch.zeros(()).double(), ValueError, r"`theta` must have shape \(\*batch, 14\). Got \(\)"),
        (torch.zeros(14, dtype=torch.int64), TypeError, "`theta` must be float32 or float64. Got torch.int64"),
        (torch.zeros(14, dtype=torch.float16), TypeError, "`theta` must be float32 or float64. Got torch.float16"),
        (np.zeros(14), TypeError, "`theta` must be a torch.Tensor. Got ndarray"),
        (torch.full((2, 14), torch.nan), ValueError, r"`theta` must not hold NaN or \+inf. Got nan at \(0, 0\)"),
        (torch.full((14,), torch.inf), ValueError, r"`theta` must not hold NaN or \+inf. Got inf at \(0,\)"),
    ],
)
@pytest.mark.parametrize("algorithm", [rf.MessagePassing(), rf.MeanField(), rf.Exact(), rf.MaxProduct()])
def test_bad_theta_is_refused(algorithm, theta, error, message):
    with pytest.raises(error, match=message):
        rf.infer(rf.chain(3, 2), theta, algorithm)


def test_bad_vectors_are_refused():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=r"`vector` must have shape \(\*batch, 14\). Got \(3,\)"):
        graph.node_views(torch.zeros(3))
    with pytest.raises(ValueError, match=r"`variable` must lie in 0..2. Got 3"):
        graph.node(graph.zeros(), 3)
    with pytest.raises(ValueError, match=r"`factor` must lie in 0..1. Got -1"):
        graph.factor(graph.zeros(), -1)
    with pytest.raises(ValueError, match=r"`mu` must have length 14"):
        graph.collapse(torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"`states` of variable 0 must lie in 0..1. Got 2. States are numbered from 0."
    ):
        graph.score(graph.zeros(), torch.tensor([2, 0, 0]))


def test_bad_arguments_of_infer_are_refused():
    graph = rf.chain(3, 2)
    with pytest.raises(TypeError, match=r"`graph` must be a FactorGraph. Got list"):
        rf.infer([], graph.zeros())
    with pytest.raises(TypeError, match=r"`algorithm` must be an object such as `MessagePassing\(\)`. Got 'trw'"):
        rf.infer(graph, graph.zeros(), "trw")
    for algorithm in (rf.MessagePassing(), rf.MeanField(), rf.Exact(), rf.ExactMAP(), rf.ConvexFreeEnergy()):
        with pytest.raises(ValueError, match='`kernels` must be "native", "gpu", "torch" or None'):
            rf.infer(graph, graph.zeros(), algorithm, kernels="cuda")
    for adjoint in (rf.Unroll(), rf.FixedPoint()):
        with pytest.raises(ValueError, match='`kernels` must be "native", "gpu", "torch" or None'):
            rf.infer(graph, graph.zeros().requires_grad_(), adjoint=adjoint, kernels="cuda")


def test_a_union_keeps_the_order_of_factors():
    part = rf.FactorGraph([2, 2, 2], [(0, 1), (0,), (1, 2)])
    union = rf.Union([part, part]).graph
    assert [union.scope(k) for k in range(6)] == [(0, 1), (0,), (1, 2), (3, 4), (3,), (4, 5)]
    rho = torch.tensor([0.5, 1.0, 0.9], dtype=torch.float64)
    theta = torch.randn(part.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = rf.infer(part, theta, rf.MessagePassing(rf.TRW(rho)))
    joint = rf.Union([part, part])
    both = rf.infer(joint.graph, joint.join([theta, theta]), rf.MessagePassing(rf.TRW(torch.cat([rho, rho]))))
    for piece in joint.split(both.mu):
        torch.testing.assert_close(piece, alone.mu)


def test_threads_that_derive_the_same_at_once_get_one_object():
    """Counting numbers are compared by identity, for one."""
    graph, of_the_other_thread = rf.chain(3, 2), []

    def make():
        of_the_other_thread.append(graph.derived("thing", object))  # which is faster
        return object()

    assert graph.derived("thing", make) is of_the_other_thread[0]
    assert graph.derived("thing", object) is of_the_other_thread[0]


def test_what_is_derived_from_a_graph_is_kept_with_it_and_not_pickled():
    graph = rf.FactorGraph([2, 3], [(0, 1)])
    made = []
    for _ in range(2):
        kept = graph.derived("lock", lambda: made.append(threading.Lock()) or made[-1])
    assert kept is made[0]
    assert len(made) == 1
    copy = pickle.loads(pickle.dumps(graph))
    assert copy.derived("lock", lambda: "fresh") == "fresh"
    assert copy.theta_size == graph.theta_size


def test_an_untied_graph_has_a_table_per_factor_in_the_layout_of_mu():
    scopes = [(0, 1), (0, 1, 2), (1, 2), (2, 1, 0)]
    tied = rf.FactorGraph([2, 2, 2], scopes, tables=[0, 1, 0, 1])
    untied = tied.untied
    assert untied.theta_size == untied.mu_size == tied.mu_size
    assert [untied.scope(c) for c in range(4)] == scopes
    assert [group.mu_start for group in untied.factor_groups] == [group.mu_start for group in tied.factor_groups]
    assert untied.untied is untied


# Graphs from other descriptions: grids of any dimension, edge lists, networkx, label images; named variables.


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
    for options in ({}, {"connectivity": 8}, {"tied": True}):
        old, new = rf.grid(3, 4, 2, **options), rf.grid((3, 4), num_states=2, **options)
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
    with pytest.raises(ValueError, match=r"`tables` must tie factors of one shape. Table 0 has \(2, 3\) and \(3, 2\)"):
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


# -- schedules: orders, levels and colours ----------------------------------------------------------------------------


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
    assert coloured_levels(graph).count == levels


@settings(max_examples=100)
@given(graphs(max_variables=7, max_factors=9))
def test_levels_of_a_coloured_schedule_are_at_most_the_greedy_colours(graph):
    levels = coloured_levels(graph)
    compiled = rf.graph.compile_levels(graph, np.argsort(levels.rank))
    assert np.array_equal(levels.rank, compiled.rank)
    assert np.array_equal(levels.level, compiled.level)
    assert levels.count == compiled.count <= rf.graph.colours(graph).max() + 1


def test_coloured_is_the_sequential_schedule_of_its_order(kernels):
    graph = rf.FactorGraph([2, 3, 2, 2, 3, 2], [*SIX, (0, 1, 5)])
    theta = torch.randn(2, graph.theta_size, dtype=torch.float64)
    coloured, ordered = (
        rf.infer(graph, theta, rf.MessagePassing(schedule=schedule), stop=rf.Stop(3, tol=None), kernels=kernels).mu
        for schedule in (rf.Coloured(), rf.Sequential(np.argsort(coloured_levels(graph).rank)))
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


@pytest.mark.parametrize("make", [rf.Sequential, rf.MeanField])
def test_orders_hold_integers(make):
    assert make(torch.tensor([1, 0])).order == (1, 0)
    with pytest.raises(ValueError, match="`order` must hold integers"):
        make([0.9, 1.2])
    with pytest.raises(ValueError, match="`order` must be one-dimensional"):
        make([[0, 1]])


def test_settings_of_message_passing_are_checked():
    for kind in (rf.MessagePassing, rf.MaxProduct):
        for damping in (-0.1, 1.0, float("nan"), "0.5"):
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
