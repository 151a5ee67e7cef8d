"""`riskfield run PROBLEM.py`: training of what a Python file describes."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from riskfield.cli._common import Config, Quiet, Threads, check_device, print_divergence
from riskfield.errors import did_you_mean
from riskfield.io._atomic import check_writable
from riskfield.io.codec import write_tree
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit as run_fit
from riskfield.learning.ranks import Ranks, ranks
from riskfield.learning.result import Reason
from riskfield.learning.validation import Validation

# The arguments that the file may define: those of `fit`, except those that are options of the command.
_ARGUMENTS = [
    name
    for name in inspect.signature(run_fit).parameters
    if name not in ("seed", "checkpoint", "resume", "progress", "ranks", "device")
]


def run(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM.py", help="A file with a function `problem()`.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A file for the parameters.", show_default=False)],
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder for checkpoints. If it holds any, the newest one is continued."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Iterations between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=check_device, help="The device to train on, such as cuda. [that of model and data]"
        ),
    ] = None,
    threads: Threads = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Fit the model that a Python file defines.

    The file defines a function problem(), which returns a dictionary with the arguments of riskfield.fit: model, data,
    loss and, if needed, inference, optimiser, ridge, validation and others. Under torchrun, every process uses its
    share of the data. If a command with --checkpoint is interrupted or killed, run it again to continue.

    \b
    Examples:
      riskfield run blobs.py --out blobs.safetensors
      torchrun --standalone --nproc-per-node 4 -m riskfield run blobs.py --out blobs.safetensors --checkpoint runs/blobs
    """
    check_writable(out)
    with ranks() as group:
        arguments = _arguments(problem)
        model = arguments["model"].to(group.device) if group.size > 1 else arguments["model"]
        for name in arguments.keys() & {"data", "validation"}:
            arguments[name] = _share(arguments[name], group)
        with print_divergence(group.rank == 0):
            result = run_fit(
                **{**arguments, "model": model},
                seed=seed,
                checkpoint=None if checkpoint is None else Checkpoints(checkpoint, every),
                resume=checkpoint is not None,
                progress=not quiet,
                ranks=group,
                device=device,
            )
        if group.rank == 0:
            write_tree(out, "parameters", model.state_dict())
            if not quiet:
                typer.echo(f"{result}\nwrote {out}")
    if result.reason is Reason.INTERRUPTED:
        raise typer.Exit(130)


def _arguments(path: Path) -> dict[str, Any]:
    """Call `problem()` in the file, and validate what it returns."""
    if not path.is_file():
        raise typer.BadParameter(f"{path}: No such file.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # the file may import modules next to it, as with `python PROBLEM.py`
        sys.path.insert(0, folder)
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
            allowed, close = ", ".join(_ARGUMENTS), did_you_mean(name, _ARGUMENTS)
            raise ValueError(f"{path}: `problem()` may define {allowed}. Got {name!r}.{close}")
    for name in ("model", "data", "loss"):
        if name not in given:
            raise ValueError(f"{path}: `problem()` must define `{name}`.")
    return given


def _share(data: Any, group: Ranks) -> Any:
    if isinstance(data, Validation):
        return replace(data, data=group.shard(data.data))
    return None if data is None else group.shard(data)
