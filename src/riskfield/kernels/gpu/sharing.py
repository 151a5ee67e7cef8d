"""Which counting numbers are equal: where all are, one is read; where those of factors are, their tables are shared.

Also the least of them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from riskfield.entropy import Counting, FloatArray
from riskfield.graph._scopes import IntArray
from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True)
class Sharing:
    """Which counting numbers are equal."""

    factors: bool  # those of all factors
    variables: bool  # those of all variables
    tables: bool  # those of factors with one table


# Counting numbers made from plain numbers are kept with their graph; what follows from them is kept with them.
_sharing: weakref.WeakKeyDictionary[Counting, Sharing] = weakref.WeakKeyDictionary()
_least: weakref.WeakKeyDictionary[Counting, float] = weakref.WeakKeyDictionary()


def sharing_of(graph: FactorGraph, counting: Counting) -> Sharing:
    """Which of these counting numbers are equal."""
    if not counting.constant:
        return _compare(graph, counting)
    if counting not in _sharing:
        _sharing[counting] = _compare(graph, counting)
    return _sharing[counting]


def least_of(counting: Counting) -> float:
    """The least counting number of a factor."""
    if not counting.constant:
        return float(counting.factor.detach().min())
    if counting not in _least:
        _least[counting] = float(counting.factor.min())
    return _least[counting]


def _compare(graph: FactorGraph, counting: Counting) -> Sharing:
    factor, total = counting.factor.detach().numpy(), counting.node_total.detach().numpy()
    factors = bool((factor == factor[:1]).all())
    tables = factors
    if not factors:
        tables = all(
            (factor[group.factors] == _of_last(factor[group.factors], group.tables)).all()
            for group in graph.factor_groups
            if group.tied
        )
    return Sharing(factors, bool((total == total[:1]).all()), tables)


def _of_last(numbers: FloatArray, tables: IntArray) -> FloatArray:
    """For each factor, the number of the last one with its table."""
    last = np.empty(tables.max() + 1, numbers.dtype)
    last[tables] = numbers
    return last[tables]
