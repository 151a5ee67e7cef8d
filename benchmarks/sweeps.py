"""The speed of a sweep: the native engine, eager PyTorch, PGMax and the bandwidth bound, measured in one run.

    python benchmarks/sweeps.py [--quick] [--out results/benchmarks/sweeps]

One *message* is one update m_c(x_i) of one factor and one of its variables; a sweep of a pairwise graph updates two
messages per factor. Potentials are uniform on [-1, 1], or on a larger range, for which the engine needs logarithms.
"native, recorded" writes a tape, and "native, backward" is the backward pass through one sweep of it. The bound is the
time to move the bytes that a sweep must move, at the bandwidth of a triad a = b + 3 c with the same working set. Every
pass reads each table and one message per factor, writes the other message, reads theta and the old belief of every
node, and writes its new belief, with one number per state. The bound ignores write-allocation, indices and arithmetic.
A message to a binary variable, its belief, its theta, and a table between two binary variables count as the one number
each that a sweep reads or writes.
Large grids and batches are also measured on 2 threads, and on 4, 8 and 16 where there are as many processors.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from time import perf_counter

import torch

import riskfield as rf
from riskfield.kernels.native import MessagePassingRun
from riskfield.kernels.problem import EVERY_SWEEP, MessagePassingProblem
from timing import EagerGrid, about, add_out, best_time, default_threads, pgmax_grid, write


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
    potentials: float  # their largest size
    ns_per_message: float
    ms_per_sweep: float
    bound_ns: float | None = None  # bandwidth bound per message, one thread

    @property
    def times_bound(self) -> float | None:
        """How many times slower than the bandwidth bound."""
        return None if self.bound_ns is None else self.ns_per_message / self.bound_ns


def triad_bandwidth(working_set: float) -> float:
    """Return the bytes per second of a = b + 3 c on one thread, with arrays of `working_set` bytes in total."""
    torch.set_num_threads(1)
    n = max(int(working_set / 24), 20_000)  # half a megabyte; with less, the call itself would be measured
    a, b, c = (torch.ones(n, dtype=torch.float64) for _ in range(3))
    return 24 * n / best_time(lambda: torch.add(b, c, alpha=3.0, out=a), 0.3)


def _numbers(states: int) -> int:
    return 1 if states == 2 else states


def bytes_per_sweep(graph: rf.FactorGraph, width: int) -> tuple[float, float]:
    """Return the bytes that a forward-backward sweep of a pairwise graph must move, and its working set in bytes."""
    tables = sum(g.num_factors * (1 if g.shape == (2, 2) else g.table_size) for g in graph.factor_groups)
    messages = sum(g.num_factors * sum(_numbers(n) for n in g.shape) for g in graph.factor_groups)
    nodes = sum(_numbers(n) for n in graph.num_states)
    per_pass = tables + messages + 3 * nodes
    return 2.0 * per_pass * width, float(tables + messages + 2 * nodes) * width


def native(rows: int, columns: int, states: int, entropy: rf.entropy.AbstractEntropy, **options: object) -> Row:
    """Time the native engine: sweeps, or with the option `part` the "recorded" ones or the "backward" pass."""
    schedule = options.get("schedule", rf.Sequential())
    dtype = options.get("dtype", torch.float64)
    batch, threads = int(options.get("batch", 1)), int(options.get("threads", 1))  # type: ignore[call-overload]
    damping = float(options.get("damping", 0.0))  # type: ignore[arg-type]
    potentials = float(options.get("potentials", 1.0))  # type: ignore[arg-type]
    part = options.get("part")
    assert isinstance(schedule, rf.Sequential | rf.Parallel)
    assert isinstance(dtype, torch.dtype)
    graph = rf.grid(rows, columns, states)
    theta = torch.empty(batch, graph.theta_size, dtype=dtype)
    theta.uniform_(-potentials, potentials, generator=torch.manual_seed(0))
    rf.set_num_threads(threads)
    problem = MessagePassingProblem(graph, entropy.counting(graph), schedule, damping)
    if part is None:
        run = MessagePassingRun(problem, theta, None)
        sweeps = max(1, int(2e6 / (2 * graph.num_factors * batch)))
        seconds = best_time(lambda: run.advance(sweeps, -1.0)) / sweeps
    else:
        seconds = _gradient_times(problem, theta)[str(part)]
    moved, working_set = bytes_per_sweep(graph, dtype.itemsize)
    messages = 2 * graph.num_factors * batch
    return Row(
        "native" if part is None else f"native, {part}",
        f"{rows}x{columns}",
        states,
        _name(entropy) + (f", damping {damping}" if damping else ""),
        type(schedule).__name__.lower(),
        str(dtype).removeprefix("torch."),
        batch,
        threads,
        potentials,
        seconds / messages * 1e9,
        seconds * 1e3,
        moved / triad_bandwidth(working_set) / (2 * graph.num_factors) * 1e9,
    )


def _gradient_times(problem: MessagePassingProblem, theta: torch.Tensor, sweeps: int = 10) -> dict[str, float]:
    """Seconds per sweep that records a tape, and of the backward pass through it from a cotangent of node marginals."""
    best = {"recorded": float("inf"), "backward": float("inf")}
    graph = problem.graph
    cotangent = torch.zeros(len(theta), graph.mu_size, dtype=theta.dtype)
    cotangent[:, : graph.node_size] = theta[:, : graph.node_size]
    for _ in range(12):
        run = MessagePassingRun(problem, theta, None, record=EVERY_SWEEP)
        began = perf_counter()
        run.advance(sweeps, -1.0)
        between = perf_counter()
        run.backward(cotangent)
        best["recorded"] = min(best["recorded"], (between - began) / sweeps)
        best["backward"] = min(best["backward"], (perf_counter() - between) / sweeps)
    return best


def eager(rows: int, columns: int, states: int, rho: float) -> Row:
    """Time flooding in eager PyTorch."""
    torch.set_num_threads(1)
    grid = EagerGrid(rows, columns, states, rho)
    messages = grid.start()

    def sweep() -> None:
        nonlocal messages
        messages = grid.sweep(messages)

    seconds = best_time(sweep)
    entropy = _name(rf.TRW(rho) if rho != 1 else rf.Bethe())
    return _rival("eager PyTorch", rows, columns, states, entropy, "float64", seconds, grid.messages)


def pgmax(rows: int, columns: int, states: int) -> Row | None:
    """Time PGMax, if it is installed."""
    grid = pgmax_grid(rows, columns, states)
    if grid is None:
        return None
    import jax

    run = jax.jit(lambda arrays: grid.run(arrays, 20))
    seconds = best_time(lambda: jax.block_until_ready(run(grid.arrays)), 5.0) / 20
    return _rival("PGMax", rows, columns, states, "Bethe", "float32", seconds, grid.messages)


def _rival(
    name: str, rows: int, columns: int, states: int, entropy: str, dtype: str, seconds: float, messages: int
) -> Row:
    per_message, per_sweep = seconds / messages * 1e9, seconds * 1e3
    return Row(name, f"{rows}x{columns}", states, entropy, "parallel", dtype, 1, 1, 1.0, per_message, per_sweep)


def measure(quick: bool) -> list[Row]:
    """Measure all rows of the table, and print each one when it is done."""
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
    for shape in ((200, 300, 2), (200, 300, 5)):
        add(native(*shape, rf.TRW(0.7)))
        add(native(*shape, trw, damping=0.3))
    # Many small grids beside one large one; and the log domain, which strong potentials need.
    for dtype in (torch.float64, torch.float32):
        for part in (None, "recorded", "backward"):
            for small in ((10, 10, 2, trw), (200, 300, 2, trw)):
                add(native(*small, dtype=dtype, part=part, batch=256 if small[0] == 10 else 1))
        for states in (2, 5, 8):
            add(native(10, 10, states, trw, dtype=dtype, batch=256))
            add(native(10, 10, states, trw, dtype=dtype, batch=256, potentials=_STRONG[dtype]))
    # Small grids with many states beside larger ones: their levels do not fill vectors.
    for states in (21, 64):
        for part in (None, "backward"):
            for size in (4, 16):
                add(native(size, size, states, rf.Bethe(), part=part))
    for size in (32, 64, 128, 256, 512, 1024, 2048):
        add(native(size, size, 2, trw))
    for rows, columns, states, batch in _SHARED:
        for threads in default_threads():
            add(native(rows, columns, states, trw, batch=batch, threads=threads))
    return found


def ratios(found: list[Row]) -> list[str]:
    """The figures people ask for, as sentences."""

    def pick(**wanted: object) -> Row | None:
        return next((r for r in found if all(getattr(r, k) == v for k, v in wanted.items())), None)

    def ratio(text: str, top: Row | None, bottom: Row | None) -> list[str]:
        return [] if top is None or bottom is None else [f"{text}: {top.ns_per_message / bottom.ns_per_message:.2f}x"]

    usual = {"implementation": "native", "entropy": "TRW 0.5", "schedule": "sequential", "dtype": "float64", "batch": 1}
    usual["potentials"] = 1.0
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
    for states in (2, 5):
        half = pick(**usual, grid="200x300", states=states, threads=1)
        for entropy in ("TRW 0.7", "TRW 0.5, damping 0.3"):
            other = pick(**{**usual, "entropy": entropy}, grid="200x300", states=states, threads=1)
            lines += ratio(f"200x300, {states} states: {entropy} / TRW 0.5", other, half)
    sizes = [pick(**usual, grid=f"{n}x{n}", states=2, threads=1) for n in (32, 64, 128, 256, 512, 1024, 2048)]
    times = [row.ns_per_message for row in sizes if row is not None]
    if times:
        lines.append(f"per message, slowest / fastest size from 32x32 to 2048x2048: {max(times) / min(times):.2f}x")
    for dtype in ("float64", "float32"):
        for part in ("", ", recorded", ", backward"):
            here = {**usual, "implementation": f"native{part}", "dtype": dtype, "states": 2, "threads": 1}
            small, one = pick(**{**here, "batch": 256}, grid="10x10"), pick(**here, grid="200x300")
            lines += ratio(f"per message, {dtype}{part}: 256 10x10 grids / one 200x300 grid", small, one)
        for states in (2, 5, 8):
            here = {**usual, "grid": "10x10", "dtype": dtype, "states": states, "batch": 256}
            strong = pick(**{**here, "potentials": _STRONG[getattr(torch, dtype)]})
            lines += ratio(
                f"256 10x10 grids, {states} states, {dtype}: logarithms / probabilities", strong, pick(**here)
            )
    for states in (21, 64):
        for part in ("", ", backward"):
            here = {**usual, "implementation": f"native{part}", "entropy": "Bethe", "states": states}
            small, larger = pick(**here, grid="4x4"), pick(**here, grid="16x16")
            lines += ratio(f"per message, {states} states{part}: a 4x4 grid / a 16x16 grid", small, larger)
    large = pick(**usual, grid="1024x1024", states=2, threads=1)
    lines += ratio("per message, 1024x1024 / 128x128", large, pick(**usual, grid="128x128", states=2, threads=1))
    for rows, columns, states, batch in _SHARED:
        here = {**usual, "grid": f"{rows}x{columns}", "states": states, "batch": batch}
        what = f"{'one' if batch == 1 else f'batch of {batch}'} {rows}x{columns} with {states} states"
        for threads in sorted({row.threads for row in found} - {1}):
            lines += ratio(
                f"{what}, one thread / {threads} threads", pick(**here, threads=1), pick(**here, threads=threads)
            )
    bethe = {"grid": "200x300", "states": 2, "entropy": "Bethe"}
    lines += ratio(
        "200x300, 2 states, Bethe: PGMax (float32) / native parallel (float64)",
        pick(implementation="PGMax", **bethe),
        pick(implementation="native", schedule="parallel", **bethe),
    )
    return lines


def _name(entropy: rf.entropy.AbstractEntropy) -> str:
    return f"TRW {entropy.rho}" if isinstance(entropy, rf.TRW) else type(entropy).__name__


# Rows, columns, states and batch size of what several threads share.
_SHARED = ((200, 300, 2, 8), (40, 40, 2, 8), (120, 160, 8, 8), (500, 500, 4, 1), (1024, 1024, 2, 1), (512, 512, 8, 1))
# Potentials too strong for probabilities.
_STRONG = {torch.float64: 300.0, torch.float32: 60.0}
_HEADER = (
    "| implementation | grid | states | entropy | schedule | dtype | batch | threads | potentials "
    "| ns/message | ms/sweep | bound ns | x bound |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: Row) -> str:
    bound = (
        ("", "")
        if row.bound_ns is None or row.times_bound is None
        else (f"{row.bound_ns:.2f}", f"{row.times_bound:.1f}")
    )
    cells = [row.implementation, row.grid, row.states, row.entropy, row.schedule, row.dtype, row.batch, row.threads]
    cells.append(f"{row.potentials:g}")
    return "| " + " | ".join(map(str, [*cells, f"{row.ns_per_message:.2f}", f"{row.ms_per_sweep:.3f}", *bound])) + " |"


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="only the 200x300 binary grid")
    add_out(parser)
    arguments = parser.parse_args()
    found = measure(arguments.quick)
    lines = ratios(found)
    print("\n" + "\n".join(lines))
    if arguments.out:
        triad = {f"{mb} MB": round(triad_bandwidth(mb * 1e6) / 1e9, 1) for mb in (1, 10, 100, 400)}
        table = "\n".join([_HEADER, *map(_line, found)])
        write(arguments.out, "Sweeps", {**about(), "triad_GB_per_s": triad}, lines, table, [asdict(r) for r in found])


if __name__ == "__main__":
    main()
