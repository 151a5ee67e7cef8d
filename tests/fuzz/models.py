"""Random models: any structure, any potentials."""

from __future__ import annotations

import math

import numpy as np
import torch

import riskfield as rf
from strategies import without_loops

MAX_JOINT_STATES = 4096


def random_graph(rng, *, forest=None, max_variables=7, max_states=4, max_arity=4, ties=True):
    """Any arity, mixed states, single states, repeated scopes, parts that are not connected, tied tables."""
    n = int(rng.integers(1, max_variables + 1))
    num_states = rng.integers(1, max_states + 1, size=n)
    if rng.random() < 0.4:
        num_states[:] = rng.integers(1, max_states + 1)
    while math.prod(num_states.tolist()) > MAX_JOINT_STATES:
        num_states[num_states.argmax()] -= 1
    arities = rng.integers(1, min(n, max_arity) + 1, size=rng.integers(0, 9))
    if rng.random() < 0.4:
        arities[:] = min(n, 2)
    scopes = [tuple(rng.permutation(n)[:arity].tolist()) for arity in arities]
    if forest or (forest is None and rng.random() < 0.3):
        scopes = without_loops(n, scopes)
    tables = None
    if ties and scopes and rng.random() < 0.3:
        keys = [(tuple(num_states[list(scope)].tolist()), int(rng.integers(2))) for scope in scopes]
        tables = [sorted(set(keys)).index(key) for key in keys]
    return rf.FactorGraph(num_states.tolist(), scopes, tables=tables)


def random_theta(graph, rng, *batch, kinds=("mild", "strong", "ties", "impossible")):
    """Log-potentials: normal, strong, of few values so that there are ties, or with -inf among them."""
    kind = rng.choice(kinds)
    theta = rng.normal(size=(*batch, graph.theta_size)) * (10.0 if kind == "strong" else rng.choice([0.2, 1.0]))
    if kind == "ties":
        theta = theta.round()
    if kind == "impossible":
        theta[rng.random(theta.shape) < rng.choice([0.05, 0.3])] = -math.inf
    return torch.from_numpy(theta)


def random_batch(rng):
    """The shape of a batch."""
    return [(), (), (3,), (1, 2)][rng.integers(4)]


def random_evidence(graph, rng, *batch):
    """States of some variables, -1 for the others; None half of the time."""
    if rng.random() < 0.5:
        return None
    states = rng.integers(0, graph.num_states, size=(*batch, graph.num_variables))
    return torch.from_numpy(np.where(rng.random(states.shape) < 0.3, states, -1))
