"""Checkpoints: one folder per checkpoint inside the folder of a run, `iteration-00000120`, whole or not there."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riskfield.errors import CheckpointError
from riskfield.io.state import write_state
from riskfield.learning.optimiser import check_counts

_NAME = re.compile(r"iteration-(\d{8,})")


@dataclass(frozen=True)
class Checkpoints:
    """Where a fit keeps what it needs to go on after an interruption, and how often.

    Arguments:
        folder: it is made where it does not exist. The newest checkpoint is kept, and only that one.
        every: how many iterations lie between checkpoints. One more is written at the end.

    >>> Checkpoints("runs/horses", every=20).every
    20
    """

    folder: str | os.PathLike[str]
    every: int = 10

    def __post_init__(self) -> None:
        check_counts(every=self.every)

    def newest(self) -> Path | None:
        """The folder of the newest checkpoint."""
        found = self._all()
        return found[max(found)] if found else None

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of an iteration, then remove earlier ones.

        Raises:
            CheckpointError: if it could not be written; the one before it is intact.
        """
        folder = Path(self.folder)
        target = folder / f"iteration-{iteration:08d}"
        earlier = self._all()
        if target in earlier.values():
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_state(target, state)
        except OSError as error:
            kept = f"that of iteration {max(earlier)} is intact" if earlier else "there is no earlier one"
            raise CheckpointError(
                error.errno, f"The checkpoint of iteration {iteration} could not be written ({error.strerror}); {kept}"
            ) from error
        for path in earlier.values():
            _remove(path)
        for path in folder.glob(".iteration-*.tmp"):  # what processes that were killed left behind
            shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> dict[int, Path]:
        folder = Path(self.folder)
        if not folder.is_dir():
            return {}
        found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
        return {int(match[1]): path for path, match in found.items() if match}


def _remove(path: Path) -> None:
    """Remove a checkpoint, such that it is never half there under its name."""
    going = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    path.rename(going)
    shutil.rmtree(going, ignore_errors=True)
