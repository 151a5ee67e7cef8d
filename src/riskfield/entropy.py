r"""Entropy approximations, defined by counting numbers.

    H(mu) = sum_c c_c H(mu_c) + sum_i c_i H(mu_i),        c^_i = c_i + sum_{c containing i} c_c

Inference maximises theta . mu + H(mu) over the local polytope; message passing needs only c_c and c^_i. The conditions
c_c > 0 and c^_i > 0 (Domke 2010, eq. 16) keep the maximiser in the interior of the polytope. They are checked here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import breadth_first_order

__all__ = [
    "TRW",
    "AbstractEntropy",
    "Bethe",
    "Counting",
    "CountingNumbers",
    "spanning_tree_rho",
]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Counting:
    """The counting numbers of an entropy on one graph: float64 tensors on the CPU."""

    factor: Tensor  # (factor,)    c_c
    node_total: Tensor  # (variable,)  c^_i
    # Whether they were made from plain numbers, so that no derivative can reach them.
    constant: bool = field(default=False, kw_only=True)

    def node(self, graph: FactorGraph) -> Tensor:
        """c_i, of shape (variable,)."""
        return self.node_total - _sum_at_variables(graph, self.factor)

    def value(self, graph: FactorGraph, mu: Tensor) -> Tensor:
        """H(mu), of shape (*batch)."""
        node = self.node(graph).to(mu)
        total = mu.new_zeros(mu.shape[:-1])
        for node_group, view in zip(graph.node_groups, graph.node_views(mu), strict=True):
            weight = node[index_tensor(node_group.variables, mu.device)]
            total = total + negative_xlogx(view).sum(-1) @ weight
        for group, view in zip(graph.factor_groups, graph.factor_views(mu), strict=True):
            weight = self.factor[index_tensor(group.factors)].to(mu)
            total = total + negative_xlogx(view.flatten(-group.arity)).sum(-1) @ weight
        return total


class AbstractEntropy(ABC):
    """A rule that assigns counting numbers to the factors and variables of a graph."""

    @abstractmethod
    def counting(self, graph: FactorGraph) -> Counting:
        """Return the validated counting numbers for `graph`."""

    def is_concave(self, graph: FactorGraph) -> bool:
        r"""Whether the entropy is concave on the local polytope, by the conditions of Heskes (2006).

        They require c_ci >= 0 with sum_{i in c} c_ci <= c_c and -c_i <= sum_{c containing i} c_ci. A linear program
        decides whether such c_ci exist. The conditions are sufficient: True proves concavity, False proves nothing.

        >>> from riskfield import Bethe, TRW, chain, grid
        >>> Bethe().is_concave(chain(5, 2)), Bethe().is_concave(grid(3, 3, 2)), TRW(0.5).is_concave(grid(3, 3, 2))
        (True, False, True)
        """
        return self.concave_shares(graph) is not None

    def concave_shares(self, graph: FactorGraph) -> list[Tensor] | None:
        """The numbers c_ci that prove the entropy concave, or None: for each factor group of shape (factor, slot)."""
        counting = self.counting(graph)
        factor = counting.factor.detach().numpy()
        deficit = -counting.node(graph).detach().numpy()
        for guess in (_equal_shares, _parent_shares):
            shares = guess(graph, factor)
            gained = np.zeros(graph.num_variables)
            for group, share in zip(graph.factor_groups, shares, strict=True):
                np.add.at(gained, group.variables, share)
            if (gained >= deficit).all():
                break
        else:
            found = _shares_by_program(graph, factor, deficit)
            if found is None:
                return None
            shares = found
        return [torch.from_numpy(share) for share in shares]


@dataclass(frozen=True)
class Bethe(AbstractEntropy):
    """c_c = 1, c^_i = 1: loopy belief propagation. Exact on trees; concave if each component has at most one loop."""

    def counting(self, graph: FactorGraph) -> Counting:
        """Return ones."""
        return _kept(graph, "Bethe", lambda: _checked(torch.ones(graph.num_factors, dtype=torch.float64), _ones(graph)))


@dataclass(frozen=True, eq=False)
class TRW(AbstractEntropy):
    """c_c = rho_c, c^_i = 1: the tree-reweighted entropy (Wainwright, Jaakkola & Willsky 2005).

    Arguments:
        rho: the appearance probabilities of the factors: one number for all, or a tensor with one number per factor.
            The log-partition value is an upper bound if the probabilities come from a distribution over spanning trees
            (`spanning_tree_rho`) or forests. For example, 1/2 is valid on a 4-connected grid: take all rows, or all
            columns. Single-variable factors have no mutual information, so a single number does not apply to them:
            they have rho 1.

    Raises:
        ValueError: on use, if a rho is not above 0, or if the length of the tensor is not the number of factors.
    """

    rho: float | Tensor = 0.5

    def __post_init__(self) -> None:
        _check_numbers("rho", self.rho)

    def counting(self, graph: FactorGraph) -> Counting:
        """Return rho for every factor and c^_i = 1."""
        if isinstance(self.rho, float | int):
            return _kept(graph, ("TRW", self.rho), lambda: self._counting(graph))
        return self._counting(graph)

    def _counting(self, graph: FactorGraph) -> Counting:
        scalar = torch.as_tensor(self.rho, dtype=torch.float64, device="cpu")
        if scalar.ndim:
            rho = scalar
            _check_length("rho", rho, graph.num_factors)
        else:
            unary = torch.zeros(graph.num_factors, dtype=torch.bool)
            for group in graph.factor_groups:
                unary[index_tensor(group.factors)] = group.arity == 1
            rho = torch.where(unary, torch.ones_like(scalar), scalar)
            if not (scalar > 0 and torch.isfinite(scalar)):
                raise ValueError(f"`rho` must be above 0 and finite. Got {float(scalar)}.")
        return _checked(rho, _ones(graph), name="rho")


@dataclass(frozen=True, eq=False)
class CountingNumbers(AbstractEntropy):
    """Any counting numbers: c_c of factors and c_i of variables.

    Arguments:
        factor: c_c, one number for all factors or a tensor with one number per factor.
        node: c_i, one number for all variables or a tensor with one number per variable.

    Raises:
        ValueError: on use, if c_c > 0 or c_i + sum_{c containing i} c_c > 0 fails anywhere.
    """

    factor: float | Tensor
    node: float | Tensor

    def __post_init__(self) -> None:
        _check_numbers("factor", self.factor)
        _check_numbers("node", self.node)

    def counting(self, graph: FactorGraph) -> Counting:
        """Return the given c_c, and c^_i = c_i + sum of c_c."""
        if isinstance(self.factor, float | int) and isinstance(self.node, float | int):
            return _kept(graph, ("CountingNumbers", self.factor, self.node), lambda: self._counting(graph))
        return self._counting(graph)

    def _counting(self, graph: FactorGraph) -> Counting:
        factor = torch.as_tensor(self.factor, dtype=torch.float64, device="cpu")
        node = torch.as_tensor(self.node, dtype=torch.float64, device="cpu")
        factor = factor.expand(graph.num_factors) if factor.ndim == 0 else factor
        node = node.expand(graph.num_variables) if node.ndim == 0 else node
        _check_length("factor", factor, graph.num_factors)
        _check_length("node", node, graph.num_variables)
        return _checked(factor, node + _sum_at_variables(graph, factor), name="factor")


def _check_numbers(name: str, value: object) -> None:
    """Refuse what is neither a number nor an array of numbers."""
    try:
        torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"`{name}` must be a number or a tensor of numbers. Got {value!r}.") from error


def spanning_tree_rho(graph: FactorGraph) -> Tensor:
    """Return the probability that each pairwise factor is in a uniform random spanning tree (forest), shape (factor,).

    This is the effective resistance of the factor if every factor is a unit resistor. Single-variable factors get 1.

    Raises:
        ValueError: if a factor joins more than two variables.

    >>> from riskfield import from_edges
    >>> spanning_tree_rho(from_edges(2, [(0, 1), (1, 2), (2, 0), (2, 3)], num_variables=4)).round(decimals=3)
    tensor([0.6670, 0.6670, 0.6670, 1.0000], dtype=torch.float64)
    """
    from scipy.sparse import csr_array, diags_array
    from scipy.sparse.csgraph import connected_components
    from scipy.sparse.linalg import splu

    rho = torch.ones(graph.num_factors, dtype=torch.float64)
    n = graph.num_variables
    pairs, numbers = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
    for group in graph.factor_groups:
        if group.arity > 2:
            raise ValueError(f"Spanning-tree appearances need pairwise factors. Got a factor of arity {group.arity}.")
        if group.arity == 2:
            pairs.append(group.variables)
            numbers.append(group.factors)
    edges, factors = np.concatenate(pairs), np.concatenate(numbers)
    if not len(edges):
        return rho
    weights = csr_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(n, n))
    weights = weights + weights.T
    laplacian = diags_array(weights.sum(axis=1)) - weights
    # Ground one variable per component, so that the remaining Laplacian is positive definite.
    _, component = connected_components(weights, directed=False)
    grounded = np.unique(component, return_index=True)[1]
    kept = np.setdiff1d(np.arange(n), grounded)
    position = np.full(n, -1)
    position[kept] = np.arange(len(kept))
    solver = splu(laplacian.tocsc()[kept][:, kept])
    resistance = np.empty(len(edges))
    for first in range(0, len(edges), 256):
        chunk = edges[first : first + 256]
        currents = np.zeros((len(kept), len(chunk)))
        for end, sign in ((0, 1.0), (1, -1.0)):
            inside = np.flatnonzero(position[chunk[:, end]] >= 0)
            currents[position[chunk[inside, end]], inside] += sign
        resistance[first : first + 256] = (currents * solver.solve(currents)).sum(axis=0)
    rho[index_tensor(factors)] = index_tensor(resistance)
    return rho


def _equal_shares(graph: FactorGraph, factor: FloatArray) -> list[FloatArray]:
    """c_c divided equally; enough for tree-reweighting on a grid."""
    return [np.repeat(factor[g.factors][:, None] / g.arity, g.arity, axis=1) for g in graph.factor_groups]


def _parent_shares(graph: FactorGraph, factor: FloatArray) -> list[FloatArray]:
    """All of c_c to the variable that is nearest to the root of a breadth-first tree; enough for Bethe on a forest."""
    rank = np.empty(graph.num_variables, np.int64)
    rank[breadth_first_order(graph)] = np.arange(graph.num_variables)
    shares = []
    for group in graph.factor_groups:
        parent = rank[group.variables].argmin(axis=1)
        shares.append(np.where(np.arange(group.arity) == parent[:, None], factor[group.factors][:, None], 0.0))
    return shares


def _shares_by_program(graph: FactorGraph, factor: FloatArray, deficit: FloatArray) -> list[FloatArray] | None:
    """Any shares that meet the conditions, by a linear program."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    owner = np.concatenate([np.repeat(g.factors, g.arity) for g in graph.factor_groups])
    member = np.concatenate([g.variables.ravel() for g in graph.factor_groups])
    columns, ones = np.arange(len(owner)), np.ones(len(owner))
    spent = csr_array((ones, (owner, columns)), shape=(graph.num_factors, len(owner)))
    gained = csr_array((ones, (member, columns)), shape=(graph.num_variables, len(owner)))
    bounds = np.concatenate([factor, -deficit])
    found = linprog(np.zeros(len(owner)), vstack([spent, -gained]), bounds, method="highs")
    if not found.success:
        return None
    stops = np.cumsum([g.variables.size for g in graph.factor_groups])[:-1]
    pieces = np.split(np.asarray(found.x), stops)
    return [part.reshape(g.variables.shape) for part, g in zip(pieces, graph.factor_groups, strict=True)]


