"""Experiments made of cells: measurements that are kept one by one, so that a run which was cut short can go on."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from riskfield.io._atomic import write_text
from riskfield.threads import set_num_threads

Setting = str | int | float
Result = dict[str, Any]  # of what JSON has


@dataclass(frozen=True)
class Cell:
    """A cell that is asked for: compute(**settings), a function of some module, so that other processes find it."""

    name: str
    compute: Callable[..., Result]
    settings: dict[str, Setting] = field(default_factory=dict)


def finite(value: float) -> float | None:
    """A number for a result, where None stands for what JSON does not have: infinities and NaN."""
    return value if math.isfinite(value) else None


class Cells:
    """The results of an experiment's cells, each in a file of its own as soon as it is there.

    What is found in the folder is not computed again. A file is written whole or not at all, so the process may end at
    any moment; what it was computing then is all that is lost.

    Arguments:
        folder: where the files are, one for each name and settings; it is made if need be.
        total: how many cells there will be, for the progress bar.
        progress: show one.

    >>> import tempfile
    >>> from riskfield.experiments.cells import Cells
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for compute in (lambda base, power: {"value": base**power}, None):
    ...         with Cells(folder, total=1) as cells:
    ...             cells.get("power", compute, base=2, power=10)
    {'value': 1024}
    {'value': 1024}
    """

    def __init__(self, folder: str | Path, total: int, progress: bool = False):
        self._folder, self._total, self._progress = Path(folder), total, progress

    def __enter__(self) -> Cells:
        from tqdm import tqdm

        self._folder.mkdir(parents=True, exist_ok=True)
        self._bar = tqdm(total=self._total, unit="cell", disable=not self._progress)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def get(self, name: str, compute: Callable[..., Result], **settings: Setting) -> Result:
        """The result of one cell: what is on file, or else compute(**settings), which then is."""
        path = self._path(name, settings)
        self._bar.set_postfix_str(path.stem, refresh=True)
        result = _read(path, settings)
        if result is None:
            result = _compute((path, Cell(name, compute, settings)))
        self._bar.update()
        return result

    def prepare(self, wanted: Iterable[Cell], jobs: int) -> None:
        """Compute those of the `wanted` cells that are not on file, in `jobs` processes of one thread each."""
        from tqdm import tqdm

        paths = [(self._path(cell.name, cell.settings), cell) for cell in wanted]
        missing = [(path, cell) for path, cell in paths if _read(path, cell.settings) is None]
        if not missing:
            return
        # Forked processes would share the locks of torch's threads, so they are started afresh.
        with multiprocessing.get_context("spawn").Pool(jobs, _start_worker) as pool:
            done = pool.imap_unordered(_compute, missing)
            for _ in tqdm(done, total=len(missing), unit="cell", disable=not self._progress):
                pass

    def find(self, name: str, **settings: Setting) -> Result | None:
        """The result of one cell if it is on file."""
        return _read(self._path(name, settings), settings)

    def _path(self, name: str, settings: dict[str, Setting]) -> Path:
        stem = ",".join([name, *(f"{key}={value}" for key, value in sorted(settings.items()))])
        return self._folder / (re.sub(r"[^\w.,=+-]", "_", stem) + ".json")


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the cells is interrupted, and ends all
    torch.set_num_threads(1)
    set_num_threads(1)


def _compute(task: tuple[Path, Cell]) -> Result:
    """Compute a cell and keep it."""
    path, cell = task
    result = cell.compute(**cell.settings)
    write_text(path, json.dumps({"settings": cell.settings, "result": result}, allow_nan=False) + "\n")
    return result


def _read(path: Path, settings: dict[str, Setting]) -> Result | None:
    """The result on file, if it is that of these settings."""
    try:
        cell = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(cell, dict) or cell.get("settings") != settings or "result" not in cell:
        return None
    result: Result = cell["result"]
    return result
