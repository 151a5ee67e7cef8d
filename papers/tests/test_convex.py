"""`python -m papers convex`, on a small stand-in for MNIST."""

import gzip

import numpy as np
import pytest
import torch

import riskfield as rf
from papers.cells import CellFile
from papers.commands import convex as command
from papers.commands import main
from papers.convex import crf_program, digits
from papers.convex import tables as convex
from papers.convex import variations as digit_variations
from papers.convex.digits import ERRORS, METHODS, PLAIN, Setup, draw_digits
from papers.convex.tables import PAPER, DigitErrors
from papers.convex.variations import DigitVariations, Variation
from papers.study import reproduce, sections

pytest.importorskip("matplotlib")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Four pictures of each digit: a bar whose place and length depend on the digit. The rest of a picture is dark."""
    monkeypatch.chdir(tmp_path)
    labels = np.repeat(np.arange(10, dtype=np.uint8), 4)
    images = np.zeros((len(labels), 28, 28), np.uint8)
    for k, digit in enumerate(labels):
        images[k, 4 : 12 + digit, 2 * digit + k % 4 : 2 * digit + k % 4 + 4] = 200
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        (raw / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    draw_digits.cache_clear()
    return str(tmp_path / "data")


def test_the_pictures(root):
    training, tests = draw_digits(root, 0.5, 2)
    assert training.labels.shape == tests.labels.shape == (18, 784)
    together = torch.cat([training.labels, tests.labels])
    assert len(together.unique(dim=0)) == 36  # no picture is in both, none twice
    changed = (training.noisy != training.labels).double().mean()
    assert 0.2 < float(changed) < 0.3  # half of what is set at random stays as it was
    examples = training.examples()
    assert torch.equal(examples.inputs["nodes"].argmax(-1), training.noisy)
    across = examples.graph.factor_groups[0].variables[5]
    joint = 2 * training.noisy[:, across[0]] + training.noisy[:, across[1]]
    assert torch.equal(examples.inputs["factors"][:, 5].argmax(-1), joint)
    assert torch.equal(draw_digits(root, 0.1, 2)[0].labels, training.labels)


def test_other_pictures(root):
    training, tests = draw_digits(root, 0.5, 1)
    more = draw_digits(root, 0.5, 1, groups=4)
    assert torch.equal(more[0].noisy, training.noisy)  # groups come behind those there are
    assert torch.equal(more[1].noisy, tests.noisy)
    assert len(torch.cat([group.labels for group in more]).unique(dim=0)) == 36
    assert not torch.equal(draw_digits(root, 0.5, 1, sample=1)[0].labels, training.labels)
    assert int(draw_digits(root, 0.5, 1, bright=200)[0].labels.sum()) == 0  # ink is 200


def test_the_measures():
    """Against the paper's definitions, pixel by pixel."""

    class Answer:
        node_marginals = (torch.tensor([[[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]]], dtype=torch.float64),)

    found = digits.errors([Answer()], torch.tensor([[0, 1, 1]]))
    expected = {
        "classification": 1 / 3,
        "regression": (0.1**2 + 0.3**2 + 0.6**2) / 3,
        "L_log": -(np.log(0.9) + np.log(0.7) + np.log(0.4)) / 3,
        "L_quad": (-1.8 + 0.82 - 1.4 + 0.58 - 0.8 + 0.52) / 3,
    }
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_training_that_makes_no_iteration(root, monkeypatch):
    monkeypatch.setattr(
        rf, "fit", lambda *_, **__: rf.learning.Fit(rf.learning.Reason.DIVERGED, "at the start", (), None)
    )
    found = digits.measure(root, "BP", 0.5, 1, 1)
    assert found["training"] == [["diverged", 0, 0]]
    assert found["objective"] is None


def test_the_potentials_of_the_program():
    """x_i w . (1, indicators) and x_i x_j v . (1, indicators) for x = -1, 1, at random weights."""
    graph, model = rf.grid(1, 2, num_states=2), crf_program.ising()
    generator = torch.Generator().manual_seed(0)
    w, a, v, b = (p.data.normal_(generator=generator).flatten() for p in model.parameters())
    noisy = torch.tensor([[1, 0]])
    hot = torch.nn.functional.one_hot
    inputs = {"nodes": hot(noisy, 2).double(), "factors": hot(2 * noisy[:, :1] + noisy[:, 1:], 4).double()}
    theta = model(graph, inputs).detach()
    for x in ((0, 0), (0, 1), (1, 0), (1, 1)):
        signs = [2 * state - 1 for state in x]
        expected = signs[0] * (a + w[1]) + signs[1] * (a + w[0]) + signs[0] * signs[1] * (b + v[2])
        assert float(graph.score(theta[0], torch.tensor(x))) == pytest.approx(float(expected))


