"""Forward-backward on many chains that share one table."""

import math

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.adjoints.forward_backward import chain_log_partition
from riskfield.kernels.chains import chains_of, expectations

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
