"""What training minimises: its value against a plain sum, its derivatives against differences."""

import math

import pytest
import torch

import riskfield as rf
from learning_cases import EXACT, TRUNCATED, chain_examples, chain_model, values
from riskfield.learning.objective import Diverged, Objective, assign

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
