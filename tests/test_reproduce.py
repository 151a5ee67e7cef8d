"""`riskfield reproduce`: cells that are kept, runs that go on, results that are right, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from riskfield.cli import main
from riskfield.cli.reproduce.gradients import GradientFigure
from riskfield.experiments.cells import Cell, Cells
from riskfield.experiments.gradient_accuracy import Accuracy
from riskfield.experiments.gradient_times import Times

pytest.importorskip("matplotlib")

TINY = {
    GradientFigure.ACCURACY: Accuracy(side=3, strengths=(0.5,), decades=(-3, 0), per_decade=1, num_models=2),
    GradientFigure.TIMES: Times(sides=(3, 4), strengths=(0.5, 1.0), side=3, num_models=2),
}
# The command on many tiny cells, in a process that can be killed.
PROGRAM = """
import sys
from riskfield.cli import main
from riskfield.cli.reproduce import gradients
from riskfield.experiments.gradient_accuracy import Accuracy
tiny = Accuracy(side=3, strengths=(0.5, 1.0), decades=(0, 0), per_decade=1, num_models=int(sys.argv[1]))
gradients._QUICK[gradients.GradientFigure.ACCURACY] = tiny
sys.exit(main(["reproduce", "gradients", "--quick", "--figure", "accuracy", "--out", "out"]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- cells ----------------------------------------------------------------------------------------------------------


def never(**settings):
    raise AssertionError(f"computed again: {settings}")


def test_a_finished_cell_is_not_computed_again(folder):
    with Cells("cells", total=2) as cells:
        assert cells.get("sum", lambda a, b: {"value": a + b}, a=1, b=0.5) == {"value": 1.5}
        assert cells.get("sum", never, b=0.5, a=1) == {"value": 1.5}
        assert cells.get("sum", lambda a, b: {"value": None}, a=1, b=2) == {"value": None}
    assert len(os.listdir("cells")) == 2


@pytest.mark.parametrize("content", ["", '{"settings": {"a": 1}}', '{"settings": {"a": 2}, "result": 0}', "[1]"])
def test_what_is_no_result_of_this_cell_is_replaced(folder, content):
    with Cells("cells", total=1) as cells:
        cells.get("x", lambda a: {"value": a}, a=1)
        (path,) = (folder / "cells").iterdir()
        path.write_text(content)
        assert cells.get("x", lambda a: {"value": 7}, a=1) == {"value": 7}
        assert cells.get("x", never, a=1) == {"value": 7}


def test_names_are_fit_for_files(folder):
    with Cells("cells", total=1) as cells:
        cells.get("x", lambda method: {}, method="../a b/c:d")
    assert os.listdir("cells") == ["x,method=.._a_b_c_d.json"]


def test_a_cell_that_fails_leaves_nothing(folder):
    with Cells("cells", total=1) as cells:
        with pytest.raises(ZeroDivisionError):
            cells.get("x", lambda a: {"value": 1 / a}, a=0)
        with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
            cells.get("x", lambda a: {"value": float("nan")}, a=0)
    assert os.listdir("cells") == []


def test_cells_can_be_computed_in_other_processes(folder):
    wanted = [Cell("x", dict, {"a": a}) for a in range(4)]
    with Cells("cells", total=4) as cells:
        cells.get("x", lambda a: {"a": "kept"}, a=2)
        cells.prepare(wanted, jobs=2)
        assert [cells.get("x", never, a=a) for a in range(4)] == [{"a": 0}, {"a": 1}, {"a": "kept"}, {"a": 3}]
        cells.prepare(wanted, jobs=2)  # nothing is left to do
    assert len(os.listdir("cells")) == 4


# -- the command ----------------------------------------------------------------------------------------------------


def test_reproduce_gradients(folder, capsys, monkeypatch):
    from matplotlib.image import imread

    monkeypatch.setattr("riskfield.cli.reproduce.gradients._QUICK", TINY)
    assert main(["reproduce", "gradients", "--quick"]) == 0
    out = capsys.readouterr().out
    results = folder / "results" / "gradients-quick"
    for name in ("accuracy", "times"):
        for ending in ("json", "md", "png"):
            assert f"wrote {results.relative_to(folder) / f'{name}.{ending}'}\n" in out
        assert imread(results / f"{name}.png").shape[2] == 4

    accuracy = json.loads((results / "accuracy.json").read_text())
    assert accuracy["about"]["command"] == "riskfield reproduce gradients --quick"
    assert len(accuracy["records"]) == TINY[GradientFigure.ACCURACY].num_cells == 4
    for record in accuracy["records"]:
        small_steps, large_steps = ([record["errors"][sides][k] for sides in "124"] for k in (0, -1))
        assert all(1e-10 < error < 1e-4 for error in small_steps)  # rounding, whatever the sides
        assert large_steps[0] > 1e-7 > large_steps[1]  # truncation, where there is only one
        assert record["fixed point"] < 1e-8
    assert "## mean field, interaction strength 0.5" in (results / "accuracy.md").read_text()

    times = json.loads((results / "times.json").read_text())
    assert len(times["records"]) == TINY[GradientFigure.TIMES].num_cells == 16
    for record in times["records"]:
        assert record["converged"]
        assert record["inference"] > 0
        assert list(record["gradients"]) == ["perturbation", "fixed point", "direct", "iterative", "unroll"]
        assert all(found["error"] < 1e-2 and found["seconds"] > 0 for found in record["gradients"].values())
    assert "## TRW, 3 x 3" in (results / "times.md").read_text()


def test_slow_methods_are_left_out_on_larger_grids(folder):
    study = Times(sides=(3, 4), strengths=(), num_models=1, limit=0.0)
    with Cells("cells", study.num_cells) as cells:
        records = study.measure(cells)
    assert [len(record["gradients"]) for record in records] == [5, 0, 5, 0]
    assert "| 4 | " in study.tables(records)
    study.plot(records)


def test_what_does_not_converge_has_no_gradient(folder, monkeypatch):
    import riskfield as rf

    monkeypatch.setattr("riskfield.experiments.gradient_times._STOP", rf.Stop(1, 1e-5))
    study = Times(sides=(4,), strengths=(), num_models=1)
    with Cells("cells", study.num_cells) as cells:
        records = study.measure(cells)
    assert [(record["converged"], record["gradients"]) for record in records] == [(False, {})] * 2
    assert "| 4 | 1 | 0/1 | " in study.tables(records)


# -- cut short ------------------------------------------------------------------------------------------------------


def start(num_models):
    command = [sys.executable, "-c", PROGRAM, str(num_models)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_cells(folder, process, count):
    while process.poll() is None and len(list(folder.glob("out/cells/*.json"))) < count:
        time.sleep(0.01)
    assert process.returncode is None, process.stderr.read()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_goes_on(folder, how):
    process = start(50)
    try:
        wait_for_cells(folder, process, 2)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("out/cells/*.json")}
    assert 2 <= len(kept) < 200
    assert not list(folder.glob("out/accuracy.*"))
    if how == signal.SIGINT:
        assert process.returncode == 130
        hint = "riskfield: finished cells are kept; the same command goes on from there."
        assert err.split("\n") == [hint, "riskfield: interrupted.", ""]
        assert not list(folder.glob("out/cells/.*"))
    process = start(1)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("wrote out/accuracy.png\n")
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert len(json.loads((folder / "out" / "accuracy.json").read_text())["records"]) == 4


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "Missing command. Try 'riskfield reproduce --help'."),
        (["reproduce", "cats"], "No such command 'cats'. Try 'riskfield reproduce --help'."),
        (["reproduce", "gradients", "--figure", "3"], "'3' is not one of 'accuracy', 'times'"),
        (["reproduce", "gradients", "now"], "Got unexpected extra argument"),
        (["reproduce", "gradients", "--quick", "--out", "file"], "file/cells: Not a directory."),
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
    assert main(["reproduce", "gradients", "--quick"]) == 2
    assert "Plots need matplotlib: pip install 'riskfield[demo]'." in capsys.readouterr().err
    assert os.listdir() == []


def test_help(capsys):
    assert main(["reproduce", "--help"]) == 0
    assert "gradients" in capsys.readouterr().out
