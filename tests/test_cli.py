"""The command-line program: how it starts, what it prints, writes and refuses, and its exit codes."""

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import load_file

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model, values
from riskfield import cli
from riskfield.cli import main
from riskfield.cli._common import complain_of_image, name_options, print_divergence
from riskfield.errors import FileFormatError, did_you_mean
from riskfield.io.uai import read_mar, read_pr

# The command-line program: what it prints, writes and refuses, and its exit codes.


# A chain of three variables and a constant: loopy belief propagation is exact here.
CHAIN = "MARKOV 3  2 3 2  4  2 0 1  2 1 2  1 0  0   6  1 2 3 4 5 6   6  2 1 1 3 1 1   2  1 4   1  10"
# Two variables that may not agree and may not differ.
IMPOSSIBLE = "MARKOV 2  2 2  2  2 0 1  2 0 1   4  1 0 0 1   4  0 1 1 0"
# Three binary variables that all differ: impossible, but belief propagation does not notice.
PARITY = "MARKOV 3 2 2 2 3  2 0 1  2 1 2  2 2 0  4 0 1 1 0  4 0 1 1 0  4 0 1 1 0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain.uai").write_text(CHAIN)
    (tmp_path / "chain.evid").write_text("1 2 1")
    (tmp_path / "impossible.uai").write_text(IMPOSSIBLE)
    (tmp_path / "parity.uai").write_text(PARITY)
    (tmp_path / "broken.uai").write_text(CHAIN[:-30])
    (tmp_path / "frustrated.uai").write_text(frustrated(6))
    (tmp_path / "folder").mkdir()
    return tmp_path


