"""Code that the benchmarks share: timing, the implementations to compare with, and the output of results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from riskfield.kernels.native import engine_name
from riskfield.threads import num_processors


def best_time(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Return the shortest time of several runs of `work`, which take about `seconds` in total."""
    work()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 5 or (spent < seconds and runs < 200):
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def least(runs: int, programs: Sequence[Callable[[], float]]) -> list[tuple[float, float]]:
    """The least processor time of each program in several turns, and the value that it returned."""
    found = [(float("inf"), float("nan"))] * len(programs)
    for _ in range(runs):
        for k, program in enumerate(programs):
            began = time.process_time()
            value = program()
            found[k] = min(found[k], (time.process_time() - began, value))
    return found


def default_threads() -> list[int]:
    """1, 2, and those of 4, 8 and 16 threads for which this process has processors."""
    return [1, 2, *(count for count in (4, 8, 16) if count <= num_processors())]


class EagerGrid:
    """Flooding on a grid with whole-image tensor operations, the fastest way to write it in eager PyTorch."""

    def __init__(self, rows: int, columns: int, states: int, rho: float):
        torch.manual_seed(0)
        self.rho = rho
        self.unary = torch.empty(rows, columns, states, dtype=torch.float64).uniform_(-1, 1)
        self.across = torch.empty(rows, columns - 1, states, states, dtype=torch.float64).uniform_(-1, 1)
        self.down = torch.empty(rows - 1, columns, states, states, dtype=torch.float64).uniform_(-1, 1)
        self.potentials = (self.unary, self.across, self.down)
        self.messages = 2 * (rows * (columns - 1) + (rows - 1) * columns)

    def start(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return uniform messages to the right, left, down and up."""
        right, left = (torch.zeros_like(self.across[..., 0]) for _ in range(2))
        lower, upper = (torch.zeros_like(self.down[..., 0]) for _ in range(2))
        return right, left, lower, upper

    def beliefs(self, messages: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Return unnormalised log-beliefs."""
        right, left, lower, upper = messages
        belief = self.unary.clone()
        belief[:, 1:] += self.rho * right
        belief[:, :-1] += self.rho * left
        belief[1:] += self.rho * lower
        belief[:-1] += self.rho * upper
        return belief

    def sweep(self, messages: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Update all messages at once."""
        right, left, lower, upper = messages
        belief, across, down = self.beliefs(messages), self.across / self.rho, self.down / self.rho
        return (
            torch.logsumexp(across + (belief[:, :-1] - left).unsqueeze(-1), -2).log_softmax(-1),
            torch.logsumexp(across + (belief[:, 1:] - right).unsqueeze(-2), -1).log_softmax(-1),
            torch.logsumexp(down + (belief[:-1] - upper).unsqueeze(-1), -2).log_softmax(-1),
            torch.logsumexp(down + (belief[1:] - lower).unsqueeze(-2), -1).log_softmax(-1),
        )


class PGMaxGrid:
    """PGMax's compiled loopy BP on a grid (float32 on one thread; it has no tree-reweighting)."""

    def __init__(self, rows: int, columns: int, states: int):
        import numpy as np
        from pgmax import fgraph, fgroup, infer, vgroup

        rng = np.random.default_rng(0)
        self.variables = vgroup.NDVarArray(num_states=states, shape=(rows, columns))
        graph = fgraph.FactorGraph(self.variables)
        x = self.variables
        edges = [[x[r, c], x[r, c + 1]] for r in range(rows) for c in range(columns - 1)]
        edges += [[x[r, c], x[r + 1, c]] for r in range(rows - 1) for c in range(columns)]
        potentials = rng.uniform(-1, 1, (len(edges), states, states))
        graph.add_factors(fgroup.PairwiseFactorGroup(variables_for_factors=edges, log_potential_matrix=potentials))
        self.bp = infer.build_inferer(graph.bp_state, backend="bp")
        self.arrays = self.bp.init(evidence_updates={x: rng.uniform(-1, 1, (rows, columns, states))})
        self.labels = rng.integers(0, states, (rows, columns, 1))
        self.messages = 2 * len(edges)

    def run(self, arrays: Any, iterations: int) -> Any:
        """Run sum-product without damping."""
        return self.bp.run(arrays, num_iters=iterations, damping=0.0, temperature=1.0)

    def loss(self, evidence: Any, potentials: Any, iterations: int) -> Any:
        """Return the univariate logistic loss after `iterations`."""
        import jax.numpy as jnp
        from pgmax import infer

        arrays = self.run(replace(self.arrays, evidence=evidence, log_potentials=potentials), iterations)
        marginals = infer.get_marginals(self.bp.get_beliefs(arrays))[self.variables]
        return -jnp.log(jnp.take_along_axis(marginals, self.labels, -1)).sum()


def pgmax_grid(rows: int, columns: int, states: int) -> PGMaxGrid | None:
    """Return a grid, or None if PGMax is not installed."""
    try:
        return PGMaxGrid(rows, columns, states)
    except ImportError:
        return None


def about() -> dict[str, object]:
    """Return the facts that are needed to repeat a measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "engine": engine_name(),
        "torch": torch.__version__,
    }


def add_out(parser: ArgumentParser) -> None:
    """Add the option that says where results go."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR/NAME", help="write DIR/NAME.md, and all numbers to DIR/records.jsonl"
    )


def keep(path: Path, record: dict[str, Any]) -> None:
    """Keep a record under the name of `path`: a line of the file `records.jsonl` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name("records.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records = {line["name"]: line for line in map(json.loads, lines)} | {path.stem: {"name": path.stem, **record}}
    file.write_text("".join(f"{json.dumps(records[name])}\n" for name in sorted(records)), encoding="utf-8")


def write(path: Path, title: str, facts: dict[str, object], ratios: list[str], table: str, rows: list[Any]) -> None:
    """Write results as Markdown, and keep them as a record."""
    keep(path, {"about": facts, "ratios": ratios, "rows": rows})
    lines = "\n".join(f"- {line}" for line in ratios)
    write_page(path, title, facts, f"## Ratios\n\n{lines}\n\n{table}\n")


def write_page(path: Path, title: str, facts: dict[str, object], text: str) -> None:
    """Write text as Markdown, under a title and the facts that are needed to repeat the measurement."""
    listed = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    path.with_suffix(".md").write_text(f"# {title}\n\n{listed}\n\n{text}", encoding="utf-8")
