"""How fast a sweep is: the native engine beside eager PyTorch, PGMax and the memory bandwidth, measured in one run.

    python benchmarks/sweeps.py [--quick] [--json results/sweeps.json]

One *message* is one update m_c(x_i) for one factor and one of its variables; a sweep of a pairwise graph updates two
per factor. All runs have uniform [-1, 1] potentials. The bound is the time to move, at the bandwidth of a triad
a = b + 3 c of the same working set, the bytes a sweep cannot avoid: every pass reads each table and one message per
factor, writes the other message, and reads theta and the old belief and writes the new belief of every node, each with
one number per state. It ignores write-allocation, indices and arithmetic. (The engine keeps messages to binary
variables in a single number; counted that way the bound for two states is 18 % lower.)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import riskfield as rf
from riskfield.kernels.native import MessagePassingRun, engine_name
from riskfield.kernels.problem import MessagePassingProblem


@dataclass
class Row:
    """One measurement."""

    implementation: str
    grid: str
    states: int
    entropy: str
    schedule: str
    dtype: str
    batch: int
    threads: int
    ns_per_message: float
    ms_per_sweep: float
    bound_ns: float | None = None  # bandwidth bound per message, one thread

    @property
    def times_bound(self) -> float | None:
        """How many times slower than the bandwidth bound."""
        return None if self.bound_ns is None else self.ns_per_message / self.bound_ns


def best_time(work: Callable[[], object], seconds: float = 1.0) -> float:
    """The shortest of several runs of `work`, over about `seconds`."""
    work()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 5 or (spent < seconds and runs < 200):
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def triad_bandwidth(working_set: float) -> float:
    """Bytes per second of a = b + 3 c on one thread, with arrays of `working_set` bytes together."""
    torch.set_num_threads(1)
    n = max(int(working_set / 24), 1000)
    a, b, c = (torch.ones(n, dtype=torch.float64) for _ in range(3))
    return 24 * n / best_time(lambda: torch.add(b, c, alpha=3.0, out=a), 0.3)


def bytes_per_sweep(graph: rf.FactorGraph, width: int) -> tuple[float, float]:
    """What one forward-backward sweep of a pairwise graph must move, and the memory it works on, in bytes."""
    tables = sum(g.num_factors * g.table_size for g in graph.factor_groups)
    messages = graph.message_size
    nodes = graph.node_size
    per_pass = tables + messages + 3 * nodes
    return 2.0 * per_pass * width, float(tables + messages + 2 * nodes) * width


def native(rows: int, columns: int, states: int, entropy: rf.AbstractEntropy, **options: object) -> Row:
    """Time the native engine."""
    schedule = options.get("schedule", rf.Sequential())
    dtype = options.get("dtype", torch.float64)
    batch, threads = int(options.get("batch", 1)), int(options.get("threads", 1))  # type: ignore[call-overload]
    assert isinstance(schedule, rf.Sequential | rf.Parallel)
    assert isinstance(dtype, torch.dtype)
    graph = rf.grid(rows, columns, states)
    theta = torch.empty(batch, graph.theta_size, dtype=dtype).uniform_(-1, 1, generator=torch.manual_seed(0))
    rf.set_num_threads(threads)
    problem = MessagePassingProblem(graph, entropy.counting(graph), schedule, 0.0, False)
    run = MessagePassingRun(problem, theta, None)
    sweeps = max(1, int(2e6 / (2 * graph.num_factors * batch)))
    seconds = best_time(lambda: run.advance(sweeps, -1.0)) / sweeps
    moved, working_set = bytes_per_sweep(graph, dtype.itemsize)
    messages = 2 * graph.num_factors * batch
    return Row(
        "native",
        f"{rows}x{columns}",
        states,
        _name(entropy),
        type(schedule).__name__.lower(),
        str(dtype).removeprefix("torch."),
        batch,
        threads,
        seconds / messages * 1e9,
        seconds * 1e3,
        moved / triad_bandwidth(working_set) / (2 * graph.num_factors) * 1e9,
    )


def eager(rows: int, columns: int, states: int, rho: float) -> Row:
    """Time flooding written with whole-image tensor operations, the fastest way to write it in eager PyTorch."""
    torch.set_num_threads(1)
    generator = torch.manual_seed(0)
    unary = torch.empty(rows, columns, states, dtype=torch.float64).uniform_(-1, 1, generator=generator)
    across = torch.empty(rows, columns - 1, states, states, dtype=torch.float64).uniform_(-1, 1) / rho
    down = torch.empty(rows - 1, columns, states, states, dtype=torch.float64).uniform_(-1, 1) / rho
    right, left = (torch.zeros(rows, columns - 1, states, dtype=torch.float64) for _ in range(2))
    lower, upper = (torch.zeros(rows - 1, columns, states, dtype=torch.float64) for _ in range(2))

    def sweep() -> None:
        nonlocal right, left, lower, upper
        belief = unary.clone()
        belief[:, 1:] += rho * right
        belief[:, :-1] += rho * left
        belief[1:] += rho * lower
        belief[:-1] += rho * upper
        right, left, lower, upper = (
            torch.logsumexp(across + (belief[:, :-1] - left).unsqueeze(-1), -2).log_softmax(-1),
            torch.logsumexp(across + (belief[:, 1:] - right).unsqueeze(-2), -1).log_softmax(-1),
            torch.logsumexp(down + (belief[:-1] - upper).unsqueeze(-1), -2).log_softmax(-1),
            torch.logsumexp(down + (belief[1:] - lower).unsqueeze(-2), -1).log_softmax(-1),
        )

    seconds = best_time(sweep)
    messages = 2 * (rows * (columns - 1) + (rows - 1) * columns)
    entropy = _name(rf.TRW(rho) if rho != 1 else rf.Bethe())
    label = "eager PyTorch"
    return Row(
        label,
        f"{rows}x{columns}",
        states,
        entropy,
        "parallel",
        "float64",
        1,
        1,
        seconds / messages * 1e9,
        seconds * 1e3,
    )


def pgmax(rows: int, columns: int, states: int) -> Row | None:
    """Time PGMax's compiled loopy BP where it is installed (float32 on one thread; it has no tree-reweighting)."""
    try:
        import jax
        import numpy as np
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    variables = vgroup.NDVarArray(num_states=states, shape=(rows, columns))
    graph = fgraph.FactorGraph(variables)
    edges = [[variables[r, c], variables[r, c + 1]] for r in range(rows) for c in range(columns - 1)]
    edges += [[variables[r, c], variables[r + 1, c]] for r in range(rows - 1) for c in range(columns)]
    potentials = rng.uniform(-1, 1, (len(edges), states, states))
    graph.add_factors(fgroup.PairwiseFactorGroup(variables_for_factors=edges, log_potential_matrix=potentials))
    bp = infer.build_inferer(graph.bp_state, backend="bp")
    arrays = bp.init(evidence_updates={variables: rng.uniform(-1, 1, (rows, columns, states))})
    run = jax.jit(lambda state: bp.run(state, num_iters=20, damping=0.0, temperature=1.0))
    seconds = best_time(lambda: jax.block_until_ready(run(arrays)), 5.0) / 20
    messages = 2 * len(edges)
    return Row(
        "PGMax",
        f"{rows}x{columns}",
        states,
        "Bethe",
        "parallel",
        "float32",
        1,
        1,
        seconds / messages * 1e9,
        seconds * 1e3,
    )


