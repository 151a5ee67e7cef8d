"""Reference implementations: message passing and mean field from the definition, one message or variable at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np


class NaiveMessagePassing:
    """Messages are plain probabilities in a dictionary, so potentials must be small."""

    def __init__(self, graph, theta, factor_number, node_total, *, damping=0.0, maximise=False):
        self.scopes = [graph.scope(f) for f in range(graph.num_factors)]
        self.node_theta = [graph.node(theta, v).numpy() for v in range(graph.num_variables)]
        self.tables = [graph.factor(theta, f).numpy() for f in range(graph.num_factors)]
        self.c, self.total = np.asarray(factor_number), np.asarray(node_total)
        self.damping, self.maximise = damping, maximise
        self.num_states = graph.num_states
        self.messages = {
            (f, v): np.full(self.num_states[v], 1 / self.num_states[v]) for f, s in enumerate(self.scopes) for v in s
        }

    def belief(self, v):
        total = self.node_theta[v].copy()
        for f, scope in enumerate(self.scopes):
            if v in scope:
                total = total + self.c[f] * np.log(self.messages[f, v])
        weights = np.exp((total - total.max()) / self.total[v])
        return weights / weights.sum()

    def factor_weights(self, f, left_out=None):
        """exp(theta_c / c_c) prod b_j / m_c over the variables of the factor other than `left_out`."""
        scope = self.scopes[f]
        ratio = {v: self.belief(v) / self.messages[f, v] for v in scope if v != left_out}
        weights = np.empty(self.tables[f].shape)
        for joint in itertools.product(*(range(n) for n in weights.shape)):
            weights[joint] = math.exp(self.tables[f][joint] / self.c[f])
            for v, x in zip(scope, joint, strict=True):
                if v != left_out:
                    weights[joint] *= ratio[v][x]
        return weights

    def new_message(self, f, v):
        weights = self.factor_weights(f, left_out=v)
        others = tuple(axis for axis, u in enumerate(self.scopes[f]) if u != v)
        message = (weights.max(axis=others) if self.maximise else weights.sum(axis=others)) if others else weights
        message = message / message.sum()
        mixed = message ** (1 - self.damping) * self.messages[f, v] ** self.damping
        return mixed / mixed.sum()

    def sequential_sweep(self, order):
        """Visit the variables forwards, then backwards, and update one message at a time."""
        rank = {v: k for k, v in enumerate(order)}
        for v in order:
            for f, scope in enumerate(self.scopes):
                if v in scope and (len(scope) == 1 or rank[v] > min(rank[u] for u in scope)):
                    self.messages[f, v] = self.new_message(f, v)
        for v in reversed(order):
            for f, scope in enumerate(self.scopes):
                if v in scope and rank[v] < max(rank[u] for u in scope):
                    self.messages[f, v] = self.new_message(f, v)

    def parallel_sweep(self):
        self.messages = {key: self.new_message(*key) for key in self.messages}

    def mu(self, graph):
        out = np.zeros(graph.mu_size)
        for v, start in enumerate(graph.node_start):
            out[start : start + self.num_states[v]] = self.belief(v)
        for group in graph.factor_groups:
            for row, f in enumerate(group.factors):
                weights = self.factor_weights(int(f)).ravel()
                start = group.mu_start + row * group.table_size
                out[start : start + group.table_size] = weights / weights.sum()
        return out


class NaiveMeanField:
    """Coordinate ascent, one variable at a time."""

    def __init__(self, graph, theta):
        self.scopes = [graph.scope(f) for f in range(graph.num_factors)]
        self.node_theta = [graph.node(theta, v).numpy() for v in range(graph.num_variables)]
        self.tables = [graph.factor(theta, f).numpy() for f in range(graph.num_factors)]
        self.q = [np.full(n, 1 / n) for n in graph.num_states]

    def sweep(self, order):
        for v in order:
            logits = self.node_theta[v].copy()
            for table, scope in zip(self.tables, self.scopes, strict=True):
                if v not in scope:
                    continue
                for joint in itertools.product(*(range(n) for n in table.shape)):
                    others = math.prod(self.q[u][x] for u, x in zip(scope, joint, strict=True) if u != v)
                    logits[joint[scope.index(v)]] += table[joint] * others
            weights = np.exp(logits - logits.max())
            self.q[v] = weights / weights.sum()
