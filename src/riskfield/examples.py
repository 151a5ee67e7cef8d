"""Labelled examples on one graph, and data sets of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from riskfield.graph.builders import Union
from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples that share one graph.

    Arguments:
        graph: the shared structure.
        labels: the true states, integers of shape (n, variable); -1 for hidden variables.
        inputs: the inputs of the model: a tensor whose first axis is the example, or a dict, tuple, list or dataclass
            of such tensors. None for a model without inputs.
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
            if not (torch.isfinite(self.weights).all() and (self.weights >= 0).all()):
                raise ValueError("`weights` must be finite and not negative.")
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
        chosen = indices if isinstance(indices, slice) else torch.as_tensor(indices, dtype=torch.int64)
        return self._mapped(lambda tensor: tensor[chosen if isinstance(chosen, slice) else chosen.to(tensor.device)])

    def to(self, device: torch.device | str) -> Examples:
        """Return the same examples with all tensors on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

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
    numbers = torch.as_tensor(indices, dtype=torch.int64)
    for part in parts:
        inside = (numbers >= start) & (numbers < start + len(part))
        taken.append(part.select(numbers[inside] - start))
        start += len(part)
    return tuple(taken)


def join(parts: Sequence[Examples]) -> Examples:
    """Join examples on different graphs into one example, so that inference runs on all of them at once.

    Variables are numbered part by part. The inputs of variables and of factors are concatenated along their second
    axis, as models with one input row per variable and per factor expect. Every part must have one example without
    weights, all variables the same number of states, and all factors the same shape without tied tables. Losses that
    are sums over variables do not change. Losses of whole examples, such as `FMeasure`, treat all parts as one example.

    >>> from riskfield import Examples, chain
    >>> parts = [Examples(chain(k, 2), torch.ones(1, k, dtype=torch.int64), torch.randn(1, k, 5)) for k in (3, 4)]
    >>> whole = join(parts)
    >>> whole.graph.num_variables, whole.inputs.shape
    (7, torch.Size([1, 7, 5]))
    """
    if not parts:
        raise ValueError("`parts` must hold at least one part. Got none.")
    groups = {(tuple(group.shape), group.tied) for part in parts for group in part.graph.factor_groups}
    states = {int(count) for part in parts for count in part.graph.num_states}
    if len(groups) > 1 or len(states) > 1 or any(tied for _, tied in groups):
        raise ValueError("`parts` must have variables of one number of states and factors of one shape, none tied.")
    if any(len(part) != 1 or part.weights is not None for part in parts):
        raise ValueError("`parts` must have one example each, without `weights`.")
    types = [key for key in parts[0].inputs if key != "nodes"] if isinstance(parts[0].inputs, Mapping) else []
    if len(types) > 1:
        # Factors are numbered part by part, but a model with several factor types expects them type by type.
        raise ValueError(
            f"`parts` must have the inputs of all factors in one tensor. Got {', '.join(map(str, types))}."
        )

    def joined(name: str, missing: Callable[[Examples], Tensor]) -> Tensor | None:
        if all(getattr(part, name) is None for part in parts):
            return None
        own = [getattr(part, name) for part in parts]
        return torch.cat([missing(part) if o is None else o for part, o in zip(parts, own, strict=True)], 1)

    return Examples(
        Union([part.graph for part in parts]).graph,
        torch.cat([part.labels for part in parts], 1),
        _joined_inputs([part.inputs for part in parts]),
        joined("evidence", lambda part: torch.full_like(part.labels, -1)),
        joined("mask", lambda part: part.asked & (part.labels >= 0)),
    )


def _joined_inputs(inputs: Sequence[Any]) -> Any:
    first = inputs[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: _joined_inputs([one[key] for one in inputs]) for key in first}
    if isinstance(first, Tensor):
        return torch.cat(list(inputs), 1)
    raise TypeError(f"`parts` must have tensors or dictionaries of tensors for inputs. Got {type(first).__name__}.")


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


def _map(value: Any, function: Callable[[Tensor], Tensor], name: str) -> Any:
    """Apply `function` to every tensor in a nest of dicts, tuples, lists and dataclasses."""
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
