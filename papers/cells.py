"""Cells: the measurements a study is made of. All cells of a study are lines of one compressed file.

A cell is computed once. It is found again by its name, its settings, the device and the precision it was computed in.
A run that was interrupted or killed continues with the cells that are missing.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import math
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.utils import parameters_to_vector

import riskfield as rf

Setting = str | int | float
Result = dict[str, Any]  # of what JSON has
Key = tuple[str, str, str]  # name, settings in JSON, precision
FILE = "cells.jsonl.gz"
M = TypeVar("M", bound=Module)


@dataclass(frozen=True)
class Cell:
    """A cell to compute: compute(**settings). `compute` is a function of a module, so that other processes find it."""

    name: str
    compute: Callable[..., Result]
    settings: dict[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A finished cell.

    Arguments:
        cell: its name.
        settings: the arguments it was computed from.
        device: where it was computed, such as "cpu" or "cuda"; None where that was not recorded.
        precision: of the model and the data, such as "float64".
        result: what was measured, with the fitted parameters where they are few.
    """

    cell: str
    settings: dict[str, Setting]
    device: str | None
    precision: str
    result: Result

    @property
    def key(self) -> Key:
        """What identifies the cell, whatever device it was computed on."""
        return self.cell, json.dumps(self.settings, sort_keys=True), self.precision

    def __str__(self) -> str:
        content = vars(self) | {"settings": dict(sorted(self.settings.items()))}
        return json.dumps(content, allow_nan=False)


class CellFile:
    """The finished cells in a folder: a gzip file of JSON lines, sorted by their keys.

    Every change replaces the whole file, and holds a lock on the folder meanwhile. So several processes may add cells
    at once, and a process that is killed loses only the cell it was computing. The same cells give the same bytes.
    """

    def __init__(self, folder: str | Path):
        self._folder, self._path = Path(folder), Path(folder, FILE)
        self._lines: dict[Key, dict[str | None, Line]] = {}  # by device
        self._state: tuple[int, int, int] | None = None  # of the file when it was last read

    def lines(self) -> list[Line]:
        """All lines on file, in their order."""
        self._read()
        return [line for key in sorted(self._lines) for _, line in sorted(self._lines[key].items(), key=_place)]

    def find(self, key: Key) -> dict[str | None, Line]:
        """The lines of one cell, by device."""
        self._read()
        return self._lines.get(key, {})

    def _read(self) -> None:
        """Read the file if it has changed.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._lines, self._state = {}, None
            return
        state = found.st_ino, found.st_size, found.st_mtime_ns
        if state != self._state:
            try:
                text = gzip.decompress(self._path.read_bytes() or b"empty").decode()
                lines = [Line(**json.loads(line)) for line in text.splitlines()]
            except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
                raise ValueError(f"{self._path} must be a gzip file with a cell in each line: {error}") from error
            self._lines, self._state = {}, state
            for line in lines:
                self._lines.setdefault(line.key, {})[line.device] = line

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines; a line of the same cell and device is replaced."""
        new = {(line.key, line.device or ""): str(line) for line in lines}
        with locked(self._folder):
            content = {(line.key, line.device or ""): str(line) for line in self.lines()} | new
            text = "".join(f"{content[place]}\n" for place in sorted(content))
            write_bytes(self._path, gzip.compress(text.encode(), mtime=0))


def _place(item: tuple[str | None, Line]) -> str:
    """Where a device stands among the lines of one cell."""
    return item[0] or ""


def finite(value: float) -> float | None:
    """A number for a result; None in place of infinities and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


class Cells:
    """The cells of one run of a study: those on file, and those it computes.

    Arguments:
        folder: where the file of cells is; it is made if need be.
        total: how many cells the run asks for, for the progress bar.
        progress: show one.
        device: where cells are computed.
        precision: in which they are computed.

    >>> import tempfile
    >>> from papers.cells import Cells
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for compute in (lambda base, power: {"value": base**power}, None):
    ...         with Cells(folder, total=1) as cells:
    ...             cells.get("power", compute, base=2, power=10)
    {'value': 1024}
    {'value': 1024}
    """

    def __init__(
        self,
        folder: str | Path,
        total: int,
        progress: bool = False,
        *,
        device: str = "cpu",
        precision: str = "float64",
    ):
        self._folder, self._file = Path(folder), CellFile(folder)
        self._total, self._progress = total, progress
        self._device, self._precision = device, precision

    def __enter__(self) -> Cells:
        from tqdm import tqdm

        self._folder.mkdir(parents=True, exist_ok=True)
        self._bar = tqdm(total=self._total, unit="cell", disable=not self._progress)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def get(self, name: str, compute: Callable[..., Result], **settings: Setting) -> Result:
        """The result of a cell: that on file, or else compute(**settings), which is then added to the file.

        A cell that was computed on another device does not count; one whose device was not recorded does.
        """
        self._bar.set_postfix_str(" ".join([name, *map(str, settings.values())]), refresh=True)
        result = self._own(name, settings)
        if result is None:
            result = _compute(self._task(Cell(name, compute, settings)))
        self._bar.update()
        return result

    def prepare(self, wanted: Iterable[Cell], jobs: int) -> None:
        """Compute those of the `wanted` cells that are not on file, in `jobs` processes of one thread each."""
        from tqdm import tqdm

        missing = [self._task(cell) for cell in wanted if self._own(cell.name, cell.settings) is None]
        if not missing:
            return
        # Forked processes would share the locks of torch's threads, so new ones are spawned.
        with multiprocessing.get_context("spawn").Pool(jobs, _start_worker) as pool:
            done = pool.imap_unordered(_compute, missing)
            for _ in tqdm(done, total=len(missing), unit="cell", disable=not self._progress):
                pass

    def find(self, name: str, **settings: Setting) -> Result | None:
        """The result of a cell if it is on file: of this device if possible, otherwise of any."""
        found = self._on_file(name, settings)
        own = self._own(name, settings)
        return own if own is not None else next((line.result for _, line in sorted(found.items(), key=_place)), None)

    def _own(self, name: str, settings: dict[str, Setting]) -> Result | None:
        found = self._on_file(name, settings)
        line = found.get(self._device, found.get(None))
        return None if line is None else line.result

    def _on_file(self, name: str, settings: dict[str, Setting]) -> dict[str | None, Line]:
        return self._file.find(Line(name, settings, None, self._precision, {}).key)

    def _task(self, cell: Cell) -> tuple[Path, str, str, Cell]:
        return self._folder, self._device, self._precision, cell


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the cells is interrupted, and ends all
    torch.set_num_threads(1)
    rf.set_num_threads(1)


def _compute(task: tuple[Path, str, str, Cell]) -> Result:
    """Compute a cell and add it to the file."""
    folder, device, precision, cell = task
    result = cell.compute(**cell.settings)
    CellFile(folder).add([Line(cell.name, cell.settings, device, precision, result)])
    return result


def parameters_of(model: Module) -> list[float]:
    """The parameters of a model, one after the other.

    >>> parameters_of(with_parameters(torch.nn.Linear(2, 1), [1, 2, 3]))
    [1.0, 2.0, 3.0]
    """
    values: list[float] = parameters_to_vector(model.parameters()).tolist()
    return values


@torch.no_grad()
def with_parameters(model: M, values: Sequence[float]) -> M:
    """`model`, after its parameters have been replaced by `values`."""
    parameters = list(model.parameters())
    parts = torch.tensor(values, dtype=torch.float64).split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))
    return model


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file that holds `content`. If the process ends before that, the old file stays."""
    # One writer at a time: a process of its own name for the temporary file, which the next write of it replaces.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which one process at a time can have."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
