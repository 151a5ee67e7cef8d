"""`riskfield reproduce convex`, on a small stand-in for MNIST."""

import gzip
import json

import numpy as np
import pytest
import torch

from riskfield.cli import main
from riskfield.cli.reproduce import convex as command
from riskfield.experiments import convex, digits
from riskfield.experiments.convex import PAPER, DigitErrors
from riskfield.experiments.digits import ERRORS, METHODS, draw_digits, make_model

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


def test_the_measures():
    """Against the paper's definitions, pixel by pixel."""

    class Answer:
        node_marginals = (torch.tensor([[[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]]], dtype=torch.float64),)

    found = digits._errors([Answer()], torch.tensor([[0, 1, 1]]))
    expected = {
        "classification": 1 / 3,
        "regression": (0.1**2 + 0.3**2 + 0.6**2) / 3,
        "L_log": -(np.log(0.9) + np.log(0.7) + np.log(0.4)) / 3,
        "L_quad": (-1.8 + 0.82 - 1.4 + 0.58 - 0.8 + 0.52) / 3,
    }
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_the_paper_has_numbers_for_all_methods():
    for rows in PAPER.values():
        assert set(rows) == set(METHODS)
        assert all(len(numbers) == len(ERRORS) for numbers in rows.values())


def test_the_command(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK", {"noises": (0.5,), "per_digit": 1, "iterations": 1})
    for module in (digits, convex):
        monkeypatch.setattr(module, "DIGITS", (1, 7))
    assert main(["reproduce", "convex", "--data", root, "--quick", "--out", "out"]) == 0
    records = json.loads((tmp_path / "out" / "errors.json").read_text())["records"]
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
        count = sum(p.numel() for p in make_model(METHODS[record["method"]].convex).parameters())
        assert len(record["parameters"]) == count
    text = (tmp_path / "out" / "errors.md").read_text()
    assert "| L_quad | .0561 / **" in text
    assert "Table 3" in text
    assert root not in text
    assert (tmp_path / "out" / "beliefs.png").stat().st_size > 0
    # What is finished is shown without being computed again.
    monkeypatch.setattr(digits, "fit", None)
    assert main(["reproduce", "convex", "--data", root, "--quick", "--finished", "--out", "out"]) == 0


def test_a_study_that_is_not_finished_shows_what_there_is(root, tmp_path):
    from riskfield.experiments.study import reproduce

    paths = reproduce(DigitErrors(root, finished=True), tmp_path / "none", "command")
    assert "| L_quad | .0561 / - |" in paths[1].read_text()


def test_missing_data_is_said_first(tmp_path, capsys):
    draw_digits.cache_clear()
    assert main(["reproduce", "convex", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) != 0
    assert "MNIST" in capsys.readouterr().err
