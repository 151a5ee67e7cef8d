"""`riskfield fit`: training of what a Python file describes."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from riskfield.errors import DivergenceWarning
from riskfield.io._atomic import check_writable, write_bytes
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit as run_fit
from riskfield.learning.ranks import Ranks, ranks
from riskfield.learning.result import Reason
from riskfield.learning.validation import Validation

# What the file may say: all arguments of `fit` but those that are options here.
_ARGUMENTS = [
    name
    for name in inspect.signature(run_fit).parameters
    if name not in ("seed", "checkpoint", "resume", "progress", "ranks")
]


def fit(
    problem: Annotated[
        Path, typer.Argument(metavar="PROBLEM.py", help="A file with a function `problem()`.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the fitted parameters go, as safetensors.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep checkpoints here, and go on from the newest one there.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Iterations between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="All randomness comes from it.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
) -> None:
    """Fit a model to examples.

    The file defines a function problem() that returns the arguments of riskfield.fit as a dictionary: model, data, loss
    and, where needed, inference, optimiser, ridge, validation, ... Under torchrun every process takes its share of the
    data. With --checkpoint the same command, interrupted or killed, goes on where it stopped.

    \b
    Examples:
      riskfield fit blobs.py --out blobs.safetensors
      torchrun --nproc-per-node 2 -m riskfield fit blobs.py --out blobs.safetensors --checkpoint runs/blobs
    """
    check_writable(out)
    with ranks() as group:
        arguments = _arguments(problem)
        model = arguments["model"].to(group.device) if group.size > 1 else arguments["model"]
        for name in arguments.keys() & {"data", "validation"}:
            arguments[name] = _share(arguments[name], group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DivergenceWarning)
            result = run_fit(
                **{**arguments, "model": model},
                seed=seed,
                checkpoint=None if checkpoint is None else Checkpoints(checkpoint, every),
                resume=checkpoint is not None,
                progress=not quiet and sys.stderr.isatty(),
                ranks=group,
            )
        if group.rank == 0:
            for warning in caught:
                typer.echo(f"riskfield: {warning.message}", err=True)
            _write(model, out)
            if not quiet:
                typer.echo(f"{result}\nwrote {out}")
    if result.reason is Reason.INTERRUPTED:
        raise typer.Exit(130)


def _arguments(path: Path) -> dict[str, Any]:
    """What `problem()` in the file returns, checked."""
    if not path.is_file():
        raise typer.BadParameter(f"{path}: No such file.")
    try:
        function = runpy.run_path(str(path)).get("problem")
        given = function() if callable(function) else None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{path}{where}: {type(error).__name__}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: `problem()` must return a dictionary of arguments of `fit`. Got {given!r}.")
    for name in given:
        if name not in _ARGUMENTS:
            raise ValueError(f"{path}: `problem()` may say {', '.join(_ARGUMENTS)}. Got {name!r}.")
    for name in ("model", "data", "loss"):
        if name not in given:
            raise ValueError(f"{path}: `problem()` must say `{name}`.")
    return given


def _share(data: Any, group: Ranks) -> Any:
    if isinstance(data, Validation):
        return replace(data, data=group.shard(data.data))
    return None if data is None else group.shard(data)


def _write(model: Any, out: Path) -> None:
    from safetensors.torch import save

    write_bytes(out, save({name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}))
