"""Checkpoints: one file per checkpoint in the folder of a run, `iteration-00000120.safetensors`, whole or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from riskfield.errors import CheckpointError, FileFormatError
from riskfield.io._atomic import write_bytes
from riskfield.io.codec import pack, unpack
from riskfield.learning.optimiser import check_counts
from riskfield.learning.result import Reason, Record, find_best, load_history

_KIND = "checkpoint"  # of saved files
_NAME = re.compile(r"iteration-(\d{8,12})\.safetensors")


@dataclass(frozen=True)
class Checkpoints:
    """Where a fit saves what it needs to resume after an interruption, and how often.

    Arguments:
        folder: the folder, which is created if necessary. Only the newest checkpoint is kept.
        every: the number of iterations between checkpoints, by default 10. One more is written at the end.

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


def newest_below(folder: Path) -> tuple[int, Path] | None:
    """The checkpoint in a folder, or in a folder below it, that was written last, and its iteration."""
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.rglob("iteration-*.safetensors")]
    dated = [(path.stat().st_mtime_ns, int(match[1]), path) for path, match in found if match]
    return max(dated)[1:] if dated else None


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds: all that a fit needs to go on with the same bits."""

    identity: dict[str, Any]
    model: dict[str, Tensor]
    optimiser: dict[str, Any]
    history: list[Record]
    best_value: float
    best: Record | None
    best_model: dict[str, Tensor]
    looks_since_best: int
    reason: Reason | None
    explanation: str

    @classmethod
    def decode(cls, content: bytes, source: str) -> Content:
        """Decode and validate the bytes of a checkpoint. `source` is its name in error messages.

        Raises:
            FileFormatError: if it is damaged or no checkpoint; an entry is missing, of another type or out of range.
        """
        state = unpack(content, _KIND, source)
        try:
            best, reason = _of(dict, state, "best"), state["reason"]
            history = load_history(state["history"])
            saved = cls(
                _of(dict, state, "identity"),
                _tensors(state, "model"),
                _of(dict, state, "optimiser"),
                history,
                _of(float, best, "value"),
                find_best(history, best["iteration"]),
                _tensors(best, "model"),
                _of(int, state, "looks_since_best"),
                None if reason is None else Reason(reason),
                _of(str, state, "explanation"),
            )
            for name, value in saved.identity.items():
                if not isinstance(value, bool | int | float | str | None):
                    raise TypeError(f"`{name}` must be a number or a string. Got {value!r:.80}.")
            if {k: t.shape for k, t in saved.best_model.items()} != {k: t.shape for k, t in saved.model.items()}:
                raise ValueError("the best parameters must have the shapes of the last ones.")
        except Exception as error:  # whatever comes of entries that nobody has checked
            raise FileFormatError(f"{source} is damaged: {error}") from error
        return saved


def _of(kind: type, tree: Mapping[str, Any], name: str) -> Any:
    if type(tree[name]) is not kind:
        raise TypeError(f"`{name}` must be a {kind.__name__}. Got {tree[name]!r:.80}.")
    return tree[name]


def _tensors(tree: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = _of(dict, tree, name)
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise TypeError(f"`{name}` must hold tensors by name. Got {value!r:.80} for {key!r}.")
    return found
