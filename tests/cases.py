"""The algorithms of the conformance tests. A new algorithm is one row here.

A row builds its algorithm for a graph and an order of its variables. Numbers per factor depend only on the arity, so
relabelled graphs and unions get the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from riskfield import (
    TRW,
    Bethe,
    ConvexFreeEnergy,
    CountingNumbers,
    Exact,
    ExactMAP,
    FactorGraph,
    MaxProduct,
    MeanField,
    MessagePassing,
    Parallel,
    Sequential,
)
from riskfield.inference import NEGATIVE_ENTROPY, SQUARE, AbstractAlgorithm, Term
from riskfield.kernels import native_available


@dataclass(frozen=True)
class Case:
    """An algorithm and its properties."""

    name: str
    make: Callable[[FactorGraph, tuple[int, ...] | None], AbstractAlgorithm]
    iterative: bool = True  # runs sweeps and can start from messages
    unique: bool = False  # concave on every graph: one fixed point, whatever the start
    marginals: bool = True  # mu holds marginals, not max-marginals
    kernels: bool = True  # runs on the kernels, which `Unroll` can differentiate


def by_arity(graph: FactorGraph, numbers: list[float]) -> torch.Tensor:
    """One number per factor, by arity."""
    out = torch.empty(graph.num_factors, dtype=torch.float64)
    for group in graph.factor_groups:
        out[torch.tensor(group.factors)] = numbers[group.arity - 1]
    return out


def _rho(graph: FactorGraph) -> TRW:
    return TRW(by_arity(graph, [1.0, 0.6, 0.45, 0.3]))


def _convex(graph: FactorGraph) -> CountingNumbers:
    return CountingNumbers(by_arity(graph, [0.5, 0.8, 1.2, 1.0]), 0.3)


def _free_energy(graph: FactorGraph) -> ConvexFreeEnergy:
    """The square term rules out the message-passing solver, so the interior-point solver runs."""
    weights = torch.full((graph.mu_size,), 0.4, dtype=torch.float64)
    for group in graph.factor_groups:
        weights[group.mu_start : group.mu_stop] = 0.3 + 0.2 * group.arity
    return ConvexFreeEnergy([Term(NEGATIVE_ENTROPY, weights), Term(SQUARE, 0.5)])


NEEDS_NATIVE = pytest.mark.skipif(not native_available(), reason="the compiled extension is not installed")


@contextmanager
def lanes(batch_lanes: bool) -> Iterator[None]:
    """Fill the lanes of native runs with models of a batch or with members of a level, whatever is faster."""
    from riskfield.kernels import native

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_batch_lanes", batch_lanes)
        yield


CASES = [
    Case("bp", lambda g, o: MessagePassing(Bethe(), Sequential(o))),
    Case("bp-parallel", lambda g, o: MessagePassing(Bethe(), Parallel())),
    Case("bp-damped", lambda g, o: MessagePassing(Bethe(), Sequential(o), damping=0.3)),
    Case("bp-parallel-damped", lambda g, o: MessagePassing(Bethe(), Parallel(), damping=0.5)),
    Case("trw", lambda g, o: MessagePassing(TRW(0.5), Sequential(o))),
    Case("trw-parallel-damped", lambda g, o: MessagePassing(TRW(0.5), Parallel(), damping=0.4)),
    Case("trw-per-factor", lambda g, o: MessagePassing(_rho(g), Sequential(o))),
    Case("convex", lambda g, o: MessagePassing(_convex(g), Sequential(o)), unique=True),
    Case("convex-parallel", lambda g, o: MessagePassing(_convex(g), Parallel(), damping=0.2), unique=True),
    Case("max-product", lambda g, o: MaxProduct(schedule=Sequential(o)), marginals=False),
    Case("max-product-parallel", lambda g, o: MaxProduct(schedule=Parallel(), damping=0.5), marginals=False),
    Case("max-product-trw", lambda g, o: MaxProduct(TRW(0.5), Sequential(o)), marginals=False),
    Case("mean-field", lambda g, o: MeanField(o)),
    Case("exact", lambda g, o: Exact(), iterative=False, unique=True),
    Case("exact-map", lambda g, o: ExactMAP(), iterative=False, unique=True, marginals=False, kernels=False),
    Case("free-energy", lambda g, o: _free_energy(g), unique=True, kernels=False),
]


def rows(select: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Run a test over the rows that `select` picks, as its argument `case`."""
    chosen = [case for case in CASES if select(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


def runs(select: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Run a test over the rows that `select` picks and the kernels each can run on: its arguments `case`, `kernels`."""
    chosen = [
        pytest.param(case, kernels, id=f"{case.name}-{kernels}", marks=marks)
        for case in CASES
        if select(case)
        for kernels, marks in (("torch", ()), ("native", NEEDS_NATIVE))
        if kernels == "torch" or case.kernels
    ]
    return pytest.mark.parametrize(("case", "kernels"), chosen)


def lines_run(function):
    """How many lines of Python `function()` runs: a loop over entries shows, vectorised work does not."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
