"""Nested states of tensors and plain values as a folder: `state.json` beside `tensors.safetensors`. No pickle.

A folder is written whole or not at all: under another name first, and moved into place when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from riskfield.errors import FileFormatError

_FORMAT = 1
_JSON, _TENSORS = "state.json", "tensors.safetensors"
_TENSOR, _PAIRS = "#tensor", "#pairs"  # the only keys of the objects that stand for a tensor, and for a dict


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Make the folder `path`, which must not exist yet, and keep `state` in it.

    `state` is a nest of dicts, lists, tensors, numbers, strings, booleans and None. Floats and tensors come back bit by
    bit. If anything fails, nothing is left behind.
    """
    write_folder(Path(path), pack_state(state))


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_state` kept in the folder `path`, with tensors on the CPU.

    Raises:
        FileFormatError: if the folder does not hold a state, or only part of one.
    """
    return unpack_state(read_files(path), str(path))


def read_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of the folder of a state."""
    try:
        return {name: (Path(path) / name).read_bytes() for name in (_JSON, _TENSORS)}
    except FileNotFoundError as error:
        raise FileFormatError(f"{path} holds no state: {Path(error.filename).name} is missing.") from None


def pack_state(state: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that hold `state`."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = {"format": _FORMAT, "state": encode(state, tensors)}
    return {_JSON: json.dumps(tree, indent=1).encode(), _TENSORS: save(tensors)}


def unpack_state(files: Mapping[str, bytes], source: str) -> dict[str, Any]:
    """The state that `files` hold; `source` names them in errors."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tree = json.loads(files[_JSON])
        tensors = load(files[_TENSORS])
        if tree["format"] != _FORMAT:
            raise FileFormatError(f"{source} has format {tree['format']}; this version reads format {_FORMAT}.")
        # Clones, because torch's kernels may round differently on memory that is not aligned as torch aligns its own.
        state: dict[str, Any] = decode(tree["state"], {name: tensor.clone() for name, tensor in tensors.items()})
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{source} does not hold a whole state: {error}") from error
    return state


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder `path` with `files` in it, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir()
        for name, content in files.items():
            with open(temporary / name, "xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        _sync_folder(temporary)
        temporary.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync_folder(path: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """`value` for JSON, its tensors moved to `tensors` under the names of their places."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, list | tuple):
        return [encode(entry, tensors, f"{name}/{k}") for k, entry in enumerate(value)]
    if isinstance(value, Mapping):
        entries = [(key, encode(entry, tensors, f"{name}/{key}")) for key, entry in value.items()]
        # JSON has string keys only; torch numbers parameters.
        plain = all(isinstance(key, str) and key not in (_TENSOR, _PAIRS) for key in value)
        return dict(entries) if plain else {_PAIRS: [list(entry) for entry in entries]}
    raise TypeError(f"A state holds tensors, numbers, strings, lists and dicts. Got {type(value).__name__}.")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: decode(entry, tensors) for key, entry in value.get(_PAIRS, value.items())}
    return value
