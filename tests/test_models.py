"""Models: theta from inputs and parameters, and one trained end to end."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import riskfield as rf
from loss_cases import draw


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
