"""Fitted models as single files: safetensors, with all that is no tensor as JSON in its header. No pickle.

Besides what a state may hold (tensors, numbers, strings, lists, dicts) there are arrays, tuples, optimisers of torch by
name, and riskfield's own frozen dataclasses, such as `Inference(...)`. The names of these are those the package
exports, which outlive the modules that define them; nothing else is ever looked up, so that reading a file runs no code
of the file's choosing.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.errors import FileFormatError
from riskfield.io._atomic import write_bytes
from riskfield.io.state import decode, encode

_FORMAT = 1
_HEADER = "riskfield"
_OBJECT, _ARRAY, _TUPLE, _OPTIMISER = "#object", "#array", "#tuple", "#optimiser"


def write_model(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Replace `path` by a file that holds `content`, whole or not at all.

    Raises:
        TypeError: if there is something in it that such a file cannot hold, a function perhaps.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = {"format": _FORMAT, "content": encode({key: _plain(value, key) for key, value in content.items()}, tensors)}
    write_bytes(path, save(tensors, metadata={_HEADER: json.dumps(tree)}))


def read_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_model` put in the file, with tensors on the CPU.

    Raises:
        FileFormatError: if the file is none of these, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(2, "No such file", os.fspath(path))
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FileFormatError(f"{path} is no model, or a damaged one: {error}") from error
    if header is None:
        raise FileFormatError(f"{path} holds tensors, but no model of riskfield.")
    try:
        tree = json.loads(header)
        if tree["format"] != _FORMAT:
            raise FileFormatError(f"{path} has format {tree['format']}; this version reads format {_FORMAT}.")
        content: dict[str, Any] = {key: _whole(value) for key, value in decode(tree["content"], tensors).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path} is a damaged model: {error!r}") from error
    return content


def _plain(value: Any, name: str) -> Any:
    """`value` as a nest of what a state may hold; `name` says where it is, for errors."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufUO":
        wide = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}.get(value.dtype.kind)
        entries = _plain(value.tolist(), name) if wide is None else torch.from_numpy(value.astype(wide, order="C"))
        return {_ARRAY: entries, "dtype": value.dtype.str}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(entry, name) for entry in value]}
    if isinstance(value, list):
        return [_plain(entry, name) for entry in value]
    if isinstance(value, Mapping):
        return {key: _plain(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, type) and value in vars(torch.optim).values():
        return {_OPTIMISER: value.__name__}
    if dataclasses.is_dataclass(value) and _exported(type(value).__name__) is type(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {_OBJECT: type(value).__name__, **{key: _plain(getattr(value, key), f"{name}.{key}") for key in fields}}
    raise TypeError(
        f"`{name}` must be made of plain values and riskfield's own objects to be kept in a file without pickle. "
        f"Got {value!r}."
    )


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        entries = value[_ARRAY]
        return np.array(entries.numpy() if isinstance(entries, Tensor) else entries, dtype=value["dtype"])
    if _TUPLE in value:
        return tuple(_whole(entry) for entry in value[_TUPLE])
    if _OPTIMISER in value:
        found = getattr(torch.optim, value[_OPTIMISER])
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise ValueError(f"{value[_OPTIMISER]} is no optimiser")
        return found
    whole = {key: _whole(entry) for key, entry in value.items()}
    if _OBJECT not in whole:
        return whole
    name = whole.pop(_OBJECT)
    kind = _exported(name)
    if kind is None:
        raise ValueError(f"this version has no {name}")
    return kind(**whole)


def _exported(name: str) -> type | None:
    """The dataclass that the package exports under `name`."""
    package = importlib.import_module("riskfield")  # not on top: it imports this module's package
    found = getattr(package, name, None) if name in package.__all__ else None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
