"""Compare a device with the CPU: every algorithm, schedule and adjoint, on small graphs of all kinds.

    PYTHONPATH=src:tests python tests/gpu_conformance.py --device cuda --jobs 14

On the device the default kernels run, on the CPU the torch kernels, the reference. Marginals, log-partition values and
gradients of a loss are compared in float64, marginals in float32 as well. A line per algorithm, graph and adjoint gives
the largest error relative to the largest number; the exit code says whether all of them are small. Notes name what the
device computes on the torch kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

import riskfield as rf
from cases import CASES, Case

GRAPHS = {
    "mixed": rf.FactorGraph([2, 3, 2, 2, 1], [(0, 1), (1, 2), (2, 1, 0), (1,), (2, 0), (2, 3), (2, 0)]),
    "tied": rf.FactorGraph([2, 2, 2, 3], [(0, 1), (1, 2), (2, 0), (3, 1)], tables=[0, 0, 0, 1]),
    "grid": rf.grid(3, 4, 2),
    "chain": rf.chain(5, 3, tied=True),
    "tree": rf.FactorGraph([2, 3, 2, 2, 3, 2], [(1, 0), (1, 2), (3, 4, 1), (4,)]),
    "hard": rf.grid(3, 4, 2),  # with an impossible state of a factor, too
    "large": rf.grid(40, 50, 2),  # which takes many programs
}
COLOURED = [
    Case("bp-coloured", lambda g, o: rf.MessagePassing(rf.Bethe(), rf.Coloured())),
    Case("trw-coloured", lambda g, o: rf.MessagePassing(rf.TRW(0.5), rf.Coloured())),
    Case("trw-coloured-damped", lambda g, o: rf.MessagePassing(rf.TRW(0.5), rf.Coloured(), damping=0.3)),
    Case("max-product-coloured", lambda g, o: rf.MaxProduct(schedule=rf.Coloured()), marginals=False),
]
FEW = ("trw-coloured", "trw-coloured-damped")  # cases on the large graph
TRUNCATED, CONVERGED = rf.Stop(4, tol=None), rf.Stop(3000, tol=1e-11)
ADJOINTS = {
    "Unroll": (rf.Unroll(), TRUNCATED, 1e-8),
    "Unroll(checkpoint=2)": (rf.Unroll(checkpoint=2), TRUNCATED, 1e-8),
    "Unroll to a tolerance": (rf.Unroll(), CONVERGED, 1e-6),
    "FixedPoint": (rf.FixedPoint(), CONVERGED, 1e-6),
    "Perturb(1)": (rf.Perturb(1), CONVERGED, 1e-4),
    "Perturb(2)": (rf.Perturb(2), CONVERGED, 1e-6),
    "Perturb(4)": (rf.Perturb(4), CONVERGED, 1e-6),
    "KKT(Direct)": (rf.KKT(rf.adjoints.Direct()), CONVERGED, 1e-6),
    "KKT(Minres)": (rf.KKT(rf.adjoints.Minres()), CONVERGED, 1e-6),
    "Envelope": (rf.Envelope(), CONVERGED, 1e-6),
}


def offered(case: Case, adjoint: str) -> bool:
    """Whether the adjoint is offered for the algorithm."""
    if not case.marginals:
        return False
    if adjoint.startswith("KKT"):
        return case.iterative and case.name != "mean-field"
    if adjoint == "FixedPoint":
        return case.iterative
    return not (adjoint == "Unroll to a tolerance" and not case.iterative)


def potentials(graph: rf.FactorGraph, seed: int) -> torch.Tensor:
    """Two thetas, of which the second has an impossible state."""
    theta = 0.7 * torch.randn(2, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    graph.node(theta, 0)[1, 0] = -torch.inf
    if graph is GRAPHS["hard"]:
        graph.factor_views(theta)[0][1, 0, 0, 0] = -torch.inf
    return theta


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest number; infinities must agree."""
    found, expected = found.detach().cpu().double(), expected.detach().double()
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("inf")
    scale = max(1.0, float(expected[finite].abs().max())) if finite.any() else 1.0
    return float((found[finite] - expected[finite]).abs().max()) / scale if finite.any() else 0.0


def forward(case: Case, graph: rf.FactorGraph, device: str) -> Iterator[tuple[str, float, float]]:
    theta, algorithm = potentials(graph, 0), case.make(graph, None)
    for name, stop, tol in (("4 sweeps", TRUNCATED, 1e-9), ("to a tolerance", CONVERGED, 1e-7)):
        expected = rf.infer(graph, theta, algorithm, stop=stop, kernels="torch")
        found = rf.infer(graph, theta.to(device), algorithm, stop=stop)
        yield f"marginals, {name}", error(found.mu, expected.mu), tol
        yield f"log-partition, {name}", error(found.log_partition, expected.log_partition), tol
    single = rf.infer(graph, theta.float().to(device), algorithm, stop=TRUNCATED)
    expected = rf.infer(graph, theta, algorithm, stop=TRUNCATED, kernels="torch")
    yield "marginals, float32", error(single.mu, expected.mu), 1e-4


