"""What holds for every algorithm: the rows of `cases.py`."""

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from cases import lanes, rows, runs
from conftest import NATIVE
from strategies import brute_force, graphs, potentials, seeds

FEW = rf.Stop(sweeps=4, tol=None)
orders = seeds.map(np.random.default_rng)


def solve(case, graph, theta, kernels, stop=FEW, order=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(graph, theta, case.make(graph, order), stop=stop, kernels=kernels, **options)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- the two kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [NATIVE])
@rows(lambda case: case.iterative and case.kernels)
@settings(max_examples=60)
@given(graph=graphs(max_states=4), seed=seeds, kind=st.sampled_from(["mild", "strong", "extreme", "impossible"]))
def test_native_equals_torch(case, native, graph, seed, kind):
    theta = potentials(graph, seed, kind, 3)
    try:
        reference = solve(case, graph, theta, "torch")
    except rf.errors.ImpossibleEvidenceError:
        for batch_lanes in (False, True):
            with lanes(batch_lanes), pytest.raises(rf.errors.ImpossibleEvidenceError):
                solve(case, graph, theta, native)
        return
    for batch_lanes in (False, True):
        with lanes(batch_lanes):
            solution = solve(case, graph, theta, native)
        close(solution.mu, reference.mu, 1e-10)
        close(solution.residual, reference.residual, 1e-9)
        close(solution.messages.exp(), reference.messages.exp(), 1e-10)
        if kind != "extreme" and case.marginals:  # ties between max-marginals are broken by rounding
            close(solution.log_partition, reference.log_partition, 1e-9)
        assert torch.equal(solution.sweeps, reference.sweeps)


@runs()
@settings(max_examples=25)
@given(graph=graphs(), seed=seeds)
def test_float32_is_near_float64(case, kernels, graph, seed):
    theta = potentials(graph, seed).float()
    single, double = (solve(case, graph, t, kernels) for t in (theta, theta.double()))
    assert single.mu.dtype == single.log_partition.dtype == torch.float32
    torch.testing.assert_close(single.mu.double(), double.mu, rtol=0, atol=2e-5)


# -- batches and unions ---------------------------------------------------------------------------------------------


@runs()
@settings(max_examples=12)
@given(graph=graphs(), seed=seeds)
def test_a_batch_is_a_loop(case, kernels, graph, seed):
    theta = potentials(graph, seed, "mild", 2, 2)
    theta[0, 0] *= 0.01  # converges in a few sweeps
    theta[1, 1] *= 3.0  # in many, or never
    for stop in (FEW, rf.Stop(sweeps=25, tol=1e-5)):
        batch = solve(case, graph, theta, kernels, stop)
        assert batch.mu.shape == (2, 2, graph.mu_size)
        assert (
            batch.log_partition.shape == batch.sweeps.shape == batch.residual.shape == batch.converged.shape == (2, 2)
        )
        for k in np.ndindex(2, 2):
            single = solve(case, graph, theta[k], kernels, stop)
            close(batch.mu[k], single.mu)
            close(batch.log_partition[k], single.log_partition)
            assert int(batch.sweeps[k]) == int(single.sweeps)
            close(batch.residual[k], single.residual, 1e-10)
            assert bool(batch.converged[k]) == bool(single.converged)
            if case.iterative:
                close(batch.messages[k].exp(), single.messages.exp())


@runs()
def test_an_empty_batch_is_fine(case, kernels):
    graph = rf.grid(2, 3, 2)
    solution = solve(case, graph, graph.zeros(0), kernels)
    assert solution.mu.shape == (0, graph.mu_size)
    assert solution.log_partition.shape == (0,)


@runs()
@settings(max_examples=25)
@given(parts=st.lists(graphs(max_variables=3, max_factors=4), min_size=1, max_size=3), seed=seeds)
def test_a_union_is_separate_runs(case, kernels, parts, seed):
    union = rf.Union(parts)
    thetas = [potentials(part, seed + k) for k, part in enumerate(parts)]
    # The steps of an interior-point method are as long as all parts allow, so that only their end can be the same.
    stop, tolerance = (FEW, 1e-11) if case.kernels else (rf.Stop(60, 1e-10), 1e-8)
    whole = solve(case, union.graph, union.join(thetas), kernels, stop)
    separate = [solve(case, part, theta, kernels, stop) for part, theta in zip(parts, thetas, strict=True)]
    for mu, alone in zip(union.split(whole.mu), separate, strict=True):
        close(mu, alone.mu, tolerance)
    close(whole.log_partition, sum(alone.log_partition for alone in separate), 10 * tolerance)


# -- labels ---------------------------------------------------------------------------------------------------------


