"""UAI files, whole and damaged: the program answers, or says in one line what is wrong."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from pathlib import Path

import numpy as np

import riskfield as rf
from fuzz import Uninteresting
from fuzz.models import random_graph, random_theta
from fuzz.mutations import mutated_bytes, mutated_words
from riskfield.cli import main
from strategies import brute_force

WORDS = [
    "-1",
    "0",
    "1",
    "2",
    "3",
    "7",
    "99999999",
    "1e400",
    "nan",
    "-0.5",
    "0." + "0" * 400 + "1",
    "MARKOV",
    "BAYES",
    "x",
]


def example(rng):
    graph = random_graph(rng, max_variables=5, ties=False)
    if graph.num_factors == 0:
        raise Uninteresting
    theta = random_theta(graph, rng, kinds=("mild", "impossible"))
    theta[: graph.node_size] = 0.0  # a UAI file has factors only
    model = _text(graph, theta)
    observed = [v for v in range(graph.num_variables) if rng.random() < 0.3]
    states = [int(rng.integers(graph.num_states[v])) for v in observed]
    evidence = f"{len(observed)} " + " ".join(f"{v} {x}" for v, x in zip(observed, states, strict=True))
    damage = rng.integers(4)
    if damage == 1:
        model = mutated_words(model, rng, WORDS)
    elif damage == 2:
        evidence = mutated_words(evidence, rng, WORDS)
    model_bytes = mutated_bytes(model.encode(), rng) if damage == 3 else model.encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "m.uai").write_bytes(model_bytes)
        (path / "m.evid").write_text(evidence)
        if damage == 0:
            _check_value(path, graph, theta, observed, states)
        algorithm = ["bp", "trw", "mean-field", "exact", "max-product"][rng.integers(5)]
        command = ["infer", str(path / "m.uai"), "--evidence", str(path / "m.evid"), "--algorithm", algorithm]
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main([*command, "--sweeps", "20"])
        assert code in (0, 2), f"exit code {code}: {errors.getvalue()}"
        assert code == 0 or len(errors.getvalue().splitlines()) >= 1


def _check_value(path, graph, theta, observed, states):
    """The file that was read is the model that was written."""
    model = rf.io.read_uai(path / "m.uai")
    evidence = rf.io.read_evidence(path / "m.evid", model.graph)
    clamped = theta.clone()
    for v, x in zip(observed, states, strict=True):
        block = graph.node(clamped, v)
        keep = float(block[x])
        block.fill_(-math.inf)
        block[x] = keep
    truth = brute_force(graph, clamped).log_partition
    try:
        found = rf.infer(model.graph, model.theta, rf.Exact(), evidence=evidence).log_partition + model.log_constant
    except rf.errors.ImpossibleEvidenceError:
        assert truth == -math.inf, "possible evidence was found impossible"
        return
    assert abs(float(found) - truth) <= 1e-8 * (1 + abs(truth)), f"log Z {float(found)}, enumeration {truth}"


def _text(graph, theta):
    lines = ["MARKOV", str(graph.num_variables), " ".join(map(str, graph.num_states.tolist())), str(graph.num_factors)]
    for f in range(graph.num_factors):
        scope = graph.scope(f)
        lines.append(f"{len(scope)} " + " ".join(map(str, scope)))
    for f in range(graph.num_factors):
        table = np.exp(graph.factor(theta, f).double().numpy()).ravel()
        lines += [str(table.size), " ".join(repr(float(entry)) for entry in table)]
    return "\n".join(lines)
