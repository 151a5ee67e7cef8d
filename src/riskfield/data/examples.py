"""Labelled examples on one graph, and data sets of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples that share one graph.

    Arguments:
        graph: the structure they share.
        labels: the true states, integers of shape (n, variable); -1 marks a hidden variable.
        inputs: what the model reads: a tensor whose first axis counts the examples, or a dict, tuple, list or dataclass
            of such tensors. None for a model without input.
        evidence: states that are observed at prediction time too, of shape (n, variable); -1 for all others.
        mask: which variables count in the loss, booleans of shape (n, variable). By default those with a label that
            are not evidence.
        weights: how much each example counts, of shape (n,). By default 1.

    >>> from riskfield import chain
    >>> examples = Examples(chain(3, num_states=2), labels=torch.tensor([[0, 1, 1], [1, 0, -1]]))
    >>> len(examples), examples.select([1]).labels
    (2, tensor([[ 1,  0, -1]]))
    """

    graph: FactorGraph
    labels: Tensor
    inputs: Any = None
    evidence: Tensor | None = None
    mask: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.graph, FactorGraph):
            raise TypeError(f"`graph` must be a FactorGraph. Got {type(self.graph).__name__}.")
        object.__setattr__(self, "labels", self.graph.check_states(self.labels, "labels", allow_unobserved=True))
        shape = tuple(self.labels.shape)
        if len(shape) != 2:
            raise ValueError(f"`labels` must have shape (n, {self.graph.num_variables}). Got {shape}.")
        if self.evidence is not None:
            object.__setattr__(
                self, "evidence", self.graph.check_states(self.evidence, "evidence", allow_unobserved=True)
            )
            _check_shape("evidence", self.evidence, shape)
        if self.mask is not None:
            object.__setattr__(self, "mask", torch.as_tensor(self.mask))
            _check_shape("mask", self.mask, shape)
            if self.mask.dtype != torch.bool:
                raise TypeError(f"`mask` must be booleans. Got {self.mask.dtype}.")
        if self.weights is not None:
            object.__setattr__(self, "weights", torch.as_tensor(self.weights))
            _check_shape("weights", self.weights, shape[:1])
            if not (torch.isfinite(self.weights).all() and (self.weights >= 0).all()):
                raise ValueError("`weights` must be finite and not negative.")
        _map(self.inputs, self._check_input, "inputs")

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.labels)

    def select(self, indices: Tensor | Sequence[int] | slice) -> Examples:
        """The examples with the given indices, in that order."""
        chosen = indices if isinstance(indices, slice) else torch.as_tensor(indices, dtype=torch.int64)
        return self._mapped(lambda tensor: tensor[chosen if isinstance(chosen, slice) else chosen.to(tensor.device)])

    def to(self, device: torch.device | str) -> Examples:
        """The same examples with all tensors on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Examples:
        mapped = copy.copy(self)  # what was checked need not be checked again
        for name in ("labels", "inputs", "evidence", "mask", "weights"):
            object.__setattr__(mapped, name, _map(getattr(self, name), function, name))
        return mapped

    def _check_input(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != len(self):
            raise ValueError(
                f"`inputs` must have one entry per example, {len(self)}, on the first axis. Got {tuple(tensor.shape)}."
            )
        return tensor


DataSet: TypeAlias = Examples | Sequence[Examples]


def blocks(data: DataSet, name: str = "data") -> tuple[Examples, ...]:
    """A data set as a tuple of `Examples`, one per graph."""
    parts = (data,) if isinstance(data, Examples) else tuple(data)
    for part in parts:
        if not isinstance(part, Examples):
            raise TypeError(f"`{name}` must be `Examples` or a sequence of them. Got {type(part).__name__}.")
    if sum(map(len, parts)) == 0:
        raise ValueError(f"`{name}` must hold at least one example.")
    return parts


def take(data: DataSet, indices: Tensor | Sequence[int]) -> tuple[Examples, ...]:
    """The examples of a data set with the given numbers, counted through all its blocks.

    Blocks keep their order, and examples that of `indices` within their block; a block none is taken from stays, empty.

    >>> from riskfield import chain
    >>> data = [Examples(chain(k, 2), torch.zeros(2, k, dtype=torch.int64)) for k in (3, 4)]
    >>> [len(block) for block in take(data, [3, 0, 2])]
    [1, 2]
    """
    parts, start, taken = blocks(data), 0, []
    numbers = torch.as_tensor(indices, dtype=torch.int64)
    for part in parts:
        inside = (numbers >= start) & (numbers < start + len(part))
        taken.append(part.select(numbers[inside] - start))
        start += len(part)
    return tuple(taken)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape}, as `labels` say. Got {tuple(tensor.shape)}.")


def _map(value: Any, function: Callable[[Tensor], Tensor], name: str) -> Any:
    """`function` of every tensor in a nest of dicts, tuples, lists and dataclasses."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map(entry, function, name) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(_map(entry, function, name) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(_map(entry, function, name) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _map(getattr(value, f.name), function, name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    raise TypeError(
        f"`{name}` must be a tensor, or a dict, tuple, list or dataclass of tensors. Got {type(value).__name__}."
    )
