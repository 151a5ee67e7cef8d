"""The speed of gradients, compared with inference alone, eager PyTorch autograd and PGMax in one run on one core.

    python benchmarks/gradients.py [--out results/benchmarks/gradients]

"Sweeps alone" are sweeps of a run that records nothing. Memory is the growth of the peak memory of a fresh process over
the given number of sweeps and their gradient.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import riskfield as rf
from riskfield.kernels import EVERY_SWEEP
from riskfield.kernels.native import MessagePassingRun
from riskfield.kernels.problem import MessagePassingProblem
from timing import EagerGrid, about, add_out, best_time, pgmax_grid, write

SWEEPS = 20
_ROWS, _COLUMNS = 200, 300


def uniform(graph: rf.FactorGraph, batch: tuple[int, ...] = ()) -> Tensor:
    """Log-potentials in [-1, 1]."""
    return torch.empty(*batch, graph.theta_size, dtype=torch.float64).uniform_(-1, 1, generator=torch.manual_seed(0))


def interleaved(*work: Callable[[], object], rounds: int = 15) -> list[float]:
    """Return the shortest time of each piece of work. They run in turn, so that a busy moment affects all of them."""
    best = [float("inf")] * len(work)
    for _ in range(rounds):
        for k, piece in enumerate(work):
            began = time.perf_counter()
            piece()
            best[k] = min(best[k], time.perf_counter() - began)
    return best


def unroll(states: int, rows: int, columns: int, entropy: rf.entropy.AbstractEntropy) -> dict[str, float]:
    """Return the seconds of sweeps alone, of recorded sweeps, and of the backward pass."""
    graph = rf.grid(rows, columns, states)
    problem = MessagePassingProblem(graph, entropy.counting(graph), rf.Sequential(), 0.0, False)
    theta = uniform(graph, (1,))
    of_all = torch.randn(1, graph.mu_size, dtype=torch.float64, generator=torch.manual_seed(1))
    of_nodes = of_all.clone()
    of_nodes[:, graph.node_size :] = 0
    plain = MessagePassingRun(problem, theta, None)
    kept = MessagePassingRun(problem, theta, None, record=EVERY_SWEEP)
    kept.advance(SWEEPS, -1.0)
    fresh: list[MessagePassingRun] = []

    def renew() -> None:
        fresh[:] = [MessagePassingRun(problem, theta, None, record=EVERY_SWEEP)]

    def record() -> None:
        fresh[0].advance(SWEEPS, -1.0)

    sweeps, _, recorded, nodes, everything = interleaved(
        lambda: plain.advance(SWEEPS, -1.0),
        renew,
        record,
        lambda: kept.backward(of_nodes),
        lambda: kept.backward(of_all),
        rounds=40,
    )
    return {
        "sweeps": sweeps,
        "recorded sweeps": recorded,
        "backward from a loss of nodes": nodes,
        "backward from a loss of nodes and factors": everything,
    }


def eager_autograd() -> float:
    """Return the seconds of the same number of flooding sweeps and their gradient in eager PyTorch."""
    grid = EagerGrid(_ROWS, _COLUMNS, 2, 0.5)
    for potential in grid.potentials:
        potential.requires_grad_()

    def work() -> None:
        messages = grid.start()
        for _ in range(SWEEPS):
            messages = grid.sweep(messages)
        loss = -grid.beliefs(messages).log_softmax(-1)[..., 0].sum()
        torch.autograd.grad(loss, grid.potentials)

    return best_time(work, 5.0)


def end_to_end(
    graph: rf.FactorGraph,
    algorithm: rf.MessagePassing,
    stop: rf.Stop,
    adjoints: Sequence[rf.adjoints.AbstractAdjoint | None],
) -> list[float]:
    """Return the seconds of `infer` alone, and with the gradient of the univariate logistic loss by each adjoint."""
    theta = uniform(graph)
    labels = torch.randint(graph.node_groups[0].num_states, (graph.num_variables, 1), generator=torch.manual_seed(1))

    def gradient(adjoint: rf.adjoints.AbstractAdjoint | None) -> None:
        leaf = theta.detach().requires_grad_()
        solution = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint)
        (-solution.node_marginals[0].gather(1, labels).log().sum()).backward()

    work: list[Callable[[], object]] = [lambda: rf.infer(graph, theta, algorithm, stop=stop)]
    work += [lambda adjoint=adjoint: gradient(adjoint) for adjoint in adjoints]  # type: ignore[misc]
    return interleaved(*work)


def pgmax_times(rows: int, columns: int, states: int) -> tuple[float, float] | None:
    """Return the seconds of 20 iterations of PGMax and of the gradient through them, or None if it is not installed."""
    grid = pgmax_grid(rows, columns, states)
    if grid is None:
        return None
    import jax

    run = jax.jit(lambda e, p: grid.loss(e, p, 20))
    gradient = jax.jit(jax.grad(lambda e, p: grid.loss(e, p, 20), (0, 1)))
    inputs = grid.arrays.evidence, grid.arrays.log_potentials
    return (
        best_time(lambda: jax.block_until_ready(run(*inputs)), 5.0),
        best_time(lambda: jax.block_until_ready(gradient(*inputs)), 8.0),
    )


def growth(sweeps: int, adjoint: str) -> float:
    """Return the bytes by which the peak memory of a fresh process grows during a run of `sweeps` and its gradient."""
    code = f"""
