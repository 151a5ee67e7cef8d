"""Labelled examples, data sets of them, and examples that observe different variables."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import riskfield as rf
from riskfield.examples import blocks, take
from riskfield.learning.objective import Objective, flat
from strategies import potentials

# Examples and data sets of them.


GRAPH = rf.chain(3, 2)
LABELS = torch.tensor([[0, 1, 1], [1, 0, -1], [0, 0, 0], [1, 1, 1]])


@dataclass(frozen=True)
class Features:
    nodes: Tensor
    edges: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


ROWS = torch.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize(
    ("inputs", "entry"),
    [
        (ROWS, lambda inputs: inputs),
        ({"nodes": ROWS, "more": [ROWS + 1]}, lambda inputs: inputs["more"][0] - 1),
        (Features(ROWS), lambda inputs: inputs.nodes),
        (Pair(ROWS, ROWS), lambda inputs: inputs.right),
        ((ROWS, None), lambda inputs: inputs[0]),
    ],
    ids=["tensor", "dict", "dataclass", "namedtuple", "tuple"],
)
def test_select_takes_every_part(inputs, entry):
    examples = rf.Examples(
        GRAPH,
        LABELS,
        inputs,
        evidence=torch.full((4, 3), -1),
        mask=LABELS == 1,
        weights=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    chosen = examples.select([2, 0])
    assert type(chosen.inputs) is type(inputs)
    assert torch.equal(entry(chosen.inputs), ROWS[[2, 0]])
    assert torch.equal(chosen.labels, LABELS[[2, 0]])
    assert torch.equal(chosen.mask, LABELS[[2, 0]] == 1)
    assert chosen.weights.tolist() == [3.0, 1.0]
    assert chosen.evidence.shape == (2, 3)
    assert chosen.graph is GRAPH
    assert torch.equal(examples.select(slice(1, 3)).labels, LABELS[1:3])
    assert len(examples.select(torch.tensor([], dtype=torch.int64))) == 0


def test_to_moves_every_part():
    moved = rf.Examples(GRAPH, LABELS, {"nodes": ROWS}, weights=torch.ones(4)).to("meta")
    assert {moved.labels.device.type, moved.inputs["nodes"].device.type, moved.weights.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"graph": "chain"}, TypeError, "`graph` must be a FactorGraph. Got str."),
        ({"labels": LABELS[0]}, ValueError, r"`labels` must have shape \(n, 3\). Got \(3,\)."),
        ({"labels": LABELS + 1}, ValueError, "`labels` of variable 1 must lie in -1..1. Got 2."),
        ({"labels": LABELS.double()}, TypeError, "`labels` must be integers"),
        ({"evidence": LABELS[:2]}, ValueError, r"`evidence` must have shape \(4, 3\) to match `labels`. Got \(2, 3\)."),
        ({"mask": LABELS}, TypeError, "`mask` must be booleans. Got torch.int64."),
        ({"mask": LABELS[:, :2] > 0}, ValueError, r"`mask` must have shape \(4, 3\)"),
        ({"weights": torch.ones(3)}, ValueError, r"`weights` must have shape \(4,\)"),
        ({"weights": -torch.ones(4)}, ValueError, "`weights` must be finite and not negative. Got -1.0."),
        ({"inputs": torch.zeros(5, 2)}, ValueError, r"one entry per example, 4, on the first axis. Got \(5, 2\)."),
        ({"inputs": {"nodes": "pixels"}}, TypeError, "`inputs` must be a tensor, or a dict.* Got str."),
    ],
)
def test_bad_examples_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        rf.Examples(**{"graph": GRAPH, "labels": LABELS, **changes})


def test_numbers_count_through_the_blocks():
    data = [rf.Examples(GRAPH, LABELS), rf.Examples(rf.chain(2, 2), torch.tensor([[0, 1], [1, 1], [0, 0]]))]
    first, second = take(data, [6, 3, 0, 5])
    assert torch.equal(first.labels, LABELS[[3, 0]])
    assert torch.equal(second.labels, torch.tensor([[0, 0], [1, 1]]))
    assert [len(part) for part in take(data, [5])] == [0, 1]
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match=f"`indices` must lie in 0..6. Got {wrong}."):
            take(data, [0, wrong])


@pytest.mark.parametrize("indices", [LABELS[:, 0] == 0, [0.5]], ids=["mask", "fractions"])
def test_examples_are_chosen_by_number(indices):
    for choose in (rf.Examples(GRAPH, LABELS).select, lambda chosen: take(rf.Examples(GRAPH, LABELS), chosen)):
        with pytest.raises(TypeError, match="`indices` must be integers"):
            choose(indices)


def test_a_data_set_holds_examples():
    assert len(blocks(rf.Examples(GRAPH, LABELS))) == 1
    with pytest.raises(TypeError, match=r"`data` must be `Examples` or a sequence of them. Got Tensor."):
        blocks([LABELS])
    with pytest.raises(ValueError, match=r"`data` must hold at least one example."):
        blocks([rf.Examples(GRAPH, LABELS[:0])])


# Examples that observe, ask for and hide different variables each, in one batch and on graphs of their own.


LOOPY = rf.from_edges(2, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (3, 4), (4, 5)], num_variables=6)
BP = rf.Inference(rf.MessagePassing(), rf.Stop(6, tol=None), rf.Unroll())


def draw(count, seed=0):
    """States, and for each example other variables that are observed, asked for and hidden."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randint(2, (count, 6), generator=generator)
    role = torch.stack([torch.randperm(6, generator=generator) for _ in range(count)]) % 3
    return rf.Examples.conditional(LOOPY, states, observed=role == 0, outputs=role == 1), states, role


