r"""Which names in a program are a function's own parameters? Joint labelling of text, on graphs with loops.

The text is Python's standard library. In the body of each function every use of a name is a variable: is it a
parameter of the function, or something else (a local variable, a global one, a module, a builtin)? The signature is not
shown. Two kinds of factors join the variables: neighbouring uses, as in a chain, and *skip* edges between one use of a
name and the next use of the same name, however far away. They make loops, so that inference is approximate: ten
iterations of belief propagation. What the labels are is known from the syntax tree. Functions of some modules are for
training, of others for the test; all functions of a set run side by side, as one graph.

    independent          logistic regression, a use at a time
    clique logistic      the logistic loss of the approximate marginals of pairs
    surrogate likelihood the likelihood with the Bethe approximation of its partition function
    ERM-F                the F-measure of the labels that will be decoded, trained through a soft decoder and the
                         iterations, from where the surrogate likelihood ended

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
_AROUND = "()[]{}.,:=+-*/%<>'\"@#\n"  # characters next to a name, past blanks


def source(module: str) -> str:
    """The text of a module of the standard library."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def functions(text: str) -> Iterator[tuple[list[ast.Name], set[str], list[str]]]:
    """For each function without functions inside: the names its body uses, its parameters, the lines of the text."""
    lines = text.splitlines()
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or any(isinstance(n, inner) for b in node.body for n in ast.walk(b)):
            continue
        given = node.args
        parameters = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        parameters |= {a.arg for a in (given.vararg, given.kwarg) if a is not None}
        uses = [n for b in node.body for n in ast.walk(b) if isinstance(n, ast.Name) and n.id != "self"]
        if len(uses) > 2:
            yield sorted(uses, key=lambda use: (use.lineno, use.col_offset)), parameters - {"self"}, lines


def features(use: ast.Name, lines: list[str], first: bool) -> list[float]:
    """What can be seen of one use of a name: the characters beside it, and its form. The last one is 1."""
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
    """A function as an example of its own graph; factors have a feature for each of their kinds."""
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
    """All functions of some modules, side by side."""
    return rf.join([example(*function, skip) for module in modules for function in functions(source(module))])


def train(data: rf.Examples, iterations: int) -> dict[str, tuple[rf.LinearModel, float]]:
    """For each way of training the model, and the seconds it took."""
    truncated = rf.Inference(rf.MessagePassing(), rf.Stop(10, tol=None), rf.Unroll())
    ways: dict[str, tuple[rf.AbstractLoss, str | None]] = {
        "independent": (rf.Independent(), None),
        "clique logistic": (rf.CliqueLogistic(), None),
        "surrogate likelihood": (rf.SurrogateLikelihood(), None),
        "ERM-F": (rf.FMeasure(rf.SoftArgmax(0.5)), "surrogate likelihood"),
    }
    out: dict[str, tuple[rf.LinearModel, float]] = {}
    for name, (loss, start) in ways.items():
        model = rf.LinearModel(2, data.inputs["nodes"].shape[-1], data.inputs["factors"].shape[-1])
        if start is not None:
            model.load_state_dict(out[start][0].state_dict())
        began = time.perf_counter()
        optimiser = rf.LBFGS(iterations=iterations)
        rf.fit(model, data, loss, truncated, optimiser=optimiser, ridge=1e-5, progress=False)
        out[name] = model, time.perf_counter() - began
    return out


def measures(model: rf.LinearModel, data: rf.Examples) -> tuple[float, float]:
    """The share of errors, and the F-measure of parameters, over all functions together."""
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(10, tol=None))
    (predicted,) = rf.predict(model, data, inference)
    return rf.error_rate(predicted, data.labels), rf.f_measure(predicted, data.labels)


def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Train on some modules, and print how the ways of training do on others."""
    parser = argparse.ArgumentParser(description="Label the names in functions, jointly.")
    parser.add_argument("--modules", type=int, default=10, help="to train on, and to test on (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="of L-BFGS (default: %(default)s)")
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
