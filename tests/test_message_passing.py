"""Message passing: exact on trees, bounds, fixed points; sweeps against loops over single messages."""

import itertools
import math
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from naive import NaiveMeanField, NaiveMessagePassing
from strategies import brute_force, forests, graphs, kinds, pairwise, potentials, seeds

# Message passing: exact on trees, bounds, fixed points of the right problem.


TIGHT = rf.Stop(sweeps=500, tol=1e-13)
schedules = st.sampled_from([rf.Sequential(), rf.Parallel()])


def run_quietly(graph, theta, algorithm, stop, kernels, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(graph, theta, algorithm, stop=stop, kernels=kernels, **options)


# -- trees ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(graph=forests(), seed=seeds, kind=kinds, schedule=schedules)
def test_belief_propagation_is_exact_on_forests(kernels, graph, seed, kind, schedule):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, rf.MessagePassing(schedule=schedule), kernels=kernels)
        return
    solution = rf.infer(graph, theta, rf.MessagePassing(schedule=schedule), stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(solution.mu, truth.mu, rtol=0, atol=1e-10)
    assert float(solution.log_partition) == pytest.approx(truth.log_partition, rel=1e-11, abs=1e-9)


@settings(max_examples=100)
@given(graph=forests(), seed=seeds, kind=kinds, schedule=schedules)
def test_max_product_finds_the_best_state_of_forests(kernels, graph, seed, kind, schedule):
    theta = potentials(graph, seed, kind)
    truth = brute_force(graph, theta)
    if truth.best == -math.inf:
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, rf.MaxProduct(schedule=schedule), kernels=kernels)
        return
    solution = rf.infer(graph, theta, rf.MaxProduct(schedule=schedule), stop=TIGHT, kernels=kernels)
    assert float(solution.log_partition) == pytest.approx(truth.best, rel=1e-12, abs=1e-10)
    assert truth.scores[tuple(solution.mode().tolist())] == pytest.approx(truth.best, rel=1e-12, abs=1e-10)


def test_one_sequential_sweep_solves_a_chain(kernels):
    graph = rf.chain(30, 3)
    theta = potentials(graph, 0, "strong")
    solution = rf.infer(graph, theta, stop=rf.Stop(1, tol=None), kernels=kernels)
    torch.testing.assert_close(solution.mu, rf.infer(graph, theta, rf.Exact()).mu, rtol=0, atol=1e-12)


# -- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(graph=pairwise(), seed=seeds, kind=st.sampled_from(["mild", "strong"]))
def test_tree_reweighting_bounds_from_above_and_mean_field_from_below(kernels, graph, seed, kind):
    theta = potentials(graph, seed, kind)
    log_partition = brute_force(graph, theta).log_partition
    lower = run_quietly(graph, theta, rf.MeanField(), rf.Stop(20), kernels)
    assert float(lower.log_partition) <= log_partition + 1e-9
    entropy = rf.TRW(rf.entropy.spanning_tree_rho(graph))
    upper = run_quietly(graph, theta, rf.MessagePassing(entropy, damping=0.3), rf.Stop(2000, tol=1e-10), kernels)
    if upper.converged:
        assert float(upper.log_partition) >= log_partition - 1e-7


@settings(max_examples=60)
@given(graph=graphs(), seed=seeds)
def test_mean_field_never_goes_down(kernels, graph, seed):
    theta = potentials(graph, seed, "strong")
    values = [
        float(rf.infer(graph, theta, rf.MeanField(), stop=rf.Stop(sweeps, tol=None), kernels=kernels).log_partition)
        for sweeps in range(6)
    ]
    assert all(later >= earlier - 1e-10 for earlier, later in itertools.pairwise(values))
    assert values[-1] <= brute_force(graph, theta).log_partition + 1e-10


# -- fixed points ---------------------------------------------------------------------------------------------------


