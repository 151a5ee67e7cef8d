r"""Conditional models, which compute potentials from inputs with matrices or any network.

    theta_i = F u(y, i),        theta_c = G v(y, c)                                            (Domke 2013, section 8.1)

u and v are features of a variable and of a factor. F and G may be any module that maps its input to one row of
potentials per variable or per factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy import broadcast_shapes  # torch's imports sympy, which takes a second
from torch import Tensor, nn

from riskfield.graph.factor_graph import FactorGraph
from riskfield.models.sparse import RowLinear

Networks = nn.Module | Mapping[str, nn.Module]
Inputs = Tensor | Mapping[str, Tensor] | None


class Tables(nn.Module):
    """Learned potentials that do not depend on inputs: `count` tables of `shape`, initialised to 0.

    As the factor network of a `Conditional` model, `Tables(graph.num_factors, 2, 2)` has one table per factor, and
    `Tables(1, 2, 2)` has one table for all factors of a tied graph.

    Arguments:
        count: the number of tables.
        shape: the shape of a table, one integer per variable of a factor.
        dtype: the dtype of the parameters, by default float64.

    >>> import torch
    >>> from riskfield.models import Tables
    >>> Tables(1, 2, 2)().shape
    torch.Size([1, 2, 2])
    """

    def __init__(self, count: int, *shape: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.values = nn.Parameter(torch.zeros(count, *shape, dtype=dtype))

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Return the tables. The inputs are ignored."""
        return self.values


class Conditional(nn.Module):
    """Computes theta from inputs with one network for the variables and one for the factors.

    Arguments:
        nodes: a module that returns node potentials of shape (*batch, variable, state).
        factors: a module that returns factor potentials of shape (*batch, factor, *shape), or with the joint states of
            a factor in one axis. On a graph with tied tables it returns one row per table instead of one per factor.

    Both may be a dictionary {name: module} instead, for types of variables or factors with separate parameters, such as
    the horizontal and the vertical edges of a grid. The rows of the modules are concatenated in the order of the
    dictionary, which must be the order of the variables or factors of the graph (group by group if there are several
    groups).

    The inputs are a dictionary of tensors. A module gets the tensor of its name; the name is "nodes" or "factors" for a
    single module. A plain tensor is passed to every module. `Tables` need no input.

    >>> import torch
    >>> from riskfield import Conditional, grid
    >>> from riskfield.models import Tables
    >>> graph = grid(3, 4, num_states=2, tied=True)  # horizontal edges share a table, vertical edges too
    >>> model = Conditional(torch.nn.Linear(5, 2, dtype=torch.float64), Tables(2, 2, 2))
    >>> model(graph, {"nodes": torch.randn(10, 12, 5, dtype=torch.float64)}).shape
    torch.Size([10, 32])
    """

    def __init__(self, nodes: Networks, factors: Networks):
        super().__init__()
        self.nodes = _named(nodes, "nodes")
        self.factors = _named(factors, "factors")
        twice = sorted(set(self.nodes) & set(self.factors))
        if twice:
            raise ValueError(f"`nodes` and `factors` must have different names. Got {twice} in both.")

    def forward(self, graph: FactorGraph, inputs: Inputs) -> Tensor:
        """Theta of shape (*batch, theta)."""
        node_shapes = [(len(group.variables), group.num_states) for group in graph.node_groups]
        factor_shapes = [(group.num_tables, *group.shape) for group in graph.factor_groups]
        nodes = _join("nodes", _outputs(self.nodes, inputs), node_shapes)
        factors = _join("factors", _outputs(self.factors, inputs), factor_shapes)
        return graph.assemble(nodes, factors)


