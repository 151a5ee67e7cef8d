"""What criteria find: bounds on the likelihood, maximum likelihood on trees, true parameters from all the data."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from loss_cases import Naive, draw
from strategies import brute_force, forests, graphs, pairwise, potentials, seeds

EXACT = rf.Inference(rf.Exact())
TIGHT = rf.Stop(sweeps=20_000, tol=1e-12)


def minimise(objective, parameters, steps=200):
    """L-BFGS to the end; the gradient it ends with."""
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        history_size=30,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        value = objective()
        value.backward()
        return value

    optimiser.step(closure)
    closure()
    return max(float(p.grad.abs().max()) for p in parameters)


def joint_states(graph):
    """All joint states, of shape (states, variable)."""
    return torch.tensor(list(itertools.product(*(range(int(n)) for n in graph.num_states))))


def log_probabilities(graph, theta):
    """Log-probabilities of `joint_states`, of shape (*batch, states)."""
    states = joint_states(graph)
    return graph.score(theta.unsqueeze(-2), states).log_softmax(-1)


# -- bounds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(graph=pairwise(max_variables=5, max_factors=7), seed=seeds)
def test_tree_reweighted_likelihood_is_below_the_true_one(graph, seed):
    """A is an upper bound, so the loss is above minus the log-likelihood."""
    theta, (labels, _) = potentials(graph, seed), draw(graph, seed)
    rho = rf.entropy.spanning_tree_rho(graph)
    bound = rf.losses.SurrogateLikelihood()(graph, theta, labels, rf.Inference(rf.MessagePassing(rf.TRW(rho)), TIGHT))
    true = rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT)
    assert bound >= true - 1e-8


@settings(max_examples=25)
@given(graph=graphs(max_variables=5), seed=seeds)
def test_mean_field_likelihood_is_above_the_true_one(graph, seed):
    """A is a lower bound, so the loss is below minus the log-likelihood; also after few sweeps."""
    theta, (labels, _) = potentials(graph, seed), draw(graph, seed)
    true = rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT)
    for stop in (TIGHT, rf.Stop(2, None)):
        bound = rf.losses.SurrogateLikelihood()(graph, theta, labels, rf.Inference(rf.MeanField(), stop))
        assert bound <= true + 1e-8


@settings(max_examples=25)
@given(graph=pairwise(max_variables=5, max_factors=7), seed=seeds)
def test_mixed_bounds_with_hidden_variables(graph, seed):
    """Mean field below A(theta, z), tree-reweighting above A(theta): a bound on the likelihood of what is observed."""
    theta, (labels, _) = potentials(graph, seed), draw(graph, seed, hidden=0.5)
    upper = rf.Inference(rf.MessagePassing(rf.TRW(rf.entropy.spanning_tree_rho(graph))), TIGHT)
    naive = Naive(graph, theta, labels)
    true = naive.log_total(naive.given) - naive.log_total(naive.known)
    assert rf.losses.SurrogateEM(clamped=rf.MeanField())(graph, theta, labels, upper) >= true - 1e-8


def test_the_bounds_are_strict_where_there_are_loops():
    graph = rf.grid(3, 3, 2)
    theta, (labels, _) = potentials(graph, 1), draw(graph, 2)
    below, above = rf.Inference(rf.MeanField(), TIGHT), rf.Inference(rf.MessagePassing(rf.TRW(0.5)), TIGHT)
    values = [rf.losses.SurrogateLikelihood()(graph, theta, labels, inference) for inference in (below, EXACT, above)]
    assert values[0] + 0.1 < values[1] < values[2] - 0.1


# -- likelihood on trees ---------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(graph=forests(max_variables=5), seed=seeds)
def test_on_forests_belief_propagation_gives_the_likelihood(graph, seed):
    theta, (labels, _) = potentials(graph, seed).requires_grad_(), draw(graph, seed, 3, hidden=0.3)
    bp = rf.Inference(rf.MessagePassing(), TIGHT)
    values = rf.losses.SurrogateEM()(graph, theta, labels, bp)
    for item in range(3):
        naive = Naive(graph, theta.detach(), labels[item])
        expected = naive.log_total(naive.given) - naive.log_total(naive.known)
        torch.testing.assert_close(float(values[item].detach()), expected, rtol=1e-7, atol=1e-7)
    (gradient,) = torch.autograd.grad(values.sum(), theta)
    exact = rf.losses.SurrogateEM()(graph, theta, labels, EXACT)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), theta)[0], rtol=0, atol=1e-6)


def test_maximum_likelihood_on_a_tree():
    """The maximum is known in closed form: the model whose clique marginals are the frequencies of the data."""
    graph = rf.from_edges([2, 3, 2, 2], [(0, 1), (1, 2), (1, 3)])
    labels = draw(graph, 5, 60)[0]
    model = rf.models.Generative(graph)
    bp = rf.Inference(rf.MessagePassing(), rf.Stop(tol=1e-13))
    risk = lambda: rf.losses.empirical_risk(rf.losses.SurrogateLikelihood(), graph, model(graph), labels, bp) / 60  # noqa: E731
    assert minimise(risk, list(model.parameters())) < 1e-7
    frequencies = rf.inference.frequencies(graph, labels)
    theta = model(graph).detach()
    torch.testing.assert_close(brute_force(graph, theta).mu, frequencies, rtol=0, atol=1e-6)
    nodes, factors = graph.node_views(frequencies), graph.factor_views(frequencies)
    entropies = [torch.special.entr(view).flatten(1).sum(1) for view in (*nodes, *factors)]
    entropy = sum(map(torch.sum, entropies[len(nodes) :])) - 2 * torch.special.entr(graph.node(frequencies, 1)).sum()
    torch.testing.assert_close(risk().detach(), entropy, rtol=0, atol=1e-9)


# -- consistency -----------------------------------------------------------------------------------------------------

# All joint states, weighted by their true probabilities, are the data of which there is enough.
LOOP = rf.grid(2, 3, 2)
CONSISTENT = {
    "likelihood": (rf.losses.SurrogateLikelihood(), EXACT),
    "clique-logistic": (rf.losses.CliqueLogistic(), EXACT),
    "clique-quadratic": (rf.losses.CliqueQuadratic(), EXACT),
    "pseudolikelihood": (rf.losses.Pseudolikelihood(), None),
    "patches": (rf.losses.PatchPseudolikelihood([0, 0, 1, 0, 0, 1]), EXACT),
    "hybrid": (rf.losses.Hybrid(rf.losses.Pseudolikelihood(), rf.losses.CliqueLogistic(), 0.5), EXACT),
}


def fitted_and_true(loss, inference):
    """The log-probabilities of all joint states, by a model fitted to them and in truth."""
    truth = log_probabilities(LOOP, 0.5 * potentials(LOOP, 3))
    labels, weights = joint_states(LOOP), truth.exp()
    model = rf.models.Generative(LOOP)
    risk = lambda: rf.losses.empirical_risk(loss, LOOP, model(LOOP), labels, inference, weights=weights)  # noqa: E731
    minimise(risk, list(model.parameters()), steps=500)
    return log_probabilities(LOOP, model(LOOP).detach()), truth


@pytest.mark.parametrize("name", CONSISTENT)
def test_consistent_criteria_find_the_true_distribution(name):
    found, truth = fitted_and_true(*CONSISTENT[name])
    torch.testing.assert_close(found, truth, rtol=0, atol=2e-3)


@pytest.mark.parametrize("loss", [rf.losses.Piecewise(), rf.losses.Independent()], ids=["piecewise", "independent"])
def test_other_criteria_do_not(loss):
    found, truth = fitted_and_true(loss, None)
    assert (found - truth).abs().max() > 0.1


@pytest.mark.parametrize("name", ["univariate-logistic", "univariate-quadratic", "mse"])
def test_univariate_criteria_find_the_true_marginals(name):
    loss = {
        "univariate-logistic": rf.losses.UnivariateLogistic(),
        "univariate-quadratic": rf.losses.UnivariateQuadratic(),
    }
    theta = potentials(LOOP, 3)
    labels, weights = joint_states(LOOP), log_probabilities(LOOP, theta).exp()
    model = rf.models.Generative(LOOP)
    chosen = loss.get(name, rf.losses.MSE())
    risk = lambda: rf.losses.empirical_risk(chosen, LOOP, model(LOOP), labels, EXACT, weights=weights)  # noqa: E731
    minimise(risk, list(model.parameters()), steps=500)
    found = EXACT(LOOP, model(LOOP).detach()).mu[: LOOP.node_size]
    torch.testing.assert_close(found, brute_force(LOOP, theta).mu[: LOOP.node_size], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [rf.MessagePassing(rf.TRW(0.5)), rf.MessagePassing()], ids=["tree-reweighted", "loopy"]
)
def test_surrogate_likelihood_matches_moments(algorithm):
    """Its minimum is where the approximate marginals are the frequencies of the data."""
    theta = 0.5 * potentials(LOOP, 3)
    labels, weights = joint_states(LOOP), log_probabilities(LOOP, theta).exp()
    inference, model = rf.Inference(algorithm, TIGHT), rf.models.Generative(LOOP)
    risk = lambda: rf.losses.empirical_risk(  # noqa: E731
        rf.losses.SurrogateLikelihood(), LOOP, model(LOOP), labels, inference, weights=weights
    )
    minimise(risk, list(model.parameters()))
    found = inference(LOOP, model(LOOP).detach()).mu
    torch.testing.assert_close(found, brute_force(LOOP, theta).mu, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["likelihood", "univariate-logistic", "clique-logistic", "pseudolikelihood", "mse"])
def test_conditional_models_find_the_true_parameters(name):
    """A chain with inputs: what is learned on some inputs predicts the distribution at others."""
    graph, generator = rf.chain(3, 2), torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    true, model = (rf.LinearModel(2, node_features=2, factor_features=2) for _ in range(2))
    with torch.no_grad():
        for parameter in true.parameters():
            parameter.copy_(randn(*parameter.shape))
    seen, unseen = ({"nodes": randn(n, 3, 2), "factors": randn(n, 2, 2)} for n in (12, 5))

    truth = log_probabilities(graph, true(graph, seen).detach())  # (input, state)
    labels = joint_states(graph).expand(12, -1, -1)
    loss = {
        "likelihood": rf.losses.SurrogateLikelihood(),
        "univariate-logistic": rf.losses.UnivariateLogistic(),
        "clique-logistic": rf.losses.CliqueLogistic(),
        "pseudolikelihood": rf.losses.Pseudolikelihood(),
        "mse": rf.losses.MSE(),
    }[name]

    def risk():
        theta = model(graph, seen).unsqueeze(1).expand(-1, len(joint_states(graph)), -1)
        return rf.losses.empirical_risk(loss, graph, theta, labels, EXACT, weights=truth.exp(), per_variable=True)

    minimise(risk, list(model.parameters()), steps=1000)
    found = log_probabilities(graph, model(graph, unseen).detach())
    torch.testing.assert_close(found, log_probabilities(graph, true(graph, unseen).detach()), rtol=0, atol=1e-2)


def test_expectation_maximisation_fits_what_is_observed():
    """A hidden variable behind two visible ones can make any joint distribution of these of rank two."""
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (0, 2)])  # variable 0 is hidden
    observed = torch.tensor([[-1, a, b] for a in range(2) for b in range(2)])
    weights = torch.tensor([0.4, 0.1, 0.15, 0.35], dtype=torch.float64)
    model = rf.models.Generative(graph)
    with torch.no_grad():  # off the saddle where the hidden variable tells nothing
        model.factors.copy_(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]))
    risk = lambda: rf.losses.empirical_risk(  # noqa: E731
        rf.losses.SurrogateEM(), graph, model(graph), observed, rf.Inference(stop=TIGHT), weights=weights
    )
    minimise(risk, list(model.parameters()))
    scores = brute_force(graph, model(graph).detach()).scores
    found = torch.tensor(scores).logsumexp(0)
    torch.testing.assert_close((found - found.logsumexp((0, 1))).exp().flatten(), weights, rtol=0, atol=1e-5)
    assert math.isclose(float(risk().detach()), float(torch.special.entr(weights).sum()), rel_tol=1e-8)


def test_contrastive_divergence_finds_the_true_parameters():
    """By steps along its noisy gradients, as far as the noise allows."""
    graph = rf.chain(3, 2, tied=True)
    truth = graph.zeros()
    graph.factor_views(truth)[0][0] = torch.tensor([[0.6, 0.0], [0.0, 0.6]])
    graph.node(truth, 0)[1] = 0.5
    labels = rf.sample(graph, truth, 20, chains=1000, seed=0).reshape(-1, 3)
    model, step = rf.models.Generative(graph), 0.5
    for k in range(60):
        model.zero_grad()
        loss = rf.losses.ContrastiveDivergence(steps=2, seed=k)
        (rf.losses.empirical_risk(loss, graph, model(graph), labels) / len(labels)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= step * parameter.grad
    found, true = (brute_force(graph, theta.detach()).mu for theta in (model(graph), truth))
    torch.testing.assert_close(found, true, rtol=0, atol=0.02)
