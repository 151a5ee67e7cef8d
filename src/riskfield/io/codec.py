"""The one format of everything riskfield saves and reads back: a tree in a safetensors file. Nothing is unpickled.

A tree is a nest of dicts, lists, tuples, tensors, arrays, numbers, strings, booleans and None, and of objects whose
classes the caller registers by name. Its tensors are the tensors of the file, named by their places in the tree, so
that any reader of safetensors finds them. The rest is JSON in the file's header, with a digest of the whole:

    {"riskfield": '{"format": 2, "kind": "checkpoint", "tree": {"model": {"weight": {"#tensor": "model/weight"}}}}',
     "sha256": "..."}

A tree without tensors that people should be able to read can be a text file instead, with the same JSON.

A file can only name classes in `names`, the registry that the reader passes; by default it is empty. Reading allocates
memory in proportion to the size of the file, whatever the file contains. Any damage to a file raises a
`FileFormatError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.errors import FileFormatError
from riskfield.io._atomic import write_bytes

_FORMAT = 2
_TREE, _DIGEST = "riskfield", "sha256"  # entries of the header
_TENSOR, _ARRAY, _TUPLE, _PAIRS, _OBJECT, _CLASS = "#tensor", "#array", "#tuple", "#pairs", "#object", "#class"
_ARRAY_TYPES = ["|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]

# A few levels are all that riskfield's own trees need; the JSON parser and this module recurse once per level.
MAX_DEPTH = 64
# JSON takes up to thirty times its length in memory once it is parsed.
MAX_HEADER_BYTES = 2**26
# A numpy array gives every string the room of the longest one, four bytes for each character.
_MAX_STRING_BYTES = 2**26

Registry = Mapping[str, type]
NOTHING: Registry = MappingProxyType({})


class _UnregisteredClass(Exception):
    """A file names a class that its reader has not registered. Otherwise it may be intact."""


def write_tree(path: str | os.PathLike[str], kind: str, tree: Mapping[str, Any], names: Registry = NOTHING) -> None:
    """Replace `path` by a file that holds `tree`. If anything fails, the old file stays.

    Arguments:
        path: the file.
        kind: what the tree is, such as "checkpoint". A reader must ask for the same kind.
        tree: what to save. `read_tree` returns floats, tensors and arrays bit by bit.
        names: the classes that the tree may hold, themselves or as instances, by their names in the file; by default
            none. Instances must be dataclasses.

    Raises:
        TypeError: if the tree holds anything else, such as a function.
        ValueError: if what is not a tensor is larger than `read_tree` would accept.
    """
    write_bytes(path, pack(kind, tree, names))


def read_tree(path: str | os.PathLike[str], kind: str, names: Registry = NOTHING) -> dict[str, Any]:
    """The tree that `write_tree` saved, with tensors on the CPU.

    Raises:
        FileFormatError: if the file is damaged, or holds something else.
    """
    return unpack(_read_bytes(path), kind, os.fspath(path), names)


def write_text_tree(path: str | os.PathLike[str], kind: str, tree: Mapping[str, Any]) -> None:
    """Replace `path` by a text file that holds `tree`, which must not hold tensors or arrays."""
    tensors: dict[str, Tensor] = {}
    content = _document(kind, tree, NOTHING, tensors)
    if tensors:
        raise TypeError(f"`tree` must not hold tensors or arrays. Got {', '.join(tensors)}.")
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def read_text_tree(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The tree that `write_text_tree` saved.

    Raises:
        FileFormatError: if the file is damaged, or holds something else.
    """
    content, source = _read_bytes(path), os.fspath(path)
    if len(content) > MAX_HEADER_BYTES:
        raise FileFormatError(f"{source} has {len(content)} bytes; at most {MAX_HEADER_BYTES} are read.")
    return _tree_of(_parse(content, source), kind, source, NOTHING, {})


