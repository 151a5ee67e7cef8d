"""Solve a UAI instance by several algorithms, bounds included. `python examples/uai_instance.py [--quick] [FILE]`."""

import sys
import tempfile
from pathlib import Path

import numpy as np

import riskfield as rf


def spin_glass(side: int) -> Path:
    """Write a random model on a grid as a file in UAI format."""
    graph, rng = rf.grid(side, side, num_states=2), np.random.default_rng(0)
    scopes = [f"2 {a} {b}" for a, b in map(graph.scope, range(graph.num_factors))]
    tables = [f"4 {' '.join(map(str, np.exp(rng.normal(size=4))))}" for _ in scopes]
    path = Path(tempfile.mkdtemp()) / "glass.uai"
    path.write_text("\n".join(["MARKOV", f"{side**2}", " ".join(["2"] * side**2), str(len(scopes)), *scopes, *tables]))
    return path


def main(words: list[str]) -> dict[str, float]:
    """Print one line per algorithm, and return ln Z by each."""
    files = [Path(word) for word in words if word != "--quick"]
    model = rf.io.read_uai(files[0] if files else spin_glass(4 if "--quick" in words else 12))
    trw = rf.MessagePassing(rf.TRW(rf.entropy.spanning_tree_rho(model.graph)))
    algorithms = {"mean field": rf.MeanField(), "exact": rf.Exact(), "TRW": trw, "loopy BP": rf.MessagePassing()}
    values = {}
    for name, algorithm in algorithms.items():
        field = rf.MRF(model.graph, model.theta, rf.Inference(algorithm))
        values[name] = float(field.log_partition) + model.log_constant
        first = float(field.marginals[0, 1])
        print(f"{name:<10}  ln Z = {values[name]:9.4f}  P(x0 = 1) = {first:.3f}  log p: {field.log_prob_is}")
    print("most probable state:", *field.mode.tolist())
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
