"""Labelled examples on one graph, and data sets of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import IntArray
from riskfield.graph.factor_graph import FactorGraph
from riskfield.models.sparse import SparseRows


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples that share one graph.

    Arguments:
        graph: the shared structure.
        labels: the true states, integers of shape (n, variable); -1 for hidden variables.
        inputs: the inputs of the model: a tensor whose first axis is the example, `SparseRows`, or a dict, tuple, list
            or dataclass of such tensors. None for a model without inputs.
        evidence: the states of observed variables, of shape (n, variable); -1 for all others. They are also observed at
            prediction time.
        mask: which variables are targets of the loss, booleans of shape (n, variable). By default those that have a
            label and are not observed.
        weights: the weights of the examples, of shape (n,). By default 1.

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
            wrong = ~(torch.isfinite(self.weights) & (self.weights >= 0))
            if wrong.any():
                raise ValueError(f"`weights` must be finite and not negative. Got {self.weights[wrong][0].item()}.")
        _map(self.inputs, self._check_input, "inputs")

    @classmethod
    def conditional(
        cls,
        graph: FactorGraph,
        states: Tensor,
        *,
        observed: Tensor,
        outputs: Tensor,
        inputs: Any = None,
        weights: Tensor | None = None,
    ) -> Examples:
        """Make examples from states and from the roles of variables: observed, outputs, or else hidden.

        Arguments:
            graph: the shared structure.
            states: integers of shape (n, variable); -1 if unknown. Only hidden variables, and outputs of examples to
                predict, may be unknown.
            observed: booleans of shape (n, variable), or (variable,) if all examples have the same roles.
            outputs: the variables to predict, booleans of the same shapes. They must not be observed.
            inputs, weights: as for `Examples`.

        >>> from riskfield import Examples, chain
        >>> states = torch.tensor([[0, 1, 1], [1, 0, 1]])
        >>> observed = torch.tensor([[True, False, False], [False, False, True]])
        >>> outputs = torch.tensor([[False, False, True], [True, True, False]])
        >>> examples = Examples.conditional(chain(3, num_states=2), states, observed=observed, outputs=outputs)
        >>> examples.labels.tolist(), examples.evidence.tolist()
        ([[-1, -1, 1], [1, 0, -1]], [[0, -1, -1], [-1, -1, 1]])
        """
        states = graph.check_states(states, "states", allow_unobserved=True)
        given, asked = (_role(name, role, states) for name, role in (("observed", observed), ("outputs", outputs)))
        if (given & asked).any():
            raise ValueError("`outputs` must not be among the `observed` variables of the same example.")
        if (given & (states < 0)).any():
            raise ValueError("`states` must not be -1 where `observed` is True.")
        labels, evidence = torch.where(asked, states, -1), torch.where(given, states, -1)
        # A mask that selects unknown labels cannot be used by a loss, but tells `predict` which variables to predict.
        unknown = bool((asked & (states < 0)).any())
        return cls(graph, labels, inputs, evidence, asked if unknown else None, weights)

    @property
    def asked(self) -> Tensor:
        """Which variables are to be predicted, of shape (n, variable).

        With a mask, these are the variables it selects. Without a mask, they are the unobserved variables with a label,
        or all unobserved variables of an example that has no labels.
        """
        given = torch.zeros_like(self.labels, dtype=torch.bool) if self.evidence is None else self.evidence >= 0
        if self.mask is not None:
            return self.mask & ~given
        labelled = self.labels >= 0
        return torch.where(labelled.any(-1, keepdim=True), labelled, True) & ~given

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.labels)

    def select(self, indices: Tensor | Sequence[int] | slice) -> Examples:
        """Return the examples with the given indices, in that order."""
        chosen = indices if isinstance(indices, slice) else _as_indices(indices)
        return self._mapped(lambda tensor: tensor[chosen if isinstance(chosen, slice) else chosen.to(tensor.device)])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Examples:
        """Return the same examples with all tensors on `device`, and all floats in `dtype`."""

        def moved(values: Any) -> Any:
            if isinstance(values, SparseRows):  # they follow the dtype of the weights they are multiplied with
                return values if device is None else values.to(device)
            return values.to(device, dtype if values.is_floating_point() else None)

        return self._mapped(moved)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Examples:
        mapped = copy.copy(self)  # skips a second validation
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
    """Return a data set as a tuple of `Examples`, one per graph."""
    parts = (data,) if isinstance(data, Examples) else tuple(data)
    for part in parts:
        if not isinstance(part, Examples):
            raise TypeError(f"`{name}` must be `Examples` or a sequence of them. Got {type(part).__name__}.")
    if sum(map(len, parts)) == 0:
        raise ValueError(f"`{name}` must hold at least one example.")
    return parts


def take(data: DataSet, indices: Tensor | Sequence[int]) -> tuple[Examples, ...]:
    """Return the examples of a data set with the given indices. Indices run through all blocks of the data set.

    Blocks keep their order. Within a block, examples have the order of `indices`. A block may become empty.

    >>> from riskfield import chain
    >>> data = [Examples(chain(k, 2), torch.zeros(2, k, dtype=torch.int64)) for k in (3, 4)]
    >>> [len(block) for block in take(data, [3, 0, 2])]
    [1, 2]
    """
    parts, start, taken = blocks(data), 0, []
    numbers, count = _as_indices(indices), sum(map(len, parts))
    if ((numbers < 0) | (numbers >= count)).any():
        wrong = int(numbers[(numbers < 0) | (numbers >= count)][0])
        raise ValueError(f"`indices` must lie in 0..{count - 1}. Got {wrong}.")
    for part in parts:
        inside = (numbers >= start) & (numbers < start + len(part))
        own = numbers[inside] - start
        whole = len(own) == len(part) and bool((own == torch.arange(len(part))).all())
        taken.append(part if whole else part.select(own))  # no copy of what may be on the disk
        start += len(part)
    return tuple(taken)


def join(parts: Sequence[Examples]) -> Examples:
    """Join all examples of `parts` into one example on a disjoint union, so that inference runs on all at once.

    Variables are numbered part by part, and example by example. The inputs are those of a model with one row per
    variable and per table, such as `LinearModel`: a tensor "nodes", and one tensor for each type of factors in the
    order of the types. A type whose rows are all equal has one table in the union. All variables must have the same
    number of states, all factors the same shape, and all examples the same weight. Losses that are sums over variables
    or factors do not change. Losses of whole examples, such as `FMeasure`, treat the union as one example.

    >>> from riskfield import Examples, chain
    >>> parts = [Examples(chain(k, 2), torch.ones(2, k, dtype=torch.int64), torch.randn(2, k, 5)) for k in (3, 4)]
    >>> whole = join(parts)
    >>> whole.graph.num_variables, whole.inputs.shape
    (14, torch.Size([1, 14, 5]))
    """
    if not parts:
        raise ValueError("`parts` must hold at least one part. Got none.")
    shapes = {group.shape for part in parts for group in part.graph.factor_groups}
    states = {int(count) for part in parts for count in np.unique(part.graph.num_states)}
    if len(shapes) > 1 or len(states) != 1:
        raise ValueError("`parts` must have variables with the same number of states, and factors of the same shape.")
    weights = torch.cat([torch.ones(len(part)) if part.weights is None else part.weights for part in parts])
    if (weights != weights[0]).any():
        raise ValueError("`parts` must have examples of equal weight.")
    inputs = [part.inputs if isinstance(part.inputs, Mapping) else {"nodes": part.inputs} for part in parts]
    types = [name for name in inputs[0] if name != "nodes"]
    if any([name for name in own if name != "nodes"] != types for own in inputs):
        raise ValueError(f"`parts` must all have the same types of inputs. Not all have {types}, as the first has.")
    joined, tied = {name: _joined([own[name] for own in inputs]) for name in inputs[0]}, []
    for name in types:
        rows = joined[name]
        tied.append(isinstance(rows, Tensor) and rows.shape[1] > 0 and bool((rows == rows[:, :1]).all()))
        if tied[-1]:
            joined[name] = rows[:, :1]

    def labels(name: str, missing: Callable[[Examples], Tensor]) -> Tensor | None:
        own = [getattr(part, name) for part in parts]
        if all(values is None for values in own):
            return None
        filled = [missing(part) if values is None else values for part, values in zip(parts, own, strict=True)]
        return torch.cat([values.reshape(1, -1) for values in filled], 1)

    whole = labels("labels", lambda part: part.labels)
    assert whole is not None
    return Examples(
        _disjoint_union(parts, states.pop(), [[own[name].shape[1] for name in types] for own in inputs], tied),
        whole,
        joined if isinstance(parts[0].inputs, Mapping) else joined["nodes"],
        labels("evidence", lambda part: torch.full_like(part.labels, -1)),
        labels("mask", lambda part: part.asked & (part.labels >= 0)),
        None if all(part.weights is None for part in parts) else weights[:1],
    )


def _disjoint_union(
    parts: Sequence[Examples], num_states: int, rows: Sequence[Sequence[int]], tied: Sequence[bool]
) -> FactorGraph:
    """The union of a copy of each part's graph for each of its examples, with the factors ordered by type.

    Arguments:
        parts: the examples.
        num_states: the number of states of every variable.
        rows: how many tables of each type one example has, for each part. Without types, all tables are of one type.
        tied: which types have one table for all their factors.
    """
    types = max(len(tied), 1)
    scopes: list[list[IntArray]] = [[] for _ in range(types)]
    tables: list[list[IntArray]] = [[] for _ in range(types)]
    num_variables, num_tables = 0, [0] * types
    for part, own in zip(parts, rows, strict=True):
        copies = np.arange(len(part))[:, None]
        for group in part.graph.factor_groups:  # one at most
            counts = list(own) or [group.num_tables]
            if sum(counts) != group.num_tables:
                raise ValueError(
                    f"`parts` must have a row of inputs for each of {group.num_tables} tables. Got {sum(counts)}."
                )
            ends = np.cumsum(counts)
            type_of = np.searchsorted(ends, group.tables, side="right")
            for number, (end, count) in enumerate(zip(ends, counts, strict=True)):
                factors = np.flatnonzero(type_of == number)
                variables = group.variables[factors] + (num_variables + part.graph.num_variables * copies)[..., None]
                scopes[number].append(variables.reshape(-1, group.arity))
                numbers = group.tables[factors] - (end - count) + num_tables[number] + count * copies
                tables[number].append(numbers.reshape(-1))
                num_tables[number] += count * len(part)
        num_variables += len(part) * part.graph.num_variables
    arity = max((own.shape[1] for of_type in scopes for own in of_type), default=1)
    first, numbers = 0, [np.empty(0, np.int64)]
    for number, of_type in enumerate(tables):
        joined = np.concatenate([*of_type, np.empty(0, np.int64)])
        numbers.append(first + (np.zeros_like(joined) if tied and tied[number] else joined))
        first += 1 if tied and tied[number] else num_tables[number]
    joined_scopes = np.concatenate([np.empty((0, arity), np.int64), *(own for of_type in scopes for own in of_type)])
    return FactorGraph(np.full(num_variables, num_states), joined_scopes, tables=np.concatenate(numbers))


def _joined(inputs: Sequence[Any]) -> Any:
    """The rows of all examples of all parts as those of one example."""
    first = inputs[0]
    if first is None:
        return None
    if isinstance(first, SparseRows):
        return SparseRows.concatenated(inputs)
    if isinstance(first, Tensor):
        return torch.cat([own.reshape(1, -1, *own.shape[2:]) for own in inputs], 1)
    raise TypeError(f"`parts` must have tensors or dictionaries of tensors for inputs. Got {type(first).__name__}.")


def _as_indices(indices: Tensor | Sequence[int]) -> Tensor:
    """Numbers of examples. A mask would pass for the numbers 0 and 1."""
    numbers = torch.as_tensor(indices)
    if numbers.numel() and (numbers.dtype == torch.bool or numbers.is_floating_point()):
        raise TypeError(f"`indices` must be integers. Got {numbers.dtype}.")
    return numbers.long()


def _role(name: str, role: Tensor, states: Tensor) -> Tensor:
    role = torch.as_tensor(role)
    if role.dtype != torch.bool or role.shape not in (states.shape, states.shape[-1:]):
        raise ValueError(
            f"`{name}` must be booleans of shape {tuple(states.shape)} or {tuple(states.shape[-1:])}. "
            f"Got {tuple(role.shape)} of {role.dtype}."
        )
    return role.expand(states.shape)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape} to match `labels`. Got {tuple(tensor.shape)}.")


def _map(value: Any, function: Callable[[Any], Any], name: str) -> Any:
    """Apply `function` to every tensor in a nest of dicts, tuples, lists and dataclasses."""
    if value is None:
        return None
    if isinstance(value, Tensor | SparseRows):  # sparse rows have the indexing of a tensor
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
