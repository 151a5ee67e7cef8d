"""Compiled sweeps against loops that send one message at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import riskfield as rf
from naive import NaiveMeanField, NaiveMessagePassing
from strategies import graphs, potentials, seeds

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