class LinearModel(Conditional):
    """theta_i = F u(y, i) and theta_c = G v(y, c), with matrices F and G that are initialised to 0.

    All variables have the same number of states, and all factors the same number of variables. The inputs are
    {"nodes": u, "factors": v}, of shapes (*batch, variable, feature) and (*batch, factor, feature), or `SparseRows`.
    For a constant term, include a feature of 1. F and G are `model.nodes["nodes"].weight` and
    `model.factors["factors"].weight`.

    Arguments:
        num_states: the number of states of every variable, at least 2.
        node_features: the length of u.
        factor_features: the length of v. A dictionary {type: length} gives every type of factor its own G; the inputs
            then have one tensor v per type, and the factors of the graph must be ordered by type.
        arity: the number of variables of a factor, by default 2.
        dtype: the dtype of the parameters, by default float64.

    >>> import torch
    >>> from riskfield import LinearModel, grid
    >>> model = LinearModel(2, node_features=3, factor_features={"horizontal": 1, "vertical": 1})
    >>> graph = grid(4, 4, num_states=2)
    >>> inputs = {"nodes": torch.ones(16, 3), "horizontal": torch.ones(12, 1), "vertical": torch.ones(12, 1)}
    >>> model(graph, {name: value.double() for name, value in inputs.items()}).shape
    torch.Size([128])
    """

    def __init__(
        self,
        num_states: int,
        node_features: int,
        factor_features: int | Mapping[str, int],
        *,
        arity: int = 2,
        dtype: torch.dtype = torch.float64,
    ):
        if not isinstance(num_states, int | np.integer) or isinstance(num_states, bool) or num_states < 2:
            raise ValueError(f"`num_states` must be an integer of at least 2. Got {num_states!r}.")
        types = factor_features if isinstance(factor_features, Mapping) else {"factors": factor_features}
        super().__init__(
            RowLinear(node_features, num_states, dtype),
            {name: RowLinear(length, num_states**arity, dtype) for name, length in types.items()},
        )


def _named(networks: Networks, name: str) -> nn.ModuleDict:
    if isinstance(networks, nn.Module):
        networks = {name: networks}
    if not isinstance(networks, Mapping) or not all(isinstance(network, nn.Module) for network in networks.values()):
        raise TypeError(f"`{name}` must be a torch module, or a dictionary of torch modules. Got {networks!r}.")
    return nn.ModuleDict(networks)


def _outputs(networks: nn.ModuleDict, inputs: Inputs) -> Iterable[tuple[str, Tensor]]:
    for name, network in networks.items():
        if isinstance(network, Tables):
            yield name, network()
            continue
        own = inputs.get(name) if isinstance(inputs, Mapping) else inputs
        if own is None:
            names = f"the keys {sorted(inputs)}" if isinstance(inputs, Mapping) else repr(inputs)
            raise ValueError(f'`inputs` must be a dictionary with a tensor "{name}", or one tensor. Got {names}.')
        yield name, network(own)


def _join(kind: str, outputs: Iterable[tuple[str, Tensor]], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Concatenate the outputs of the networks along their rows and split them into groups of `shapes` (row, *block)."""
    if not shapes:  # a chain of one variable has no factors, even if the model has networks for them
        return []
    groups: list[list[Tensor]] = [[] for _ in shapes]
    current, filled = 0, 0
    for name, output in outputs:
        while current < len(shapes) - 1 and filled == shapes[current][0]:
            current, filled = current + 1, 0
        rows, *block = shapes[current]
        if filled == rows and output.numel() > 0:  # an image of one row has no vertical edges
            raise ValueError(f'`{kind}`: the network "{name}" returned rows, but all {kind} have potentials already.')
        output = _blocks(f'`{kind}`: the network "{name}"', output, rows - filled, block)
        groups[current].append(output)
        filled += output.shape[-1 - len(block)]
    if current < len(shapes) - 1 or filled < shapes[-1][0]:
        raise ValueError(
            f"`{kind}`: the networks returned too few rows. The graph's groups have shapes {list(shapes)}."
        )
    return [_concatenate(parts, len(shape)) for parts, shape in zip(groups, shapes, strict=True)]


def _blocks(who: str, output: Tensor, most: int, block: list[int]) -> Tensor:
    """Return `output` with validated axes (*batch, row, *block)."""
    size = math.prod(block)
    if output.shape[-len(block) :] != torch.Size(block) and output.shape[-1:] == torch.Size([size]):
        output = output.unflatten(-1, block)
    if output.ndim <= len(block) or output.shape[-len(block) :] != torch.Size(block):
        wanted = f"(*batch, row, {', '.join(map(str, block))})"
        raise ValueError(f"{who} must return a tensor of shape {wanted}. Got {tuple(output.shape)}.")
    if output.shape[-1 - len(block)] > most:
        raise ValueError(f"{who} must return at most {most} rows. Got shape {tuple(output.shape)}.")
    return output


def _concatenate(parts: list[Tensor], dims: int) -> Tensor:
    batch = broadcast_shapes(*(part.shape[:-dims] for part in parts))
    return torch.cat([part.expand(*batch, *part.shape[-dims:]) for part in parts], dim=-dims)