def frustrated(side):
    """A torus of strong couplings with alternating signs, on which belief propagation does not settle."""
    edges = []
    for r in range(side):
        for c in range(side):
            here = r * side + c
            edges += [(here, r * side + (c + 1) % side), (here, (r + 1) % side * side + c)]
    scopes = " ".join(f"2 {a} {b}" for a, b in edges)
    tables = " ".join("4 20 1 1 20" if (k * k // 3) % 2 else "4 1 20 20 1" for k in range(len(edges)))
    fields = " ".join(f"2 1 {1 + (k % 3) / 10}" for k in range(side * side))
    n = side * side
    ones = " ".join(f"1 {k}" for k in range(n))
    return f"MARKOV {n} {'2 ' * n} {len(edges) + n} {scopes} {ones} {tables} {fields}"


def open_pipe(path, reader):
    """Open a named pipe for writing as soon as `reader` has opened it, and never wait for one that has ended."""
    while reader.poll() is None:
        try:
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.05)
        else:
            os.set_blocking(pipe, True)
            return open(pipe, "w")
    raise AssertionError(reader.stderr.read())


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line with which the program refuses."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("riskfield: ")
    return err


class TestResults:
    @pytest.mark.parametrize("algorithm", ["bp", "exact"])
    def test_prints_and_writes(self, folder, capsys, algorithm):
        code, out, err = run(
            capsys, "infer", "chain.uai", "--algorithm", algorithm, "--evidence", "chain.evid",
            "--out", "chain.MAR", "--pr", "chain.PR",
        )  # fmt: skip
        assert code == 0
        assert err == ""
        model = rf.io.read_uai("chain.uai")
        solution = rf.infer(model.graph, model.theta, rf.Exact(), evidence={2: 1})
        value = float(solution.log_partition) + model.log_constant
        assert read_pr("chain.PR") == pytest.approx(value, rel=1e-10)
        error = (read_mar("chain.MAR", model.graph) - solution.mu[: model.graph.node_size]).abs().max()
        assert error < 1e-8
        rows = out.splitlines()
        assert rows[0].split() == ["variable", "best", "state", "marginals"]
        assert rows[3].split() == ["2", "1", "0.000000", "1.000000", "(observed)"]
        summary = dict(row.split(maxsplit=1) for row in rows[5:])
        assert summary["model"] == "3 variables, 3 factors, 1 observed"
        assert summary["converged"] == "yes"
        assert float(out.split("ln Z")[1].split()[0]) == pytest.approx(value, rel=1e-8)
        assert float(out.split("log10 Z")[1].split()[0]) == pytest.approx(value / math.log(10), rel=1e-8)

    def test_bounds(self, folder, capsys):
        values = {}
        for algorithm in ("mean-field", "exact", "trw"):
            extra = ["--rho", "trees", "--sweeps", "5000"] if algorithm == "trw" else []
            code, out, _ = run(capsys, "infer", "frustrated.uai", "--algorithm", algorithm, *extra)
            assert code == 0
            values[algorithm] = float(out.split("ln Z")[1].split()[0])
            note = {"mean-field": "(lower bound)", "exact": "", "trw": "(upper bound)"}[algorithm]
            assert note in out
        assert values["mean-field"] < values["exact"] < values["trw"]

    def test_max_product(self, folder, capsys):
        code, out, err = run(capsys, "infer", "chain.uai", "--algorithm", "max-product", "--out", "chain.MPE")
        assert (code, err) == (0, "")
        # The best of 6 * 4 for (1, 2), 4 * 3 for state 1, ...: x0 = 1, x1 = 1 (5) with x2 = 1 (3), times 4.
        assert (folder / "chain.MPE").read_text() == "MPE\n3 1 1 1\n"
        assert float(out.split("ln score")[1].split()[0]) == pytest.approx(math.log(5 * 3 * 4 * 10))

    def test_max_product_never_writes_an_impossible_state(self, folder, capsys):
        # Neighbours on the cycle differ. All max-marginals tie, and every variable's own maximum is state 0.
        edges = [(k, (k + 1) % 5) for k in range(5)]
        different = " ".join("0" if a == b else "1" for a in range(3) for b in range(3))
        scopes = "\n".join(f"2 {a} {b}" for a, b in edges)
        (folder / "colours.uai").write_text(f"MARKOV 5 3 3 3 3 3 5\n{scopes}\n" + f"9 {different}\n" * 5)
        code, out, err = run(capsys, "infer", "colours.uai", "--algorithm", "max-product", "--out", "colours.MPE")
        states = [int(word) for word in (folder / "colours.MPE").read_text().split()[2:]]
        assert (code, err) == (0, "")
        assert "optimal" in out
        assert all(states[a] != states[b] for a, b in edges)

    @pytest.mark.parametrize("schedule", ["sequential", "parallel"])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_schedules_and_precisions(self, folder, capsys, schedule, dtype):
        code, out, _ = run(capsys, "infer", "chain.uai", "--schedule", schedule, "--dtype", dtype, "--damping", "0.1")
        assert code == 0
        assert out.splitlines()[-1].split() == ["converged", "yes"]

    def test_rows_and_states_are_limited(self, folder, capsys):
        (folder / "many.uai").write_text(f"MARKOV 50 {'30 ' * 50} 0")
        _, out, _ = run(capsys, "infer", "many.uai", "--max-rows", "3")
        assert "... and 47 more variables (see --max-rows and --out)" in out
        assert "... (30 states)" in out
        assert max(map(len, out.splitlines())) < 120
        _, out, _ = run(capsys, "infer", "many.uai", "--max-rows", "0")
        assert out.startswith("model ")

    def test_quiet(self, folder, capsys):
        assert run(capsys, "infer", "chain.uai", "--quiet", "--pr", "chain.PR") == (0, "", "")
        assert (folder / "chain.PR").exists()

    def test_not_converged_is_said_and_is_no_failure(self, folder, capsys):
        code, out, err = run(capsys, "infer", "frustrated.uai", "--sweeps", "5", "--out", "f.MAR")
        assert code == 0
        assert out.splitlines()[-1].split() == ["converged", "NO"]
        assert err.startswith("riskfield: WARNING: not converged. The marginals still change by ")
        assert "after 5 sweeps (tolerance 1e-08). Try more --sweeps or --damping 0.5 or --algorithm trw." in err
        assert err.count("\n") == 1
        assert (folder / "f.MAR").exists()

    def test_threads(self, folder, capsys):
        assert run(capsys, "infer", "chain.uai", "--threads", "1", "--quiet")[0] == 0

    def test_result_can_go_to_a_pipe(self, folder):
        command = [sys.executable, "-m", "riskfield", "infer", "chain.uai", "--quiet", "--pr", "/dev/stdout"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.startswith("PR\n")
        assert done.stderr == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["infer"], "Missing argument 'MODEL.uai'"),
            (["infer", "absent.uai"], "absent.uai: No such file or directory."),
            (["infer", "folder"], "folder: Is a directory."),
            (["infer", "broken.uai"], "broken.uai: expected "),
            (["infer", "chain.uai", "--evidence", "absent.evid"], "absent.evid: No such file"),
            (["infer", "chain.uai", "--evidence", "chain.uai"], "chain.uai: expected a number at token 1"),
            (["infer", "impossible.uai", "--algorithm", "exact"], "Every joint state has probability zero"),
            (["infer", "chain.uai", "--algorithm", "bq"], "'bq' is not one of 'bp', 'trw', 'mean-field'"),
            (["infer", "chain.uai", "--sweeps", "0"], "Invalid value for '--sweeps'"),
            (["infer", "chain.uai", "--tol", "-1"], "--tol"),
            (["infer", "chain.uai", "--tol", "nan"], "tol"),
            (["infer", "chain.uai", "--damping", "1"], "--damping must be at least 0 and below 1. Got 1."),
            (["infer", "chain.uai", "--damping", "nan"], "--damping must be"),
            (
                ["infer", "chain.uai", "--algorithm", "trw", "--rho", "tree"],
                "--rho must be 'trees', or a probability above 0 and at most 1. Got 'tree'.",
            ),
            (["infer", "chain.uai", "--algorithm", "trw", "--rho", "0"], "--rho must be 'trees', or a probability"),
            (["infer", "chain.uai", "--algorithm", "trw", "--rho", "2"], "above 0 and at most 1. Got '2'."),
            (["infer", "chain.uai", "--rho", "0.5"], "--rho applies to trw. Got --algorithm bp."),
            (
                ["infer", "chain.uai", "--algorithm", "exact", "--damping", "0"],
                "--damping applies to bp, max-product, trw",
            ),
            (["infer", "chain.uai", "--algorithm", "mean-field", "--schedule", "parallel"], "--schedule applies to"),
            (["infer", "chain.uai", "--memory", "1"], "--memory applies to exact"),
            (["infer", "chain.uai", "--algorithm", "exact", "--memory", "-1"], "--memory must be above 0"),
            (
                ["infer", "parity.uai", "--algorithm", "exact", "--memory", "1e-9"],
                "; --memory allows 1.86265e-09 GiB. Raise it, or try --algorithm bp.",
            ),
            (["infer", "parity.uai", "--algorithm", "max-product", "--memory", "1e-9"], "raise --memory."),
            (["infer", "parity.uai", "--algorithm", "max-product"], "Every joint state has probability zero"),
            (["infer", "chain.uai", "--algorithm", "max-product", "--pr", "x.PR"], "--pr applies to bp, exact"),
            (["infer", "chain.uai", "--dtype", "float16"], "'float16' is not one of"),
            (["infer", "chain.uai", "--threads", "0"], "--threads"),
            (["infer", "chain.uai", "--frobnicate"], "No such option: --frobnicate"),
            (["infer", "chain.uai", "extra.uai"], "extra.uai"),
            (["infr", "chain.uai"], "No such command 'infr'"),
        ],
    )
    def test_one_line_and_nothing_written(self, folder, capsys, arguments, message):
        before = sorted(folder.iterdir())
        if arguments[0] == "infer" and "--pr" not in arguments:
            arguments = [*arguments, "--out", "result.MAR"]
        assert message in refused(capsys, *arguments)
        assert sorted(folder.iterdir()) == before

    def test_spanning_trees_need_pairs(self, folder, capsys):
        (folder / "three.uai").write_text(f"MARKOV 3 2 2 2 1 3 0 1 2 8 {'1 ' * 8}")
        assert "arity 3" in refused(capsys, "infer", "three.uai", "--algorithm", "trw", "--rho", "trees")

    def test_mean_field_does_not_call_a_possible_model_impossible(self, folder, capsys):
        (folder / "equal.uai").write_text("MARKOV 2 2 2 1 2 0 1 4 1 0 0 1")
        message = refused(capsys, "infer", "equal.uai", "--algorithm", "mean-field")
        assert "no distribution that avoids the zeros" in message
        assert run(capsys, "infer", "equal.uai")[0] == 0

    def test_zero_constant(self, folder, capsys):
        (folder / "zero.uai").write_text("MARKOV 1 2 1 0 1 0")
        assert "Every joint state has probability zero" in refused(capsys, "infer", "zero.uai")

    def test_outputs_are_checked_before_the_work(self, folder, capsys, monkeypatch):
        def never(*_):
            raise AssertionError("the model was read first")

        monkeypatch.setattr("riskfield.cli.infer.read_uai", never)
        for option in ("--out", "--pr"):
            assert "absent/x: No such file" in refused(capsys, "infer", "chain.uai", option, "absent/x")
            assert "folder: Is a directory" in refused(capsys, "infer", "chain.uai", option, "folder")
            assert "chain.uai/x: Not a directory" in refused(capsys, "infer", "chain.uai", option, "chain.uai/x")
            assert "would overwrite" in refused(capsys, "infer", "chain.uai", option, "folder/../chain.uai")
        assert "would overwrite" in refused(capsys, "infer", "chain.uai", "--out", "same", "--pr", "same")
        assert "would overwrite" in refused(
            capsys, "infer", "chain.uai", "--evidence", "chain.evid", "--out", "chain.evid"
        )

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_unwritable_folder(self, folder, capsys):
        (folder / "folder").chmod(0o555)
        assert "Permission denied" in refused(capsys, "infer", "chain.uai", "--out", "folder/x")

    def test_unforeseen_errors_take_one_line_too(self, folder, capsys, monkeypatch):
        def fail(*_):
            raise RuntimeError("something\nodd")

        monkeypatch.setattr("riskfield.cli.infer.read_uai", fail)
        code, out, err = run(capsys, "infer", "chain.uai")
        assert (code, out) == (1, "")
        assert err.startswith("riskfield: RuntimeError: something odd This is a bug")
        assert err.count("\n") == 1
        monkeypatch.setenv("RISKFIELD_TRACEBACK", "1")
        assert "Traceback" in run(capsys, "infer", "chain.uai")[2]

    def test_memory_error(self, folder, capsys, monkeypatch):
        def fail(*_):
            raise MemoryError

        monkeypatch.setattr("riskfield.cli.infer.read_uai", fail)
        assert refused(capsys, "infer", "chain.uai") == "riskfield: Out of memory.\n"


