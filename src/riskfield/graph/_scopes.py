"""Checks of the variables, factors and tables that a caller passes, and their conversion to arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


def frozen(array: npt.NDArray[np.integer]) -> IntArray:
    out: IntArray = np.ascontiguousarray(array, dtype=np.int64)
    out.setflags(write=False)
    return out


def integers(values: object, name: str) -> npt.NDArray[np.integer]:
    """`values` as an array of integers, checked. Empty input of any type is allowed."""
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must hold integers. Got {array.dtype}.")
    return array


def checked_states(num_states: object) -> IntArray:
    array = integers(num_states, "num_states")
    if array.ndim != 1:
        raise ValueError(f"`num_states` must be one-dimensional. Got shape {array.shape}.")
    if (array < 1).any():
        variable = int(np.flatnonzero(array < 1)[0])
        raise ValueError(f"`num_states` must be at least 1. Got {array[variable]} for variable {variable}.")
    return frozen(array.copy())  # a copy, because the caller may change the original


@dataclass(frozen=True, eq=False)
class ScopeBlock:
    """Factors of one arity: their numbers, of shape (factor,), and their variables, of shape (factor, arity)."""

    numbers: IntArray
    variables: IntArray


def scope_blocks(factors: object, num_variables: int) -> list[ScopeBlock]:
    """The factors, checked, in blocks of equal arity."""
    if isinstance(factors, Mapping | str):
        raise ValueError(f"`factors` must be a sequence of tuples of variables. Got {type(factors).__name__}.")
    if isinstance(factors, np.ndarray):
        blocks = _array_blocks([factors])
    else:
        items = list(factors)  # type: ignore[call-overload]
        if items and all(isinstance(item, np.ndarray) and item.ndim == 2 for item in items):
            blocks = _array_blocks(items)
        else:
            blocks = _tuple_blocks(items)
    for block in blocks:
        _check_scopes(block, num_variables)
    return blocks


def _array_blocks(arrays: list[npt.NDArray[np.integer]]) -> list[ScopeBlock]:
    blocks, first = [], 0
    for given in arrays:
        array = integers(given, "factors")
        if array.size == 0 and (array.ndim < 2 or len(array) == 0):
            continue
        if array.ndim != 2 or array.shape[1] == 0:
            raise ValueError(f"`factors` must have shape (factors, arity) with arity at least 1. Got {array.shape}.")
        numbers = np.arange(first, first + len(array))
        blocks.append(ScopeBlock(numbers, np.ascontiguousarray(array, dtype=np.int64)))
        first += len(array)
    return blocks


def _tuple_blocks(items: list[object]) -> list[ScopeBlock]:
    by_arity: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}
    for number, item in enumerate(items):
        try:
            scope = tuple(int(v) for v in item)  # type: ignore[attr-defined]
            whole = all(int(v) == v for v in item)  # type: ignore[attr-defined]
        except TypeError:
            raise ValueError(f"`factors[{number}]` must be a tuple of variables. Got {item!r}.") from None
        if not scope or not whole:
            raise ValueError(f"`factors[{number}]` must name one or more variables by integers. Got {item!r}.")
        numbers, scopes = by_arity.setdefault(len(scope), ([], []))
        numbers.append(number)
        scopes.append(scope)
    return [ScopeBlock(np.array(n), np.array(scopes, dtype=np.int64)) for n, scopes in by_arity.values()]


def _check_scopes(block: ScopeBlock, num_variables: int) -> None:
    variables = block.variables
    bad = ((variables < 0) | (variables >= num_variables)).any(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        named = tuple(map(int, variables[row]))
        raise ValueError(f"`factors[{block.numbers[row]}]` must name variables in 0..{num_variables - 1}. Got {named}.")
    ordered = np.sort(variables, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if twice.any():
        row = int(np.flatnonzero(twice)[0])
        named = tuple(map(int, variables[row]))
        raise ValueError(f"`factors[{block.numbers[row]}]` names a variable twice: {named}.")


def checked_tables(tables: object, num_factors: int) -> IntArray | None:
    if tables is None:
        return None
    array = integers(tables, "tables")
    if array.shape != (num_factors,):
        raise ValueError(f"`tables` must hold one integer per factor ({num_factors}). Got shape {array.shape}.")
    return array.astype(np.int64)


def check_tied_shapes(
    groups: list[tuple[tuple[int, ...], list[tuple[IntArray, IntArray]]]], table_ids: IntArray
) -> None:
    owner: dict[int, tuple[int, ...]] = {}
    for shape, pieces in groups:
        for table in np.unique(np.concatenate([table_ids[numbers] for numbers, _ in pieces])):
            if owner.setdefault(int(table), shape) != shape:
                raise ValueError(
                    f"`tables` must tie factors of one shape. Table {table} has {owner[int(table)]} and {shape}."
                )


def checked_names(names: Iterable[str] | None, num_variables: int) -> dict[str, int]:
    """The number of each name; empty without names."""
    given = [] if names is None else list(names)
    if names is not None and len(given) != num_variables:
        raise ValueError(f"`names` must hold one name per variable ({num_variables}). Got {len(given)}.")
    numbers: dict[str, int] = {}
    for number, name in enumerate(given):
        if not isinstance(name, str):
            raise TypeError(f"`names` must hold strings. Got {name!r} for variable {number}.")
        if numbers.setdefault(name, number) != number:
            raise ValueError(f"`names` must be distinct. Variables {numbers[name]} and {number} are both {name!r}.")
    return numbers


def index_tensor(array: npt.NDArray[np.number], device: torch.device | str = "cpu") -> Tensor:
    """A copy of an index array as a tensor."""
    return torch.tensor(array, device=device)


def check_positive(name: str, value: object) -> int:
    """Return `value`, or raise unless it is a positive integer."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer. Got {value!r}.")
    return int(value)
