"""One process at a time writes to a folder, and a killed one blocks nobody."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model
from riskfield.io._lock import NAME, lock_folder

HOLDER = """
import sys, time
from riskfield.io._lock import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder, and the folder."""
    folder = tmp_path / "run"
    path = str(Path(rf.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout.readline() == b"held\n"
    yield process, folder
    process.kill()
    process.wait()
    process.stdout.close()


def train(folder, **settings):
    optimiser = rf.optim.LBFGS(iterations=2)
    return rf.fit(
        *(chain_model(), chain_examples(), rf.losses.UnivariateLogistic(), EXACT),
        **{"optimiser": optimiser, "checkpoint": folder, "progress": False, **settings},
    )


def test_a_second_writer_is_told_who_the_first_is_and_a_killed_one_blocks_nobody(holder):
    process, folder = holder
    with pytest.raises(BlockingIOError) as caught:
        train(folder)
    assert caught.value.filename == str(folder)
    expected = f"is in use by process {process.pid} on {socket.gethostname()} since {time.strftime('%Y-')}"
    assert expected in caught.value.strerror
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / NAME).exists()
    assert train(folder).history
    assert [path.name for path in folder.iterdir()] == ["iteration-00000002.safetensors"]


def test_two_fits_of_one_process_exclude_each_other(tmp_path):
    def again(record, model):
        with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()} "):
            train(tmp_path, resume=True)

    train(tmp_path, callbacks=[again])


def test_a_lock_is_released_by_errors_and_is_no_trace(tmp_path):
    def failing():
        with lock_folder(tmp_path):
            raise RuntimeError("lost")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            failing()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_is_locked(tmp_path):
    from riskfield.estimators.image_run import prepare

    with prepare(tmp_path, {}, resume=False), pytest.raises(BlockingIOError, match="is in use by process"):  # noqa: SIM117
        with prepare(tmp_path, {}, resume=True):
            pass
    with prepare(tmp_path, {}, resume=True) as checkpoints:
        assert checkpoints.parent == tmp_path


def test_a_lock_whose_file_its_last_holder_removes_is_taken_again(tmp_path, monkeypatch):
    """Between the opening of the file and the lock on it, the holder before may end: the open file is then no lock."""
    stat, removed = os.stat, []

    def stat_after_removal(path, **options):
        if not removed and os.fspath(path) == os.fspath(tmp_path / NAME):
            removed.append((tmp_path / NAME).unlink())
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", stat_after_removal)
    with lock_folder(tmp_path):
        assert removed
        assert (tmp_path / NAME).exists()
        with pytest.raises(BlockingIOError), lock_folder(tmp_path):
            pass
