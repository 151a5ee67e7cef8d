"""Training killed at random moments: what is resumed ends bit by bit as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import riskfield as rf

NAMES = ["lbfgs", "adam", "smd"]
TESTS = Path(__file__).parent.parent


def example(rng):
    name = NAMES[rng.integers(len(NAMES))]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rng.integers(1, 4)):
            _killed(folder, name, rng)
        lines, complaints = _finish(_worker(folder, f"only={name}"))
        assert [line for line in lines if line.startswith("result")] == _undisturbed(name), complaints
        left = [path.name for path in (Path(folder) / name).iterdir()]
        assert len(left) == 1, f"left behind: {left}"


def _killed(folder, name, rng):
    """Start training, wait for a random iteration and a random moment in it, and kill the process."""
    if rng.random() < 0.3:
        moment = ["fsync", "replace", "unlink"][rng.integers(3)]
        _finish(_worker(folder, f"only={name}", f"{moment}={rng.integers(1, 8)}"))
        return
    process = _worker(folder, f"only={name}")
    patience = int(rng.integers(0, 10))
    for line in process.stdout:
        patience -= line.startswith("iteration")
        if patience <= 0:
            break
    time.sleep(rng.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    _finish(process)


def _worker(folder, *scenes):
    path = os.pathsep.join([str(TESTS), str(Path(rf.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(TESTS / "survival_worker.py"), str(folder), *scenes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def _finish(process):
    out, complaints = process.communicate(timeout=1800)  # seconds, unless the machine is very busy
    assert process.returncode in (0, -signal.SIGKILL), complaints
    return out.splitlines(), complaints


@cache
def _undisturbed(name):
    with tempfile.TemporaryDirectory() as folder:
        lines, complaints = _finish(_worker(folder, f"only={name}"))
    found = [line for line in lines if line.startswith("result")]
    assert len(found) == 1, complaints
    return found
