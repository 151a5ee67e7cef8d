"""Factor graphs: the layout, views, builders, unions, and what is refused."""

import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from counting import lines_run
from strategies import brute_force, graphs, potentials, seeds

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
    with pytest.raises(ValueError, match=r"`tables`: factors tied to 4 have shapes \(2, 3\) and \(3, 2\)"):
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
    with pytest.raises(ValueError, match=r"`states` of variable 0 must lie in 0..1. Got 2"):
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
