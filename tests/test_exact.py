"""Exact inference: marginals, the most probable joint state, elimination orders and chains."""

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from cases import lines_run
from riskfield.adjoints.forward_backward import chain_log_partition
from riskfield.graph.elimination import min_fill
from riskfield.kernels.chains import chains_of, expectations
from strategies import brute_force, graphs, kinds, potentials, seeds

# Exact inference against enumeration, and where it refuses. `test_uai.py` has the competition's answers.


@settings(max_examples=200)
@given(graphs(max_states=4), seeds, kinds)
def test_equals_enumeration(graph, seed, kind):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, rf.Exact())
        return
    solution = rf.infer(graph, theta, rf.Exact())
    torch.testing.assert_close(solution.mu, truth.mu, rtol=0, atol=1e-10)
    assert float(solution.log_partition) == pytest.approx(truth.log_partition, rel=1e-12, abs=1e-10)
    assert solution.converged
    assert solution.sweeps == 1
    assert solution.residual == 0
    assert solution.messages is None


@settings(max_examples=60)
@given(graphs(max_states=4), seeds, st.sampled_from(["mild", "impossible"]))
def test_marginals_are_the_gradient_of_the_log_partition_function(graph, seed, kind):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        return
    theta.requires_grad_()
    solution = rf.infer(graph, theta, rf.Exact())
    (gradient,) = torch.autograd.grad(solution.log_partition, theta, retain_graph=True)
    torch.testing.assert_close(gradient, graph.collapse(truth.mu), rtol=0, atol=1e-10)
    torch.testing.assert_close(solution.mu.detach(), truth.mu, rtol=0, atol=1e-10)
    (through_mu,) = torch.autograd.grad(solution.mu.square().sum(), theta)
    assert torch.isfinite(through_mu).all()


def test_gradients_of_marginals_pass_gradcheck_twice():
    graph = rf.FactorGraph([2, 3, 2, 1], [(0, 1), (1, 2, 3), (2, 0)], tables=[0, 1, 2])
    theta = potentials(graph, 0).requires_grad_()

    def mu(theta):
        return rf.infer(graph, theta, rf.Exact()).mu

    assert torch.autograd.gradcheck(mu, theta)
    assert torch.autograd.gradgradcheck(mu, theta)


def test_float32_is_computed_in_float64():
    graph = rf.grid(4, 4, 3)
    theta = potentials(graph, 0, "extreme", dtype=torch.float32)
    single, double = (rf.infer(graph, t, rf.Exact()) for t in (theta, theta.double()))
    assert single.mu.dtype == single.log_partition.dtype == torch.float32
    torch.testing.assert_close(single.mu, double.mu.float(), rtol=0, atol=0)
    torch.testing.assert_close(single.log_partition, double.log_partition.float(), rtol=0, atol=0)


def test_batches_are_worked_off_in_parts_that_fit():
    graph = rf.grid(3, 4, 2)
    theta = potentials(graph, 0, "mild", 2, 3)
    whole = rf.infer(graph, theta, rf.Exact())
    parts = rf.infer(graph, theta, rf.Exact(max_bytes=3000))
    torch.testing.assert_close(parts.mu, whole.mu, rtol=0, atol=1e-14)
    torch.testing.assert_close(parts.log_partition, whole.log_partition, rtol=1e-14, atol=0)


def test_log_partition_can_be_had_from_theta_alone():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0, "mild", 2, 2)
    solution = rf.infer(graph, theta, rf.Exact())
    alone = rf.Exact().log_partition(graph, theta, solution.mu)
    torch.testing.assert_close(alone, solution.log_partition, rtol=1e-14, atol=0)


def test_refuses_with_treewidth_memory_and_limit():
    graph = rf.grid(20, 20, 2)
    with pytest.raises(
        rf.errors.TreewidthError, match=r"treewidth 2\d .* needs .* GiB; `max_bytes` allows 1 MiB"
    ) as info:
        rf.infer(graph, graph.zeros(), rf.Exact(max_bytes=2**20))
    received = pickle.loads(pickle.dumps(info.value))  # as from another process
    assert (str(received), received.need) == (str(info.value), info.value.need)


def test_refuses_hopeless_graphs_soon():
    graph = rf.grid(80, 80, 5)
    with pytest.raises(rf.errors.TreewidthError, match=r"treewidth more than 64 .* needs more than 2\^67 bytes"):
        rf.infer(graph, graph.zeros(), rf.Exact())


