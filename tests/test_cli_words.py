"""How the command-line program starts, completes words, suggests names and words its errors."""

import os
import subprocess
import sys

import numpy as np
import pytest
import typer
from PIL import Image

from riskfield import cli
from riskfield.cli import main
from riskfield.cli._common import complain_of_image, name_options
from riskfield.errors import FileFormatError, did_you_mean
from test_cli import folder, refused, run  # noqa: F401


def program(arguments="", then="", **environment):
    """The program in a process of its own, and what it prints."""
    code = f"""
import sys
from riskfield.cli import main
main({arguments.split()!r})
{then}
"""
    options = {"env": {**os.environ, **environment}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code], **options)
    return done.stdout + done.stderr


def test_help_does_not_load_torch():
    said = program("--help", "print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert "evaluate  Compare predictions with masks." in said
    assert said.endswith("False False\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_begins_as_in_the_list(name, capsys):
    assert main([name, "--help"]) == 0
    words = capsys.readouterr().out.split("\n\n")[1].split()
    assert " ".join(words) == cli.COMMANDS[name]


@pytest.mark.parametrize(
    ("words", "found"),
    [("riskfield in", ["infer"]), ("riskfield ", list(cli.COMMANDS)), ("riskfield infer --str", ["--strict"])],
)
def test_words_are_completed_in_bash(words, found):
    said = program(_RISKFIELD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert [line for line in said.splitlines() if line] == found


def test_completion_of_commands_does_not_load_torch():
    environment = {"_RISKFIELD_COMPLETE": "complete_bash", "COMP_WORDS": "riskfield f", "COMP_CWORD": "1"}
    code = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
from riskfield.cli import main
main([])
"""
    options = {"env": {**os.environ, **environment}, "capture_output": True, "text": True, "check": False}
    assert subprocess.run([sys.executable, "-c", code], **options).stdout.split() == ["fit", "False"]


def test_the_script_for_bash_can_be_shown():
    assert "_RISKFIELD_COMPLETE=complete_bash" in program(_RISKFIELD_COMPLETE="source_bash")


def test_misspelt_names_get_a_suggestion(folder, capsys):  # noqa: F811
    assert "Did you mean 'infer'?" in refused(capsys, "infre", "chain.uai")
    assert "--algorithm" in refused(capsys, "infer", "chain.uai", "--algoritm", "bp")
    fit = ["fit", "--images", "folder", "--masks", "folder", "--out", "model"]
    assert "Did you mean 'clique-logistic'?" in refused(capsys, *fit, "--loss", "clique-logisitc")
    (folder / "fit.toml").write_text("iteration = 3")
    assert "Did you mean 'iterations'?" in refused(capsys, *fit, "--config", "fit.toml")
    (folder / "problem.py").write_text("def problem():\n    return {'model': 1, 'data': 1, 'los': 1}")
    assert "Did you mean 'loss'?" in refused(capsys, "run", "problem.py", "--out", "out.safetensors")


def test_nothing_is_suggested_for_other_words():
    assert did_you_mean("hinge", ["loss", "ridge", "iterations"]) == " Did you mean 'ridge'?"
    assert did_you_mean("hinge", ["loss", "iterations"]) == ""
    assert did_you_mean(3, ["loss"]) == ""


def test_strict_runs_fail_without_convergence(folder, capsys):  # noqa: F811
    arguments = ["infer", "frustrated.uai", "--sweeps", "3", "--quiet"]
    assert run(capsys, *arguments)[0] == 0
    code, out, err = run(capsys, *arguments, "--strict", "--out", "result.MAR")
    assert (code, out) == (3, "")
    assert "not converged" in err
    assert (folder / "result.MAR").exists()
    assert run(capsys, "infer", "chain.uai", "--strict")[0] == 0
    # Max-product is judged by its certificate.
    best = ["infer", "frustrated.uai", "--algorithm", "max-product", "--quiet", "--strict"]
    assert run(capsys, *best)[0] == 0
    assert run(capsys, *best, "--memory", "1e-6")[0] == 3


@pytest.mark.parametrize(
    "arguments", [["infer", "broken.uai"], ["infer", "no.uai"], ["infer", "chain.uai", "--rho", "1"]]
)
def test_tracebacks_of_all_errors_can_be_shown(folder, capsys, monkeypatch, arguments):  # noqa: F811
    assert "Traceback" not in refused(capsys, *arguments)
    monkeypatch.setenv("RISKFIELD_TRACEBACK", "1")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("riskfield: ")


def test_errors_name_options(folder, capsys):  # noqa: F811
    """Not the arguments of the Python functions behind them."""
    images, masks = folder / "images", folder / "masks"
    images.mkdir()
    masks.mkdir()
    fit = ["fit", "--images", images, "--masks", masks, "--out", "model"]
    assert refused(capsys, *fit).startswith(f"riskfield: --images: {images} has no images")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(images / "a.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(masks / "b.png")
    assert refused(capsys, *fit).startswith(f"riskfield: --masks: {masks} has no mask for")
    assert "--ignore must be none" in refused(capsys, *fit, "--class", "0=a", "--class", "1=b", "--ignore", "1")


def test_the_words_of_errors():
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(image: str, kept: int = typer.Option(3, "--keep")): ...

    loaded = typer.main.get_command(app)
    message = "`kept` and `max_bytes` must be positive, `runs` and `image` given. Got `other`."
    expected = "--keep and --memory must be positive, MODEL and IMAGE given. Got `other`."
    assert name_options(message, loaded) == expected


def test_an_image_is_named_once(capsys):
    for error in (FileFormatError("test/horse.png: not an image."), FileNotFoundError(2, "missing", "test/horse.png")):
        complain_of_image("horse", error)
        assert capsys.readouterr().err.count("horse") == 1
    complain_of_image("horse", ValueError("it must be finite: all of it"))
    assert capsys.readouterr().err == "riskfield: horse: it must be finite: all of it\n"