def negative_xlogx(x: Tensor) -> Tensor:
    """-x log x, with value and gradient 0 at x = 0, so that impossible states do not contribute."""
    positive = x > 0
    return torch.where(positive, -x * torch.where(positive, x, 1).log(), 0)


def _ones(graph: FactorGraph) -> Tensor:
    return torch.ones(graph.num_variables, dtype=torch.float64)


def _sum_at_variables(graph: FactorGraph, factor: Tensor) -> Tensor:
    """For each variable, sum the numbers of the factors that contain it."""
    total = torch.zeros(graph.num_variables, dtype=torch.float64)
    for group in graph.factor_groups:
        share = factor[index_tensor(group.factors)]
        for slot in range(group.arity):
            total = total.index_add(0, index_tensor(group.variables[:, slot]), share)
    return total


_MOST_KEPT = 8  # counting numbers of one graph


def _kept(graph: FactorGraph, key: Hashable, make: Callable[[], Counting]) -> Counting:
    """The counting numbers under `key`, made once from plain numbers and kept with the graph, as are a few others."""
    kept: dict[Hashable, Counting] = graph.derived("counting numbers", dict)
    found = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        with torch.inference_mode(False):  # as in `FactorGraph.derived`
            found = kept[key] = replace(make(), constant=True)
    return found


def _check_length(name: str, numbers: Tensor, length: int) -> None:
    if numbers.shape != (length,):
        raise ValueError(f"`{name}` must be one number or have shape ({length},). Got shape {tuple(numbers.shape)}.")


def _checked(factor: Tensor, node_total: Tensor, name: str = "factor") -> Counting:
    for label, numbers in ((f"`{name}`: c_c", factor), ("c_i + sum of c_c", node_total)):
        bad = ~((numbers > 0) & torch.isfinite(numbers))
        if bad.any():
            where = int(bad.nonzero()[0])
            raise ValueError(f"{label} must be above 0 and finite. Got {float(numbers[where])} at {where}.")
    return Counting(factor, node_total)
