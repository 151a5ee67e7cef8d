"""The distribution of a model, and samples of it by Gibbs sampling."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck
from torch.distributions import kl_divergence

import riskfield as rf
from strategies import brute_force, graphs, potentials, seeds

# The distribution: against enumeration of all joint states.


GRAPH = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0), (1, 2, 3), (3,)], names=["a", "b", "c", "d"])
LARGE = rf.grid(40, 40, num_states=2)
STATES = torch.tensor(list(itertools.product(*(range(n) for n in GRAPH.num_states))))
BP = rf.Inference(rf.MessagePassing())


def tied_potentials(*batch, graph=GRAPH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=generator)


def probabilities(theta):
    return GRAPH.score(theta.unsqueeze(-2), STATES).softmax(-1)


def test_values_by_enumeration():
    theta = tied_potentials(2)
    model, p = rf.MRF(GRAPH, theta), probabilities(theta)
    assert (model.batch_shape, model.event_shape) == ((2,), (4,))
    torch.testing.assert_close(model.log_prob(STATES[:, None]).T, p.log())
    torch.testing.assert_close(model.log_partition, GRAPH.score(theta.unsqueeze(1), STATES).logsumexp(-1))
    torch.testing.assert_close(model.entropy(), -(p * p.log()).sum(-1))
    assert torch.equal(model.mode, STATES[p.argmax(-1)])
    for variable, count in enumerate(GRAPH.num_states):
        for state in range(3):
            wanted = (p * (STATES[:, variable] == state)).sum(-1)
            torch.testing.assert_close(model.marginals[:, variable, state], wanted)
        assert not model.marginals[:, variable, count:].any()
    agree = (p * (STATES[:, 0] == 1) * (STATES[:, 1] == 2)).sum(-1)
    torch.testing.assert_close(model.factor_marginals[0][:, 0, 1, 2], agree)
    assert model.log_prob_is == "exact"
    assert model.support.check(STATES).all()
    assert not model.support.check(STATES + 1).all()


def test_condition():
    theta = tied_potentials()
    p = probabilities(theta)
    chosen = STATES[:, 1] == 2
    model = rf.MRF(GRAPH, theta).condition({"b": 2})
    wanted = torch.where(chosen, p / p[chosen].sum(), 0)
    torch.testing.assert_close(model.log_prob(STATES).exp(), wanted)
    assert (model.sample((20,), seed=0)[:, 1] == 2).all()
    assert model.mode[1] == 2
    both = rf.MRF(GRAPH, theta).condition(torch.tensor([[-1, 2, -1, -1], [1, -1, -1, 0]]))
    assert both.batch_shape == (2,)
    torch.testing.assert_close(both.log_partition[0], model.log_partition)


def test_samples_have_the_probabilities_of_the_model():
    theta = tied_potentials(2)
    model = rf.MRF(GRAPH, theta)
    states = model.sample((100, 100), seed=0)
    assert states.shape == (100, 100, 2, 4)
    assert torch.equal(states, model.sample((100, 100), seed=0))
    p = probabilities(theta)
    number = (states * torch.tensor([12, 4, 2, 1])).sum(-1).flatten(0, 1)
    for item in range(2):
        counts = torch.bincount(number[:, item], minlength=24).double()
        chi_square = ((counts - 10_000 * p[item]).square() / (10_000 * p[item])).sum()
        assert chi_square < 60  # 23 degrees of freedom: exceeded with probability 4e-5
    assert model.sample().shape == (2, 4)
    assert model.sample((0,)).shape == (0, 2, 4)


def test_samples_where_elimination_does_not_fit():
    graph, theta = LARGE, LARGE.zeros()
    graph.node_views(theta)[0][:, 1] = 2.0
    states = rf.MRF(graph, theta, BP).sample((3,), seed=0, burn_in=2)
    assert states.shape == (3, 1600)
    assert 0.86 < states.double().mean() < 0.90  # the sigmoid of 2 is 0.881


def test_exact_samples_refuse_what_does_not_fit_and_what_is_impossible():
    with pytest.raises(rf.errors.TreewidthError):
        rf.inference.sample_exactly(LARGE, LARGE.zeros(), 1)
    theta = GRAPH.zeros()
    GRAPH.node(theta, 0)[:] = float("-inf")
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="nothing to draw from"):
        rf.inference.sample_exactly(GRAPH, theta, 1)
    with pytest.raises(ValueError, match=r"`num_samples` must be a positive integer\. Got 0"):
        rf.inference.sample_exactly(GRAPH, GRAPH.zeros(), 0)


def test_gradients():
    graph = rf.chain(2, num_states=2)
    theta, value = tied_potentials(graph=graph).requires_grad_(), torch.tensor([1, 0])
    assert gradcheck(lambda t: rf.MRF(graph, t).log_prob(value), theta)
    assert gradcheck(lambda t: rf.MRF(graph, t).entropy(), theta)
    assert gradcheck(lambda t: rf.MRF(graph, t).marginals[0], theta)
    model = rf.MRF(graph, theta)
    model.log_prob(value).sum().backward()
    model.log_prob(value).sum().backward()  # again: what is kept belongs to no graph of autograd


def test_what_the_log_probability_is():
    tree, square = rf.chain(4, 2), rf.grid(3, 3, 2)
    cases = [
        (tree, rf.Inference(rf.MessagePassing(), rf.Stop(1, tol=None)), "exact"),
        (square, BP, "approximation"),
        (square, rf.Inference(rf.MessagePassing(rf.TRW(0.5))), "lower bound"),
        (square, rf.Inference(rf.MessagePassing(rf.TRW(rf.entropy.spanning_tree_rho(square)))), "lower bound"),
        (square, rf.Inference(rf.MessagePassing(rf.TRW(0.9))), "approximation"),
        (square, rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(3, tol=None)), "approximation"),
        (square, rf.Inference(rf.MeanField()), "upper bound"),
        (square, rf.Inference(rf.Exact()), "exact"),
    ]
    for graph, inference, wanted in cases:
        theta = tied_potentials(graph=graph)
        model, exact = rf.MRF(graph, theta, inference), rf.MRF(graph, theta)
        state = torch.zeros(graph.num_variables, dtype=torch.long)
        assert model.log_prob_is == wanted
        gap = float(model.log_prob(state) - exact.log_prob(state))
        assert {"exact": abs(gap) < 1e-9, "lower bound": gap < 0, "upper bound": gap > 0}.get(wanted, True)


def test_divergence_and_expansion():
    p, q = (rf.MRF(GRAPH, tied_potentials(seed=seed)) for seed in (0, 1))
    a, b = (probabilities(model.theta) for model in (p, q))
    torch.testing.assert_close(kl_divergence(p, q), (a * (a / b).log()).sum())
    wide = p.expand((5, 2))
    assert wide.batch_shape == (5, 2)
    assert wide.log_prob(STATES[0]).shape == (5, 2)
    with pytest.raises(ValueError, match=r"`kl_divergence` needs two MRFs on the same `FactorGraph`. Got two graphs."):
        kl_divergence(p, rf.MRF(LARGE, LARGE.zeros()))


def test_refusals():
    with pytest.raises(TypeError, match=r"`graph` must be a FactorGraph\. Got str"):
        rf.MRF("grid", GRAPH.zeros())
    with pytest.raises(TypeError, match=r"`inference` must be an algorithm such as `MessagePassing\(\)`, or an object"):
        rf.MRF(GRAPH, GRAPH.zeros(), "exact")
    with pytest.raises(ValueError, match="`theta` must not hold NaN"):
        rf.MRF(GRAPH, GRAPH.zeros() * float("nan"))
    with pytest.raises(rf.errors.TreewidthError):
        rf.MRF(LARGE, LARGE.zeros()).log_partition  # noqa: B018


def test_an_algorithm_is_an_inference():
    theta = torch.linspace(-1, 1, GRAPH.theta_size, dtype=torch.float64)
    bare, whole = rf.MRF(GRAPH, theta, rf.MeanField()), rf.MRF(GRAPH, theta, rf.Inference(rf.MeanField()))
    assert bare.inference == whole.inference
    assert torch.equal(bare.log_partition, whole.log_partition)


# Gibbs sampling against enumeration, with fixed seeds.


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
    with pytest.raises(ValueError, match=r"`start` must have non-zero probability under `theta` and `evidence`."):
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


def test_no_variables_have_no_marginals():
    assert rf.MRF(rf.FactorGraph([]), torch.zeros(2, 0)).marginals.shape == (2, 0, 0)


def test_states_have_no_mean():
    graph = rf.chain(2, num_states=2)
    model = rf.MRF(graph, graph.zeros())
    with pytest.raises(NotImplementedError, match=r"have no mean. Use `marginals`"):
        model.mean  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"have no variance. Use `marginals`"):
        model.stddev  # noqa: B018


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