def relabelled(graph, seed):
    """The same model with variables, the states of each and the slots of each factor in another order.

    Returns the graph, maps of theta and mu to it, and the new name of each variable.
    """
    rng = np.random.default_rng(seed)
    n = graph.num_variables
    name = rng.permutation(n)
    state_order = [rng.permutation(k) for k in graph.num_states]
    num_states = np.empty(n, np.int64)
    num_states[name] = graph.num_states
    scopes, tables, slot_orders = [None] * graph.num_factors, [None] * graph.num_factors, {}
    for k, group in enumerate(graph.factor_groups):
        # Tied factors are relabelled alike, or their common table would come apart.
        slots = np.arange(group.arity) if group.tied else rng.permutation(group.arity)
        slot_orders[k] = slots
        for f, scope, table in zip(group.factors, group.variables, group.tables, strict=True):
            scopes[f] = tuple(int(name[v]) for v in scope[slots])
            tables[f] = (k, int(table))
    tied = any(group.tied for group in graph.factor_groups)
    if tied:
        state_order = [np.arange(k) for k in graph.num_states]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(tables))}
    other = rf.FactorGraph(num_states, scopes, tables=[numbers[key] for key in tables] if tied else None)

    def translate(vector, is_mu):
        out = torch.zeros(other.mu_size if is_mu else other.theta_size, dtype=vector.dtype)
        for v in range(n):
            other.node(out, int(name[v]))[:] = graph.node(vector, v)[torch.from_numpy(state_order[v])]
        for k, group in enumerate(graph.factor_groups):
            view = graph.factor_views(vector)[k]
            for row, f in enumerate(group.factors):
                table = view[row if is_mu else int(group.tables[row])]
                for axis, v in enumerate(group.variables[row]):
                    table = table.index_select(axis, torch.from_numpy(state_order[v]))
                target = other.factor_groups[other._factor_group_of[f]]
                place = int(other._factor_row[f]) if is_mu else int(target.tables[other._factor_row[f]])
                block = other.factor_views(out)[other._factor_group_of[f]]
                block[place] = table.permute(*slot_orders[k].tolist())
        return out

    return other, translate, name


@runs()
@settings(max_examples=40)
@given(graph=graphs(max_states=4), seed=seeds, kind=st.sampled_from(["mild", "impossible"]))
def test_relabelling_permutes_the_answer(case, kernels, graph, seed, kind):
    theta = potentials(graph, seed, kind)
    if brute_force(graph, theta).best == -math.inf:
        return
    other, translate, name = relabelled(graph, seed)
    order = np.random.default_rng(seed).permutation(graph.num_variables)
    try:
        solution = solve(case, graph, theta, kernels, order=tuple(order.tolist()))
    except rf.errors.ImpossibleEvidenceError:
        assert case.name == "mean-field"  # no product distribution meets the constraints
        return
    renamed = solve(case, other, translate(theta, False), kernels, order=tuple(name[order].tolist()))
    close(renamed.mu, translate(solution.mu, True), 1e-11)
    if case.marginals or graph.is_forest:  # joint states of loopy graphs are decoded in the order of the variables
        close(renamed.log_partition, solution.log_partition, 1e-10)


@runs(lambda case: case.unique)
@settings(max_examples=25)
@given(graph=graphs(), seed=seeds)
def test_fixed_points_of_concave_entropies_do_not_depend_on_the_order(case, kernels, graph, seed):
    theta = potentials(graph, seed)
    stop = rf.Stop(sweeps=1000, tol=1e-12)
    order = tuple(np.random.default_rng(seed).permutation(graph.num_variables).tolist())
    first, second = (solve(case, graph, theta, kernels, stop, order=o) for o in (None, order))
    if first.converged and second.converged:
        close(first.mu[: graph.node_size], second.mu[: graph.node_size], 1e-8)


# -- warm starts ----------------------------------------------------------------------------------------------------


@runs(lambda case: case.iterative)
@settings(max_examples=25)
@given(graph=graphs(), seed=seeds)
def test_messages_continue_a_run(case, kernels, graph, seed):
    theta = potentials(graph, seed)
    first = solve(case, graph, theta, kernels, rf.Stop(2, tol=None))
    second = solve(case, graph, theta, kernels, rf.Stop(3, tol=None), messages=first.messages)
    whole = solve(case, graph, theta, kernels, rf.Stop(5, tol=None))
    close(second.mu, whole.mu, 1e-11)


@runs(lambda case: case.unique and case.iterative)
@settings(max_examples=40)
@given(graph=graphs(), seed=seeds, before=st.sampled_from(["mild", "impossible", "extreme"]))
def test_warm_starts_reach_the_fixed_point_of_the_new_theta(case, kernels, graph, seed, before):
    """Also where states that were impossible (or nearly so) have become possible again."""
    theta = potentials(graph, seed)
    stop = rf.Stop(sweeps=1000, tol=1e-12)
    try:
        earlier = solve(case, graph, potentials(graph, seed + 1, before), kernels, rf.Stop(30, tol=None))
    except rf.errors.ImpossibleEvidenceError:
        return
    cold = solve(case, graph, theta, kernels, stop)
    warm = solve(case, graph, theta, kernels, stop, messages=earlier.messages)
    if cold.converged and warm.converged:
        # The tolerance is one on node marginals; factor marginals may follow behind.
        close(warm.mu[: graph.node_size], cold.mu[: graph.node_size], 1e-8)
        close(warm.log_partition, cold.log_partition, 1e-8)