def model(seed=0):
    made = rf.models.Generative(LOOPY)
    theta = potentials(LOOPY, seed)
    with torch.no_grad():
        made.nodes.copy_(theta[: LOOPY.node_size])
        made.factors.copy_(theta[LOOPY.node_size :])
    return made


def test_roles_become_labels_and_evidence():
    examples, states, role = draw(20)
    assert torch.equal(examples.labels, torch.where(role == 1, states, -1))
    assert torch.equal(examples.evidence, torch.where(role == 0, states, -1))
    assert examples.mask is None
    assert torch.equal(examples.asked, role == 1)
    alike = rf.Examples.conditional(LOOPY, states, observed=torch.arange(6) < 2, outputs=torch.arange(6) > 3)
    assert torch.equal(alike.asked, (torch.arange(6) > 3).expand(20, 6))


@pytest.mark.parametrize(
    "loss",
    [
        rf.losses.MSE(),
        rf.losses.L1(),
        rf.losses.FMeasure(),
        rf.losses.SurrogateEM(),
        rf.losses.UnivariateLogistic(),
        rf.losses.CliqueLogistic(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_batch_of_different_roles_is_its_examples_one_by_one(loss):
    """Value, gradient and Hessian-vector product."""
    examples, _, _ = draw(8)
    v = potentials(LOOPY, 5)
    whole = Objective(model(), examples, loss, BP, per_variable=False)(None, along=v)
    singles = [Objective(model(), examples.select([k]), loss, BP, per_variable=False)(None, along=v) for k in range(8)]
    assert whole.value == pytest.approx(sum(one.value for one in singles))
    for name in ("gradient", "product"):
        torch.testing.assert_close(getattr(whole, name), sum(getattr(one, name) for one in singles))


@pytest.mark.parametrize(
    "loss",
    [rf.losses.MSE(), rf.losses.L1(rf.decoders.SoftArgmax(0.5)), rf.losses.FMeasure(rf.decoders.SoftEqualCount(0.5))],
    ids=str,
)
def test_gradients_with_different_roles_against_differences(loss):
    objective = Objective(model(), draw(5)[0], loss, BP)
    start, v, step = flat(objective.parameters).detach(), potentials(LOOPY, 7), 1e-6

    def moved(by):
        torch.nn.utils.vector_to_parameters(start + by * v, objective.parameters)
        return objective(None, along=v)

    here, ahead, behind = moved(0), moved(step), moved(-step)
    assert float(here.gradient @ v) == pytest.approx((ahead.value - behind.value) / (2 * step), rel=1e-6)
    torch.testing.assert_close(here.product, (ahead.gradient - behind.gradient) / (2 * step), rtol=1e-5, atol=1e-7)


def test_training_and_prediction_with_different_roles():
    """Trained on random roles, the model predicts any variables from any others."""
    truth = 2 * potentials(LOOPY, 3)
    states = rf.sample(LOOPY, truth, 1, chains=600, seed=0)[:, 0]
    role = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(k)) for k in range(600)]) % 3
    examples = rf.Examples.conditional(LOOPY, states, observed=role == 0, outputs=role == 1)
    trained, train, test = rf.models.Generative(LOOPY), examples.select(slice(0, 400)), examples.select(slice(400, 600))
    rf.fit(
        trained, train, rf.losses.MSE(), BP, optimiser=rf.optim.SMD(gain=5.0, batch_size=20, epochs=8), progress=False
    )
    errors = []
    for one in (trained, rf.models.Generative(LOOPY)):
        (predicted,) = rf.predict(one, test, BP)
        assert torch.equal(predicted[test.evidence >= 0], test.evidence[test.evidence >= 0])
        errors.append(rf.metrics.error_rate(predicted, test.labels))
    best = rf.decoders.decode(LOOPY, truth.expand(200, -1), rf.Inference(rf.Exact()), evidence=test.evidence)
    assert errors[0] < rf.metrics.error_rate(best, test.labels) + 0.04 < errors[1] - 0.1


