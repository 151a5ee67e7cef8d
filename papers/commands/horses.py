"""`python -m papers horses`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from papers.commands._app import (
    Data,
    Device,
    Finished,
    OnDevice,
    Out,
    Quick,
    Quiet,
    Rows,
    app,
    chosen,
    folder,
    given,
    run,
)
from papers.horses import ROWS, HorsesTable

_QUICK: dict[str, Any] = {"num_train": 12, "num_test": 12, "iterations": 40, "scale": 0.1}


@app.command()
def horses(
    data: Data = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Resolution of inference, as a part of the pictures'. [1, or less with --quick]"),
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Train on the first pictures by name, and test with the last.")
    ] = False,
    step: Annotated[
        float | None,
        typer.Option(help="Ten multiples of this as thresholds of edge features; the paper does not give its own."),
    ] = None,
    rows: Rows = None,
    finished: Finished = False,
    device: OnDevice = Device.CPU,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Segment horses: truncated fitting by several losses, kinds of inference and numbers of sweeps.

    Table 2 and Figure 5 of Domke (2013): 200 training and 127 test pictures of the Weizmann horse database,
    tree-reweighted inference and mean field, truncated after 10, 20 and 40 sweeps. Four more lines, which are not in
    the paper, explain differences from it.

    At full size it takes days on one core.

    \b
    Examples:
      python -m papers horses --data ~/data --quick
      python -m papers horses --data ~/data --scale 0.25
      python -m papers horses --data ~/data --device cuda --rows "univariate logistic, clique logistic"
    """
    size = _QUICK if quick else {}
    if scale is not None:
        size = size | {"scale": scale}
    lines = chosen(rows, finished, ROWS)
    study = HorsesTable(folder(data), rows=lines, in_order=in_order, step=step, device=device.value, **size)
    options = [
        *([f"--scale {scale:g}"] if scale else []),
        *(["--in-order"] if in_order else []),
        *([] if step is None else [f"--step {step:g}"]),
        *given(rows, finished),
    ]
    run("horses", [study], quick, out, quiet, [*options, *(["--device cuda"] if device is Device.CUDA else [])])