def measure(quick: bool) -> list[Row]:
    """All rows of the table, printed as they come."""
    found: list[Row] = []

    def add(row: Row | None) -> None:
        if row is not None:
            found.append(row)
            print(_line(row), flush=True)

    trw, parallel = rf.TRW(0.5), rf.Parallel()
    print(_HEADER)
    shapes = [(200, 300, 2)] if quick else [(200, 300, 2), (240, 320, 8), (200, 300, 5), (100, 100, 21)]
    for rows, columns, states in shapes:
        add(native(rows, columns, states, trw))
        add(native(rows, columns, states, trw, schedule=parallel))
        add(native(rows, columns, states, rf.Bethe()))
        add(native(rows, columns, states, rf.Bethe(), schedule=parallel))
        add(eager(rows, columns, states, 0.5))
        add(pgmax(rows, columns, states) if not quick else None)
    if quick:
        return found
    add(native(200, 300, 2, rf.TRW(0.7)))
    add(native(200, 300, 2, trw, dtype=torch.float32))
    for size in (32, 64, 128, 256, 512, 1024, 2048):
        add(native(size, size, 2, trw))
    for rows, columns, states, batch in ((200, 300, 2, 8), (120, 160, 8, 8), (1024, 1024, 2, 1), (512, 512, 8, 1)):
        for threads in (1, 2):
            add(native(rows, columns, states, trw, batch=batch, threads=threads))
    return found


