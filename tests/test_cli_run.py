"""`riskfield run`: alone, interrupted, and under torchrun."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model, values
from riskfield.cli import main
from riskfield.cli._common import print_divergence

TESTS = Path(__file__).parent
LOSS = rf.losses.UnivariateLogistic()
PROBLEM = """
import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model

def problem():
    return {
        "model": chain_model(),
        "data": chain_examples(12),
        "loss": rf.losses.UnivariateLogistic(),
        "inference": EXACT,
        "ridge": 1e-2,
        "validation": rf.Validation(chain_examples(5, seed=1), patience=100),
        "optimiser": rf.optim.LBFGS(iterations=8),
    }
"""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(rf.__file__).parent.parent)]),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.py").write_text(PROBLEM)
    return tmp_path


def expected():
    model = chain_model()
    validation = rf.Validation(chain_examples(5, seed=1), patience=100)
    settings = {"ridge": 1e-2, "optimiser": rf.optim.LBFGS(iterations=8), "validation": validation, "progress": False}
    rf.fit(model, chain_examples(12), LOSS, EXACT, **settings)
    return values(model)


def found(path="model.safetensors"):
    model = chain_model()
    model.load_state_dict(load_file(path))
    return values(model)


def test_fits_what_the_file_says_and_resumes(folder, capsys):
    command = ["run", "problem.py", "--out", "model.safetensors", "--checkpoint", "run", "--every", "3"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("Fit(8 iterations, objective 0.")
    assert said.endswith("wrote model.safetensors\n")
    assert torch.equal(found(), expected())
    assert [path.name for path in (folder / "run").iterdir()] == ["iteration-00000008.safetensors"]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert torch.equal(found(), expected())


def test_under_torchrun(folder):
    """The command of the documentation."""
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m riskfield run problem.py --out model.safetensors"
    )
    ran = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("wrote model.safetensors") == 1
    assert torch.allclose(found(), expected(), rtol=1e-6, atol=1e-9)


def test_ctrl_c_writes_the_best_so_far(folder):
    slow = PROBLEM.replace(
        '"ridge"', '"callbacks": [lambda record, model: print(record.iteration, flush=True)], "ridge"'
    ).replace("LBFGS(iterations=8)", "Torch(batch_size=1, epochs=100000)")
    (folder / "slow.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "riskfield", "run", "slow.py", "--out", "model.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=folder,
    )
    for line in process.stdout:
        if line.strip() == "3":
            break
    process.send_signal(signal.SIGINT)
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "interrupted: by the keyboard)" in out
    assert found().abs().max() > 0


def test_divergence_is_said(folder, capsys):
    steep = PROBLEM.replace("LBFGS(iterations=8)", "Torch(torch.optim.SGD, {'lr': 1e4})")
    (folder / "steep.py").write_text(steep.replace("import riskfield", "import torch, riskfield"))
    assert main(["run", "steep.py", "--out", "model.safetensors"]) == 0
    printed = capsys.readouterr()
    assert "riskfield: Training diverged: the objective is inf." in printed.err
    assert "diverged: the objective is inf)" in printed.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("problem = 3", "bad.py: `problem()` must return a dictionary of arguments of `fit`. Got None."),
        ("def problem():\n    return 1 / 0", "bad.py, line 2: ZeroDivisionError: division by zero"),
        ("def problem():\n    return {'models': 1}", "bad.py: `problem()` may define model, data, loss, inference,"),
        ("def problem():\n    return {'model': 1}", "bad.py: `problem()` must define `data`."),
        (None, "bad.py: No such file."),
    ],
)
def test_bad_files_are_named(folder, capsys, text, message):
    if text is not None:
        (folder / "bad.py").write_text(text)
    assert main(["run", "bad.py", "--out", "model.safetensors"]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "model.safetensors").exists()


def test_only_divergence_is_printed_as_a_line(capsys):
    with warnings.catch_warnings(record=True, action="always") as caught, print_divergence():
        warnings.warn("another", UserWarning, stacklevel=1)
        warnings.warn("it went wrong", rf.errors.DivergenceWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another"]
    assert capsys.readouterr().err == "riskfield: it went wrong\n"
