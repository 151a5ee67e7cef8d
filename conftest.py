"""What all tests share, those of the library, of its docstrings and of the studies: seeds, and one thread."""

from importlib.util import find_spec

import pytest
import torch

import riskfield as rf

# Modules that cannot be imported here, whose examples would be run.
collect_ignore_glob = [] if find_spec("triton") else ["src/riskfield/kernels/gpu/*"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_lines(monkeypatch):
    """Progress is printed every ten seconds; how many lines that makes would depend on the speed of the machine."""
    monkeypatch.setattr("riskfield.progress.SECONDS", float("inf"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
    rf.set_num_threads(1)
