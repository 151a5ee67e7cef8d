"""Experiments made of cells: measurements that are kept one by one, so that a run which was cut short can go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from riskfield.io._atomic import write_text

Setting = str | int | float
Result = dict[str, Any]  # of what JSON has


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
        stem = ",".join([name, *(f"{key}={value}" for key, value in sorted(settings.items()))])
        path = self._folder / (re.sub(r"[^\w.,=+-]", "_", stem) + ".json")
        self._bar.set_postfix_str(stem, refresh=True)
        result = _read(path, settings)
        if result is None:
            result = compute(**settings)
            write_text(path, json.dumps({"settings": settings, "result": result}, allow_nan=False) + "\n")
        self._bar.update()
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
