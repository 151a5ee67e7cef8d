"""The factors of a graph as each of their variables sees them.

A *kind* is the shape of a factor as one of its variables sees it: its own number of states, then those of the other
variables in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riskfield.graph.factor_graph import FactorGraph

Kind = tuple[int, ...]  # own states, then the others' states in ascending order
# The entries of a table as a variable sees them, for each other variable the entries as that one sees them, and the
# slot of the variable in the factor.
EntryOrder = tuple[np.ndarray, list[np.ndarray], int]
# (group, slot) -> its kind, its other slots, where its incidences begin in its kind, the number of its `EntryOrder`.
_Views = dict[tuple[int, int], tuple[Kind, list[int], int, int]]


@dataclass(frozen=True, eq=False)
class Incidences:
    """Factors of one kind, seen from one variable each."""

    variable: np.ndarray
    others: np.ndarray  # (incidence, other)
    mates: list[np.ndarray]  # per other, the incidence of that variable among those of its kind
    mate_kinds: tuple[Kind, ...]
    factor: np.ndarray
    base: np.ndarray  # of the table in theta
    entries: np.ndarray  # which order of entries
    message: np.ndarray  # start in the caller's messages
    table: np.ndarray  # identifies (table, order of entries)
    mu: np.ndarray  # start in mu, or -1 where the variable is not the factor's first


def find_incidences(graph: FactorGraph, share_tables: bool = True) -> tuple[dict[Kind, Incidences], list[EntryOrder]]:
    """All incidences of factors and variables by kind, and the orders of entries that they refer to."""
    views, orders = _enumerate(graph)
    members: dict[Kind, list[tuple[int, int]]] = {}
    for place, (kind, *_) in views.items():
        members.setdefault(kind, []).append(place)
    return {kind: _collect(graph, kind, own, views, share_tables) for kind, own in members.items()}, orders


def _enumerate(graph: FactorGraph) -> tuple[_Views, list[EntryOrder]]:
    """What each (group, slot) sees."""
    places: _Views = {}
    orders: list[np.ndarray] = []
    begin: dict[Kind, int] = {}
    for g, group in enumerate(graph.factor_groups):
        for slot in range(group.arity):
            others = sorted((s for s in range(group.arity) if s != slot), key=lambda s: (group.shape[s], s))
            kind = (group.shape[slot], *(group.shape[s] for s in others))
            axes = [slot, *others]
            entries = np.arange(group.table_size).reshape(group.shape).transpose(axes).reshape(-1)
            orders.append(entries)
            places[g, slot] = (kind, others, begin.get(kind, 0), len(orders) - 1)
            begin[kind] = begin.get(kind, 0) + group.num_factors
    maps = [
        [np.argsort(orders[places[g, s][3]])[orders[order]] for s in others]
        for (g, _), (_, others, _, order) in places.items()
    ]
    return places, list(zip(orders, maps, [slot for _, slot in places], strict=True))


def _collect(
    graph: FactorGraph, kind: Kind, members: list[tuple[int, int]], places: _Views, share_tables: bool
) -> Incidences:
    pieces = []
    for g, slot in members:
        group = graph.factor_groups[g]
        _, others, _, order = places[g, slot]
        rows = np.arange(group.num_factors)
        mates = [places[g, s][2] + rows for s in others]
        mate_kinds = tuple(places[g, s][0] for s in others)
        pieces.append(
            (
                group.variables[:, slot],
                group.variables[:, others].reshape(group.num_factors, len(others)),
                mates,
                mate_kinds,
                group.factors,
                group.theta_start + group.tables * group.table_size,
                np.full(group.num_factors, order),
                group.message_range(slot)[0] + rows * group.shape[slot],
                group.mu_start + rows * group.table_size if slot == 0 else np.full(group.num_factors, -1),
            )
        )
    assert len({piece[3] for piece in pieces}) == 1
    joined = [np.concatenate([piece[k] for piece in pieces]) for k in (0, 1, 4, 5, 6, 7, 8)]
    mates = [np.concatenate([piece[2][o] for piece in pieces]) for o in range(len(kind) - 1)]
    variable, neighbours, factor, base, entries, message, mu = joined
    table = np.arange(len(variable))
    if share_tables and any(graph.factor_groups[g].tied for g, _ in members):
        table = np.unique(base * (entries.max() + 1) + entries, return_inverse=True)[1].reshape(-1)
    return Incidences(variable, neighbours, mates, pieces[0][3], factor, base, entries, message, table, mu)
