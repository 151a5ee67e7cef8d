"""Models: theta from inputs and parameters, and models that also learn the weights of a free energy."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import riskfield as rf
from loss_cases import draw
from strategies import potentials

# Models: theta from inputs and parameters, and one trained end to end.


def filled(model, seed=0):
    """`model` with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    return model


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_linear_model_by_its_formula():
    graph, model = rf.chain(4, 3), filled(rf.LinearModel(3, node_features=5, factor_features=2))
    u, v = randn(6, 4, 5), randn(6, 3, 2)
    theta = model(graph, {"nodes": u, "factors": v})
    f, g = model.nodes["nodes"].weight, model.factors["factors"].weight
    assert theta.shape == (6, graph.theta_size)
    for i in range(4):
        torch.testing.assert_close(graph.node(theta, i), u[:, i] @ f.T)
    for c in range(3):
        torch.testing.assert_close(graph.factor(theta, c), (v[:, c] @ g.T).reshape(6, 3, 3))


def test_separate_matrices_for_types_of_edges():
    graph = rf.grid(3, 4, 2)  # 9 horizontal, then 8 vertical
    model = filled(rf.LinearModel(2, 1, {"horizontal": 2, "vertical": 3}))
    inputs = {"nodes": randn(12, 1), "horizontal": randn(9, 2), "vertical": randn(8, 3)}
    (theta,) = graph.factor_views(model(graph, inputs))
    for name, rows in (("horizontal", slice(0, 9)), ("vertical", slice(9, 17))):
        expected = inputs[name] @ model.factors[name].weight.T
        torch.testing.assert_close(theta[rows].flatten(1), expected)


def test_one_matrix_serves_graphs_of_all_sizes():
    model = filled(rf.LinearModel(2, 3, 1))
    for rows, columns in ((2, 3), (4, 2)):
        graph = rf.grid(rows, columns, 2)
        theta = model(graph, {"nodes": randn(rows * columns, 3), "factors": torch.ones(graph.num_factors, 1).double()})
        tables = graph.factor_views(theta)[0]
        assert torch.equal(tables, tables[:1].expand_as(tables))


def test_matrices_begin_at_zero():
    model = rf.LinearModel(2, 3, 1)
    assert all((parameter == 0).all() and parameter.dtype == torch.float64 for parameter in model.parameters())


def test_wide_factors():
    graph = rf.FactorGraph([2, 2, 2, 2], [(0, 1, 2), (1, 2, 3)])
    model = filled(rf.LinearModel(2, 1, 4, arity=3))
    assert model(graph, {"nodes": randn(5, 4, 1), "factors": randn(5, 2, 4)}).shape == (5, graph.theta_size)


def test_groups_of_variables_and_factors():
    """Rows are joined group after group: variables by their number of states, factors by their shape."""
    graph = rf.FactorGraph([2, 3, 2, 3], [(0, 1), (0, 2), (2, 3)])
    model = filled(
        rf.Conditional(
            {"two": rf.models.Tables(2, 2), "three": nn.Linear(4, 3, dtype=torch.float64)},
            {"mixed": rf.models.Tables(2, 2, 3), "equal": rf.models.Tables(1, 2, 2)},
        )
    )
    theta = model(graph, {"three": randn(7, 2, 4)})
    assert theta.shape == (7, graph.theta_size)
    two, mixed, equal = model.nodes["two"].values, model.factors["mixed"].values, model.factors["equal"].values
    torch.testing.assert_close(graph.node(theta, 2)[3], two[1])
    torch.testing.assert_close(graph.factor(theta, 2)[0], mixed[1])
    torch.testing.assert_close(graph.factor(theta, 1)[6], equal[0])


def test_a_table_per_factor_and_one_for_all():
    inputs = {"nodes": randn(5, 4, 2)}
    nodes = nn.Linear(2, 3, dtype=torch.float64)
    full = filled(rf.Conditional(nodes, rf.models.Tables(3, 3, 3)))(rf.chain(4, 3), inputs)
    tied = filled(rf.Conditional(nodes, rf.models.Tables(1, 3, 3)))(rf.chain(4, 3, tied=True), inputs)
    assert full.shape == (5, 4 * 3 + 3 * 9)
    assert tied.shape == (5, 4 * 3 + 9)


def test_a_chain_of_one_variable():
    model = rf.Conditional(nn.Linear(2, 3, dtype=torch.float64), rf.models.Tables(1, 3, 3))
    assert model(rf.chain(1, 3, tied=True), {"nodes": randn(5, 1, 2)}).shape == (5, 3)


