"""What training minimises, also on unions of examples."""

import math
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import riskfield as rf
from learning_cases import EXACT, TRUNCATED, chain_examples, chain_model, values
from riskfield import losses
from riskfield.learning.objective import Diverged, Objective, assign
from riskfield.learning.unions import unite
from riskfield.models import SparseRows, Tables

# What training minimises: its value against a plain sum, its derivatives against differences.


LONG = rf.chain(7, 3, tied=True)


def data():
    """Two graphs, weights, a mask, hidden labels and evidence."""
    first, second = chain_examples(6, seed=1), chain_examples(4, seed=2, graph=LONG)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    evidence = torch.where(torch.rand(4, 7, generator=generator) < 0.3, second.labels, -1)
    hidden = torch.where(torch.rand(4, 7, generator=generator) < 0.2, -1, second.labels)
    return [
        rf.Examples(first.graph, first.labels, first.inputs, mask=mask),
        rf.Examples(LONG, hidden, second.inputs, evidence=evidence, weights=torch.tensor([1.0, 0.0, 2.5, 0.3])),
    ]


def plain_risk(model, examples, per_variable):
    """The definition, one example at a time."""
    total, amount = 0.0, 0.0
    for block in examples:
        theta = model(block.graph, block.inputs)
        for row in range(len(block)):
            evidence = None if block.evidence is None else block.evidence[row]
            given = torch.zeros(block.graph.num_variables, dtype=torch.bool) if evidence is None else evidence >= 0
            counts = (block.labels[row] >= 0) & ~given if block.mask is None else block.mask[row]
            solution = EXACT(block.graph, theta[row], evidence=evidence)
            weight = 1.0 if block.weights is None else float(block.weights[row])
            for variable in torch.nonzero(counts).flatten().tolist():
                label = int(block.labels[row, variable])
                total -= weight * float(block.graph.node(solution.mu, variable)[label].log().detach())
                amount += weight
    return total / amount if per_variable else total


