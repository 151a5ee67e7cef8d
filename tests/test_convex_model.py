"""Models whose weights of a free energy are learned: `ConvexModel` in `fit`."""

import pytest
import torch

import riskfield as rf
from strategies import potentials

GRAPH = rf.grid(4, 4, 2)
STOP = rf.Stop(200, 1e-11)
FREE_ENERGY = rf.Inference(rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint()), STOP, rf.KKT())


def inputs(noisy):
    """Indicators of y_i and of (y_i, y_j)."""
    pairs = torch.tensor(GRAPH.factor_groups[0].variables)
    joint = 2 * noisy[..., pairs[:, 0]] + noisy[..., pairs[:, 1]]
    hot = torch.nn.functional.one_hot
    return {"nodes": hot(noisy, 2).double(), "factors": hot(joint, 4).double()}


def stripes(count, seed=0):
    """Vertical stripes, every fifth pixel wrong."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(2, (count, 1), generator=generator)
    labels = ((torch.arange(16) % 4) // 2 + shift) % 2
    flipped = torch.rand(count, 16, generator=generator) < 0.2
    return rf.Examples(GRAPH, labels, inputs(torch.where(flipped, 1 - labels, labels)))


def convex_model(functions=(rf.inference.NEGATIVE_ENTROPY,)):
    return rf.models.ConvexModel(rf.LinearModel(2, 2, 4), {f: rf.LinearModel(2, 2, 4) for f in functions})


def randomise(model, size=0.5):
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter += size * torch.randn(parameter.shape, generator=torch.manual_seed(k), dtype=parameter.dtype)
    return model


@pytest.mark.parametrize(
    "loss", [rf.losses.UnivariateLogistic(), rf.losses.UnivariateQuadratic(), rf.losses.CliqueLogistic()]
)
def test_the_gradient_of_the_risk_in_all_parameters(loss):
    from riskfield.learning.objective import Objective, assign, flat

    model = randomise(convex_model((rf.inference.NEGATIVE_ENTROPY, rf.inference.SQUARE)))
    objective = Objective(model, stripes(3), loss, FREE_ENERGY)
    parameters = list(model.parameters())
    here = flat(parameters).detach()
    along = torch.randn(len(here), generator=torch.manual_seed(9), dtype=here.dtype)
    slope = float(objective().gradient @ along)
    values = []
    for step in (1e-4, -1e-4):
        assign(parameters, here + step * along)
        values.append(objective().value)
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-6)


def test_weights_are_held_first_and_then_learned():
    model, examples = convex_model(), stripes(6)
    model.log_weights.requires_grad_(False)
    optimiser = rf.optim.LBFGS(iterations=8)
    held = rf.fit(
        model,
        examples,
        rf.losses.UnivariateQuadratic(),
        FREE_ENERGY,
        warm_start=True,
        optimiser=optimiser,
        progress=False,
    )
    (term,) = model.terms(GRAPH, examples.inputs)
    assert (term.weight == 1).all()
    model.log_weights.requires_grad_(True)
    free = rf.fit(
        model,
        examples,
        rf.losses.UnivariateQuadratic(),
        FREE_ENERGY,
        warm_start=True,
        optimiser=optimiser,
        progress=False,
    )
    assert free.best.risk < held.best.risk < held.history[0].risk
    (term,) = model.terms(GRAPH, examples.inputs)
    assert (term.weight > 0).all()
    assert len(term.weight.unique()) > 10  # one for each of 4 + 16 configurations
    # The same input anywhere in the image has the same weights.
    pairs = term.weight[:, GRAPH.node_size :].unflatten(1, (-1, 4))
    for code in range(4):
        rows = pairs[examples.inputs["factors"][..., code] == 1]
        assert torch.equal(rows, rows[:1].expand_as(rows))


@torch.no_grad()
def test_inference_of_a_model():
    model, examples = randomise(convex_model()), stripes(2)
    inference = rf.models.inference_of(model, rf.Inference(rf.ConvexFreeEnergy(), STOP), GRAPH, examples.inputs)
    mu = inference(GRAPH, model(GRAPH, examples.inputs)).mu
    weights = model.terms(GRAPH, examples.inputs)[0].weight
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    expected = rf.infer(GRAPH, model(GRAPH, examples.inputs), energy, stop=STOP).mu
    assert torch.equal(mu, expected)
    plain = rf.Inference(rf.MessagePassing())
    assert rf.models.inference_of(model.theta, plain, GRAPH, examples.inputs) is plain
    assert rf.models.inference_of(model, None, GRAPH) is None


def test_validation_and_prediction_use_the_learned_weights():
    model, examples = randomise(convex_model()), stripes(4)
    result = rf.fit(
        model,
        examples,
        rf.losses.UnivariateLogistic(),
        FREE_ENERGY,
        optimiser=rf.optim.LBFGS(iterations=3),
        validation=stripes(4, seed=1),
        progress=False,
    )
    assert all(record.validation is not None for record in result.history)


def test_what_is_refused():
    with pytest.raises(TypeError, match="`log_weights` must have a torch module for each ConvexFunction"):
        rf.models.ConvexModel(rf.LinearModel(2, 2, 4), {torch.exp: rf.LinearModel(2, 2, 4)})
    with pytest.raises(ValueError, match="`log_weights` must have at least one function"):
        rf.models.ConvexModel(rf.LinearModel(2, 2, 4), {})
    with pytest.raises(ValueError, match=r"`inference` must run ConvexFreeEnergy\(\).* Got MessagePassing"):
        rf.fit(convex_model(), stripes(1), rf.losses.UnivariateLogistic(), rf.Inference(), progress=False)


def test_equal_weights_of_a_batch_are_counting_numbers():
    theta = potentials(GRAPH, 0, "mild", 3)
    weights = torch.ones(3, GRAPH.mu_size, dtype=torch.float64)
    plain = rf.infer(GRAPH, theta, rf.ConvexFreeEnergy(), stop=STOP)
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    assert torch.equal(rf.infer(GRAPH, theta, energy, stop=STOP).mu, plain.mu)
    interior = rf.infer(GRAPH, theta, rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint()), stop=STOP)
    torch.testing.assert_close(interior.mu, plain.mu, rtol=0, atol=1e-9)
    weights[1] *= 2
    assert energy.counting_numbers(GRAPH) is None


def test_predictions_use_the_learned_weights():
    graph = rf.chain(2, num_states=2)
    model = rf.models.ConvexModel(
        rf.models.Generative(graph), {rf.inference.NEGATIVE_ENTROPY: rf.models.Generative(graph)}
    )
    with torch.no_grad():
        model.theta.nodes += torch.tensor([0.0, 0.3, 0.0, 0.3])
    unknown = rf.Examples(graph, torch.full((1, 2), -1))
    assert rf.predict(model, unknown, FREE_ENERGY)[0].tolist() == [[1, 1]]
    with torch.no_grad():
        model.log_weights[0].nodes += torch.tensor([0.0, 3.0, 0.0, 3.0])  # for which state 1 had better be improbable
    assert rf.predict(model, unknown, FREE_ENERGY)[0].tolist() == [[0, 0]]
