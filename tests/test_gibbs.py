"""Gibbs sampling against enumeration, with fixed seeds."""

import math

import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from strategies import brute_force, graphs, potentials, seeds


@settings(max_examples=40)
@given(graphs(), seeds)
def test_frequencies_are_marginals(graph, seed):
    theta = potentials(graph, seed)
    states = rf.sample(graph, theta, 100, chains=200, burn_in=60, seed=seed % 2**31)
    assert states.shape == (200, 100, graph.num_variables)
    counted = rf.inference.frequencies(graph, states).mean(0)
    torch.testing.assert_close(counted, brute_force(graph, theta).mu, rtol=0, atol=0.03)


def test_frequencies_converge():
    graph = rf.FactorGraph([2, 3, 2, 1, 4], [(0, 1), (1, 2, 4), (4, 0), (3, 1), (0, 1)], tables=[0, 1, 2, 3, 0])
    theta = potentials(graph, 0)
    states = rf.sample(graph, theta, 500, chains=1000, seed=1)
    counted = rf.inference.frequencies(graph, states).mean(0)
    torch.testing.assert_close(counted, brute_force(graph, theta).mu, rtol=0, atol=0.004)


def test_a_batch_has_its_own_potentials():
    graph = rf.grid(2, 2, 2)
    theta = potentials(graph, 0, "mild", 2, 3)
    states = rf.sample(graph, theta, 200, chains=200, seed=0)
    assert states.shape == (2, 3, 200, 200, 4)
    counted = rf.inference.frequencies(graph, states).mean(2)
    torch.testing.assert_close(counted, rf.infer(graph, theta, rf.Exact()).mu, rtol=0, atol=0.02)


def test_seeds_reproduce():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    first, again, other = (rf.sample(graph, theta, 5, chains=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    by_generator = rf.sample(graph, theta, 5, chains=2, seed=torch.Generator().manual_seed(3))
    assert torch.equal(first, by_generator)
    torch.manual_seed(11)
    first = rf.sample(graph, theta, 5)
    torch.manual_seed(11)
    assert torch.equal(first, rf.sample(graph, theta, 5))


def test_thinning_and_burn_in_pick_from_the_same_chain():
    graph = rf.grid(2, 3, 3)
    theta = potentials(graph, 0)
    every = rf.sample(graph, theta, 20, burn_in=0, seed=0)
    assert torch.equal(rf.sample(graph, theta, 4, burn_in=8, thinning=3, seed=0), every[:, 10:20:3])


def test_evidence_is_kept():
    graph = rf.grid(2, 3, 3)
    theta = potentials(graph, 0)
    states = rf.sample(graph, theta, 300, chains=200, evidence={0: 2, 4: 0}, seed=0)
    assert (states[..., 0] == 2).all()
    assert (states[..., 4] == 0).all()
    exact = rf.infer(graph, theta, rf.Exact(), evidence={0: 2, 4: 0}).mu
    torch.testing.assert_close(rf.inference.frequencies(graph, states).mean(0), exact, rtol=0, atol=0.02)


def test_impossible_states_are_never_drawn_and_a_start_is_found():
    """Colour a 4 x 4 grid with three colours."""
    graph = rf.grid(4, 4, 3, tied=True)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, range(3), range(3)] = -math.inf
    states = rf.sample(graph, theta, 50, chains=20, seed=0)
    assert (graph.score(theta, states) == 0).all()


def test_a_given_start_is_used():
    graph = rf.chain(4, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [1, 0]] = -math.inf  # all alike: no single variable can move
    ones = torch.ones(4, dtype=torch.int64)
    assert (rf.sample(graph, theta, 10, chains=3, start=ones) == 1).all()
    with pytest.raises(ValueError, match="`start` must have non-zero probability"):
        rf.sample(graph, theta, 10, start=torch.tensor([0, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"`start` must broadcast to shape \(3, 4\). Got \(2, 4\)"):
        rf.sample(graph, theta, 10, chains=3, start=torch.stack([ones, ones]))
    with pytest.raises(ValueError, match=r"`start` of variable 0 must lie in 0..1. Got 2"):
        rf.sample(graph, theta, 10, start=2 * ones)


def test_impossible_models_are_refused():
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.node(theta, 1)[:] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="make every state of some variable impossible"):
        rf.sample(graph, theta, 1)
    theta = graph.zeros()
    graph.factor(theta, 0)[:] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="No state of non-zero probability was found"):
        rf.sample(graph, theta, 1)


def test_degenerate_graphs():
    for graph in (rf.FactorGraph([]), rf.FactorGraph([1, 3]), rf.FactorGraph([1, 1], [(0, 1)])):
        states = rf.sample(graph, potentials(graph, 0), 4, chains=2, progress=True)
        assert states.shape == (2, 4, graph.num_variables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "`num_samples` must be an integer of at least 1. Got 0"),
        ({"chains": 0}, "`chains` must be an integer of at least 1. Got 0"),
        ({"burn_in": -1}, "`burn_in` must be an integer of at least 0. Got -1"),
        ({"thinning": 1.5}, "`thinning` must be an integer of at least 1. Got 1.5"),
    ],
)
def test_bad_counts_are_refused(options, message):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=message):
        rf.sample(graph, graph.zeros(), **{"num_samples": 1, **options})


def test_bad_theta_is_refused():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=r"`theta` must not hold NaN or \+inf"):
        rf.sample(graph, graph.zeros() + math.nan, 1)
    with pytest.raises(ValueError, match=r"`states` must have shape \(\*batch, sample, variable\)"):
        rf.inference.frequencies(graph, torch.zeros(3, dtype=torch.int64))


# -- how much samples are worth ---------------------------------------------------------------------------------------


def autoregressive(correlation, chains, samples, start=0.0):
    """x_t = correlation x_{t-1} + noise, whose samples are worth (1 - correlation) / (1 + correlation) each."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(chains, samples, 1, dtype=torch.float64, generator=generator)
    values = [noise[:, 0] / math.sqrt(1 - correlation**2) + start]
    for t in range(1, samples):
        values.append(correlation * values[-1] + noise[:, t])
    return torch.stack(values, 1)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression(correlation):
    expected = 100 * 1000 * (1 - correlation) / (1 + correlation)
    found = rf.inference.effective_sample_size(autoregressive(correlation, 100, 1000))
    assert found.shape == (1,)
    assert abs(float(found) / expected - 1) < 0.1


def test_effective_sample_size_sees_chains_that_disagree():
    """Each chain by itself looks independent; together they are as many samples as there are chains."""
    draws = autoregressive(0.0, 10, 50) + 20 * torch.arange(10)[:, None, None]
    assert float(rf.inference.effective_sample_size(draws)) < 15
    both = torch.cat([draws, torch.ones_like(draws)], -1)
    assert rf.inference.effective_sample_size(both.expand(3, -1, -1, -1))[2].tolist()[1] == 500  # of what never changes
    with pytest.raises(ValueError, match=r"`draws` must be floats .* Got \(10, 50, 1\) of torch.int64"):
        rf.inference.effective_sample_size(draws.long())
