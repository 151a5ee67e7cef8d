"""Runs that are killed, interrupted, or out of space: real processes, real signals."""

import copy
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model, values
from riskfield.io.codec import read_tree, write_tree
from riskfield.learning.fit_state import describe

TESTS = Path(__file__).parent
LOSS = rf.losses.UnivariateLogistic()


def worker(folder, *scenes):
    """Start `survival_worker.py`."""
    path = os.pathsep.join([str(TESTS), str(Path(rf.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(TESTS / "survival_worker.py"), str(folder), *scenes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def finish(process):
    """The lines a worker prints until it ends, and what it complained of."""
    out, complaints = process.communicate(timeout=120)
    return out.splitlines(), complaints


def results(lines):
    return [line for line in lines if line.startswith("result")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the worker finds when it is left alone."""
    lines, complaints = finish(worker(tmp_path_factory.mktemp("undisturbed")))
    assert len(results(lines)) == 3, complaints
    return results(lines)


# -- kill -9 ----------------------------------------------------------------------------------------------------------


def test_killed_at_random_moments_it_ends_bit_by_bit_the_same(tmp_path, undisturbed):
    chance, killed = random.Random(0), 0
    while killed < 3:
        process = worker(tmp_path)
        patience = chance.randint(3, 9)
        for line in process.stdout:
            patience -= line.startswith("iteration")
            if patience == 0:
                break
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        lines, complaints = finish(process)
        if process.returncode == 0:  # it was faster
            break
        assert process.returncode == -signal.SIGKILL, complaints
        killed += 1
    lines, complaints = finish(worker(tmp_path))
    assert results(lines) == undisturbed, complaints
    assert killed > 0


def test_killed_while_writing_a_checkpoint_it_ends_bit_by_bit_the_same(tmp_path, undisturbed):
    """In the middle of the files, before one is moved into place, before the last one is gone."""
    for scene in ("fsync=6", "replace=3", "unlink=2"):
        process = worker(tmp_path, scene)
        _, complaints = finish(process)
        assert process.returncode == -signal.SIGKILL, complaints
    lines, complaints = finish(worker(tmp_path))
    assert results(lines) == undisturbed, complaints
    for name in ("lbfgs", "adam", "smd"):
        assert len(list((tmp_path / name).iterdir())) == 1, "what the killed ones left behind is gone"


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_returns_the_best_so_far(tmp_path):
    process = worker(tmp_path, "only=endless")
    for line in process.stdout:
        if line.split() == ["iteration", "endless", "5"]:
            break
    process.send_signal(signal.SIGINT)
    lines, complaints = finish(process)
    assert process.returncode == 0, complaints
    (result,) = results(lines)
    assert result.split()[2] == "interrupted"
    (best,) = [line.split() for line in lines if line.startswith("best")]
    assert 1 <= int(best[2]) <= int(best[3])
    assert int(best[3]) >= 5


@pytest.mark.parametrize("moment", [0, 1, 7, 20])
def test_an_interruption_anywhere_leaves_the_best_parameters(moment, monkeypatch):
    """Also in the middle of a line search, where the parameters are those of a trial."""
    from riskfield.learning.objective import Objective

    evaluate, seen, kept = Objective.__call__, [], [(float("inf"), values(chain_model()))]

    def interrupted(self, *arguments, **settings):
        if len(seen) == moment:
            raise KeyboardInterrupt
        seen.append(1)
        return evaluate(self, *arguments, **settings)

    monkeypatch.setattr(Objective, "__call__", interrupted)
    model = chain_model()
    result = rf.fit(
        model,
        chain_examples(),
        LOSS,
        EXACT,
        progress=False,
        callbacks=[lambda record, model: kept.append((record.objective, values(model)))],
    )
    assert result.reason is rf.learning.Reason.INTERRUPTED
    assert torch.equal(values(model), min(kept, key=lambda pair: pair[0])[1])


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_file_system_that_takes_no_more_leaves_the_earlier_checkpoint(tmp_path, undisturbed):
    process = worker(tmp_path, "only=adam", "full=5")
    lines, complaints = finish(process)
    assert process.returncode == 1
    assert "CheckpointError" in complaints
    assert (
        "checkpoint of iteration 6 could not be written (File too large); that of iteration 4 is intact" in complaints
    )
    assert [path.name for path in (tmp_path / "adam").iterdir()] == ["iteration-00000004.safetensors"]
    lines, complaints = finish(worker(tmp_path, "only=adam"))
    assert results(lines) == undisturbed[1:2], complaints


def test_no_space_left_keeps_model_and_checkpoint(tmp_path, monkeypatch):
    sync, left = os.fsync, [4]

    def full(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    model, seen = chain_model(), []
    with pytest.raises(
        rf.errors.CheckpointError, match=r"iteration 3 could not be written \(No space left on device\)"
    ) as info:
        rf.fit(
            model,
            chain_examples(),
            LOSS,
            EXACT,
            checkpoint=rf.Checkpoints(tmp_path / "run", every=1),
            progress=False,
            callbacks=[lambda record, model: seen.append(values(model))],
        )
    assert info.value.errno == errno.ENOSPC
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["iteration-00000002.safetensors"]
    assert torch.equal(values(model), seen[-1])
    state = read_tree(tmp_path / "run" / "iteration-00000002.safetensors", "checkpoint")
    assert len(state["history"]) == 2


# -- resuming ---------------------------------------------------------------------------------------------------------


def train(folder, iterations, *, model=None, **settings):
    model = chain_model() if model is None else model
    optimiser = settings.pop("optimiser", rf.optim.LBFGS(iterations=iterations))
    settings = {"ridge": 1e-3, "progress": False, "checkpoint": rf.Checkpoints(folder, every=3), **settings}
    result = rf.fit(
        model,
        settings.pop("data", chain_examples()),
        settings.pop("loss", LOSS),
        EXACT,
        optimiser=optimiser,
        **settings,
    )
    return result, values(model)


def test_a_run_can_be_made_longer(tmp_path):
    """What was found is taken up where it ended; the rest is as if it had been one run."""
    _, whole = train(tmp_path / "whole", 12)
    first, _ = train(tmp_path / "parts", 5)
    then, found = train(tmp_path / "parts", 12, resume=True)
    assert first.reason is then.reason is rf.learning.Reason.ITERATIONS
    assert torch.equal(found, whole)
    assert then.history[:5] == first.history
    assert then.history[-1].evaluations > first.history[-1].evaluations
    assert then.history[-1].seconds > first.history[-1].seconds


@pytest.mark.parametrize("lasso", [0.0, 1e-3])
def test_a_run_continues_with_a_shorter_memory(tmp_path, lasso):
    """The newest steps are kept."""
    train(tmp_path, 8, lasso=lasso)
    result, _ = train(tmp_path, 10, optimiser=rf.optim.LBFGS(iterations=10, memory=2), resume=True, lasso=lasso)
    assert len(result.history) == 10
    assert result.history[-1].objective < result.history[7].objective


def test_a_finished_run_is_not_run_again(tmp_path):
    first, found = train(tmp_path, 1000)
    assert first.reason is rf.learning.Reason.CONVERGED
    started = []
    again, same = train(tmp_path, 1000, resume=True, callbacks=[lambda record, model: started.append(record)])
    assert not started
    assert again == first
    assert torch.equal(same, found)


def test_resuming_nothing_is_beginning(tmp_path):
    _, found = train(tmp_path / "a", 4, resume=True)
    assert torch.equal(found, train(tmp_path / "b", 4)[1])


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    train(tmp_path, 2)
    with pytest.raises(FileExistsError, match=r"already holds a run. Use `resume=True` to continue it"):
        train(tmp_path, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ridge": 0.5}, r"`ridge` was 0.001 in the run to be resumed. Got 0.5."),
        ({"seed": 3}, r"`seed` was 0 in the run to be resumed. Got 3."),
        ({"per_variable": False}, r"`per_variable` was True"),
        ({"loss": rf.losses.UnivariateQuadratic()}, r"`loss` was 'UnivariateLogistic' .* Got 'UnivariateQuadratic'."),
        (
            {"loss": rf.losses.UnivariateLogistic(class_weight=(1, 5))},
            r"`loss` was 'UnivariateLogistic' .* Got 'UnivariateLogistic\(class_weight=\(1, 5\)\)'.",
        ),
        ({"optimiser": rf.optim.Torch()}, r"`optimiser` was 'LBFGS' .* Got 'Torch'."),
        ({"data": chain_examples(7)}, r"`examples` was 30 .* Got 7."),
        ({"model": chain_model().float()}, r"`model` must be the same as in the run.*'nodes.nodes.weight'"),
    ],
)
def test_another_run_is_not_resumed(tmp_path, settings, message):
    train(tmp_path, 2)
    if "model" in settings:
        data = chain_examples()
        settings = {**settings, "data": rf.Examples(data.graph, data.labels, {"nodes": data.inputs["nodes"].float()})}
    with pytest.raises(ValueError, match=message):
        train(tmp_path, 4, resume=True, **settings)


def test_the_description_of_a_loss_tells_its_settings_apart():
    losses = rf.losses
    pairs = [
        (losses.SmoothedClassification(alpha=15), losses.SmoothedClassification(alpha=5)),
        (losses.Hybrid(LOSS, LOSS, 0.5), losses.Hybrid(LOSS, losses.UnivariateLogistic((1, 2)), 0.5)),
        (losses.PatchPseudolikelihood([0, 0, 1, 1]), losses.PatchPseudolikelihood([0, 1, 1, 1])),
        (losses.Custom(max), losses.Custom(min)),
    ]
    for one, other in pairs:
        assert describe(one) == describe(copy.deepcopy(one)) != describe(other)
    assert describe(losses.SmoothedClassification(alpha=15)) == describe(losses.SmoothedClassification(alpha=15.0))


def test_a_damaged_checkpoint_is_named(tmp_path):
    train(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for content, message in [
        (whole[:-20], "iteration-00000002.safetensors is damaged"),
        (whole[:-4] + b"\0\0\0\0", "does not match its digest"),
        (b"", "is empty"),
    ]:
        path.write_bytes(content)
        with pytest.raises(rf.errors.FileFormatError, match=message):
            train(tmp_path, 4, resume=True)


LBFGS, ADAM, SMD = rf.optim.LBFGS(iterations=4), rf.optim.Torch(epochs=4), rf.optim.SMD(epochs=4)


@pytest.mark.parametrize(
    ("optimiser", "place", "value", "message"),
    [
        (LBFGS, "best/iteration", 7, r"`best` must be one of 4 iterations. Got 7."),
        (LBFGS, "best/iteration", -1, r"`best` must be one of 4 iterations. Got -1."),
        (LBFGS, "best/iteration", "2", r"`best` must be one of 4 iterations. Got '2'."),
        (LBFGS, "best/value", None, r"`value` must be a float. Got None."),
        (LBFGS, "best/model", {}, r"the best parameters must have the shapes of the last ones"),
        (LBFGS, "best", [1], r"`best` must be a dict. Got \[1\]."),
        (LBFGS, "history", {}, r"`history` must be a list. Got {}."),
        (LBFGS, "history/1/1", "small", r"`objective` must be of type float. Got 'small'."),
        (LBFGS, "history/1/0", 9, r"`iteration` must be 2. Got 9."),
        (LBFGS, "history/1", [1.0], r"a record must be a list of 8 values"),
        (LBFGS, "identity", None, r"`identity` must be a dict. Got None."),
        (LBFGS, "identity/ridge", torch.zeros(2), r"`ridge` must be a number or a string. Got tensor"),
        (LBFGS, "model", {"nodes": 3}, r"`model` must hold tensors by name. Got 3 for 'nodes'."),
        (LBFGS, "reason", "tired", r"'tired' is not a valid Reason"),
        (LBFGS, "looks_since_best", 0.5, r"`looks_since_best` must be a int. Got 0.5."),
        (LBFGS, "optimiser", {}, r"holds no state of this optimiser: KeyError\('curvature'\)"),
        (LBFGS, "optimiser/curvature/inverses", [1.0], r"`curvature` must hold as many changes of the gradient as"),
        (LBFGS, "optimiser/last/0", torch.zeros(3), r"`last/0` must have 1 or \d+ floating entries. Got 3 of"),
        (LBFGS, "optimiser/curvature/steps/1", "x", r"`curvature/steps/1` must hold tensors and numbers. Got 'x'."),
        (LBFGS, "optimiser/here", [1.0, 2.0], r"holds no state of this optimiser: ValueError"),
        (LBFGS, "optimiser/here/0", 10**400, r"holds no state of this optimiser: OverflowError"),
        (ADAM, "optimiser/torch/0/exp_avg", torch.zeros(2), r"`torch/0/exp_avg` must have 1 or \d+ floating entries"),
        (ADAM, "optimiser/torch", {9: {}}, r"`torch` must hold states of 3 parameters. Got number 9."),
        (ADAM, "optimiser/torch", [1], r"holds no state of this optimiser"),
        (SMD, "optimiser/gains", torch.zeros(2), r"`optimiser/gains` must have 1 or \d+ floating entries"),
        (SMD, "optimiser/lowest", "low", r"`optimiser/lowest` must hold tensors and numbers. Got 'low'."),
    ],
)
def test_an_ill_typed_checkpoint_is_named(tmp_path, optimiser, place, value, message):
    """What cannot be a checkpoint of the run is refused before anything goes on from it."""
    train(tmp_path, 4, optimiser=optimiser)
    (path,) = tmp_path.iterdir()
    state = read_tree(path, "checkpoint")
    *parents, last = [int(key) if key.isdigit() else key for key in place.split("/")]
    inner = state
    for key in parents:
        inner = inner[key]
    inner[last] = value
    write_tree(path, "checkpoint", state)
    model = chain_model()
    before = values(model)
    with pytest.raises(rf.errors.FileFormatError, match=message) as caught:
        train(tmp_path, 6, model=model, optimiser=optimiser, resume=True)
    assert "iteration-00000004.safetensors" in str(caught.value)
    assert torch.equal(values(model), before)


# -- the files --------------------------------------------------------------------------------------------------------


def test_states_come_back_bit_by_bit(tmp_path):
    state = {
        "numbers": [0.1, -0.0, float("inf"), 5e-324, 1, True, None, "text"],
        "tensors": {0: torch.randn(3, 2), 1: {"step": torch.tensor(4.0), "flags": torch.tensor([True, False])}},
        "none": torch.zeros(0, 3, dtype=torch.float64),
        "views": [torch.arange(6).reshape(2, 3).T, torch.ones(2, dtype=torch.bfloat16)],
        "#tensor": {"nested": {}},
    }
    write_tree(tmp_path / "state", "state", state)
    found = read_tree(tmp_path / "state", "state")

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return type(a) is type(b) and repr(a) == repr(b)

    assert same(state, found)
    with pytest.raises(TypeError, match=r"`a/set` must be made of plain values .* Got {1}."):
        write_tree(tmp_path / "other", "state", {"a": {"set": {1}}})
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