def test_gradients_count_towards_the_memory():
    graph = rf.grid(6, 6, 2)
    limited = rf.Exact(max_bytes=20_000)
    rf.infer(graph, graph.zeros(), limited)
    with pytest.raises(rf.errors.TreewidthError):
        rf.infer(graph, graph.zeros().requires_grad_(), limited)


def test_observed_variables_cut_the_treewidth():
    graph = rf.grid(20, 20, 2)
    theta = potentials(graph, 0)
    observed = {20 * r + c: (r + c) % 2 for r in range(20) for c in range(0, 20, 2)}
    exact = rf.infer(graph, theta, rf.Exact(max_bytes=20_000), evidence=observed)
    # Chains are left, on which message passing is exact.
    by_messages = rf.infer(graph, theta, evidence=observed, stop=rf.Stop(tol=1e-13), kernels="torch")
    torch.testing.assert_close(exact.mu, by_messages.mu, rtol=0, atol=1e-10)


def test_long_chains_do_not_recurse():
    graph = rf.chain(5000, 2, tied=True)
    theta = graph.zeros()
    graph.factor_views(theta)[0][0, 0, 1] = -math.inf  # once 1, always 1
    solution = rf.infer(graph, theta, rf.Exact())
    assert float(solution.log_partition) == pytest.approx(math.log(5001), rel=1e-12)


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_memory_limit_must_be_positive(max_bytes):
    with pytest.raises(ValueError, match="`max_bytes` must be positive"):
        rf.Exact(max_bytes=max_bytes)


def test_has_nothing_to_start_from():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match="`messages` must be None"):
        rf.infer(graph, graph.zeros(), rf.Exact(), messages=torch.zeros(8, dtype=torch.float64))


# The most probable joint state: ties, hard constraints, bounds, and elimination.


NEG_INF = -math.inf


