"""Elimination orders: the order in which variables are summed out, which determines the size of the tables.

Eliminating a variable joins all its neighbours into one clique. The min-fill heuristic always eliminates the variable
that adds the fewest new pairs of neighbours. The *induced width* is the largest number of neighbours that a variable
has when it is eliminated. It is an upper bound of the treewidth, and equal to it on trees and other chordal graphs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True, eq=False)
class Elimination:
    """An elimination order of (some of) the variables of a graph."""

    order: tuple[int, ...]
    later: tuple[tuple[int, ...], ...]  # for each variable of the order: the clique of its neighbours, in that order
    complete: bool  # False if a clique was wider than the limit

    @property
    def width(self) -> int:
        """The induced width: the largest number of neighbours of a variable when it is eliminated."""
        return max((len(clique) for clique in self.later), default=0)


def min_fill(
    graph: FactorGraph, left_out: npt.NDArray[np.bool_] | None = None, *, max_width: int | None = None
) -> Elimination:
    """Find the min-fill order of the variables. Ties go to the variable with the fewest neighbours, then to the first.

    Arguments:
        graph: the structure.
        left_out: optional mask of shape (variable,): observed variables, which are not eliminated.
        max_width: stop at the first clique that is wider. On large graphs nearly all time is spent on wide cliques.

    >>> from riskfield import chain, grid
    >>> min_fill(chain(1000, num_states=2)).width, min_fill(grid(4, 50, num_states=2)).width
    (1, 4)
    """
    neighbours = _adjacency(graph, left_out)
    fill = {v: _missing_pairs(neighbours, v) for v in neighbours}
    heap = [(missing, len(neighbours[v]), v) for v, missing in fill.items()]
    heapq.heapify(heap)
    order: list[int] = []
    cliques: list[set[int]] = []
    while heap:
        missing, degree, variable = heapq.heappop(heap)
        # Outdated entries stay in the heap and are skipped here.
        if variable not in neighbours or missing != fill[variable] or degree != len(neighbours[variable]):
            continue
        if max_width is not None and degree > max_width:
            break
        changed = _eliminate(neighbours, fill, variable)
        order.append(variable)
        cliques.append(neighbours.pop(variable))
        for v in changed:
            heapq.heappush(heap, (fill[v], len(neighbours[v]), v))
    complete = not neighbours
    position = {v: k for k, v in enumerate([*order, *neighbours])}
    later = tuple(tuple(sorted(clique, key=position.__getitem__)) for clique in cliques)
    return Elimination(tuple(order), later, complete)


def by_number(
    graph: FactorGraph, left_out: npt.NDArray[np.bool_] | None = None, *, max_width: int | None = None
) -> Elimination:
    """Eliminate the variables in the order of their numbers. On grids, row by row, this is narrower than min-fill.

    >>> from riskfield import grid
    >>> by_number(grid(12, 12, num_states=2)).width, min_fill(grid(12, 12, num_states=2)).width
    (12, 16)
    """
    neighbours = _adjacency(graph, left_out)
    cliques: list[set[int]] = []
    order = sorted(neighbours)
    for variable in order:
        clique = neighbours.pop(variable)
        if max_width is not None and len(clique) > max_width:
            neighbours[variable] = clique
            break
        for other in clique:
            neighbours[other] |= clique
            neighbours[other] -= {other, variable}
        cliques.append(clique)
    later = tuple(tuple(sorted(clique)) for clique in cliques)
    return Elimination(tuple(order[: len(cliques)]), later, not neighbours)


def _adjacency(graph: FactorGraph, left_out: npt.NDArray[np.bool_] | None) -> dict[int, set[int]]:
    keep = np.ones(graph.num_variables, bool) if left_out is None else ~left_out
    pairs = graph.neighbour_pairs()
    pairs = np.unique(np.sort(pairs[keep[pairs].all(axis=1)], axis=1), axis=0)
    neighbours: dict[int, set[int]] = {v: set() for v in np.flatnonzero(keep).tolist()}
    for a, b in pairs.tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    return neighbours


def _missing_pairs(neighbours: dict[int, set[int]], variable: int) -> int:
    around = neighbours[variable]
    present = sum(len(neighbours[other] & around) for other in around) // 2
    return len(around) * (len(around) - 1) // 2 - present


def _eliminate(neighbours: dict[int, set[int]], fill: dict[int, int], variable: int) -> set[int]:
    """Eliminate `variable` and join its neighbours. Return the variables whose fill or degree changed."""
    clique = neighbours[variable]
    changed = set(clique)
    if fill[variable]:
        for a in clique:
            for b in clique - neighbours[a]:
                if b <= a:  # each pair once; `a` itself is in the difference
                    continue
                common = neighbours[a] & neighbours[b]
                for c in common:
                    fill[c] -= 1
                changed |= common
                fill[a] += len(neighbours[a]) - len(common)
                fill[b] += len(neighbours[b]) - len(common)
                neighbours[a].add(b)
                neighbours[b].add(a)
    for a in clique:
        # The clique is complete now, so only the neighbours of `a` outside of it have no edge to `variable`.
        fill[a] -= len(neighbours[a]) - len(clique)
        neighbours[a].discard(variable)
    changed.discard(variable)
    return changed
