"""The claims of docs/inference.md about convergence, trees and bounds, each tested on many random models.

Run `python tests/claims.py --models 10000 --out results/convergence` for the record;
`test_convergence.py` takes a slice.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import riskfield as rf
from riskfield.kernels import torch_reference
from riskfield.kernels.problem import MessagePassingProblem

BATCH = 50  # thetas on one graph
SWEEPS = 4000  # after which a run is given up
# How far rounding alone may move marginals and log-partition values of these models, in doubles.
ROUNDING = 1e-11
TREES = "undamped belief propagation is exact on a tree after one sweep from the leaves, two from the root"


@dataclass
class Record:
    """What one claim came to."""

    claim: str
    models: int = 0
    settled: int = 0  # models that the claim is about: those whose run converged
    worst: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: torch.Tensor) -> None:
        for name, tensor in values.items():
            self.values.setdefault(name, []).extend(tensor.tolist())

    def summary(self) -> dict[str, object]:
        quantiles = {
            name: {q: float(np.quantile(values, float(q))) for q in ("0.5", "0.99", "0.999", "1")}
            for name, values in self.values.items()
            if values
        }
        return {"claim": self.claim, "models": self.models, "converged": self.settled, "quantiles": quantiles}


def random_graph(rng: np.random.Generator, tree: bool, max_arity: int = 3) -> rf.FactorGraph:
    """Up to eight variables of two or three states; factors of two or three variables, and a few of one."""
    n = int(rng.integers(2, 9))
    scopes: list[tuple[int, ...]] = []
    if tree:
        waiting = rng.permutation(n).tolist()
        reached = [waiting.pop()]
        while waiting:
            new = [waiting.pop() for _ in range(min(len(waiting), int(rng.integers(1, max_arity))))]
            scopes.append(tuple(rng.permutation([*new, int(rng.choice(reached))]).tolist()))
            reached += new
    else:
        for _ in range(int(rng.integers(n, 2 * n + 1))):
            arity = min(n, max_arity if rng.random() < 0.25 else 2)
            scopes.append(tuple(rng.permutation(n)[:arity].tolist()))
    if rng.random() < 0.2:
        scopes.append((int(rng.integers(n)),))
    return rf.FactorGraph(rng.integers(2, 4, n).tolist(), scopes)


def random_theta(rng: np.random.Generator, graph: rf.FactorGraph) -> torch.Tensor:
    """Normal log-potentials, each theta with a scale between 1 and 30."""
    scale = np.exp(rng.uniform(0, math.log(30), (BATCH, 1)))
    return torch.from_numpy(scale * rng.normal(size=(BATCH, graph.theta_size)))


def random_entropy(rng: np.random.Generator, graph: rf.FactorGraph) -> rf.entropy.AbstractEntropy:
    """Bethe, TRW with one or many rho, or counting numbers of any sign for the variables."""
    kind = rng.integers(4)
    if kind == 0:
        return rf.Bethe()
    factor = torch.from_numpy(rng.uniform(0.3, 1.0 if kind == 2 else 1.5, graph.num_factors))
    if kind == 1:
        return rf.TRW(0.5)
    if kind == 2:
        return rf.TRW(factor)
    total = torch.from_numpy(rng.uniform(0.7, 1.5, graph.num_variables))
    return rf.CountingNumbers(factor, total - rf.CountingNumbers(factor, 1e6).counting(graph).node_total + 1e6)


def infer(*args, **kwargs) -> rf.Solution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        return rf.infer(*args, **kwargs)


def settings(rng: np.random.Generator) -> tuple[float, float, rf.Sequential | rf.Parallel]:
    """A tolerance, a damping and a schedule."""
    damping = float(rng.choice([0, 0.5, 0.9]))
    return float(10.0 ** -rng.integers(4, 11)), damping, rf.Parallel() if rng.random() < 0.2 else rf.Sequential()


def distances(graph, theta, algorithm, solution, tol) -> dict[str, torch.Tensor]:
    """The errors of the items that converged, in units of the tolerance, by many more sweeps from where they are."""
    chosen = solution.converged
    if not chosen.any():
        return {}
    sweeps = 1000 + 6 * int(solution.sweeps[chosen].max())
    messages = solution.messages[chosen]
    fixed = infer(graph, theta[chosen], algorithm, stop=rf.Stop(sweeps, None), messages=messages)
    found = {
        "mu": (solution.mu[chosen] - fixed.mu).abs().amax(1),
        "value": (solution.log_partition[chosen] - fixed.log_partition).abs(),
    }
    errors = {name: (error - ROUNDING).clamp(min=0) / tol for name, error in found.items()}
    if isinstance(algorithm, rf.MessagePassing):
        # How far the long run itself is from a fixed point, undamped and by the torch kernels.
        counting = algorithm.entropy.counting(graph)
        problem = MessagePassingProblem(graph, counting, algorithm.schedule, algorithm.damping, maximise=False)
        gap = torch_reference.MessagePassingRun(problem, theta[chosen], fixed.messages).gap()
        errors["reference"] = (gap.marginals - ROUNDING).clamp(min=0) / tol
    return errors


def message_passing_converges(rng, kernels) -> Iterator[Record]:
    """Converged to tol: all marginals and the log-partition value are within a small multiple of tol."""
    record = Record("message passing that converged to tol is within a small multiple of tol of its fixed point")
    while True:
        graph = random_graph(rng, tree=rng.random() < 0.3)
        theta, (tol, damping, schedule) = random_theta(rng, graph), settings(rng)
        algorithm = rf.MessagePassing(random_entropy(rng, graph), schedule, damping)
        solution = infer(graph, theta, algorithm, stop=rf.Stop(SWEEPS, tol), kernels=kernels)
        record.models += len(theta)
        record.settled += int(solution.converged.sum())
        record.add(**distances(graph, theta, algorithm, solution, tol))
        yield record


def mean_field_converges(rng, kernels) -> Iterator[Record]:
    """The same of mean field."""
    record = Record("mean field that converged to tol is within a small multiple of tol of its fixed point")
    while True:
        graph = random_graph(rng, tree=rng.random() < 0.3)
        theta, (tol, *_) = random_theta(rng, graph), settings(rng)
        solution = infer(graph, theta, rf.MeanField(), stop=rf.Stop(SWEEPS, tol), kernels=kernels)
        record.models += len(theta)
        record.settled += int(solution.converged.sum())
        record.add(**distances(graph, theta, rf.MeanField(), solution, tol))
        yield record


def trees_are_exact(rng, kernels) -> Iterator[Record]:
    """On a tree, converged belief propagation has the exact marginals and log-partition function."""
    record = Record("belief propagation on a tree that converged to tol is exact to a small multiple of tol")
    while True:
        graph = random_graph(rng, tree=True)
        theta, (tol, damping, schedule) = random_theta(rng, graph), settings(rng)
        algorithm = rf.MessagePassing(rf.Bethe(), schedule, damping)
        solution = infer(graph, theta, algorithm, stop=rf.Stop(SWEEPS, tol), kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        record.models += len(theta)
        record.settled += int(solution.converged.sum())
        chosen = solution.converged
        record.add(
            mu=((solution.mu - exact.mu).abs().amax(1) - ROUNDING).clamp(min=0)[chosen] / tol,
            value=((solution.log_partition - exact.log_partition).abs() - ROUNDING).clamp(min=0)[chosen] / tol,
        )
        yield record


def trees_take_few_sweeps(rng, kernels) -> Iterator[Record]:
    """Numbered from the leaves to the root one sweep is exact; numbered the other way two are."""
    record = Record(TREES)
    while True:
        n = int(rng.integers(2, 9))
        parent = [int(rng.integers(k)) for k in range(1, n)]
        states, inwards = rng.integers(2, 4, n), rng.random() < 0.5
        edges = [(k + 1, p) for k, p in enumerate(parent)]
        if inwards:
            edges = [(n - 1 - a, n - 1 - b) for a, b in edges]
        graph = rf.FactorGraph(states.tolist(), edges)
        theta = random_theta(rng, graph)
        solution = infer(graph, theta, stop=rf.Stop(1 if inwards else 2, None), kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        record.models += len(theta)
        record.settled += len(theta)
        record.add(mu=((solution.mu - exact.mu).abs().amax(1) - ROUNDING).clamp(min=0))
        yield record


def tree_reweighting_bounds(rng, kernels) -> Iterator[Record]:
    """Converged TRW with rho from spanning trees is an upper bound, to a small multiple of tol."""
    record = Record("TRW with rho from spanning trees, converged to tol, is at least A less a small multiple of tol")
    while True:
        graph = random_graph(rng, tree=False, max_arity=2)
        theta, (tol, damping, schedule) = random_theta(rng, graph), settings(rng)
        algorithm = rf.MessagePassing(rf.TRW(rf.entropy.spanning_tree_rho(graph)), schedule, damping)
        solution = infer(graph, theta, algorithm, stop=rf.Stop(SWEEPS, tol), kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        record.models += len(theta)
        record.settled += int(solution.converged.sum())
        below = (exact.log_partition - solution.log_partition - ROUNDING).clamp(min=0)
        record.add(below=below[solution.converged] / tol)
        yield record


def mean_field_bounds(rng, kernels) -> Iterator[Record]:
    """Mean field is a lower bound after any number of sweeps, and its value never falls."""
    record = Record("mean field is at most A after any number of sweeps, and no sweep lowers it")
    while True:
        graph = random_graph(rng, tree=rng.random() < 0.3)
        theta, sweeps = random_theta(rng, graph), int(rng.integers(0, 30))
        first = infer(graph, theta, rf.MeanField(), stop=rf.Stop(sweeps, None), kernels=kernels)
        more = infer(graph, theta, rf.MeanField(), stop=rf.Stop(1, None), messages=first.messages, kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        record.models += len(theta)
        record.settled += len(theta)
        record.add(
            above=(first.log_partition - exact.log_partition - ROUNDING).clamp(min=0),
            fall=(first.log_partition - more.log_partition - ROUNDING).clamp(min=0),
        )
        yield record


def max_product_scores(rng, kernels) -> Iterator[Record]:
    """The value of max-product is below A, converged or not."""
    record = Record("the value of max-product is at most A")
    while True:
        graph = random_graph(rng, tree=rng.random() < 0.3)
        theta, (_, damping, schedule) = random_theta(rng, graph), settings(rng)
        algorithm = rf.MaxProduct(rf.Bethe(), schedule, damping)
        solution = infer(graph, theta, algorithm, stop=rf.Stop(int(rng.integers(1, 100)), None), kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        record.models += len(theta)
        record.settled += len(theta)
        record.add(above=(solution.log_partition - exact.log_partition - ROUNDING).clamp(min=0))
        yield record


CLAIMS: tuple[Callable[..., Iterator[Record]], ...] = (
    message_passing_converges,
    mean_field_converges,
    trees_are_exact,
    trees_take_few_sweeps,
    tree_reweighting_bounds,
    mean_field_bounds,
    max_product_scores,
)


def examine(claim: Callable[..., Iterator[Record]], models: int, seed: int, kernels: str | None = None) -> Record:
    """The record of a claim on at least so many models."""
    for record in claim(np.random.default_rng(seed), kernels):
        if record.models >= models:
            return record
    raise AssertionError("a claim goes on for ever")


def _write(out: Path, records: list[dict[str, object]], models: int, seed: int) -> None:
    out.with_suffix(".json").write_text(json.dumps({"seed": seed, "claims": records}, indent=1) + "\n")
    worst: dict[str, float] = {}
    for record in records:
        for name, values in record["quantiles"].items():  # type: ignore[attr-defined]
            key = name if record["claim"] != TREES else f"{name} of trees"
            worst[key] = max(worst.get(key, 0.0), values["1"])
    lines = [
        "# The claims of docs/inference.md, tested",
        "",
        f"**Marginals of runs that converged to `tol` are within {worst['mu']:.2g} `tol` of the fixed point, and",
        f"log-partition values within {worst['value']:.2g} `tol`. Upper bounds of TRW are at most {worst['below']:.2g}",
        f"`tol` too low, values of mean field and max-product at most {worst['above']:.2g} too high. On trees the",
        f"error after one or two sweeps is at most {worst['mu of trees']:.2g}.** Less than {ROUNDING:g} counts as 0.",
        "",
        f"`python tests/claims.py --models {models} --seed {seed} --out results/convergence` wrote this page.",
        "Errors `mu`, `value` and `below` are in units of the tolerance, which varies from 1e-4 to 1e-10; `above`,",
        "`fall` and the `mu` of a fixed number of sweeps are absolute. The fixed point is that of a run that goes on",
        "for 1000 sweeps and six times as many as it took; `reference` is the inconsistency of that run's own",
        "marginals, in units of the tolerance, also weighted by its effect on the log-partition value. Models have 2",
        "to 8 variables of 2 or 3 states, factors of 1 to 3 variables, potentials of scale 1 to 30, damping 0, .5, .9.",
        "",
        "| claim | models | converged | quantity | median | 99 % | 99.9 % | largest |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for record in records:
        quantiles: dict[str, dict[str, float]] = record["quantiles"]  # type: ignore[assignment]
        for name, values in quantiles.items():
            numbers = " | ".join(f"{v:.2g}" for v in values.values())
            lines.append(f"| {record['claim']} | {record['models']} | {record['converged']} | {name} | {numbers} |")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/convergence"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for claim in CLAIMS:
        began = time.perf_counter()
        records.append(examine(claim, options.models, options.seed).summary())
        print(f"{claim.__name__} {time.perf_counter() - began:.0f} s", json.dumps(records[-1]), flush=True)
    _write(options.out, records, options.models, options.seed)


if __name__ == "__main__":
    main()