import pathlib, re, torch, riskfield as rf
rf.set_num_threads(1)
graph = rf.grid({_ROWS}, {_COLUMNS}, 2)
theta = torch.zeros(graph.theta_size, dtype=torch.float64).uniform_(-1, 1).requires_grad_()
def gradient(sweeps, adjoint):
    stop = rf.Stop(sweeps=sweeps, tol=None)
    mu = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=stop, adjoint=adjoint).mu
    torch.autograd.grad(mu.sum(), theta)  # not kept, as backward() would
gradient(1, rf.Unroll())
# Not getrusage: its peak includes that of the process this one was forked from.
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
gradient({sweeps}, {adjoint})
print(peak() - before)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    rows: list[dict[str, object]] = []
    lines: list[str] = []

    def add(what: str, seconds: float) -> None:
        rows.append({"what": what, "ms": round(seconds * 1e3, 2)})
        print(f"{what}: {seconds * 1e3:.1f} ms", flush=True)

    def ratio(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    for states, height, width, entropy in (
        (2, _ROWS, _COLUMNS, rf.TRW(0.5)),
        (5, 200, 200, rf.Bethe()),
        (8, 120, 160, rf.TRW(0.5)),
        (21, 60, 80, rf.Bethe()),
    ):
        name = f"{height}x{width}, {states} states, {entropy}, {SWEEPS} sweeps"
        times = unroll(states, height, width, entropy)
        for part, seconds in times.items():
            add(f"{name}: {part}", seconds)
        for loss in ("nodes and factors", "nodes"):
            backward = times[f"backward from a loss of {loss}"]
            ratio(f"{name}, loss of {loss}: backward / sweeps alone = {backward / times['sweeps']:.2f}")
            total = times["recorded sweeps"] + backward
            ratio(f"{name}, loss of {loss}: (recorded + backward) / sweeps alone = {total / times['sweeps']:.2f}")
        if states == 2:
            rival = eager_autograd()
            add(f"{name}: eager PyTorch, flooding with autograd", rival)
            ratio(f"{name}: eager PyTorch autograd / (recorded + backward) = {rival / total:.1f}")

    grid = rf.grid(_ROWS, _COLUMNS, 2)
    message_bytes = 2 * grid.num_factors * 8
    for sweeps in (20, 100):
        kept = growth(sweeps, "rf.Unroll()") / (message_bytes * sweeps)
        ratio(f"memory of {sweeps} sweeps / (messages x sweeps x 8 bytes) = {kept:.2f}")
    kept = growth(400, "rf.Unroll(checkpoint=True)") / message_bytes
    ratio(f"memory of 400 sweeps with checkpoints, in sweeps of messages (2 sqrt(400) = 40) = {kept:.1f}")

    _, default, unrolled = end_to_end(
        rf.grid(10, 10, 2), rf.MessagePassing(rf.TRW(0.5)), rf.Stop(), [None, rf.Unroll()]
    )
    ratio(f"10x10, 2 states, to 1e-6: default gradient / gradient with adjoint=Unroll() = {default / unrolled:.2f}")

    graph, stop = rf.grid(200, 200, 5), rf.Stop(tol=1e-6)
    adjoints = [rf.FixedPoint(tol=1e-6), rf.Unroll(), rf.Perturb()]
    inference, *gradients = end_to_end(graph, rf.MessagePassing(), stop, adjoints)
    name = "200x200, 5 states, BP to 1e-6"
    add(f"{name}: marginals", inference)
    for adjoint, seconds in zip(adjoints, gradients, strict=True):
        add(f"{name}: marginals and gradient by {type(adjoint).__name__}", seconds)
    ratio(f"{name}: Perturb's extra time / inference = {(gradients[2] - inference) / inference:.2f}")
    threads = os.cpu_count() or 1
    if threads > 1:
        rf.set_num_threads(threads)
        alone, perturbed = end_to_end(graph, rf.MessagePassing(), stop, [rf.Perturb()])
        rf.set_num_threads(1)
        ratio(f"{name}: the same on {threads} threads = {(perturbed - alone) / alone:.2f}")
    rival_times = pgmax_times(200, 200, 5)
    if rival_times is not None:
        add("200x200, 5 states, PGMax, 20 iterations: loss", rival_times[0])
        add("200x200, 5 states, PGMax, 20 iterations: gradient", rival_times[1])
        ratio(f"{name}: PGMax's 20 iterations / our marginals = {rival_times[0] / inference:.1f}")
        ratio(f"{name}: PGMax's gradient / ours by FixedPoint = {rival_times[1] / gradients[0]:.1f}")

    if arguments.out:
        table = "\n".join(["| what | ms |", "|---|---|", *(f"| {row['what']} | {row['ms']} |" for row in rows)])
        write(arguments.out, "Gradients", about(), lines, table, rows)


if __name__ == "__main__":
    main()