@pytest.mark.parametrize("per_variable", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_value_is_the_definition(per_variable, chunk_size):
    model = chain_model(seed=0)
    settings = {"ridge": 0.3, "per_variable": per_variable, "chunk_size": chunk_size}
    at = Objective(model, data(), rf.losses.UnivariateLogistic(), EXACT, **settings)()
    expected = plain_risk(model, data(), per_variable)
    assert at.risk == pytest.approx(expected, rel=1e-10)
    assert at.value == pytest.approx(expected + 0.3 * float(values(model).square().sum()), rel=1e-10)


@pytest.mark.parametrize("per_variable", [True, False])
def test_gradient_and_hessian_product_are_those_of_the_value(per_variable):
    model = chain_model(seed=0)
    objective = Objective(
        model, data(), rf.losses.UnivariateLogistic(), TRUNCATED, ridge=0.3, per_variable=per_variable, chunk_size=3
    )
    gamma, step = values(model), 1e-5
    direction = torch.randn(len(gamma), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    at = objective(along=direction)
    assert torch.allclose(at.gradient, objective().gradient, rtol=1e-10)
    numeric, around = torch.empty_like(gamma), []
    for k in range(len(gamma)):
        sides = []
        for sign in (1, -1):
            assign(objective.parameters, gamma + sign * step * torch.eye(len(gamma), dtype=torch.float64)[k])
            sides.append(objective().value)
        numeric[k] = (sides[0] - sides[1]) / (2 * step)
    for sign in (1, -1):
        assign(objective.parameters, gamma + sign * step * direction)
        around.append(objective().gradient)
    scale = float(at.gradient.abs().max())
    assert torch.allclose(at.gradient, numeric, atol=1e-8 * scale, rtol=1e-6)
    assert torch.allclose(at.product, (around[0] - around[1]) / (2 * step), atol=1e-7 * scale, rtol=1e-6)


@pytest.mark.parametrize("per_variable", [True, False])
def test_batches_make_up_the_whole(per_variable):
    """The batches hold every example once, and their values, by how much they hold, average to that of all."""
    model = chain_model(seed=0)
    objective = Objective(model, data(), rf.losses.UnivariateLogistic(), EXACT, ridge=0.1, per_variable=per_variable)
    parts = list(objective.batches(3, seed=5))
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert {len(part) for part in parts} == {2, 3}
    found = [objective(part) for part in parts]
    whole = objective()
    amount = sum(at.amount for at in found)
    assert amount == pytest.approx(whole.amount)
    assert sum(at.amount * at.value for at in found) / amount == pytest.approx(whole.value, rel=1e-12)
    assert torch.allclose(sum(at.amount * at.gradient for at in found) / amount, whole.gradient, rtol=1e-10)
    assert [p.tolist() for p in objective.batches(3, seed=5)] == [p.tolist() for p in parts]
    assert [p.tolist() for p in objective.batches(3, seed=6)] != [p.tolist() for p in parts]


def test_parameters_that_do_not_matter_have_no_gradient():
    class Extra(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = chain_model(seed=0), torch.nn.Linear(2, 2, dtype=torch.float64)

        def forward(self, graph, inputs):
            return self.used(graph, inputs)

    at = Objective(Extra(), chain_examples(3), rf.losses.UnivariateLogistic(), EXACT)()
    assert at.gradient[:24].abs().min() > 0
    assert at.gradient[24:].abs().max() == 0


def test_the_risk_alone_needs_no_gradient():
    objective = Objective(chain_model(seed=0), data(), rf.losses.UnivariateLogistic(), EXACT, ridge=0.5)
    assert objective.risk() == pytest.approx(objective().risk, rel=1e-12)


def test_what_is_not_finite_is_named():
    model = chain_model()
    objective = Objective(model, chain_examples(3), rf.losses.UnivariateLogistic(), EXACT)
    next(model.parameters()).data[0, 0] = float("nan")
    with pytest.raises(Diverged, match="the objective is nan: the model returned a theta with NaN"):
        objective()
    infinite = rf.losses.Custom(lambda solution, labels, mask: solution.mu[..., 0] / 0)
    with pytest.raises(Diverged, match=r"the objective is inf$"):
        Objective(chain_model(), chain_examples(3), infinite, EXACT)()
    steep = rf.losses.Custom(lambda solution, labels, mask: (solution.mu[..., 0] - solution.mu[..., 0].detach()).sqrt())
    with pytest.raises(Diverged, match="a derivative of the objective is not finite"):
        Objective(chain_model(), chain_examples(3), steep, EXACT)()


def test_a_risk_below_what_the_loss_can_be_is_divergence():
    class Shifted(rf.losses.UnivariateLogistic):
        lower_bound = 0.0

        def of_solution(self, solution, labels, mask):
            return super().of_solution(solution, labels, mask) - 5 * shift

    uniform = math.log(3)  # the risk per variable at theta = 0, of 5 variables per example
    for per_variable in (True, False):
        objective = Objective(chain_model(), chain_examples(8), Shifted(), EXACT, per_variable=per_variable)
        shift = uniform + 0.0009  # to be forgiven
        assert objective().risk < 0
        shift = uniform + 0.0011
        with pytest.raises(Diverged, match="but Shifted cannot be negative"):
            objective()


def test_mixtures_know_their_bounds():
    likelihoods = rf.losses.Hybrid(rf.losses.SurrogateLikelihood(), rf.losses.SurrogateEM(), 0.5)
    assert likelihoods.lower_bound == 0
    assert (
        rf.losses.Hybrid(rf.losses.SurrogateLikelihood(), rf.losses.UnivariateQuadratic(), 0.5).lower_bound == -math.inf
    )
    assert rf.losses.Hybrid(rf.losses.SurrogateLikelihood(), rf.losses.UnivariateQuadratic(), 1.0).lower_bound == 0
    assert likelihoods.comparable
    assert not rf.losses.Hybrid(rf.losses.SurrogateLikelihood(), rf.losses.ContrastiveDivergence(), 0.5).comparable


def test_bad_models_and_data_are_refused():
    with pytest.raises(ValueError, match=r"`model` must have a parameter that requires a gradient. Got none."):
        Objective(torch.nn.Module(), chain_examples(2), rf.losses.UnivariateLogistic(), EXACT)
    mixed = chain_model()
    mixed.extra = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"one dtype on one device. Got torch.float32 on cpu, torch.float64 on cpu."):
        Objective(mixed, chain_examples(2), rf.losses.UnivariateLogistic(), EXACT)
    weightless = chain_examples(2)
    weightless = rf.Examples(weightless.graph, weightless.labels, weightless.inputs, weights=torch.zeros(2))
    with pytest.raises(ValueError, match="an example of positive weight with at least one target"):
        Objective(chain_model(), weightless, rf.losses.UnivariateLogistic(), EXACT)


# Examples of different structure are united, and the risk and its derivatives do not change.


ONE_SWEEP = rf.Inference(rf.MessagePassing(), rf.Stop(1, tol=None))
LOOPY = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(3, tol=None))


def chains(weights=None, sparse=False):
    """Chains of several lengths with one tied table each, several examples of each length."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for length, count in ((3, 4), (1, 2), (6, 3), (2, 5)):
        nodes = torch.randn(count, length, 5, generator=generator, dtype=torch.float64)
        inputs = {"nodes": nodes, "factors": torch.ones(count, min(length - 1, 1), 1, dtype=torch.float64)}
        if sparse:
            inputs["nodes"] = SparseRows(sp.csr_array(nodes.reshape(-1, 5).numpy()), count)
        labels = torch.randint(3, (count, length), generator=generator)
        own = None if weights is None else torch.tensor(weights)[torch.arange(count) % len(weights)]
        data.append(rf.Examples(rf.chain(length, 3, tied=True), labels, inputs, weights=own))
    return data


def grids(tied):
    generator = torch.Generator().manual_seed(1)
    data = []
    for rows, columns, count in ((2, 3, 3), (1, 4, 2), (3, 3, 2)):
        graph = rf.grid(rows, columns, 3, tied=tied)
        inputs = {"nodes": torch.randn(count, rows * columns, 5, generator=generator, dtype=torch.float64)}
        for name, edges in (("horizontal", rows * (columns - 1)), ("vertical", (rows - 1) * columns)):
            shape = count, min(edges, 1) if tied else edges, 1
            inputs[name] = torch.ones(shape, dtype=torch.float64)
            if not tied:
                inputs[name] = torch.rand(shape, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (count, rows * columns), generator=generator)
        data.append(rf.Examples(graph, labels, inputs))
    return data


def random_parameters(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def linear(types="factors"):
    return random_parameters(rf.LinearModel(3, 5, dict.fromkeys(types.split(), 1)))


def recurrent():
    return rf.Conditional(torch.nn.LSTM(5, 3, dtype=torch.float64), Tables(1, 3, 3))


def both(model, data, loss, inference, **settings):
    """The objective on unions and one block after the other."""
    together, apart = (Objective(model, data, loss, inference, **settings) for _ in range(2))
    apart._united = None
    return together, apart


def assert_same(together, apart):
    assert together._united is not None
    along = torch.linspace(-1, 1, sum(p.numel() for p in together.parameters), dtype=torch.float64)
    a, b = together(None, along), apart(None, along)
    assert a.value == pytest.approx(b.value, rel=1e-12)
    torch.testing.assert_close(a.gradient, b.gradient, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(a.product, b.product, atol=1e-11, rtol=1e-9)
    assert together.risk() == pytest.approx(apart.risk(), rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        losses.UnivariateLogistic(),
        losses.CliqueQuadratic(),
        losses.SurrogateLikelihood(),
        losses.SurrogateEM(),
        losses.Pseudolikelihood(),
        losses.Piecewise(),
        losses.Independent(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_risk_of_chains(loss):
    assert_same(*both(linear(), chains(), loss, ONE_SWEEP, ridge=0.1))


def test_all_chains_are_one_graph_with_one_table():
    (union,) = unite(linear(), chains())
    (group,) = union.examples.graph.factor_groups
    assert union.examples.graph.num_variables == 3 * 4 + 2 + 6 * 3 + 2 * 5
    assert group.num_tables == 1
    assert [(piece.block, len(piece.rows)) for piece in union.pieces] == [(0, 4), (1, 2), (2, 3), (3, 5)]


@pytest.mark.parametrize("tied", [True, False])
def test_grids_with_two_types_of_edges(tied):
    model, data = linear("horizontal vertical"), grids(tied)
    assert_same(*both(model, data, losses.UnivariateLogistic(), LOOPY))
    tables = {union.examples.graph.is_forest: union.examples.graph for union in unite(model, data)}
    assert set(tables) == {True, False}  # a row of pixels is a chain, and inference on it can be exact
    if tied:
        assert tables[False].factor_groups[0].num_tables == 2


def test_weights():
    assert_same(*both(linear(), chains(weights=[1.0, 2.5, 0.0]), losses.UnivariateLogistic(), ONE_SWEEP))
    assert unite(linear(), chains(weights=np.linspace(0.1, 1, 20).tolist()[:5])) is not None
    many = chains(weights=[1.0])
    many = [block.select(slice(None)) for block in many]
    for k, block in enumerate(many):
        object.__setattr__(block, "weights", torch.arange(len(block)) + 10.0 * k + 1)
    assert unite(linear(), many) is None  # a weight for every example


def test_sparse_rows_and_a_tied_table():
    sparse, dense = (Objective(linear(), chains(sparse=s), losses.UnivariateLogistic(), ONE_SWEEP) for s in (1, 0))
    assert sparse._united is not None
    a, b = sparse(), dense()
    assert a.value == pytest.approx(b.value, rel=1e-12)
    torch.testing.assert_close(a.gradient, b.gradient, atol=1e-12, rtol=1e-10)
    some = torch.tensor([1, 4, 5, 9])  # of several blocks, one after the other
    torch.testing.assert_close(sparse(some).gradient, dense(some).gradient, atol=1e-12, rtol=1e-10)
    nodes = torch.nn.Linear(5, 3, bias=False, dtype=torch.float64)
    model = random_parameters(rf.Conditional(nodes, Tables(1, 3, 3)))
    data = [rf.Examples(b.graph, b.labels, {"nodes": b.inputs["nodes"]}) for b in chains()]
    assert_same(*both(model, data, losses.SurrogateLikelihood(), ONE_SWEEP))


def test_unions_are_bounded(monkeypatch):
    assert [len(u.pieces) for u in unite(linear(), chains(), most_examples=5)] == [2, 3, 1]
    monkeypatch.setattr("riskfield.kernels.marginals_at_once", lambda device: 150)
    found = unite(linear(), chains())
    assert len(found) > 1
    assert all(union.examples.graph.mu_size <= 450 for union in found)
    assert_same(*both(linear(), chains(), losses.UnivariateLogistic(), ONE_SWEEP))
    monkeypatch.setattr("riskfield.kernels.marginals_at_once", lambda device: 1)
    assert unite(linear(), chains()) is None


@pytest.mark.parametrize(
    ("loss", "inference", "model"),
    [
        (losses.FMeasure(), ONE_SWEEP, linear),  # a loss of whole examples
        (losses.UnivariateLogistic(), rf.Inference(rf.MessagePassing(), rf.Stop(9, tol=1e-6)), linear),
        (
            losses.UnivariateLogistic(),
            ONE_SWEEP,
            recurrent,
        ),
    ],
)
def test_what_a_union_would_change_stays_apart(loss, inference, model):
    assert Objective(model(), chains(), loss, inference)._united is None


@pytest.mark.parametrize("decoder", [None, rf.decoders.MAP(), rf.decoders.EqualCount()])
def test_predictions_are_the_same(decoder, monkeypatch):
    states = 2 if decoder == rf.decoders.EqualCount() else 3
    data = [rf.Examples(rf.chain(b.graph.num_variables, states, tied=True), -b.labels.clamp(max=0) - 1, b.inputs)
            for b in chains()]  # fmt: skip
    model = random_parameters(rf.LinearModel(states, 5, 1))
    together = rf.predict(model, data, ONE_SWEEP, decoder)
    monkeypatch.setattr(sys.modules["riskfield.learning.predict"], "unite", lambda *arguments: None)
    for a, b in zip(together, rf.predict(model, data, ONE_SWEEP, decoder), strict=True):
        assert torch.equal(a, b)


def test_a_fit_is_the_same(monkeypatch):
    def fitted():
        model = rf.LinearModel(3, 5, 1)
        rf.fit(model, chains(), losses.UnivariateLogistic(), ONE_SWEEP, ridge=0.05, progress=False)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    together = fitted()
    monkeypatch.setattr("riskfield.learning.objective.unite", lambda *arguments: None)
    torch.testing.assert_close(together, fitted(), atol=1e-5, rtol=0)


def test_inputs_in_another_order_than_the_models_are_joined_by_name():
    torch.manual_seed(0)
    model = rf.models.LinearModel(2, 3, {"horizontal": 2, "vertical": 2}).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    data = []
    for rows, columns in ((2, 3), (3, 2)):
        graph = rf.grid(rows, columns, 2)
        sizes = {"vertical": (rows - 1) * columns, "horizontal": rows * (columns - 1)}
        inputs = {"nodes": torch.randn(1, graph.num_variables, 3, dtype=torch.float64)}
        inputs |= {name: torch.randn(1, size, 2, dtype=torch.float64) for name, size in sizes.items()}
        data.append(rf.Examples(graph, torch.zeros(1, graph.num_variables, dtype=torch.int64), inputs))
    objective = Objective(model, data, rf.losses.Pseudolikelihood(), None)
    joined = float(objective().value)
    objective._united = None
    assert joined == pytest.approx(float(objective().value))