def pack(kind: str, tree: Mapping[str, Any], names: Registry = NOTHING) -> bytes:
    """The content of the file that `write_tree` writes."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_document(kind, tree, names, tensors))
    if len(text) > MAX_HEADER_BYTES // 2:  # the header quotes it, and lists the tensors
        raise ValueError(f"`tree` must have at most {MAX_HEADER_BYTES // 2} bytes besides tensors. Got {len(text)}.")
    return save(tensors, metadata={_TREE: text, _DIGEST: _digest(text, tensors)})


def unpack(content: bytes, kind: str, source: str, names: Registry = NOTHING) -> dict[str, Any]:
    """The tree in the content of a file; `source` names the file in errors."""
    from safetensors.torch import load

    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise FileFormatError(f"{source} is not a safetensors file, or only part of one.")
    if size > MAX_HEADER_BYTES:
        raise FileFormatError(f"{source} has a header of {size} bytes; at most {MAX_HEADER_BYTES} are read.")
    header = _parse(content[8 : 8 + size], source).get("__metadata__")
    text = header.get(_TREE) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(text, str):
        raise FileFormatError(f"{source} was not written by riskfield: its header has no entry {_TREE!r}.")
    try:
        # Clones, because torch's kernels may round differently on memory that is not aligned as torch aligns its own.
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}
        digest = _digest(text, tensors)
    except Exception as error:  # whatever comes of a header that nobody has checked
        raise FileFormatError(f"{source} is damaged: {error}") from error
    document = _parse(text, source)
    _check_document(document, kind, source)  # before the digest: an older format may compute it in another way
    if header.get(_DIGEST) != digest:
        raise FileFormatError(f"{source} is damaged: its content does not match its digest.")
    return _tree_of(document, kind, source, names, tensors)


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    if not Path(path).is_file():
        raise FileNotFoundError(2, "No such file", os.fspath(path))
    return Path(path).read_bytes()


def _document(kind: str, tree: Mapping[str, Any], names: Registry, tensors: dict[str, Tensor]) -> dict[str, Any]:
    encoder = _Encoder(tensors, {kind: name for name, kind in names.items()})
    return {"format": _FORMAT, "kind": kind, "tree": encoder.mapping(tree, "")}


def _check_document(document: Mapping[str, Any], kind: str, source: str) -> None:
    if document.get("format") != _FORMAT:
        raise FileFormatError(f"{source} has format {document.get('format')!r}; this version reads format {_FORMAT}.")
    if document.get("kind") != kind:
        raise FileFormatError(f"{source} must hold a tree of kind {kind!r}. It holds {document.get('kind')!r}.")


def _tree_of(
    document: Mapping[str, Any], kind: str, source: str, names: Registry, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    _check_document(document, kind, source)
    try:
        tree = _Decoder(tensors, names).value(document.get("tree"), MAX_DEPTH)
    except _UnregisteredClass as error:
        raise FileFormatError(f"{source} {error}") from error
    except Exception as error:  # whatever comes of entries that nobody has checked
        raise FileFormatError(f"{source} is damaged: {error}") from error
    if not isinstance(tree, dict):
        raise FileFormatError(f"{source} is damaged: it holds no tree.")
    return tree


def _parse(text: str | bytes, source: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FileFormatError(f"{source} is damaged: {error}") from error
    except RecursionError:
        raise FileFormatError(f"{source} is damaged: it is nested more than {MAX_DEPTH} levels deep.") from None
    if not isinstance(found, dict):
        raise FileFormatError(f"{source} is damaged: its JSON is not an object.")
    return found


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of the JSON text and of the names, types, shapes and numbers of the tensors."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():  # torch does not view an empty tensor as bytes if its strides are odd
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Turns trees into JSON, and collects their tensors."""

    tensors: dict[str, Tensor]
    names: Mapping[type, str]

    def value(self, value: Any, name: str) -> Any:
        """`value` for JSON; `name` is its place in the tree."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            return {_TENSOR: self._keep(value, name)}
        if isinstance(value, np.ndarray):
            return self._array(value, name)
        if isinstance(value, list):
            return self._entries(value, name)
        if isinstance(value, tuple):
            return {_TUPLE: self._entries(value, name)}
        if isinstance(value, Mapping):
            return self.mapping(value, name)
        if isinstance(value, type) and value in self.names:
            return {_CLASS: self.names[value]}
        if dataclasses.is_dataclass(value) and type(value) in self.names:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return {_OBJECT: self.names[type(value)], "fields": self.mapping(fields, name)}
        hint = " Register your own dataclass with `riskfield.estimators.registry.register`." if self.names else ""
        raise TypeError(
            f"`{name}` must be made of plain values and riskfield's own objects to be saved without pickle. "
            f"Got {value!r}.{hint}"
        )

    def mapping(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        entries = {key: self.value(entry, f"{name}/{key}" if name else str(key)) for key, entry in value.items()}
        if all(isinstance(key, str) and not key.startswith("#") for key in entries):
            return entries
        return {_PAIRS: [[self.value(key, name), entry] for key, entry in entries.items()]}  # torch numbers parameters

    def _entries(self, values: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
        return [self.value(entry, f"{name}/{k}") for k, entry in enumerate(values)]

    def _array(self, array: np.ndarray[Any, Any], name: str) -> dict[str, Any]:
        kind = array.dtype.newbyteorder("<").str
        if array.dtype.kind in "UO":
            if array.dtype.kind == "U" and array.nbytes > _MAX_STRING_BYTES:
                raise ValueError(f"`{name}` must have at most {_MAX_STRING_BYTES} bytes. Got {array.nbytes}.")
            entries = [self.value(entry, name) for entry in array.ravel().tolist()]
            return {_ARRAY: entries, "dtype": array.dtype.kind, "shape": list(array.shape)}
        if kind not in _ARRAY_TYPES:
            raise TypeError(f"`{name}` must be an array of booleans, numbers, strings or objects. Got {array.dtype}.")
        return {_ARRAY: self._keep(torch.from_numpy(array.astype(kind, order="C")), name), "dtype": kind}

    def _keep(self, tensor: Tensor, name: str) -> str:
        while name in self.tensors:  # {"a": {"b": ...}} and {"a/b": ...}
            name += "'"
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """Turns JSON back into trees."""

    tensors: Mapping[str, Tensor]
    names: Registry

    def value(self, value: Any, depth: int) -> Any:
        """What `_Encoder.value` was given, at most `depth` levels deep."""
        if depth == 0:
            raise FileFormatError(f"it is nested more than {MAX_DEPTH} levels deep.")
        if isinstance(value, list):
            return [self.value(entry, depth - 1) for entry in value]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("#")), None)
        if tag is None:
            return {key: self.value(entry, depth - 1) for key, entry in value.items()}
        if tag == _TENSOR:
            return self._tensor(value[tag])
        if tag == _ARRAY:
            return self._array(value, depth)
        if tag == _TUPLE:
            return tuple(self._list(value[tag], depth))
        if tag == _PAIRS:
            return self._pairs(self._list(value[tag], depth))
        if tag == _CLASS:
            return self._named(value[tag])
        if tag == _OBJECT:
            return self._object(self._named(value[tag]), self.value(value.get("fields"), depth - 1))
        raise FileFormatError(f"this version does not know {tag!r}.")

    def _list(self, value: Any, depth: int) -> list[Any]:
        if not isinstance(value, list):
            raise FileFormatError(f"expected a list. Got {value!r:.80}.")
        return [self.value(entry, depth - 1) for entry in value]

    def _tensor(self, name: Any) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise FileFormatError(f"it has no tensor {name!r:.80}.")
        return self.tensors[name]

    def _array(self, value: dict[str, Any], depth: int) -> np.ndarray[Any, Any]:
        kind = value.get("dtype")
        if kind in ("U", "O"):
            entries, shape = self._list(value[_ARRAY], depth), value.get("shape")
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise FileFormatError(f"`shape` must be a list of integers. Got {shape!r:.80}.")
            if len(shape) > 32 or math.prod(shape) != len(entries):
                raise FileFormatError(f"an array of {len(entries)} entries cannot have shape {shape!r:.80}.")
            return _strings(entries).reshape(shape) if kind == "U" else _objects(entries).reshape(shape)
        if kind not in _ARRAY_TYPES:
            raise FileFormatError(f"arrays have the types {', '.join(_ARRAY_TYPES)}, U or O. Got {kind!r:.80}.")
        array = self._tensor(value[_ARRAY]).numpy()
        if array.dtype != np.dtype(kind):
            raise FileFormatError(f"an array of type {kind} is stored as {array.dtype}.")
        return array

    @staticmethod
    def _pairs(pairs: list[Any]) -> dict[Any, Any]:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise FileFormatError("the entries of a dict must be pairs.")
        try:
            return dict(pairs)
        except TypeError as error:  # a key that is a list, say
            raise FileFormatError(f"{error}.") from error

    def _named(self, name: Any) -> type:
        if not isinstance(name, str) or name not in self.names:
            if self.names and isinstance(name, str) and "." in name:  # the module and the class
                raise _UnregisteredClass(
                    f"names the class {name!r:.80}, which is not registered. If it is yours, import the module that "
                    "registers it first."
                )
            raise FileFormatError(f"a file of this kind may not name {name!r:.80}.")
        return self.names[name]

    @staticmethod
    def _object(kind: type, fields: Any) -> Any:
        if not dataclasses.is_dataclass(kind) or not isinstance(fields, dict):
            raise FileFormatError(f"{kind.__name__} cannot be made of {fields!r:.80}.")
        try:
            return kind(**fields)
        except Exception as error:  # whatever a constructor makes of arguments that nobody has checked
            raise FileFormatError(f"{kind.__name__}: {error}") from error


def _strings(entries: list[Any]) -> np.ndarray[Any, Any]:
    if not all(isinstance(entry, str) for entry in entries):
        raise FileFormatError("an array of strings holds something else.")
    width = max(map(len, entries), default=0)
    if 4 * width * len(entries) > _MAX_STRING_BYTES:
        raise FileFormatError(
            f"{len(entries)} strings of up to {width} characters would take more than {_MAX_STRING_BYTES} bytes."
        )
    return np.array(entries, dtype=str)


def _objects(entries: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(entries), dtype=object)
    for k, entry in enumerate(entries):  # one by one, because numpy would look into lists
        array[k] = entry
    return array