def tied_model(seed, *, forest, hard, max_variables=6):
    """A random model whose potentials are -1, 0 or 1, so that many states tie; `hard` makes a quarter impossible."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, max_variables + 1))
    component, scopes = list(range(n)), []
    for _ in range(rng.integers(0, 8)):
        scope = tuple(rng.permutation(n)[: rng.integers(1, min(n, 3) + 1)].tolist())
        touched = {component[v] for v in scope}
        if forest and len(touched) < len(scope):
            continue
        component = [min(touched) if c in touched else c for c in component]
        scopes.append(scope)
    graph = rf.FactorGraph(rng.integers(1, 4, n).tolist(), scopes)
    theta = torch.from_numpy(rng.integers(-1, 2, graph.theta_size).astype(float))
    if hard:
        theta[torch.from_numpy(rng.random(graph.theta_size) < 0.25)] = NEG_INF
    return graph, theta, brute_force(graph, theta)


def solve(graph, theta, algorithm, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(graph, theta, algorithm, **options)


def check_forests(kernels, seeds):
    own_maxima_fail = 0
    for seed in seeds:
        graph, theta, truth = tied_model(seed, forest=True, hard=bool(seed % 2))
        if truth.best == NEG_INF:
            with pytest.raises(rf.errors.ImpossibleEvidenceError):
                solve(graph, theta, rf.MaxProduct(), kernels=kernels)
            continue
        solution = solve(graph, theta, rf.MaxProduct(), kernels=kernels)
        mode = solution.joint_mode()
        own = rf.decoders.MaxMarginal()(graph, solution.mu)
        own_maxima_fail += truth.scores[tuple(own.tolist())] < truth.best
        assert truth.scores[tuple(mode.states.tolist())] == truth.best == float(mode.score), seed
        assert torch.equal(mode.states, solution.mode())
        assert float(solution.log_partition) == truth.best
        assert mode.possible
        assert mode.certified, seed
    return own_maxima_fail


def test_forests_with_ties_and_hard_constraints(kernels):
    assert check_forests(kernels, range(150)) > 0  # the models are such that every variable's own maximum is not enough


def check_loopy(kernels, seeds):
    suboptimal = 0
    for seed in seeds:
        graph, theta, truth = tied_model(seed, forest=False, hard=bool(seed % 2), max_variables=5)
        exact = rf.ExactMAP()
        if truth.best == NEG_INF:
            with pytest.raises(rf.errors.ImpossibleEvidenceError):
                rf.infer(graph, theta, exact)
            solution = solve(graph, theta, rf.MaxProduct(), stop=rf.Stop(50), kernels=kernels, throw=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
                assert not solution.joint_mode().possible
            continue
        best = rf.infer(graph, theta, exact).joint_mode()
        assert truth.scores[tuple(best.states.tolist())] == truth.best == float(best.score) == float(best.upper_bound)
        assert best.certified
        for algorithm in (rf.MaxProduct(), rf.MaxProduct(rf.TRW(0.3), damping=0.2)):
            mode = solve(graph, theta, algorithm, stop=rf.Stop(50), kernels=kernels).joint_mode()
            assert mode.possible, seed
            assert truth.scores[tuple(mode.states.tolist())] == float(mode.score), seed
            assert float(mode.upper_bound) >= truth.best - 1e-9, seed
            assert not (mode.certified and float(mode.score) < truth.best - 1e-6), seed
            suboptimal += float(mode.score) < truth.best
    return suboptimal


def test_loopy_graphs_with_ties_and_hard_constraints(kernels):
    assert check_loopy(kernels, range(60)) <= 6


@pytest.mark.slow
def test_thousands_of_tied_models(kernels):
    assert check_forests(kernels, range(1000, 6000)) > 0
    check_loopy(kernels, range(1000, 3000))


def test_trw_certifies_what_its_trees_agree_on():
    graph = rf.grid(6, 6, 2)
    rng = np.random.default_rng(0)
    theta = graph.zeros()
    graph.node_views(theta)[0][:] = torch.from_numpy(rng.normal(size=(36, 2)))
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 0.4  # attractive: the relaxation is tight
    mode = rf.infer(graph, theta, rf.MaxProduct(rf.TRW(0.5)), stop=rf.Stop(5000, 1e-12)).joint_mode()
    best = rf.infer(graph, theta, rf.ExactMAP()).joint_mode()
    assert mode.certified
    assert torch.equal(mode.states, best.states)
    # Loopy belief propagation finds it, too, but cannot know.
    loopy = rf.infer(graph, theta, rf.MaxProduct()).joint_mode()
    assert not loopy.certified
    assert math.isinf(float(loopy.upper_bound))


def test_an_impossible_state_is_never_passed_off(kernels):
    """Colour an odd cycle with three colours: all max-marginals tie, own maxima would give everyone the same."""
    graph = rf.from_edges(3, [(k, (k + 1) % 7) for k in range(7)], num_variables=7)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, range(3), range(3)] = NEG_INF
    mode = rf.infer(graph, theta, rf.MaxProduct(), kernels=kernels).joint_mode()
    assert mode.possible
    assert float(mode.score) == 0
    # Two colours are too few: message passing does not notice, elimination does.
    two = rf.from_edges(2, [(k, (k + 1) % 7) for k in range(7)], num_variables=7)
    theta = two.zeros()
    two.factor_views(theta)[0][:, range(2), range(2)] = NEG_INF
    solution = rf.infer(two, theta, rf.MaxProduct(), kernels=kernels, throw=False)
    with pytest.warns(rf.errors.ConvergenceWarning, match="Every joint state of 1 batch items is impossible"):
        mode = solution.joint_mode()
    assert not mode.possible
    assert not mode.certified
    with pytest.warns(rf.errors.ConvergenceWarning, match="is impossible"):
        assert solution.log_partition == NEG_INF
    solution = rf.infer(two, theta, rf.MaxProduct(max_bytes=1), kernels=kernels)
    with pytest.warns(rf.errors.ConvergenceWarning, match="only impossible joint states for 1 batch items"):
        mode = solution.joint_mode()
    assert not mode.possible
    assert not mode.certified


def test_batches_are_decoded_item_by_item(kernels):
    graph, _, _ = tied_model(3, forest=False, hard=False)
    theta = torch.from_numpy(np.random.default_rng(0).integers(-1, 2, (2, 3, graph.theta_size)).astype(float))
    for algorithm in (rf.MaxProduct(damping=0.1), rf.ExactMAP()):
        whole = solve(graph, theta, algorithm, kernels=None if isinstance(algorithm, rf.ExactMAP) else kernels)
        assert whole.mode().shape == (2, 3, graph.num_variables)
        mode = whole.joint_mode()
        for k in np.ndindex(2, 3):
            alone = solve(graph, theta[k], algorithm, kernels=None if isinstance(algorithm, rf.ExactMAP) else kernels)
            assert torch.equal(mode.states[k], alone.mode())
            assert mode.score[k] == alone.joint_mode().score


def test_map_decodes_ties_consistently():
    graph = rf.chain(4, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = NEG_INF  # 0101 and 1010 tie
    for decoder in (rf.decoders.MAP(), rf.decoders.MAP(rf.ExactMAP())):
        states = rf.decoders.decode(graph, theta, rf.Inference(), decoder)
        assert states.tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    evidence = torch.tensor([-1, -1, 1, -1])
    assert rf.decoders.decode(graph, theta, rf.Inference(), rf.decoders.MAP(), evidence=evidence).tolist() == [
        1,
        0,
        1,
        0,
    ]


def test_the_saddle_point_of_tied_labels_is_zero():
    graph = rf.chain(4, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = -1.0
    assert float(rf.losses.SaddlePoint()(graph, theta, torch.tensor([1, 0, 1, 0]))) == 0


def test_exact_map_refuses_what_it_cannot_do():
    graph = rf.grid(30, 30, 2)
    with pytest.raises(rf.errors.TreewidthError, match=r"treewidth 3\d .* needs .* `max_bytes` allows 2 GiB"):
        rf.infer(graph, graph.zeros(), rf.ExactMAP())
    with pytest.raises(ValueError, match=r"`max_bytes` must be positive. Got 0."):
        rf.ExactMAP(max_bytes=0)
    small = rf.chain(3, 2)
    with pytest.raises(ValueError, match=r"`Unroll` needs sweeps .*, which ExactMAP does not offer. .* detach `theta`"):
        rf.infer(small, small.zeros().requires_grad_(), rf.ExactMAP())
    with pytest.raises(ValueError, match="`messages` must be None"):
        rf.infer(small, small.zeros(), rf.ExactMAP(), messages=torch.zeros(1))


def test_a_gap_above_rounding_is_not_certified_in_float32():
    graph = rf.grid(100, 100, 2)
    theta = torch.randn(graph.theta_size, generator=torch.Generator().manual_seed(0))
    for coupling, agrees in ((0.1, True), (0.3, False)):
        weak = theta.clone()
        graph.factor_views(weak)[0].mul_(coupling)
        mode = rf.infer(graph, weak, rf.MaxProduct(rf.TRW(0.5))).joint_mode()
        assert (float(mode.upper_bound) - float(graph.score(weak.double(), mode.states)) < 1e-3) == agrees
        assert bool(mode.certified) == agrees


@pytest.mark.parametrize("constant", [0.0, 1e7])
def test_a_constant_in_a_table_does_not_certify_another_state(constant):
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = -1.0  # no state satisfies all three
    graph.node(theta, 0)[1] = 0.3
    graph.node(theta, 1)[:] += constant
    mode = rf.infer(graph, theta, rf.MaxProduct(rf.TRW(2 / 3))).joint_mode()
    assert float(mode.score) < float(mode.upper_bound) - 0.1
    assert not mode.certified
    assert rf.infer(graph, theta, rf.ExactMAP()).joint_mode().certified


@pytest.mark.parametrize("algorithm", [rf.MaxProduct(), rf.ExactMAP()], ids=str)
def test_an_empty_batch_has_a_joint_mode(algorithm):
    graph = rf.chain(3, 2)
    mode = rf.infer(graph, graph.zeros(0), algorithm).joint_mode()
    assert mode.states.shape == (0, 3)
    assert mode.certified.shape == (0,)


# Min-fill orders.


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


# Forward-backward on many chains that share one table.


LENGTHS = [1, 5, 3, 3, 7, 1, 2] * 50
STATES = 4
ONE_SWEEP = rf.Inference(rf.MessagePassing(), rf.Stop(1, tol=None))


def chains(lengths=LENGTHS, states=STATES):
    """The union of chains, with one table for all pairs."""
    edges, first = [], 0
    for length in lengths:
        edges += [(first + k, first + k + 1) for k in range(length - 1)]
        first += length
    return rf.FactorGraph(np.full(first, states), np.array(edges), tables=np.zeros(len(edges), int))


def random_theta(graph, scale=1.0, seed=0):
    return scale * torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forbid(graph, theta):
    """No transition from state 0 to 1, none from 2 to itself, and no variable 3 in state 1."""
    theta = theta.clone()
    graph.factor_views(theta)[0][0, [0, 2], [1, 2]] = -math.inf
    graph.node(theta, 3)[1] = -math.inf
    return theta


@pytest.mark.parametrize("change", [lambda graph, theta: theta, forbid], ids=["finite", "forbidden"])
def test_expectations_are_those_of_exact_inference(change):
    graph = chains()
    theta = change(graph, random_theta(graph))
    found = expectations(graph, chains_of(graph), theta)
    truth = rf.infer(graph, theta, rf.Exact())
    assert float(found.log_partition) == pytest.approx(float(truth.log_partition), abs=1e-10)
    torch.testing.assert_close(found.statistics, graph.collapse(truth.mu), atol=1e-12, rtol=0)


def test_variables_in_any_order():
    graph = rf.FactorGraph([3] * 6, [(4, 1), (1, 5), (0, 2)], tables=[0, 0, 0])
    assert chains_of(graph) is None  # too few to be worth it
    many = rf.Union([graph] * 120).graph
    many = rf.FactorGraph(many.num_states, many.factor_groups[0].variables[:, ::-1], tables=np.zeros(360, int))
    theta = random_theta(many)
    truth = rf.infer(many, theta, rf.Exact())
    found = expectations(many, chains_of(many), theta)
    torch.testing.assert_close(found.statistics, many.collapse(truth.mu), atol=1e-12, rtol=0)


def test_other_graphs_are_left_alone():
    states, tables = np.full(600, 4), np.zeros(599, int)
    star = rf.FactorGraph(states, [(0, k) for k in range(1, 600)], tables=tables)
    cycles = rf.FactorGraph(states, [(k, k - k % 3 + (k + 1) % 3) for k in range(600)], tables=np.zeros(600, int))
    assert chains_of(star) is None
    assert chains_of(cycles) is None
    assert chains_of(rf.chain(600, 4, tied=True)) is None  # one long chain: message passing is faster
    assert chains_of(rf.Union([rf.chain(3, 4)] * 200).graph) is None  # a table for every pair


def test_potentials_that_could_underflow_are_left_to_message_passing():
    graph = chains()
    assert expectations(graph, chains_of(graph), random_theta(graph, scale=200)) is None
    assert expectations(graph, chains_of(graph), torch.full((graph.theta_size,), math.nan, dtype=torch.float64)) is None
    # Two groups of states that no transition joins: the less probable one fades step by step, and must not be lost,
    # since the last variable requires it.
    graph = chains([12] * 500, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][0] = torch.tensor([[0.0, -math.inf], [-math.inf, -50.0]])
    for last in range(11, 6000, 12):
        graph.node(theta, last)[0] = -math.inf
    assert chain_log_partition(graph, theta, rf.Exact(), rf.Stop()) is None
    labels = torch.ones(6000, dtype=torch.int64)
    assert float(rf.losses.SurrogateLikelihood()(graph, theta, labels, ONE_SWEEP)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("coupling", [-20.0, -60.0, -95.0, -103.0])
def test_expectations_in_single_precision_are_right_or_left_to_message_passing(coupling):
    """The best path has a transition whose probability has few digits, or none, in float32."""
    graph = chains([10] * 1000, 2)
    theta = graph.zeros()
    nodes = graph.node_views(theta)[0].view(1000, 10, 2)
    nodes[:, :5, 1] = nodes[:, 5:, 0] = -20.0
    graph.factor_views(theta)[0][0, [0, 1], [1, 0]] = coupling
    single = theta.float().requires_grad_()
    labels = torch.ones(10_000, dtype=torch.int64)
    (found,) = torch.autograd.grad(
        rf.losses.SurrogateLikelihood()(graph, single, labels, rf.Inference(rf.Exact())), single
    )
    double = theta.requires_grad_()
    (truth,) = torch.autograd.grad(rf.losses.SurrogateLikelihood()(graph, double, labels, ONE_SWEEP), double)
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-2)
    value = chain_log_partition(graph, single.detach(), rf.Exact(), rf.Stop())
    assert (value is None) == (coupling < -20)


@pytest.mark.parametrize("inference", [rf.Inference(rf.Exact()), ONE_SWEEP])
def test_likelihood_uses_it_and_has_the_same_derivatives(inference, monkeypatch):
    graph = chains([3, 2, 4] * 40, 5)
    theta = random_theta(graph).requires_grad_()
    labels = torch.randint(5, (graph.num_variables,), generator=torch.Generator().manual_seed(1))
    loss = rf.losses.SurrogateLikelihood()
    direction = random_theta(graph, seed=2)

    def derivatives():
        (gradient,) = torch.autograd.grad(loss(graph, theta, labels, inference), theta, create_graph=True)
        (product,) = torch.autograd.grad(gradient @ direction, theta)
        return gradient.detach(), product

    used = []
    monkeypatch.setattr(
        "riskfield.losses.likelihood.chain_log_partition",
        lambda *arguments: used.append(1) or chain_log_partition(*arguments),
    )
    ours = derivatives()
    assert used
    monkeypatch.setattr("riskfield.losses.likelihood.chain_log_partition", lambda *arguments: None)
    inference = ONE_SWEEP  # `Envelope`, which `Exact` gets, refuses second derivatives
    for a, b in zip(ours, derivatives(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)
