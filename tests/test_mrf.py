"""The distribution: against enumeration of all joint states."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import kl_divergence

import riskfield as rf

GRAPH = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0), (1, 2, 3), (3,)], names=["a", "b", "c", "d"])
LARGE = rf.grid(40, 40, num_states=2)
STATES = torch.tensor(list(itertools.product(*(range(n) for n in GRAPH.num_states))))
BP = rf.Inference(rf.MessagePassing())


def potentials(*batch, graph=GRAPH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=generator)


def probabilities(theta):
    return GRAPH.score(theta.unsqueeze(-2), STATES).softmax(-1)


def test_values_by_enumeration():
    theta = potentials(2)
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
    theta = potentials()
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
    theta = potentials(2)
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
    theta, value = potentials(graph=graph).requires_grad_(), torch.tensor([1, 0])
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
        theta = potentials(graph=graph)
        model, exact = rf.MRF(graph, theta, inference), rf.MRF(graph, theta)
        state = torch.zeros(graph.num_variables, dtype=torch.long)
        assert model.log_prob_is == wanted
        gap = float(model.log_prob(state) - exact.log_prob(state))
        assert {"exact": abs(gap) < 1e-9, "lower bound": gap < 0, "upper bound": gap > 0}.get(wanted, True)


def test_divergence_and_expansion():
    p, q = (rf.MRF(GRAPH, potentials(seed=seed)) for seed in (0, 1))
    a, b = (probabilities(model.theta) for model in (p, q))
    torch.testing.assert_close(kl_divergence(p, q), (a * (a / b).log()).sum())
    wide = p.expand((5, 2))
    assert wide.batch_shape == (5, 2)
    assert wide.log_prob(STATES[0]).shape == (5, 2)
    with pytest.raises(ValueError, match="`kl_divergence` needs two MRFs on one graph"):
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
