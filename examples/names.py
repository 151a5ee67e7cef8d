r"""Which names in a function are its parameters? Joint labelling of text, on graphs with loops.

The text is Python's standard library. Every use of a name in the body of a function is a binary variable: the name is a
parameter of the function, or something else (a local variable, a global variable, a module, a builtin). The signature
is not an input. Two kinds of factors join the variables: *chain* edges between consecutive uses, and *skip* edges
between a use of a name and the next use of the same name, however far apart. They form loops, so inference is
approximate: ten iterations of belief propagation. The labels come from the syntax tree. Some modules are used for
training and others for testing. All functions of a set form one graph. Four models are trained:

    independent          logistic regression for each use separately
    clique logistic      the logistic loss of the approximate marginals of pairs
    surrogate likelihood the likelihood with the Bethe approximation of the log-partition function
    ERM-F                the F-measure of the decoded labels, trained through a soft decoder and the iterations,
                         starting from the result of the surrogate likelihood

    python examples/names.py
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import keyword
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import riskfield as rf

TRAIN = ("argparse", "bdb", "configparser", "csv", "difflib", "fractions", "gettext", "heapq", "inspect", "shutil")
TEST = ("calendar", "cmd", "dis", "ftplib", "imaplib", "optparse", "pprint", "statistics", "textwrap", "zipfile")
_AROUND = "()[]{}.,:=+-*/%<>'\"@#\n"  # characters next to a name, ignoring blanks


def source(module: str) -> str:
    """Read the source of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def functions(text: str) -> Iterator[tuple[list[ast.Name], set[str], list[str]]]:
    """Yield the used names, the parameters and the lines of the text of every function without nested functions."""
    lines = text.splitlines()
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or any(isinstance(n, inner) for b in node.body for n in ast.walk(b)):
            continue
        signature = node.args
        parameters = {a.arg for a in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)}
        parameters |= {a.arg for a in (signature.vararg, signature.kwarg) if a is not None}
        uses = [n for b in node.body for n in ast.walk(b) if isinstance(n, ast.Name) and n.id != "self"]
        if len(uses) > 2:
            yield sorted(uses, key=lambda use: (use.lineno, use.col_offset)), parameters - {"self"}, lines


def features(use: ast.Name, lines: list[str], first: bool) -> list[float]:
    """Return the features of one use of a name: the characters beside it, and its form. The last feature is 1."""
    line = lines[use.lineno - 1].encode()  # offsets count bytes
    before = line[: use.col_offset].decode().rstrip()
    after = line[use.end_col_offset :].decode().lstrip()
    left, right = before[-1:] or "\n", after[:1] or "\n"
    word = (before.split() or [""])[-1]
    return [
        *(float(left == c) for c in _AROUND),
        *(float(right == c) for c in _AROUND),
        float(keyword.iskeyword(word)),
        float(word == "in"),
        float(isinstance(use.ctx, ast.Store)),
        float(use.id.islower()),
        float(use.id[0].isupper()),
        float(use.id[0] == "_"),
        float("_" in use.id),
        float(len(use.id) == 1),
        len(use.id) / 10,
        float(first),
        1.0,
    ]


def example(uses: list[ast.Name], parameters: set[str], lines: list[str], skip: bool) -> rf.Examples:
    """Build the example of one function. The features of a factor indicate its kind."""
    latest: dict[str, int] = {}
    edges, kinds, rows = [], [], []
    for k, use in enumerate(uses):
        if k:
            edges.append((k - 1, k))
            kinds.append((1.0, 0.0, float(use.id == uses[k - 1].id)))
        if skip and latest.get(use.id, k - 1) < k - 1:
            edges.append((latest[use.id], k))
            kinds.append((0.0, 1.0, 0.0))
        rows.append(features(use, lines, use.id not in latest))
        latest[use.id] = k
    labels = torch.tensor([[int(use.id in parameters) for use in uses]])
    inputs = {"nodes": torch.tensor([rows]).double(), "factors": torch.tensor([kinds]).double()}
    return rf.Examples(rf.from_edges(2, edges, num_variables=len(uses)), labels, inputs)


def load(modules: Sequence[str], skip: bool = True) -> rf.Examples:
    """Join all functions of the given modules into one example."""
    return rf.learning.join([example(*function, skip) for module in modules for function in functions(source(module))])


def train(data: rf.Examples, iterations: int) -> dict[str, tuple[rf.LinearModel, float]]:
    """Train one model per criterion. Return the models and the seconds that training took."""
    truncated = rf.Inference(rf.MessagePassing(), rf.Stop(10, tol=None), rf.Unroll())
    criteria: dict[str, tuple[rf.losses.AbstractLoss, str | None]] = {
        "independent": (rf.losses.Independent(), None),
        "clique logistic": (rf.losses.CliqueLogistic(), None),
        "surrogate likelihood": (rf.losses.SurrogateLikelihood(), None),
        "ERM-F": (rf.losses.FMeasure(rf.decoders.SoftArgmax(0.5)), "surrogate likelihood"),
    }
    out: dict[str, tuple[rf.LinearModel, float]] = {}
    for name, (loss, start) in criteria.items():
        model = rf.LinearModel(2, data.inputs["nodes"].shape[-1], data.inputs["factors"].shape[-1])
        if start is not None:
            model.load_state_dict(out[start][0].state_dict())
        began = time.perf_counter()
        optimiser = rf.optim.LBFGS(iterations=iterations)
        rf.fit(model, data, loss, truncated, optimiser=optimiser, ridge=1e-5)
        out[name] = model, time.perf_counter() - began
    return out


def measures(model: rf.LinearModel, data: rf.Examples) -> tuple[float, float]:
    """Return the error rate and the F-measure of parameters, over all functions together."""
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(10, tol=None))
    (predicted,) = rf.predict(model, data, inference)
    return rf.metrics.error_rate(predicted, data.labels), rf.metrics.f_measure(predicted, data.labels)


def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Train on some modules, and print the errors of each model on others."""
    parser = argparse.ArgumentParser(description="Label the names in functions, jointly.")
    parser.add_argument("--modules", type=int, default=10, help="modules per set (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="L-BFGS iterations (default: %(default)s)")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    data, test = load(TRAIN[: options.modules]), load(TEST[: options.modules])
    uses, factors = data.graph.num_variables, data.graph.num_factors
    share = float(data.labels.double().mean())
    print(f"train: {uses} uses of names, {factors} factors; test: {test.graph.num_variables}; {share:.0%} parameters\n")
    print(f"{'':<22}{'train error':>12}{'test error':>12}{'test F':>9}{'seconds':>9}")
    results = {}
    for name, (model, seconds) in train(data, options.iterations).items():
        (train_error, _), (error, f) = measures(model, data), measures(model, test)
        print(f"{name:<22}{train_error:>12.1%}{error:>12.1%}{f:>9.3f}{seconds:>9.1f}")
        results[name] = torch.tensor([train_error, error, f])
    print(f"\n{time.perf_counter() - began:.0f} seconds")
    return results


if __name__ == "__main__":
    main()