def test_predictions_are_the_same_in_chunks_and_one_by_one():
    examples, states, role = draw(7)
    for decoder in (None, rf.decoders.EqualCount()):
        (whole,) = rf.predict(model(), examples, BP, decoder)
        (chunks,) = rf.predict(model(), examples, BP, decoder, chunk_size=2)
        assert torch.equal(whole, chunks)
        for k in range(7):
            theta = model()(LOOPY).detach()
            alone = rf.decoders.decode(LOOPY, theta, BP, decoder, evidence=examples.evidence[k], mask=role[k] == 1)
            assert torch.equal(whole[k], alone)
    # What is hidden has no say in how many of the two asked for are 1.
    assert whole[role == 1].reshape(7, 2).sum(-1).tolist() == [1] * 7
    unknown = rf.Examples.conditional(LOOPY, torch.where(role == 0, states, -1), observed=role == 0, outputs=role == 1)
    assert torch.equal(rf.predict(model(), unknown, BP, rf.decoders.EqualCount())[0], whole)
    without = rf.Examples(LOOPY, torch.full((7, 6), -1), evidence=examples.evidence)
    assert torch.equal(without.asked, role != 0)


# -- graphs of their own --------------------------------------------------------------------------------------------


def parts(roles=True):
    generator = torch.Generator().manual_seed(2)
    out = []
    for size in (3, 5, 4):
        edges = [(k, k + 1) for k in range(size - 1)] + [(0, size - 1)]
        graph = rf.from_edges(2, edges, num_variables=size)
        inputs = {
            "nodes": torch.randn(1, size, 3, generator=generator, dtype=torch.float64),
            "factors": torch.randn(1, size, 2, generator=generator, dtype=torch.float64),
        }
        states = torch.randint(2, (1, size), generator=generator)
        observed = torch.arange(size) == (1 if roles and size < 5 else -1)
        outputs = ~observed & (torch.arange(size) != 2)
        out.append(rf.Examples.conditional(graph, states, observed=observed, outputs=outputs, inputs=inputs))
    return out


def linear():
    made = rf.LinearModel(2, 3, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


@pytest.mark.parametrize(
    "loss", [rf.losses.MSE(), rf.losses.UnivariateLogistic(), rf.losses.SurrogateEM()], ids=lambda x: type(x).__name__
)
def test_graphs_side_by_side_are_the_same_as_one_by_one(loss):
    together = Objective(linear(), rf.learning.join(parts()), loss, BP)(None)
    apart = Objective(linear(), parts(), loss, BP)(None)
    assert together.value == pytest.approx(apart.value)
    torch.testing.assert_close(together.gradient, apart.gradient)
    (predicted,) = rf.predict(linear(), rf.learning.join(parts()), BP)
    assert torch.equal(predicted, torch.cat(rf.predict(linear(), parts(), BP), 1))


def zeros(graph):
    return rf.Examples(graph, torch.zeros(1, graph.num_variables, dtype=torch.int64))


def test_join_keeps_roles():
    whole = rf.learning.join(parts())
    assert torch.equal(whole.asked, torch.cat([part.asked for part in parts()], 1))
    assert (whole.evidence >= 0).sum() == 2
    assert rf.learning.join(parts(roles=False)).evidence.eq(-1).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rf.learning.join([]), ValueError, "`parts` must hold at least one part"),
        (
            lambda: rf.learning.join([replace(draw(2)[0], weights=torch.tensor([1.0, 2.0]))]),
            ValueError,
            "`parts` must have examples of equal weight",
        ),
        (
            lambda: rf.learning.join([*parts(), rf.Examples(rf.chain(2, 3), torch.zeros(1, 2).long())]),
            ValueError,
            "the same number of states",
        ),
        (
            lambda: rf.Examples.conditional(
                LOOPY, torch.zeros(2, 6).long(), observed=torch.ones(6).bool(), outputs=torch.ones(6).bool()
            ),
            ValueError,
            "`outputs` must not be among the `observed`",
        ),
        (
            lambda: rf.Examples.conditional(
                LOOPY, torch.full((2, 6), -1), observed=torch.ones(6).bool(), outputs=torch.zeros(6).bool()
            ),
            ValueError,
            "`states` must not be -1 where `observed` is True",
        ),
        (
            lambda: rf.Examples.conditional(
                LOOPY, torch.zeros(2, 6).long(), observed=torch.ones(5).bool(), outputs=torch.zeros(6).bool()
            ),
            ValueError,
            r"`observed` must be booleans of shape \(2, 6\) or \(6,\). Got \(5,\) of torch.bool",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_join_refuses_other_types_and_too_few_rows():
    inputs = {"nodes": torch.zeros(1, 6, 1), "horizontal": torch.zeros(1, 4, 1), "vertical": torch.zeros(1, 3, 1)}
    part = rf.Examples(rf.grid(2, 3, 2), torch.zeros(1, 6, dtype=torch.int64), inputs)
    other = replace(part, inputs={**inputs, "diagonal": torch.zeros(1, 3, 1)})
    with pytest.raises(ValueError, match=r"Not all have \['horizontal', 'vertical'\]"):
        rf.learning.join([part, other])
    with pytest.raises(ValueError, match="for each of 7 tables"):
        rf.learning.join([other])


@pytest.mark.parametrize("num_states", [1, 0, 2.0, True])
def test_a_linear_model_needs_two_states(num_states):
    with pytest.raises(ValueError, match=f"`num_states` must be an integer of at least 2. Got {num_states!r}."):
        rf.LinearModel(num_states, 3, 1)