def constraints(graph):
    """The rows of A in A mu = b: node marginals sum to 1, factor marginals agree with them."""
    rows = []
    for v, start in enumerate(graph.node_start):
        row = np.zeros(graph.mu_size)
        row[start : start + graph.num_states[v]] = 1
        rows.append(row)
    for group in graph.factor_groups:
        index = np.arange(group.table_size).reshape(group.shape)
        for k, scope in enumerate(group.variables):
            start = group.mu_start + k * group.table_size
            for slot, v in enumerate(scope):
                for x in range(group.shape[slot]):
                    row = np.zeros(graph.mu_size)
                    row[start + index.take(x, axis=slot).ravel()] = 1
                    row[graph.node_start[v] + x] -= 1
                    rows.append(row)
    return np.array(rows)


def objective_gradient(graph, theta, mu, factor, node):
    """The derivative of theta . mu + H(mu), from the definition of H."""
    gradient = graph.expand(theta).numpy().copy()
    for v, start in enumerate(graph.node_start):
        block = slice(start, start + graph.num_states[v])
        gradient[block] -= node[v] * (np.log(mu[block]) + 1)
    for group in graph.factor_groups:
        for k, f in enumerate(group.factors):
            block = slice(group.mu_start + k * group.table_size, group.mu_start + (k + 1) * group.table_size)
            gradient[block] -= factor[f] * (np.log(mu[block]) + 1)
    return gradient


@settings(max_examples=100)
@given(graph=graphs(), seed=seeds, damping=st.sampled_from([0.0, 0.4]), schedule=schedules)
def test_converged_marginals_are_stationary_points(kernels, graph, seed, damping, schedule):
    rng = np.random.default_rng(seed)
    theta = potentials(graph, seed)
    factor = rng.uniform(0.4, 1.5, graph.num_factors)
    joined = np.zeros(graph.num_variables)
    for f in range(graph.num_factors):
        joined[list(graph.scope(f))] += factor[f]
    node = rng.uniform(0.6, 1.6, graph.num_variables) - joined
    entropy = rf.CountingNumbers(torch.tensor(factor), torch.tensor(node))
    solution = run_quietly(graph, theta, rf.MessagePassing(entropy, schedule, damping), rf.Stop(400, 1e-12), kernels)
    if not solution.converged:
        return
    mu, matrix = solution.mu.numpy(), constraints(graph)
    sums = np.zeros(len(matrix))
    sums[: graph.num_variables] = 1
    assert mu.min() >= 0
    np.testing.assert_allclose(matrix @ mu, sums, rtol=0, atol=1e-9)
    # Along every direction that keeps the constraints the objective is level.
    _, singular, directions = np.linalg.svd(matrix)
    feasible = directions[(singular > 1e-9).sum() :]
    slope = feasible @ objective_gradient(graph, theta, mu, factor, node)
    np.testing.assert_allclose(slope, 0, rtol=0, atol=1e-7)


def test_most_random_models_converge(kernels):
    """The test above says nothing about runs that do not converge: they must be the exception."""
    graph = rf.grid(3, 3, 2)
    theta = torch.stack([potentials(graph, seed) for seed in range(20)])
    solution = run_quietly(graph, theta, rf.MessagePassing(rf.TRW(0.5)), rf.Stop(400, 1e-12), kernels)
    assert solution.converged.all()


def test_value_is_the_maximum_of_a_concave_problem(kernels):
    """Any other feasible point, here mixtures with exact and uniform marginals, has a lower value."""
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)
    for other in (rf.infer(graph, theta, rf.Exact()).mu, rf.infer(graph, graph.zeros(), rf.Exact()).mu):
        for share in (0.01, 0.1, 0.5, 1.0):
            mixed = (1 - share) * solution.mu + share * other
            assert algorithm.log_partition(graph, theta, mixed) < solution.log_partition


# -- hard cases -----------------------------------------------------------------------------------------------------


def strong_couplings(graph, seed, scale):
    """Theta of an Ising model with couplings of either sign."""
    rng = np.random.default_rng(seed)
    theta = graph.zeros()
    graph.node_views(theta)[0][:] = torch.from_numpy(rng.normal(size=(graph.num_variables, 2)))
    coupling = torch.from_numpy(rng.normal(scale=scale, size=graph.num_factors))[:, None, None]
    graph.factor_views(theta)[0][:] = coupling * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    return theta


