"""Use an installed riskfield as a newcomer would: inference, a gradient, training, a report, the command.

`make wheel` and the builds of wheels run this in an environment without a compiler.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import riskfield as rf
from riskfield.kernels import native  # fails where the wheel has no compiled extension
from riskfield.report.sequences import write_sequence_report


def main() -> None:
    """Raise if a part does not work."""
    graph = rf.grid(6, 7, num_states=3)
    theta = torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta.requires_grad_()
    solution = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=rf.Stop(10, tol=None))
    solution.mu.square().sum().backward()
    assert theta.grad is not None
    assert theta.grad.isfinite().all()

    rng = np.random.default_rng(0)
    y = [np.cumsum(rng.random(6) < 0.3) % 2 for _ in range(8)]
    X = [tags[:, None] + rng.normal(size=(6, 1)) for tags in y]
    crf = rf.CRF().fit(X, y)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_sequence_report(page, {"chain": crf}, X, y)
        assert "</html>" in page.read_text(encoding="utf-8")
        crf.save(Path(folder) / "chain.safetensors")
        rf.CRF.load(Path(folder) / "chain.safetensors")

    told = subprocess.run(
        [sys.executable, "-m", "riskfield", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert told == f"riskfield {rf.__version__}\n", told
    print(f"riskfield {rf.__version__} works on Python {sys.version.split()[0]}, engine {native.engine_name()}")


if __name__ == "__main__":
    main()
