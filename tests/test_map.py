"""The most probable joint state: ties, hard constraints, bounds, and elimination."""

import math
import warnings

import numpy as np
import pytest
import torch

import riskfield as rf
from strategies import brute_force

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


@pytest.mark.parametrize("algorithm", [rf.MaxProduct(), rf.ExactMAP()], ids=str)
def test_an_empty_batch_has_a_joint_mode(algorithm):
    graph = rf.chain(3, 2)
    mode = rf.infer(graph, graph.zeros(0), algorithm).joint_mode()
    assert mode.states.shape == (0, 3)
    assert mode.certified.shape == (0,)
