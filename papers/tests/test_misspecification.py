"""`python -m papers misspecification`: the data are what they claim to be, and a wrong model does what it should."""

import pytest
import torch

import riskfield as rf
from papers.cells import Cells
from papers.commands import main
from papers.misspecification import Errors, Marginals, World, chain_model
from papers.study import sections

pytest.importorskip("matplotlib")

NAMES = ["likelihood", "univariate logistic", "clique logistic", "exact marginals"]
LENGTH = 5


@pytest.fixture(scope="module")
def world():
    return World.draw(LENGTH, seed=3, num_examples=10_000)


def test_x_given_y_is_what_the_true_model_says(world):
    """Of each x_i, by itself and together with each y_j and each x_j, as often as expected from P(x | y)."""
    with torch.no_grad():
        theta = world.model(world.graph, {"nodes": world.y})
    (marginals,) = rf.infer(world.graph, theta, rf.Exact()).node_marginals
    surprise = world.x - marginals[..., 1]  # of mean 0, whatever y
    ones = torch.ones(len(surprise), 1, dtype=torch.float64)
    with_inputs = surprise.T @ torch.cat([ones, world.y.double()], 1) / len(surprise)
    assert with_inputs.abs().max() < 4 * 0.5 / len(surprise) ** 0.5
    pairs = rf.infer(world.graph, theta, rf.Exact()).factor_marginals[0][..., 1, 1]
    joint = (world.x[:, 1:] * world.x[:, :-1] - pairs).mean(0)
    assert joint.abs().max() < 4 * 0.5 / len(surprise) ** 0.5
    # The bounds are not met by chance alone: inputs of other examples do not predict these x.
    assert (surprise.T @ world.y.double() / len(surprise)).abs().max() < 0.02 < _dependence(world)


def _dependence(world):
    """The largest covariance of an x_i with its own y_i."""
    x, y = world.x.double(), world.y.double()
    return ((x * y).mean(0) - x.mean(0) * y.mean(0)).abs().max()


def test_potentials_are_drawn_as_in_the_paper(world):
    state = world.model.state_dict()
    pairs = state["factors.factors.values"]
    assert pairs.shape == (LENGTH - 1, 2, 2)
    t = pairs[:, 0, 0]
    assert (t.abs() <= 1).all()
    assert torch.equal(pairs, t[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    nodes = state["nodes.nodes.values"]  # theta(x) + t or - t, by whether x = y
    assert torch.allclose(nodes[:, 0, 0] - nodes[:, 1, 0], nodes[:, 1, 1] - nodes[:, 0, 1])
    assert nodes.abs().max() <= 2
    assert not torch.equal(World.draw(LENGTH, seed=4, num_examples=1).model.state_dict()["nodes.nodes.values"], nodes)


def test_x_is_shifted_in_a_circle_and_y_is_not(world):
    examples = world.shifted(2, 10, 13)
    assert torch.equal(examples.labels[:, 2:], world.x[10:13, :-2])
    assert torch.equal(examples.labels[:, :2], world.x[10:13, -2:])
    assert torch.equal(examples.inputs["nodes"], world.y[10:13])


def test_each_variable_has_tables_of_its_own():
    model = chain_model(3)
    with torch.no_grad():
        model.nodes["nodes"].values[1, 0] = torch.tensor([5.0, 7.0])
    theta = model(rf.chain(3, 2), {"nodes": torch.tensor([[0, 0, 0], [1, 1, 1]])})
    assert rf.chain(3, 2).node_views(theta)[0].tolist() == [[[0, 0], [5, 7], [0, 0]], [[0, 0]] * 3]


def test_the_likelihood_suffers_most_from_a_shift(tmp_path):
    study = Errors(length=8, shifts=(0, 1), sizes=(1000,), num_distributions=3)
    with Cells(tmp_path, study.num_cells) as cells:
        records = study.measure(cells)
    mean = {
        (shift, name): sum(record["errors"][name] for record in records if record["shift"] == shift) / 3
        for shift in (0, 1)
        for name in NAMES
    }
    for name in NAMES[:3]:
        assert abs(mean[0, name] - mean[0, "exact marginals"]) < 0.005
    assert mean[1, "univariate logistic"] < mean[1, "clique logistic"] < mean[1, "likelihood"] - 0.002
    assert mean[1, "exact marginals"] == mean[0, "exact marginals"]
    assert all(reason == "converged" for record in records for reason in record["reasons"].values())
    with pytest.MonkeyPatch.context() as patch, Cells(tmp_path, study.num_cells) as cells:
        patch.setattr("papers.misspecification._fitted", None)
        assert study.measure(cells) == records  # all from the files


def test_reproduce_misspecification(tmp_path, capsys, monkeypatch, written):
    from matplotlib.image import imread

    tiny = (
        Errors(length=4, shifts=(0, 1), sizes=(10,), num_distributions=2),
        Marginals(length=4, shifts=(0, 1), size=10),
    )
    monkeypatch.setattr("papers.commands.misspecification._QUICK", tiny)
    assert main(["misspecification", "--quick", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote ") == 4
    for study in tiny:
        assert "    python -m papers misspecification --quick" in sections(tmp_path)[study.name]
        assert len(written[study.name]) == study.num_cells
        assert imread(tmp_path / f"{study.name}.png").shape[2] == 4
    text = sections(tmp_path)["errors"]
    assert "## Shift 1\n\n| data | likelihood | univariate logistic | clique logistic | exact marginals |" in text
    records = written["marginals"]
    straight, shifted = (record["marginals"] for record in records)
    assert list(straight) == NAMES
    assert shifted["exact marginals"] == straight["exact marginals"][-1:] + straight["exact marginals"][:-1]
    assert all(0 < p < 1 for record in records for name in NAMES for p in record["marginals"][name])