def test_the_time_does_not_include_loading(folder, capsys, monkeypatch):
    from riskfield.cli import infer as command

    run_inference, clock, calls = command.run_inference, [0.0], []

    def slow_at_first(*arguments, **options):
        clock[0] += 3 if calls else 1000
        calls.append(1)
        return run_inference(*arguments, **options)

    monkeypatch.setattr(command, "run_inference", slow_at_first)
    monkeypatch.setattr(command.time, "perf_counter", lambda: clock[0])
    assert "algorithm  bp, 3 s\n" in run(capsys, "infer", "chain.uai")[1]


def test_what_is_timed_loads_nothing(folder):
    """A forest runs other code than a graph with cycles."""
    code = f"""if True:
        import sys
        from riskfield.cli import infer as command
        run, loaded = command._run, []
        def watched(*arguments, **options):
            before = set(sys.modules)
            solution = run(*arguments, **options)
            loaded.extend(set(sys.modules) - before)
            return solution
        command._run = watched
        from riskfield.cli import main
        assert main(["infer", {str(folder / "chain.uai")!r}]) == 0
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


class TestProgram:
    def test_version(self, capsys):
        assert run(capsys, "--version") == (0, f"riskfield {rf.__version__}\n", "")

    def test_help_has_examples(self, capsys):
        code, out, _ = run(capsys, "infer", "--help")
        assert code == 0
        assert "Examples:\n    riskfield infer model.uai\n" in out

    def test_no_command_shows_help(self, capsys):
        code, out, err = run(capsys)
        assert (code, out) == (2, "")
        assert err.startswith("Usage: riskfield")

    def test_interrupt(self, folder):
        os.mkfifo(folder / "large.uai")
        command = [sys.executable, "-m", "riskfield", "infer", "large.uai", "--tol", "0", "--sweeps", "1000000000"]
        command += ["--out", "large.MAR"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            # The model is a pipe, which opens once the program has started and reads it.
            with open_pipe(folder / "large.uai", process) as pipe:
                pipe.write(frustrated(40))
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130
        assert out == ""
        assert err.strip() == "riskfield: interrupted."
        assert not (folder / "large.MAR").exists()

    def test_closed_pipe(self, folder):
        command = f"'{sys.executable}' -m riskfield infer chain.uai | true"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""

    def test_importing_the_library_loads_no_command_line(self):
        # Torch itself may load some of them, so they are counted from there.
        code = "import torch, sys; before = set(sys.modules); import riskfield; print(*set(sys.modules) - before)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        assert {name.split(".")[0] for name in done.stdout.split()}.isdisjoint({"scipy", "tqdm", "typer"})


# How the command-line program starts, completes words, suggests names and words its errors.


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


def test_misspelt_names_get_a_suggestion(folder, capsys):
    assert "Did you mean 'infer'?" in refused(capsys, "infre", "chain.uai")
    assert "--algorithm" in refused(capsys, "infer", "chain.uai", "--algoritm", "bp")
    said = refused(capsys, "infer", "chain.uai", "--algorithm", "mean-feild")
    assert "'--algorithm': 'mean-feild' is not one of" in said
    assert "Did you mean 'mean-field'? Try " in said
    fit = ["fit", "--images", "folder", "--masks", "folder", "--out", "model"]
    assert "Did you mean 'clique-logistic'?" in refused(capsys, *fit, "--loss", "clique-logisitc")
    (folder / "fit.toml").write_text("iteration = 3")
    assert "Did you mean 'iterations'?" in refused(capsys, *fit, "--config", "fit.toml")
    (folder / "problem.py").write_text("def problem():\n    return {'model': 1, 'data': 1, 'los': 1}")
    assert "Did you mean 'loss'?" in refused(capsys, "run", "problem.py", "--out", "out.safetensors")


def test_nothing_is_suggested_for_other_words():
    assert did_you_mean("hinge", ["loss", "ridge", "iterations"]) == " Did you mean 'ridge'?"
    assert did_you_mean("hinge", ["loss", "iterations"]) == ""
    assert did_you_mean("likelihood", ["pseudolikelihood", "surrogate-likelihood"]) == (
        " Did you mean 'surrogate-likelihood'?"
    )
    assert did_you_mean(3, ["loss"]) == ""


def test_strict_runs_fail_without_convergence(folder, capsys):
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
def test_tracebacks_of_all_errors_can_be_shown(folder, capsys, monkeypatch, arguments):
    assert "Traceback" not in refused(capsys, *arguments)
    monkeypatch.setenv("RISKFIELD_TRACEBACK", "1")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("riskfield: ")


def test_errors_name_options(folder, capsys):
    """Not the arguments of the Python functions behind them."""
    images, masks = folder / "images", folder / "masks"
    images.mkdir()
    masks.mkdir()
    fit = ["fit", "--images", images, "--masks", masks, "--out", "model"]
    assert refused(capsys, *fit).startswith(f"riskfield: --images: {images} has no images")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(images / "a.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(masks / "b.png")
    assert refused(capsys, *fit).startswith(f"riskfield: --masks: {masks} has no mask for")
    assert "--ignore must not be one of the classes" in refused(
        capsys, *fit, "--class", "0=a", "--class", "1=b", "--ignore", "1"
    )


def test_the_words_of_errors():
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(image: str, kept: int = typer.Option(3, "--keep")): ...

    loaded = typer.main.get_command(app)
    message = "`X` is empty; `kept` and `max_bytes` must be positive, `runs` and `image` given. Got `other`."
    expected = "--images is empty; --keep and --memory must be positive, MODEL and IMAGE given. Got `other`."
    assert name_options(message, loaded) == expected


def test_an_image_is_named_once(capsys):
    for error in (FileFormatError("test/horse.png: not an image."), FileNotFoundError(2, "missing", "test/horse.png")):
        complain_of_image("horse", error)
        assert capsys.readouterr().err.count("horse") == 1
    complain_of_image("horse", ValueError("it must be finite: all of it"))
    assert capsys.readouterr().err == "riskfield: horse: it must be finite: all of it\n"


# `riskfield run`: alone, interrupted, and under torchrun.


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
def problem(tmp_path, monkeypatch):
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


def test_fits_what_the_file_says_and_resumes(problem, capsys):
    command = ["run", "problem.py", "--out", "model.safetensors", "--checkpoint", "run", "--every", "3"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("Fit(8 iterations, objective 0.")
    assert said.endswith("wrote model.safetensors\n")
    assert torch.equal(found(), expected())
    assert [path.name for path in (problem / "run").iterdir()] == ["iteration-00000008.safetensors"]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert torch.equal(found(), expected())


def test_the_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "problem.py").write_text("from neighbour_of_problem import problem")
    (tmp_path / "apart" / "neighbour_of_problem.py").write_text(PROBLEM)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "apart/problem.py", "--out", "model.safetensors", "--quiet"]) == 0
    assert torch.equal(found(), expected())


def test_under_torchrun(problem):
    """The command of the documentation."""
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m riskfield run problem.py --out model.safetensors"
    )
    ran = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=problem
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("wrote model.safetensors") == 1
    assert torch.allclose(found(), expected(), rtol=1e-6, atol=1e-9)


def test_ctrl_c_writes_the_best_so_far(problem):
    slow = PROBLEM.replace(
        '"ridge"', '"callbacks": [lambda record, model: print(record.iteration, flush=True)], "ridge"'
    ).replace("LBFGS(iterations=8)", "Torch(batch_size=1, epochs=100000)")
    (problem / "slow.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "riskfield", "run", "slow.py", "--out", "model.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=problem,
    )
    for line in process.stdout:
        if line.strip() == "3":
            break
    process.send_signal(signal.SIGINT)
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "interrupted: by the keyboard)" in out
    assert found().abs().max() > 0


def test_divergence_is_said(problem, capsys):
    steep = PROBLEM.replace("LBFGS(iterations=8)", "Torch(torch.optim.SGD, {'lr': 1e4})")
    (problem / "steep.py").write_text(steep.replace("import riskfield", "import torch, riskfield"))
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
def test_bad_files_are_named(problem, capsys, text, message):
    if text is not None:
        (problem / "bad.py").write_text(text)
    assert main(["run", "bad.py", "--out", "model.safetensors"]) == 2
    assert message in capsys.readouterr().err
    assert not (problem / "model.safetensors").exists()


def test_only_divergence_is_printed_as_a_line(capsys):
    with warnings.catch_warnings(record=True, action="always") as caught, print_divergence():
        warnings.warn("another", UserWarning, stacklevel=1)
        warnings.warn("it went wrong", rf.errors.DivergenceWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another"]
    assert capsys.readouterr().err == "riskfield: it went wrong\n"
