"""The fixed costs of a call: `infer` on small graphs, the first call on large ones, and what threads gain.

    python benchmarks/calls.py [--quick] [--threads 1 2 4] [--out results/benchmarks/calls]

A small graph has ten binary variables. Its times are the shortest of many short series of calls, on one thread. The
gradient is that of a weighted sum of all marginals. A first call compiles the plan of its graph: what is reported is
the processor time of one sweep on a new graph, minus that of one more sweep. Threads share one 500x500 grid with four
states: 20 sweeps without a tape, with one, and the backward pass. By default there are 1 and 2 threads, and 4, 8 and 16
where there are as many processors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import riskfield as rf
from timing import about, add_out, default_threads, write


@dataclass
class Row:
    """One measurement."""

    what: str
    threads: int
    microseconds: float


def shortest(work: Callable[[], object], calls: int = 10, series: int = 300) -> float:
    """Return the shortest time of a call, in seconds, over many short series of calls."""
    best = float("inf")
    for _ in range(series):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def small_graphs() -> list[Row]:
    """Time calls on ten variables."""
    found = []
    for name, graph in (("chain", rf.chain(10, num_states=2)), ("2x5 grid", rf.grid(2, 5, num_states=2))):
        torch.manual_seed(0)
        theta = 0.5 * torch.randn(graph.theta_size, dtype=torch.float64)
        weights, leaf = torch.randn(graph.mu_size, dtype=torch.float64), theta.clone().requires_grad_()

        def gradient(graph: rf.FactorGraph = graph, leaf: torch.Tensor = leaf, weights: torch.Tensor = weights) -> None:
            leaf.grad = None
            (rf.infer(graph, leaf).mu * weights).sum().backward()

        found += [
            Row(f"{name}: infer", 1, 1e6 * shortest(lambda graph=graph, theta=theta: rf.infer(graph, theta))),
            Row(f"{name}: infer, loss and gradient", 1, 1e6 * shortest(gradient)),
        ]
    return found


def first_calls(quick: bool) -> list[Row]:
    """Time the first call on a new large graph."""
    size, length = (200, 10**5) if quick else (1000, 10**6)
    rf.infer(rf.grid(3, 3, 2), rf.grid(3, 3, 2).zeros())  # loads what every first call loads
    found = []
    for name, make in (
        (f"{size}x{size} grid", lambda: rf.grid(size, size, 2)),
        (f"chain of {length}", lambda: rf.chain(length, 2)),
    ):
        graph, stop = make(), rf.Stop(1, tol=None)
        theta, took = graph.zeros(), []
        for _ in range(2):
            began = time.process_time()
            rf.infer(graph, theta, stop=stop)
            took.append(time.process_time() - began)
        found.append(Row(f"{name}: what a first call takes longer", 1, 1e6 * (took[0] - took[1])))
    return found


def threads_on_a_grid(quick: bool, numbers: list[int]) -> list[Row]:
    """Time runs and backward passes of one large graph on several threads, in turns."""
    graph = rf.grid(100, 100, 4) if quick else rf.grid(500, 500, 4)
    torch.manual_seed(0)
    theta = torch.randn(graph.theta_size, dtype=torch.float64)
    algorithm, stop, leaf = rf.MessagePassing(rf.TRW(0.5)), rf.Stop(20, tol=None), theta.clone().requires_grad_()
    best: dict[tuple[str, int], float] = {}
    for _ in range(3 if quick else 7):
        for threads in numbers:
            rf.set_num_threads(threads)
            times = [time.perf_counter()]
            rf.infer(graph, theta, algorithm, stop=stop)
            times.append(time.perf_counter())
            mu = rf.infer(graph, leaf, algorithm, stop=stop).mu
            times.append(time.perf_counter())
            torch.autograd.grad(mu, leaf, torch.ones_like(mu))
            times.append(time.perf_counter())
            for what, began, ended in zip(
                ("20 sweeps", "20 recorded sweeps", "backward"), times, times[1:], strict=False
            ):
                key = what, threads
                best[key] = min(best.get(key, float("inf")), ended - began)
    rf.set_num_threads(1)
    return [Row(f"grid: {what}", threads, 1e6 * took) for (what, threads), took in best.items()]


_HEADER = "| what | threads | microseconds |\n|---|---|---|"


def ratios(found: list[Row]) -> list[str]:
    """How much faster several threads are than one."""
    alone = {row.what: row.microseconds for row in found if row.threads == 1}
    return [
        f"{row.what}: {alone[row.what] / row.microseconds:.2f}x as fast on {row.threads} threads as on one"
        for row in found
        if row.threads > 1 and row.what in alone
    ]


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="smaller graphs")
    parser.add_argument("--threads", type=int, nargs="+", default=default_threads(), help="numbers of threads")
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    found = small_graphs() + first_calls(arguments.quick)
    found += threads_on_a_grid(arguments.quick, arguments.threads)
    table = "\n".join([_HEADER, *(f"| {row.what} | {row.threads} | {row.microseconds:.1f} |" for row in found)])
    lines = ratios(found)
    print(table + "\n\n" + "\n".join(lines))
    if arguments.out:
        write(arguments.out, "Calls", about(), lines, table, [asdict(row) for row in found])


if __name__ == "__main__":
    main()