def backward(case: Case, graph: rf.FactorGraph, device: str) -> Iterator[tuple[str, float, float]]:
    algorithm = case.make(graph, None)
    weights = torch.randn(graph.mu_size, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for name, (adjoint, stop, tol) in ADJOINTS.items():
        if not offered(case, name):
            continue
        results = []
        for place, kernels in ((device, None), ("cpu", "torch" if name.startswith("Unroll") else None)):
            theta = potentials(graph, 1).to(place).requires_grad_()
            solution = rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint, kernels=kernels)
            loss = solution.log_partition if name == "Envelope" else (solution.mu**2 * weights.to(place)).sum(-1)
            results.append(torch.autograd.grad(loss.sum(), theta)[0])
        yield name, error(results[0], results[1].cpu()), tol


def counting(case: Case, graph: rf.FactorGraph, device: str) -> Iterator[tuple[str, float, float]]:
    algorithm = case.make(graph, None)
    if not offered(case, "Unroll") or not algorithm.recorded_parameters:
        return
    results = []
    for place, kernels in ((device, None), ("cpu", "torch")):
        numbers = tuple(number.detach().clone().requires_grad_() for number in algorithm.parameters(graph))
        theta = potentials(graph, 1).to(place)
        mu = rf.infer(graph, theta, algorithm.with_parameters(graph, numbers), stop=TRUNCATED, kernels=kernels).mu
        results.append(torch.autograd.grad((mu**2).sum(), numbers))
    for name, found, expected in zip(("factors", "variables"), *results, strict=True):
        yield f"Unroll, counting of {name}", error(found, expected), 1e-8


def graphs_of(case: Case, graphs: list[str]) -> list[str]:
    """On which of these graphs a case runs."""
    return [kind for kind in graphs if kind != "large" or case.name in FEW]


def compare(cases: list[Case], graphs: list[str], device: str) -> int:
    """Print a line for each comparison; how many failed."""
    failed = 0
    for case in cases:
        for kind in graphs_of(case, graphs):
            graph = GRAPHS[kind]
            for check in (forward, backward, counting):
                rows = check(case, graph, device)
                while True:
                    try:
                        name, found, tol = next(rows)
                    except StopIteration:
                        break
                    except Exception as problem:  # the next rows of this graph are lost, which is said
                        name, found, tol = f"{check.__name__}: {type(problem).__name__}: {problem}", float("nan"), 0.0
                    good = found <= tol
                    failed += not good
                    print(f"{'ok  ' if good else 'FAIL'} {case.name:22s}{kind:8s}{name:32s}{found:9.1e}", flush=True)
    for text in sorted(rf.errors._warned_slow):
        print("note", ", ".join(case.name for case in cases), text)
    print("end", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each for one algorithm on one graph")
    parser.add_argument("--only", help="one algorithm, by its name")
    parser.add_argument("--graph", choices=list(GRAPHS), help="one graph, by its name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [case for case in [*CASES, *COLOURED] if case.kernels and options.only in (None, case.name)]
    graphs = [options.graph] if options.graph else list(GRAPHS)
    if options.jobs == 1:
        return min(compare(cases, graphs, options.device), 1)

    def run(task: tuple[str, Case]) -> list[str]:
        graph, case = task
        command = [sys.executable, __file__, "--device", options.device, "--only", case.name, "--graph", graph]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = done.stdout.removesuffix("end\n").splitlines()
        if done.returncode not in (0, 1) or not done.stdout.endswith("end\n"):
            # After its last line a process can still fail to end: that is not about the results, but it is shown.
            kind = "note" if done.stdout.endswith("end\n") else "FAIL"
            text = " ".join(done.stderr.split())[-500:]
            found.append(f"{kind} {case.name} on {graph} ended with code {done.returncode}: {text}")
        sys.stdout.write("".join(f"{line}\n" for line in found))  # at once: other threads write, too
        sys.stdout.flush()
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [(graph, case) for graph in graphs for case in cases if graph in graphs_of(case, graphs)]
        lines = [line for log in pool.map(run, tasks) for line in log]
    failed = sum(line.startswith("FAIL") for line in lines)
    good = sum(line.startswith("ok") for line in lines)
    print(f"{good} comparisons agree, {failed} do not, on {_name(options.device)}, torch {torch.__version__}")
    return min(failed, 1)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "the CPU"


if __name__ == "__main__":
    sys.exit(main())
