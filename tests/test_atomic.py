"""Files are written whole or not at all, and what killed writers leave behind is removed by the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import riskfield
from riskfield.io import _atomic
from riskfield.io._atomic import write_bytes, write_text

KILLED = """
import os, signal, sys
from riskfield.io import _atomic
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
_atomic.write_text(sys.argv[1], "half")
"""
WRITER = "import sys; from riskfield.io._atomic import write_text; write_text(sys.argv[1], 'whole')"


def run(code, path):
    environment = {**os.environ, "PYTHONPATH": str(Path(riskfield.__file__).parent.parent)}
    return subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=120, check=False).returncode


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    assert run(KILLED, tmp_path / "a") != 0
    (left,) = names(tmp_path)
    assert left.startswith(".a.")
    assert left.endswith(".tmp")
    assert run(WRITER, tmp_path / "b") == 0
    assert names(tmp_path) == ["b"]


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not written to any folder yet."""
    monkeypatch.setattr(_atomic, "_cleaned", set())


def temporary(host, pid, start):
    return f".a.{host}-{pid}-{start}-0123456789ab.tmp"


def test_files_of_living_or_unknown_writers_stay(tmp_path, fresh):
    here, pid = _atomic._host(), os.getpid()
    start = _atomic._start_time(pid)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = [temporary(here, pid, start), temporary(here, pid, 0), temporary("00000000", gone.pid, 1), ".b.tmp"]
    dead = [temporary(here, gone.pid, 1)]
    if start is not None:
        dead.append(temporary(here, pid, start + 1))  # another process that had this number
    for name in living + dead:
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "a", "whole")
    assert names(tmp_path) == sorted(["a", *living])


def test_a_folder_is_searched_once(tmp_path, fresh, monkeypatch):
    """Folders may hold many thousand files."""
    searched, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: searched.append(folder) or scan(folder))
    for _ in range(3):
        write_bytes(tmp_path / "a", b"whole")
    assert searched == [tmp_path]
