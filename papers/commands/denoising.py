"""`python -m papers denoising`."""

from __future__ import annotations

from enum import StrEnum
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
from papers.denoising import table_2010 as implicit
from papers.denoising import table_2013 as power
from papers.study import AbstractStudy


class Table(StrEnum):
    """The tables of `python -m papers denoising`."""

    PAMI = "2013"
    NIPS = "2010"


_QUICK: dict[Table, dict[str, Any]] = {
    Table.PAMI: {"num_train": 8, "num_test": 16, "shape": (50, 75), "again": False},
    Table.NIPS: {"num_pictures": 8, "num_tests": 19, "shape": (50, 75), "tol": 1e-4},
}


@app.command()
def denoising(
    data: Data = None,
    table: Annotated[Table | None, typer.Option(help="Only the one of this year.")] = None,
    rows: Rows = None,
    finished: Finished = False,
    device: OnDevice = Device.CPU,
    quick: Quick = False,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Restore binary pictures: the same model, trained by several losses.

    2013 is Table 1 and Figure 4 of Domke (2013): ten losses at three noise levels, 32 training and 100 test pictures of
    the Berkeley Segmentation Data Set. 2010 is Table 1 and Figure 1 of Domke (2010): four training losses, each
    measured by all of them, on 100 and 100 such pictures, and on shapes that stand in for the pictures of its other
    columns.

    At full size they take some hours on one core.

    \b
    Examples:
      python -m papers denoising --data ~/data --quick
      python -m papers denoising --data ~/data --table 2013 --rows "surrogate likelihood, univariate logistic"
    """
    shared: dict[str, Any] = {"root": folder(data), "device": device.value}
    studies: list[AbstractStudy] = []
    if table is not Table.NIPS:
        size = shared | (_QUICK[Table.PAMI] if quick else {})
        studies.append(power.PowerNoiseTable(rows=chosen(rows, finished, tuple(power.PAPER)), **size))
    if table is not Table.PAMI:
        size = shared | (_QUICK[Table.NIPS] if quick else {})
        studies.append(implicit.ImplicitTable(rows=chosen(rows, finished, tuple(implicit.PAPER)), **size))
    options = [*(["--table", table] if table else []), *given(rows, finished)]
    options += ["--device cuda"] if device is Device.CUDA else []
    run("denoising", studies, quick, out, quiet, options)