def test_mean_field_of_the_program_starts_from_the_potentials():
    """Two variables that want to agree: the second, for 1, is the surer, but the first, for 0, is renewed first."""
    graph = rf.grid(1, 2, num_states=2)
    theta = graph.zeros()
    graph.node(theta, 0)[0] = 0.5
    graph.node(theta, 1)[1] = 0.9
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 4.0
    before = crf_program.MeanFieldFromPotentials(range(2)).start(graph, theta.unsqueeze(0), None, None).marginals()
    expected = theta[: graph.node_size].unflatten(0, (2, 2)).softmax(-1).flatten()
    assert torch.allclose(before[0, : graph.node_size], expected)
    ends = [
        rf.Inference(algorithm(range(2)), rf.Stop(100, 1e-9))(graph, theta).node_marginals[0][:, 1]
        for algorithm in (rf.MeanField, crf_program.MeanFieldFromPotentials)
    ]
    assert bool((ends[0] < 0.1).all())
    assert bool((ends[1] > 0.9).all())


def test_the_paper_has_numbers_for_all_methods():
    for rows in PAPER.values():
        assert set(rows) == set(METHODS)
        assert all(len(numbers) == len(ERRORS) for numbers in rows.values())


def test_the_command(root, tmp_path, capsys, monkeypatch, written):
    monkeypatch.setattr(command, "QUICK", {"noises": (0.5,), "per_digit": 1, "iterations": 1})
    for module in (digits, convex):
        monkeypatch.setattr(module, "DIGITS", (1, 7))
    assert main(["convex", "--data", root, "--quick", "--out", "out"]) == 0
    records = written["errors"]
    assert [record["method"] for record in records] == [
        "L_quad",
        "L_log",
        "BP",
        "mean field",
        "pseudo + BP",
        "pseudo + mean field",
    ]
    for record in records:
        assert all(np.isfinite(record["test"][name]) for name in ERRORS)
        assert np.shape(record["beliefs"]) == (2, 784)
        count = sum(p.numel() for p in PLAIN.model(PLAIN.methods[record["method"]].convex).parameters())
        assert len(record["parameters"]) == count
    text = sections(tmp_path / "out")["errors"]
    assert "| L_quad | .0561 / **" in text
    assert "Table 3" in text
    assert root not in text
    assert (tmp_path / "out" / "beliefs.png").stat().st_size > 0
    # What is finished is shown without being computed again.
    monkeypatch.setattr(rf, "fit", None)
    assert main(["convex", "--data", root, "--quick", "--finished", "--out", "out"]) == 0


def test_a_study_that_is_not_finished_shows_what_there_is(root, tmp_path):
    paths = reproduce(DigitErrors(root, finished=True), tmp_path / "none", "command")
    assert "| L_quad | .0561 / - |" in paths[0].read_text()


def test_missing_data_is_said_first(tmp_path, capsys):
    draw_digits.cache_clear()
    assert main(["convex", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) != 0
    assert "MNIST" in capsys.readouterr().err


def _records(study, folder):
    with study.open_cells(folder) as cells:
        return study.measure(cells)


def test_variations(root, tmp_path, monkeypatch):
    for module in (digits, convex):
        monkeypatch.setattr(module, "DIGITS", (1, 7))
    ways = (
        Variation("samples", (Setup(sample=1), Setup(sample=2)), ("pseudo + BP",)),
        Variation("Ising", (Setup(field=crf_program.ising),), ("pseudo + mean field", "BP")),
    )
    monkeypatch.setattr(digit_variations, "VARIATIONS", ways)
    study = DigitVariations(root, noises=(0.5, 0.1), per_digit=1, iterations=1, groups=2)
    records = _records(study, tmp_path / "out")
    assert {record["noise"] for record in records} == {0.5}  # the paper has no numbers for 10 %
    counts = {(record["method"], record["how"]): len(record["tests"]) for record in records}
    assert len(counts) == len(records) == 2 * len(METHODS) + 3
    assert counts["pseudo + BP", "samples"] == counts["BP", "other test pictures"] == 2
    assert counts["BP", "Ising"] == counts["L_log", "as in errors"] == 1
    assert len(CellFile(tmp_path / "out").lines()) == study.num_cells
    text = study.tables(records)
    (line,) = (line for line in text.splitlines() if line.startswith("| pseudo + BP | samples |"))
    values = next(record for record in records if record["how"] == "samples")["tests"]
    mean = np.mean([value["classification"] for value in values])
    spread = np.std([value["classification"] for value in values], ddof=1)
    assert f".0977 / **{mean:.4f}** ± {spread:.4f}".replace("0.", ".") in line
    # What is finished is shown without being computed again.
    monkeypatch.setattr(rf, "fit", None)
    again = DigitVariations(root, noises=(0.5,), per_digit=1, iterations=1, groups=2, finished=True)
    assert _records(again, tmp_path / "out") == records
