"""Accuracy of every algorithm on UAI instances with known exact answers.

Every algorithm runs once, on one thread in float64, on each NAME.uai of a folder that also contains NAME.uai.MAR and
NAME.uai.PR (and optionally NAME.uai.evid). The script keeps all numbers and prints a Markdown table. `--docs`
replaces the table in a page, between the lines `<!-- accuracy: begin -->` and `<!-- accuracy: end -->`.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from riskfield.entropy import TRW, Bethe, spanning_tree_rho
from riskfield.errors import ConvergenceWarning, ImpossibleEvidenceError, TreewidthError
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import infer
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.exact import Exact
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.io.uai import read_evidence, read_mar, read_pr, read_uai
from riskfield.kernels import native_available
from riskfield.threads import set_num_threads
from timing import keep

BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"

# None: the algorithm does not apply to such graphs.
ALGORITHMS: dict[str, Callable[[FactorGraph], AbstractAlgorithm | None]] = {
    "BP": lambda graph: MessagePassing(Bethe()),
    "BP, damping 0.5": lambda graph: MessagePassing(Bethe(), damping=0.5),
    "TRW 0.5": lambda graph: MessagePassing(TRW(0.5)),
    "TRW 0.5, damping 0.5": lambda graph: MessagePassing(TRW(0.5), damping=0.5),
    "TRW spanning trees": lambda graph: MessagePassing(TRW(spanning_tree_rho(graph))) if is_pairwise(graph) else None,
    "mean field": lambda graph: MeanField(),
    "exact": lambda graph: Exact(),
}


def is_pairwise(graph: FactorGraph) -> bool:
    return all(group.arity <= 2 for group in graph.factor_groups)


def measure(path: Path, stop: Stop) -> list[dict[str, Any]]:
    model = read_uai(path)
    beside = path.with_name(path.name + ".evid")
    evidence = read_evidence(beside, model.graph) if beside.exists() else {}
    answer = read_mar(path.with_name(path.name + ".MAR"), model.graph)
    log_partition = read_pr(path.with_name(path.name + ".PR"))
    rows = []
    for name, make in ALGORITHMS.items():
        algorithm = make(model.graph)
        if algorithm is None:
            continue
        row: dict[str, Any] = {"instance": path.stem, "algorithm": name}
        began = time.perf_counter()
        try:
            solution = infer(model.graph, model.theta, algorithm, stop=stop, evidence=evidence)
        except TreewidthError:
            rows.append({**row, "refused": "does not fit in 2 GiB"})
            continue
        except ImpossibleEvidenceError:
            # The known answers show that the models are possible: mean field cannot start because of zeros in tables.
            rows.append({**row, "refused": "stopped by zeros in the tables"})
            continue
        value = float(solution.log_partition) + model.log_constant
        row["seconds"] = time.perf_counter() - began
        error = (solution.mu[: model.graph.node_size] - answer).abs()
        row["largest_error"], row["mean_error"] = float(error.max()), float(error.mean())
        row["log10_z_error"] = (value - log_partition) / math.log(10)
        row["sweeps"], row["converged"] = int(solution.sweeps), bool(solution.converged)
        row["residual"] = float(solution.residual)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| instance | algorithm | largest error | mean error | error of log10 Z | sweeps | converged | seconds |",
        "|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        head = f"| {row['instance']} | {row['algorithm']} |"
        if "refused" in row:
            lines.append(f"{head} {row['refused']} | | | | | |")
            continue
        numbers = f"{row['largest_error']:.1e} | {row['mean_error']:.1e} | {row['log10_z_error']:+.2g}"
        end = f"{row['sweeps']} | {'yes' if row['converged'] else '**no**'} | {row['seconds']:.2g}"
        lines.append(f"{head} {numbers} | {end} |")
    return "\n".join(lines)


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return (
        subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of .uai files with their answers")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR/NAME",
        default=Path("results/benchmarks/uai"),
        help="write all numbers to DIR/records.jsonl",
    )
    parser.add_argument("--docs", type=Path, help="a page whose table to replace")
    parser.add_argument("--sweeps", type=int, default=5000)
    parser.add_argument("--tol", type=float, default=1e-8)
    arguments = parser.parse_args()
    paths = [p for p in sorted(arguments.folder.glob("*.uai")) if p.with_name(p.name + ".MAR").exists()]
    if not paths:
        parser.error(f"{arguments.folder} holds no .uai files with .MAR files beside them")
    set_num_threads(1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # the table has a column for it
    stop = Stop(sweeps=arguments.sweeps, tol=arguments.tol)
    measure(paths[0], Stop(sweeps=2, tol=None))  # so that imports on first use are not timed
    rows = [row for path in paths for row in measure(path, stop)]
    report = {
        "commit": commit(),
        "processor": processor(),
        "threads": 1,
        "kernels": "native" if native_available() else "torch",
        "torch": torch.__version__,
        "sweeps": arguments.sweeps,
        "tol": arguments.tol,
        "rows": rows,
    }
    keep(arguments.out, report)
    print(table(rows))
    if arguments.docs is not None:
        before, rest = arguments.docs.read_text().split(BEGIN)
        after = rest.split(END)[1]
        arguments.docs.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
