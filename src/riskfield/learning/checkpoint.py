"""Checkpoints: one file per checkpoint in the folder of a run, `iteration-00000120.safetensors`, whole or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riskfield.errors import CheckpointError
from riskfield.io._atomic import write_bytes
from riskfield.io.codec import pack, unpack
from riskfield.learning.optimiser import check_counts

_KIND = "checkpoint"  # of saved files
_NAME = re.compile(r"iteration-(\d{8,12})\.safetensors")


@dataclass(frozen=True)
class Checkpoints:
    """Where a fit saves what it needs to resume after an interruption, and how often.

    Arguments:
        folder: the folder, which is created if necessary. Only the newest checkpoint is kept.
        every: the number of iterations between checkpoints. One more is written at the end.

    >>> Checkpoints("runs/horses", every=20).every
    20
    """

    folder: str | os.PathLike[str]
    every: int = 10

    def __post_init__(self) -> None:
        check_counts(every=self.every)

    def newest(self) -> Path | None:
        """Return the file of the newest checkpoint, or None."""
        found = self._all()
        return found[max(found)] if found else None

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of an iteration, then remove earlier ones.

        Raises:
            CheckpointError: if it could not be written; the one before it is intact.
        """
        folder = Path(self.folder)
        target = folder / f"iteration-{iteration:08d}.safetensors"
        earlier = {number: path for number, path in self._all().items() if path != target}
        if not target.exists():
            content = pack(_KIND, state)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_bytes(target, content)
            except OSError as error:
                kept = f"that of iteration {max(earlier)} is intact" if earlier else "there is no earlier one"
                what = f"The checkpoint of iteration {iteration} could not be written ({error.strerror}); {kept}"
                raise CheckpointError(error.errno, what) from error
        for path in earlier.values():
            path.unlink(missing_ok=True)

    def _all(self) -> dict[int, Path]:
        folder = Path(self.folder)
        if not folder.is_dir():
            return {}
        found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
        return {int(match[1]): path for path, match in found.items() if match}


def decode_checkpoint(content: bytes, source: str) -> dict[str, Any]:
    """Decode the content of a checkpoint file. `source` is its name in error messages.

    Raises:
        FileFormatError: if the file is damaged or not a checkpoint.
    """
    return unpack(content, _KIND, source)