def ratios(found: list[Row]) -> list[str]:
    """The figures people ask for, as sentences."""

    def pick(**wanted: object) -> Row | None:
        return next((r for r in found if all(getattr(r, k) == v for k, v in wanted.items())), None)

    def ratio(text: str, top: Row | None, bottom: Row | None) -> list[str]:
        return [] if top is None or bottom is None else [f"{text}: {top.ns_per_message / bottom.ns_per_message:.2f}x"]

    usual = {"implementation": "native", "entropy": "TRW 0.5", "schedule": "sequential", "dtype": "float64", "batch": 1}
    binary = pick(**usual, grid="200x300", states=2, threads=1)
    lines = ratio(
        "200x300, 2 states, TRW 0.5: eager PyTorch / native sequential",
        pick(implementation="eager PyTorch", grid="200x300", states=2),
        binary,
    )
    for grid, states in (("200x300", 2), ("240x320", 8), ("200x300", 5), ("100x100", 21)):
        row = pick(**usual, grid=grid, states=states, threads=1)
        if row is not None and row.times_bound is not None:
            lines.append(f"{grid}, {states} states, TRW 0.5 sequential / bandwidth bound: {row.times_bound:.2f}x")
            if states == 2:
                # The engine keeps less than the bound counts: one number per message to a binary variable.
                graph = rf.grid(*map(int, grid.split("x")), states)
                kept = sum(g.num_factors * g.table_size for g in graph.factor_groups) + 3 * graph.node_size
                share = (kept + graph.message_size / 2) / (kept + graph.message_size)
                lines.append(f"the same, with messages counted as one number: {row.times_bound / share:.2f}x")
    large = pick(**usual, grid="1024x1024", states=2, threads=1)
    lines += ratio("per message, 1024x1024 / 128x128", large, pick(**usual, grid="128x128", states=2, threads=1))
    lines += ratio("1024x1024, one thread / two threads", large, pick(**usual, grid="1024x1024", states=2, threads=2))
    batch = {**usual, "batch": 8}
    for grid, states in (("200x300", 2), ("120x160", 8)):
        lines += ratio(
            f"batch of 8 {grid} with {states} states, one thread / two threads",
            pick(**batch, grid=grid, states=states, threads=1),
            pick(**batch, grid=grid, states=states, threads=2),
        )
    bethe = {"grid": "200x300", "states": 2, "entropy": "Bethe"}
    lines += ratio(
        "200x300, 2 states, Bethe: PGMax (float32) / native parallel (float64)",
        pick(implementation="PGMax", **bethe),
        pick(implementation="native", schedule="parallel", **bethe),
    )
    return lines


def _name(entropy: rf.AbstractEntropy) -> str:
    return f"TRW {entropy.rho}" if isinstance(entropy, rf.TRW) else type(entropy).__name__


_HEADER = (
    "| implementation | grid | states | entropy | schedule | dtype | batch | threads "
    "| ns/message | ms/sweep | bound ns | x bound |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: Row) -> str:
    bound = (
        ("", "")
        if row.bound_ns is None or row.times_bound is None
        else (f"{row.bound_ns:.2f}", f"{row.times_bound:.1f}")
    )
    cells = [row.implementation, row.grid, row.states, row.entropy, row.schedule, row.dtype, row.batch, row.threads]
    return "| " + " | ".join(map(str, [*cells, f"{row.ns_per_message:.2f}", f"{row.ms_per_sweep:.3f}", *bound])) + " |"


def main() -> None:
    """Measure, print, and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="only the 200x300 binary grid")
    parser.add_argument("--json", type=Path, help="write the rows here, and a table beside it with the ending .md")
    arguments = parser.parse_args()
    found = measure(arguments.quick)
    lines = ratios(found)
    print("\n" + "\n".join(lines))
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "command": "python benchmarks/sweeps.py " + " ".join(sys.argv[1:]),
            "commit": commit,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "engine": engine_name(),
            "torch": torch.__version__,
            "triad_GB_per_s": {f"{mb} MB": round(triad_bandwidth(mb * 1e6) / 1e9, 1) for mb in (1, 10, 100, 400)},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"about": about, "ratios": lines, "rows": [asdict(r) for r in found]}, indent=1)
        )
        table = "\n".join([_HEADER, *map(_line, found)])
        facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
        text = f"# Sweeps\n\n{facts}\n\n## Ratios\n\n" + "\n".join(f"- {line}" for line in lines) + f"\n\n{table}\n"
        arguments.json.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