def test_generative_models():
    graph = rf.FactorGraph([2, 3, 2, 3], [(0, 2), (1, 3), (2, 0)], tables=[0, 1, 0])
    full = filled(rf.models.Generative(graph))
    assert sum(parameter.numel() for parameter in full.parameters()) == graph.theta_size
    theta = full(graph)
    assert theta.shape == (graph.theta_size,)
    assert theta.unique().numel() == graph.theta_size
    tied = filled(rf.models.Generative(graph, node_types=[5, 1, 5, 1]))
    theta = tied(graph)
    assert sum(parameter.numel() for parameter in tied.parameters()) == 5 + graph.theta_size - graph.node_size
    assert torch.equal(graph.node(theta, 0), graph.node(theta, 2))
    assert torch.equal(graph.node(theta, 1), graph.node(theta, 3))
    untied = rf.models.Generative(graph, node_types=[0, 1, 2, 1])
    assert sum(parameter.numel() for parameter in untied.parameters()) == 7 + graph.theta_size - graph.node_size


def test_gradients_reach_the_parameters():
    """By finite differences, through inference."""
    graph, model = rf.grid(2, 2, 2), filled(rf.LinearModel(2, 2, {"horizontal": 1, "vertical": 1}))
    inputs = {"nodes": randn(3, 4, 2), "horizontal": randn(3, 2, 1), "vertical": randn(3, 2, 1)}
    labels, _ = draw(graph, 1, 3)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(4, None), rf.Unroll())
    names = [name for name, _ in model.named_parameters()]

    def risk(*values):
        theta = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (graph, inputs))
        return rf.losses.empirical_risk(
            rf.losses.UnivariateLogistic(), graph, theta, labels, inference, per_variable=True
        )

    assert torch.autograd.gradcheck(risk, tuple(model.parameters()))


def test_a_network_trained_end_to_end_through_tree_reweighting():
    """Stripes under noise: the network has to look around, and the tables of the edges are learned with it."""
    rows, columns, noise = 8, 10, 0.7
    graph = rf.grid(rows, columns, 2, tied=True)
    rng = np.random.default_rng(0)

    def drawn_images(count):
        shift, slope = rng.integers(0, 6, (count, 1, 1)), rng.choice([-1, 1], (count, 1, 1))
        i, j = np.mgrid[:rows, :columns]
        labels = ((j + slope * i + shift) // 3) % 2
        noisy = labels + rng.normal(scale=noise, size=labels.shape)
        return torch.tensor(noisy[:, None]), torch.tensor(labels.reshape(count, -1))

    class Rows(nn.Module):
        """One row of potentials per pixel."""

        def forward(self, x):
            return x.flatten(2).transpose(1, 2)

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1), Rows()
    ).double()
    model = rf.Conditional(network, rf.models.Tables(2, 2, 2))
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(5, None), rf.Unroll())
    seen, unseen = drawn_images(60), drawn_images(60)

    def risk(images):
        noisy, labels = images
        return rf.losses.empirical_risk(
            rf.losses.UnivariateLogistic(), graph, model(graph, noisy), labels, inference, per_variable=True
        )

    before = float(risk(unseen).detach())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        risk(seen).backward()
        optimiser.step()
    after = float(risk(unseen).detach())
    predicted = rf.decoders.decode(graph, model(graph, unseen[0]), inference)
    alone = (unseen[0].flatten(1) > 0.5).long()
    assert before > 0.6  # about log 2: it knows nothing
    assert after < 0.5 * before
    assert rf.metrics.error_rate(predicted, unseen[1]) < 0.4 * rf.metrics.error_rate(alone, unseen[1])
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