@runs(lambda case: case.iterative)
def test_messages_of_a_converged_run_are_converged(case, kernels):
    graph = rf.grid(3, 3, 2)
    theta = 0.3 * potentials(graph, 0)
    first = rf.infer(graph, theta, case.make(graph, None), stop=rf.Stop(tol=1e-10), kernels=kernels)
    again = rf.infer(
        graph, theta, case.make(graph, None), stop=rf.Stop(tol=1e-8), kernels=kernels, messages=first.messages
    )
    assert int(again.sweeps) == 1
    close(again.mu, first.mu, 1e-8)


@runs(lambda case: case.iterative)
def test_messages_must_fit(case, kernels):
    graph = rf.grid(2, 2, 2)
    theta = graph.zeros(3)
    good = solve(case, graph, theta, kernels).messages
    with pytest.raises(ValueError, match=r"`messages` must have shape \(\*batch, \d+\). Got \(3, \d+\)"):
        solve(case, graph, theta, kernels, messages=good[:, :-1])
    with pytest.raises(ValueError, match=r"`messages` must have the batch shape \(3,\) of theta. Got \(2, \d+\)"):
        solve(case, graph, theta, kernels, messages=good[:2])
    with pytest.raises(ValueError, match="`messages` must not hold NaN"):
        solve(case, graph, theta, kernels, messages=good * math.nan)


# -- small print ----------------------------------------------------------------------------------------------------


@runs()
@pytest.mark.parametrize(
    "graph",
    [
        rf.FactorGraph([]),
        rf.FactorGraph([3, 1, 2]),
        rf.FactorGraph([1, 1], [(0, 1), (1,)]),
        rf.FactorGraph([1, 3, 1], [(0, 1, 2), (2, 1)]),
        rf.FactorGraph([2, 2], [(0,), (0,), (1, 0), (0, 1)]),
    ],
    ids=["nothing", "no factors", "single states", "some single states", "repeated scopes"],
)
def test_degenerate_graphs(case, kernels, graph):
    theta = potentials(graph, 0)
    solution = rf.infer(graph, theta, case.make(graph, None), stop=rf.Stop(200, 1e-10), kernels=kernels)
    assert solution.mu.shape == (graph.mu_size,)
    assert solution.converged
    assert torch.isfinite(solution.mu).all()
    if case.name in ("bp", "exact"):
        truth = brute_force(graph, theta)
        if graph.num_factors < 4:  # the last one has a loop
            close(solution.mu, truth.mu, 1e-9)
            close(float(solution.log_partition), truth.log_partition, 1e-9)


@runs()
def test_inputs_are_left_alone(case, kernels):
    graph = rf.grid(2, 3, 2, tied=True)
    theta = potentials(graph, 0)
    before = theta.clone()
    first = solve(case, graph, theta, kernels, evidence={0: 1})
    assert torch.equal(theta, before)
    if case.iterative:
        messages = first.messages.clone()
        solve(case, graph, theta, kernels, messages=first.messages)
        assert torch.equal(first.messages, messages)


@runs()
def test_non_contiguous_theta(case, kernels):
    graph = rf.grid(2, 3, 2)
    theta = potentials(graph, 0, "mild", 3)
    strided = theta.repeat_interleave(2, dim=1)[:, ::2]
    assert not strided.is_contiguous()
    close(solve(case, graph, strided, kernels).mu, solve(case, graph, theta, kernels).mu)


@rows(lambda case: case.kernels and case.marginals)
def test_gradients_flow_through_the_sweeps(case):
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (2, 0), (0, 1, 2)])
    theta = potentials(graph, 0).requires_grad_()
    algorithm = case.make(graph, None)
    mu = lambda t: rf.infer(graph, t, algorithm, stop=rf.Stop(2, tol=None)).mu  # noqa: E731
    assert torch.autograd.gradcheck(mu, theta)


@rows()
def test_algorithms_are_frozen_and_pickle(case):
    graph = rf.grid(2, 2, 2)
    algorithm = case.make(graph, None)
    with pytest.raises(AttributeError):
        algorithm.anything = 1
    copy = pickle.loads(pickle.dumps(algorithm))
    theta = potentials(graph, 0)
    close(*(rf.infer(graph, theta, a, stop=FEW, kernels="torch").mu for a in (algorithm, copy)))
