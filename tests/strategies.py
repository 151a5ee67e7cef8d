"""Small random models, and their exact marginals and log-partition values by enumeration of all joint states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from riskfield import FactorGraph

seeds = st.integers(0, 2**32 - 1)


@st.composite
def graphs(draw, *, max_variables=5, max_states=3, max_factors=6, max_arity=4, allow_ties=True, forest=False):
    """Any factor graph: loops (unless `forest`), repeated scopes, isolated variables, single states, tied tables."""
    n = draw(st.integers(1, max_variables))
    num_states = draw(st.lists(st.integers(1, max_states), min_size=n, max_size=n))
    scope = st.permutations(range(n)).flatmap(
        lambda order: st.integers(1, min(n, max_arity)).map(lambda arity: tuple(order[:arity]))
    )
    scopes = draw(st.lists(scope, max_size=max_factors))
    if forest:
        scopes = without_loops(n, scopes)
    tables = None
    if allow_ties and scopes and draw(st.booleans()):
        # Factors of one shape may share a table.
        labels = draw(st.lists(st.integers(0, 1), min_size=len(scopes), max_size=len(scopes)))
        keys = [(tuple(num_states[v] for v in s), label) for s, label in zip(scopes, labels, strict=True)]
        tables = [sorted(set(keys)).index(key) for key in keys]
    return FactorGraph(num_states, scopes, tables=tables)


def forests(**settings):
    return graphs(forest=True, **settings)


@st.composite
def pairwise(draw, *, max_variables=5, max_states=3, max_factors=8):
    """Pairwise graphs, with a few single-variable factors."""
    return draw(graphs(max_variables=max_variables, max_states=max_states, max_factors=max_factors, max_arity=2))


def potentials(graph, seed, kind="mild", *batch, dtype=torch.float64):
    """Random theta. "extreme" has values around +-500; "impossible" has entries of -inf, but not at node states 0."""
    rng = np.random.default_rng(seed)
    theta = torch.from_numpy(rng.normal(size=(*batch, graph.theta_size)))
    if kind == "extreme":
        theta = theta + torch.from_numpy(rng.choice([-500.0, 0.0, 500.0], size=theta.shape))
    elif kind == "strong":
        theta = 4 * theta
    elif kind == "impossible":
        theta[torch.from_numpy(rng.random(theta.shape) < 0.15)] = -math.inf
        for view in graph.node_views(theta):
            view[..., 0] = torch.where(view[..., 0] == -math.inf, 0.0, view[..., 0])
    else:
        assert kind == "mild"
    return theta.to(dtype)


kinds = st.sampled_from(["mild", "extreme", "impossible"])


@dataclass(frozen=True)
class Truth:
    """The exact answers for a small model."""

    log_partition: float
    mu: torch.Tensor  # NaN if no joint state is possible
    best: float  # the highest score of a joint state
    scores: np.ndarray  # theta . f(x), one axis per variable


def brute_force(graph, theta):
    """The exact answers for one theta: score all joint states, then sum over them."""
    shape = tuple(int(n) for n in graph.num_states)
    scores = np.zeros(shape)
    blocks = [((v,), graph.node(theta, v)) for v in range(graph.num_variables)]
    blocks += [(graph.scope(f), graph.factor(theta, f)) for f in range(graph.num_factors)]
    for scope, table in blocks:
        scores = scores + _over_all(table.double().numpy(), scope, shape)
    best = float(scores.max())
    if best == -math.inf:
        return Truth(-math.inf, torch.full((graph.mu_size,), math.nan, dtype=torch.float64), best, scores)
    weights = np.exp(scores - best)
    log_partition = best + math.log(weights.sum())
    weights /= weights.sum()
    mu = torch.zeros(graph.mu_size, dtype=torch.float64)
    for v in range(graph.num_variables):
        graph.node(mu, v).copy_(torch.from_numpy(_sum_to(weights, (v,))))
    # Slice mu directly: `graph.factor` tells theta and mu apart by their length, which is equal without tied tables.
    for group in graph.factor_groups:
        for row, scope in enumerate(group.variables.tolist()):
            start = group.mu_start + row * group.table_size
            mu[start : start + group.table_size] = torch.from_numpy(_sum_to(weights, scope).ravel())
    return Truth(log_partition, mu, best, scores)


def without_loops(n, scopes):
    component = list(range(n))
    kept = []
    for scope in scopes:
        touched = {component[v] for v in scope}
        if len(touched) == len(scope):
            kept.append(scope)
            component = [min(touched) if c in touched else c for c in component]
    return kept


def _over_all(table, scope, shape):
    """`table` with one axis per variable; axes outside its scope have length 1."""
    ordered = np.transpose(table, np.argsort(scope))
    return ordered.reshape([shape[v] if v in scope else 1 for v in range(len(shape))])


def _sum_to(weights, scope):
    others = tuple(v for v in range(weights.ndim) if v not in scope)
    return np.transpose(weights.sum(axis=others), np.argsort(np.argsort(scope)))
