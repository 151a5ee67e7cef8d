"""The scripts for the first day: short, and better than guessing already with `--quick`."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("bilstm_crf", "unet_crf", "relational", "uai_instance")


def script(name):
    torch.manual_seed(0)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", SHORT)
def test_a_script_has_at_most_forty_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_sequences():
    assert script("bilstm_crf")(quick=True) > 0.45  # guessing: 1/6


def test_images():
    model, threshold = script("unet_crf")(quick=True)
    assert model < threshold


def test_relations():
    pytest.importorskip("networkx")
    assert script("relational")(quick=True) > 0.8


def test_a_uai_instance(capsys):
    values = script("uai_instance")(["--quick"])
    assert values["mean field"] < values["exact"] < values["TRW"]
    assert "log p: lower bound" in capsys.readouterr().out
