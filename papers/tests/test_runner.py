"""`python -m papers`: a study as a command, runs that continue after they were cut short, and refusals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import papers
from papers.cells import CellFile, Cells
from papers.commands import main
from papers.commands.gradients import GradientFigure
from papers.gradients.accuracy import Accuracy
from papers.gradients.times import Times
from papers.study import sections

pytest.importorskip("matplotlib")

ROOT = Path(papers.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
TINY = {
    GradientFigure.ACCURACY: Accuracy(side=3, strengths=(0.5,), decades=(-3, 0), per_decade=1, num_models=2),
    GradientFigure.TIMES: Times(sides=(3, 4), strengths=(0.5, 1.0), side=3, num_models=2),
}
# The command on many tiny cells, in a process that can be killed.
PROGRAM = """
import sys
from papers.commands import main
from papers.commands import gradients
from papers.gradients.accuracy import Accuracy
tiny = Accuracy(side=3, strengths=(0.5, 1.0), decades=(0, 0), per_decade=1, num_models=int(sys.argv[1]))
gradients._QUICK[gradients.GradientFigure.ACCURACY] = tiny
sys.exit(main(["gradients", "--quick", "--figure", "accuracy", "--out", "out"]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the command ----------------------------------------------------------------------------------------------------


def test_gradients(folder, capsys, monkeypatch, written):
    from matplotlib.image import imread

    monkeypatch.setattr("papers.commands.gradients._QUICK", TINY)
    assert main(["gradients", "--quick"]) == 0
    out = capsys.readouterr().out
    results = folder / "results" / "gradients-quick"
    for name in ("accuracy", "times"):
        assert f"wrote results/gradients-quick/tables.md\nwrote results/gradients-quick/{name}.png\n" in out
        assert imread(results / f"{name}.png").shape[2] == 4

    assert "    python -m papers gradients --quick\n" in sections(results)["accuracy"]
    assert len(written["accuracy"]) == TINY[GradientFigure.ACCURACY].num_cells == 4
    for record in written["accuracy"]:
        small_steps, large_steps = ([record["errors"][sides][k] for sides in "124"] for k in (0, -1))
        assert all(1e-10 < error < 1e-4 for error in small_steps)  # rounding, whatever the sides
        assert large_steps[0] > 1e-7 > large_steps[1]  # truncation, where there is only one
        assert record["fixed point"] < 1e-8
    assert "## mean field, interaction strength 0.5" in sections(results)["accuracy"]

    assert len(written["times"]) == TINY[GradientFigure.TIMES].num_cells == 16
    for record in written["times"]:
        assert record["converged"]
        assert record["inference"] > 0
        assert list(record["gradients"]) == ["perturbation", "fixed point", "direct", "iterative", "unroll"]
        assert all(found["error"] < 1e-2 and found["seconds"] > 0 for found in record["gradients"].values())
    assert "## TRW, 3 x 3" in sections(results)["times"]


def test_slow_methods_are_left_out_on_larger_grids(folder):
    study = Times(sides=(3, 4), strengths=(), num_models=1, limit=0.0)
    with Cells("cells", study.num_cells) as cells:
        records = study.measure(cells)
    assert [len(record["gradients"]) for record in records] == [5, 0, 5, 0]
    assert "| 4 | " in study.tables(records)
    study.plot(records)


def test_what_does_not_converge_has_no_gradient(folder, monkeypatch):
    import riskfield as rf

    monkeypatch.setattr("papers.gradients.times._STOP", rf.Stop(1, 1e-5))
    study = Times(sides=(4,), strengths=(), num_models=1)
    with Cells("cells", study.num_cells) as cells:
        records = study.measure(cells)
    assert [(record["converged"], record["gradients"]) for record in records] == [(False, {})] * 2
    assert "| 4 | 1 | 0/1 | " in study.tables(records)


# -- cut short ------------------------------------------------------------------------------------------------------


def start(num_models):
    command = [sys.executable, "-c", PROGRAM, str(num_models)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def cells_on_file():
    return {line.key: line for line in CellFile("out").lines()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_continues(folder, how):
    process = start(50)
    try:
        while process.poll() is None and len(cells_on_file()) < 2:
            time.sleep(0.01)
        assert process.returncode is None, process.stderr.read()
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    kept = cells_on_file()
    assert 2 <= len(kept) < 200
    assert not {"tables.md", "accuracy.png"} & set(os.listdir("out"))
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err == "papers: interrupted. Finished cells are kept; the same command continues.\n"
        assert os.listdir("out") == ["cells.jsonl.gz"]
    process = start(1)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("wrote out/accuracy.png\n")
    after = cells_on_file()
    assert all(after[key] == line for key, line in kept.items())  # the times in them show that none was computed again


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command. Try 'python -m papers --help'."),
        (["cats"], "No such command 'cats'. Try 'python -m papers --help'."),
        (["gradients", "--figure", "3"], "'3' is not one of 'accuracy', 'times'"),
        (["gradients", "now"], "Got unexpected extra argument"),
        (["gradients", "--quick", "--out", "file"], "file: File exists."),
    ],
)
def test_refusals(folder, capsys, arguments, message):
    (folder / "file").write_text("")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir() == ["file"]


def test_without_matplotlib_nothing_begins(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["gradients", "--quick"]) == 2
    assert "Plots need matplotlib: pip install 'riskfield[papers]'." in capsys.readouterr().err
    assert os.listdir() == []


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "gradients" in capsys.readouterr().out