GRAPH = rf.chain(4, 2)
LINEAR = {"nodes": nn.Linear(2, 2, dtype=torch.float64), "factors": nn.Linear(1, 4, dtype=torch.float64)}
INPUTS = {"nodes": randn(5, 4, 2), "factors": randn(5, 3, 1)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rf.Conditional("linear", rf.models.Tables(1, 2, 2)), TypeError, "`nodes` must be a torch module"),
        (lambda: rf.Conditional(rf.models.Tables(4, 2), {"a": 3}), TypeError, "`factors` must be a torch module"),
        (
            lambda: rf.Conditional({"a": rf.models.Tables(4, 2)}, {"a": rf.models.Tables(3, 2, 2)}),
            ValueError,
            "`nodes` and `factors` must have different names. Got ['a'] in both",
        ),
        (
            lambda: rf.Conditional(**LINEAR)(GRAPH, {"nodes": INPUTS["nodes"]}),
            ValueError,
            "`inputs` must be a dictionary with a tensor \"factors\", or one tensor. Got the keys ['nodes']",
        ),
        (
            lambda: rf.Conditional(**LINEAR)(GRAPH, None),
            ValueError,
            '`inputs` must be a dictionary with a tensor "nodes"',
        ),
        (
            lambda: rf.Conditional(**LINEAR)(rf.chain(3, 2), INPUTS),
            ValueError,
            '`nodes`: the network "nodes" must return at most 3 rows. Got shape (5, 4, 2)',
        ),
        (
            lambda: rf.Conditional(**LINEAR)(rf.chain(5, 2), INPUTS),
            ValueError,
            "`nodes`: the networks returned too few rows. The graph's groups have shapes [(5, 2)]",
        ),
        (
            lambda: rf.Conditional(**LINEAR)(rf.chain(4, 3), INPUTS),
            ValueError,
            '`nodes`: the network "nodes" must return a tensor of shape (*batch, row, 3). Got (5, 4, 2)',
        ),
        (
            lambda: rf.Conditional(
                rf.models.Tables(4, 2), {"a": rf.models.Tables(3, 2, 2), "b": rf.models.Tables(1, 2, 2)}
            )(GRAPH, None),
            ValueError,
            '`factors`: the network "b" returned rows, but all factors have potentials already',
        ),
        (
            lambda: rf.models.Generative(GRAPH)(rf.chain(5, 2)),
            ValueError,
            "`graph` must have a theta of length 20. Got 26",
        ),
        (
            lambda: rf.models.Generative(GRAPH)(GRAPH, INPUTS),
            ValueError,
            "`inputs` must be None for a generative model",
        ),
        (
            lambda: rf.models.Generative(GRAPH, node_types=[0, 1]),
            ValueError,
            "`node_types` must hold one integer per variable (4). Got shape (2,)",
        ),
        (
            lambda: rf.models.Generative(rf.FactorGraph([2, 3, 2]), node_types=[0, 0, 0]),
            ValueError,
            "`node_types`: variables 0 and 1 are of one type but have 2 and 3 states",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# Models whose weights of a free energy are learned: `ConvexModel` in `fit`.


GRID = rf.grid(4, 4, 2)
STOP = rf.Stop(200, 1e-11)
FREE_ENERGY = rf.Inference(rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint()), STOP, rf.KKT())


def inputs(noisy):
    """Indicators of y_i and of (y_i, y_j)."""
    pairs = torch.tensor(GRID.factor_groups[0].variables)
    joint = 2 * noisy[..., pairs[:, 0]] + noisy[..., pairs[:, 1]]
    hot = torch.nn.functional.one_hot
    return {"nodes": hot(noisy, 2).double(), "factors": hot(joint, 4).double()}


def stripes(count, seed=0):
    """Vertical stripes, every fifth pixel wrong."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(2, (count, 1), generator=generator)
    labels = ((torch.arange(16) % 4) // 2 + shift) % 2
    flipped = torch.rand(count, 16, generator=generator) < 0.2
    return rf.Examples(GRID, labels, inputs(torch.where(flipped, 1 - labels, labels)))


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
    (term,) = model.terms(GRID, examples.inputs)
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
    (term,) = model.terms(GRID, examples.inputs)
    assert (term.weight > 0).all()
    assert len(term.weight.unique()) > 10  # one for each of 4 + 16 configurations
    # The same input anywhere in the image has the same weights.
    pairs = term.weight[:, GRID.node_size :].unflatten(1, (-1, 4))
    for code in range(4):
        rows = pairs[examples.inputs["factors"][..., code] == 1]
        assert torch.equal(rows, rows[:1].expand_as(rows))


@torch.no_grad()
def test_inference_of_a_model():
    model, examples = randomise(convex_model()), stripes(2)
    inference = rf.models.inference_of(model, rf.Inference(rf.ConvexFreeEnergy(), STOP), GRID, examples.inputs)
    mu = inference(GRID, model(GRID, examples.inputs)).mu
    weights = model.terms(GRID, examples.inputs)[0].weight
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    expected = rf.infer(GRID, model(GRID, examples.inputs), energy, stop=STOP).mu
    assert torch.equal(mu, expected)
    plain = rf.Inference(rf.MessagePassing())
    assert rf.models.inference_of(model.theta, plain, GRID, examples.inputs) is plain
    assert rf.models.inference_of(model, None, GRID) is None


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
    theta = potentials(GRID, 0, "mild", 3)
    weights = torch.ones(3, GRID.mu_size, dtype=torch.float64)
    plain = rf.infer(GRID, theta, rf.ConvexFreeEnergy(), stop=STOP)
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    assert torch.equal(rf.infer(GRID, theta, energy, stop=STOP).mu, plain.mu)
    interior = rf.infer(GRID, theta, rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint()), stop=STOP)
    torch.testing.assert_close(interior.mu, plain.mu, rtol=0, atol=1e-9)
    weights[1] *= 2
    assert energy.counting_numbers(GRID) is None


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