def test_sequential_tree_reweighting_converges_where_parallel_bp_does_not(kernels):
    side, seeds = (6, (0, 1, 2)) if kernels == "native" else (4, (0, 1))
    graph = rf.grid(side, side, 2)
    theta = torch.stack([strong_couplings(graph, seed, scale=2.0) for seed in seeds])
    solution = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=rf.Stop(2000, tol=1e-4), kernels=kernels)
    assert solution.converged.all()
    flooding = rf.MessagePassing(schedule=rf.Parallel())
    with pytest.warns(rf.errors.ConvergenceWarning):
        assert not rf.infer(graph, theta, flooding, stop=rf.Stop(600, tol=1e-4), kernels=kernels).converged.any()


@settings(max_examples=100)
@given(graph=graphs(), seed=seeds, kind=st.sampled_from(["extreme", "impossible"]), schedule=schedules)
def test_extreme_and_impossible_potentials_give_no_nan(kernels, graph, seed, kind, schedule):
    theta = potentials(graph, seed, kind)
    possible = brute_force(graph, theta).best > -math.inf
    for entropy in (rf.Bethe(), rf.TRW(0.5)):
        try:
            solution = run_quietly(graph, theta, rf.MessagePassing(entropy, schedule), rf.Stop(8), kernels)
        except rf.errors.ImpossibleEvidenceError:
            assert not possible
            continue
        assert ((solution.mu >= 0) & (solution.mu <= 1 + 1e-12)).all()
        for view in solution.node_marginals:
            torch.testing.assert_close(view.sum(-1), torch.ones_like(view[..., 0]), rtol=0, atol=1e-10)
        for group, view in zip(graph.factor_groups, solution.factor_marginals, strict=True):
            total = view.flatten(-group.arity).sum(-1)
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-10)


def test_a_hard_chain_is_solved(kernels):
    """Once on, always on: of the 2^n states only n + 1 are possible."""
    graph = rf.chain(40, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, 1, 0] = -math.inf
    solution = rf.infer(graph, theta, stop=TIGHT, kernels=kernels)
    expected = torch.arange(1, 41, dtype=torch.float64) / 41
    torch.testing.assert_close(solution.node_marginals[0][:, 1], expected, rtol=0, atol=1e-12)
    assert float(solution.log_partition) == pytest.approx(math.log(41))


def test_factors_of_probability_zero_and_large_counts_of_neighbours(kernels):
    """A hub whose state every leaf forbids but one: products of many small numbers, and zeros among them."""
    leaves = 3000
    graph = rf.from_edges(2, [(leaf, 0) for leaf in range(1, leaves + 1)], num_variables=leaves + 1)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:] = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    graph.node(theta, 0)[1] = leaves * math.log((math.exp(3) + 1) / 2)  # as probable as state 0, by symmetry
    solution = rf.infer(graph, theta, stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(graph.node(solution.mu, 0), torch.tensor([0.5, 0.5]).double(), rtol=0, atol=1e-9)
    graph.factor_views(theta)[0][7, :, 0] = -math.inf
    hard = rf.infer(graph, theta, stop=TIGHT, kernels=kernels)
    assert graph.node(hard.mu, 0).tolist() == [0.0, 1.0]


def test_a_star_takes_time_linear_in_its_leaves(kernels):
    """Compared with as many edges that share no variable, in processor time: other programs do not disturb it."""

    def seconds(edges):
        graph = rf.from_edges(2, edges, num_variables=int(edges.max()) + 1)
        theta = potentials(graph, 0)
        times = []
        for _ in range(3):
            began = time.process_time()
            rf.infer(graph, theta, stop=rf.Stop(2, tol=None), kernels=kernels)
            times.append(time.process_time() - began)
        return min(times)

    count = 50_000
    star = np.stack([np.arange(1, count + 1), np.zeros(count, int)], axis=1)
    assert seconds(star) < 10 * seconds(np.arange(2 * count).reshape(count, 2))


# Compiled sweeps against loops that send one message at a time.


SWEEPS = 3


def random_counting(graph, seed):
    rng = np.random.default_rng(seed)
    factor = rng.uniform(0.4, 1.5, graph.num_factors)
    return factor, rng.uniform(0.5, 1.5, graph.num_variables)  # c_c and c^_i


def entropy_of(graph, factor, node_total):
    joined = np.zeros(graph.num_variables)
    for f in range(graph.num_factors):
        joined[list(graph.scope(f))] += factor[f]
    return rf.CountingNumbers(torch.tensor(factor), torch.tensor(node_total - joined))


@settings(max_examples=100)
@given(
    graph=graphs(max_variables=4, max_factors=5),
    seed=seeds,
    order_seed=seeds,
    damping=st.sampled_from([0.0, 0.0, 0.6]),
    maximise=st.booleans(),
)
def test_sequential_sweeps_are_one_message_at_a_time(kernels, graph, seed, order_seed, damping, maximise):
    order = np.random.default_rng(order_seed).permutation(graph.num_variables).tolist()
    theta = potentials(graph, seed)
    factor, total = random_counting(graph, seed)
    naive = NaiveMessagePassing(graph, theta, factor, total, damping=damping, maximise=maximise)
    algorithm = (rf.MaxProduct if maximise else rf.MessagePassing)(
        entropy_of(graph, factor, total), rf.Sequential(order), damping
    )
    for sweeps in range(SWEEPS + 1):
        solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(sweeps, tol=None), kernels=kernels)
        np.testing.assert_allclose(solution.mu.numpy(), naive.mu(graph), rtol=0, atol=1e-12)
        naive.sequential_sweep(order)


@settings(max_examples=50)
@given(
    graph=graphs(max_variables=4, max_factors=5),
    seed=seeds,
    damping=st.sampled_from([0.0, 0.5]),
    maximise=st.booleans(),
)
def test_parallel_sweeps_send_all_messages_from_the_old_ones(kernels, graph, seed, damping, maximise):
    theta = potentials(graph, seed)
    factor, total = random_counting(graph, seed)
    naive = NaiveMessagePassing(graph, theta, factor, total, damping=damping, maximise=maximise)
    algorithm = (rf.MaxProduct if maximise else rf.MessagePassing)(
        entropy_of(graph, factor, total), rf.Parallel(), damping
    )
    for _ in range(SWEEPS):
        naive.parallel_sweep()
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(SWEEPS, tol=None), kernels=kernels)
    np.testing.assert_allclose(solution.mu.numpy(), naive.mu(graph), rtol=0, atol=1e-12)


@settings(max_examples=50)
@given(graph=graphs(max_variables=4, max_factors=5), seed=seeds, order_seed=seeds)
def test_mean_field_sweeps_are_one_variable_at_a_time(kernels, graph, seed, order_seed):
    order = np.random.default_rng(order_seed).permutation(graph.num_variables).tolist()
    theta = potentials(graph, seed)
    naive = NaiveMeanField(graph, theta)
    for _ in range(SWEEPS):
        naive.sweep(order)
    solution = rf.infer(graph, theta, rf.MeanField(tuple(order)), stop=rf.Stop(SWEEPS, tol=None), kernels=kernels)
    for v in range(graph.num_variables):
        np.testing.assert_allclose(graph.node(solution.mu, v).numpy(), naive.q[v], rtol=0, atol=1e-12)
    for f in range(graph.num_factors):
        # The slice of mu of the factor: by the group, since theta and mu may have one length.
        group = next(g for g in graph.factor_groups if f in g.factors)
        start = group.mu_start + group.factors.tolist().index(f) * group.table_size
        product = np.ones(())
        for v in graph.scope(f):
            product = np.multiply.outer(product, naive.q[v])
        block = solution.mu[start : start + group.table_size].numpy()
        np.testing.assert_allclose(block, product.ravel(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("connectivity", [4, 8])
def test_levels_of_a_grid_change_nothing(kernels, connectivity):
    graph = rf.grid(3, 4, 2, connectivity=connectivity, tied=True)
    theta = potentials(graph, 0)
    naive = NaiveMessagePassing(graph, theta, np.full(graph.num_factors, 0.5), np.ones(12))
    for _ in range(2):
        naive.sequential_sweep(range(12))
    solution = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=rf.Stop(2, tol=None), kernels=kernels)
    np.testing.assert_allclose(solution.mu.numpy(), naive.mu(graph), rtol=0, atol=1e-12)
