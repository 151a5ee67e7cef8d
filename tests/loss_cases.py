"""A table of all losses, random labels and evidence, and reference implementations. A new loss is one row here."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import riskfield as rf
from strategies import brute_force


@dataclass(frozen=True)
class LossCase:
    """A loss and what it needs."""

    name: str
    loss: rf.losses.AbstractLoss
    marginal: bool = False  # depends on marginals
    value: bool = False  # depends on log-partition values
    hidden: bool = True  # allows hidden variables
    binary: bool = False  # needs binary variables

    @property
    def infers(self):
        return self.marginal or self.value


def entropy_of_nodes(solution, labels, mask):
    """An example of a user's loss: a function of the marginals and the log-partition value."""
    nodes = solution.mu[..., : solution.graph.node_size]
    return torch.special.entr(nodes).sum(-1) * mask.sum(-1) + 0.1 * solution.log_partition


LOSSES = [
    LossCase("univariate-logistic", rf.losses.UnivariateLogistic(), marginal=True),
    LossCase("univariate-quadratic", rf.losses.UnivariateQuadratic(), marginal=True),
    LossCase("smoothed-classification", rf.losses.SmoothedClassification(5.0), marginal=True),
    LossCase("clique-logistic", rf.losses.CliqueLogistic(), marginal=True),
    LossCase("clique-quadratic", rf.losses.CliqueQuadratic(), marginal=True),
    LossCase("clique-smoothed-classification", rf.losses.CliqueSmoothedClassification(5.0), marginal=True),
    LossCase("l1", rf.losses.L1(rf.decoders.SoftArgmax(0.5)), marginal=True),
    LossCase("mse", rf.losses.MSE(), marginal=True),
    LossCase("f-measure", rf.losses.FMeasure(rf.decoders.SoftEqualCount(0.5)), marginal=True, binary=True),
    LossCase("custom", rf.losses.Custom(entropy_of_nodes), marginal=True),
    LossCase("hybrid", rf.losses.Hybrid(rf.losses.UnivariateLogistic(), rf.losses.MSE(), 0.3), marginal=True),
    LossCase("surrogate-likelihood", rf.losses.SurrogateLikelihood(), value=True, hidden=False),
    LossCase("surrogate-em", rf.losses.SurrogateEM(), value=True),
    LossCase("mixed-em", rf.losses.SurrogateEM(clamped=rf.MeanField()), value=True),
    LossCase(
        "hybrid-of-value",
        rf.losses.Hybrid(rf.losses.SurrogateEM(), rf.losses.CliqueLogistic(), 0.4),
        marginal=True,
        value=True,
    ),
    LossCase("pseudolikelihood", rf.losses.Pseudolikelihood()),
    LossCase("piecewise", rf.losses.Piecewise()),
    LossCase("independent", rf.losses.Independent()),
    LossCase("saddle-point", rf.losses.SaddlePoint(rf.MaxProduct(rf.TRW(0.5), damping=0.2))),
    LossCase("contrastive-divergence", rf.losses.ContrastiveDivergence(steps=2, seed=3)),
]


def losses(select=lambda case: True):
    """Run a test over the rows that `select` picks, as its argument `row`."""
    chosen = [case for case in LOSSES if select(case)]
    return pytest.mark.parametrize("row", chosen, ids=[case.name for case in chosen])


def draw(graph, seed, *batch, hidden=0.0, given=0.0):
    """Random labels of shape (*batch, variable), -1 with probability `hidden`, and random evidence (or None)."""
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(rng.integers(0, graph.num_states, size=(*batch, graph.num_variables)))
    labels = torch.where(torch.from_numpy(rng.random(states.shape) < hidden), -1, states)
    if not given:
        return labels, None
    evidence = torch.where(torch.from_numpy(rng.random(states.shape) < given), states, -1)
    return labels, evidence


# -- the definitions, in loops over single variables and joint states -----------------------------------------------


class Naive:
    """One example: theta of shape (theta,), labels and evidence of shape (variable,)."""

    def __init__(self, graph, theta, labels, evidence=None):
        self.graph, self.theta = graph, theta
        evidence = torch.full_like(labels, -1) if evidence is None else evidence
        self.given = [int(e) for e in evidence]
        self.is_target = [int(x) >= 0 and e < 0 for x, e in zip(labels, self.given, strict=True)]
        triples = zip(labels.tolist(), self.given, self.is_target, strict=True)
        self.known = [e if e >= 0 else (x if scored else -1) for x, e, scored in triples]
        self.scores = brute_force(graph, theta).scores

    def log_total(self, fixed):
        """log sum exp over all joint states that agree with `fixed` (-1: free)."""
        part = self.scores[tuple(slice(None) if x < 0 else x for x in fixed)]
        top = part.max()
        return top + math.log(np.exp(part - top).sum())

    def marginal(self, scope):
        """p(x_scope | evidence), as a dictionary {joint state: probability}."""
        total = self.log_total(self.given)
        out = {}
        for joint in itertools.product(*(range(int(self.graph.num_states[v])) for v in scope)):
            fixed = list(self.given)
            agrees = all(fixed[v] in (-1, x) for v, x in zip(scope, joint, strict=True))
            for v, x in zip(scope, joint, strict=True):
                fixed[v] = x
            out[joint] = math.exp(self.log_total(fixed) - total) if agrees else 0.0
        return out

    def over_variables(self, compare):
        targets = [v for v, scored in enumerate(self.is_target) if scored]
        return sum(compare(self.marginal((v,)), (self.known[v],)) for v in targets)

    def over_cliques(self, compare):
        total = 0.0
        for f in range(self.graph.num_factors):
            scope = self.graph.scope(f)
            label = tuple(self.known[v] for v in scope)
            if min(label) >= 0 and any(self.is_target[v] for v in scope):
                total += compare(self.marginal(scope), label)
        return total

    def pseudolikelihood(self):
        total = 0.0
        for v, scored in enumerate(self.is_target):
            if scored:
                logits = self.graph.node(self.theta, v).clone()
                for f in range(self.graph.num_factors):
                    scope = self.graph.scope(f)
                    if v in scope and all(self.known[u] >= 0 for u in scope):
                        index = tuple(slice(None) if u == v else self.known[u] for u in scope)
                        logits = logits + self.graph.factor(self.theta, f)[index]
                total -= float(logits.log_softmax(0)[self.known[v]])
        return total

    def piecewise(self):
        total = self.independent(single=False)
        for f in range(self.graph.num_factors):
            scope = self.graph.scope(f)
            label = tuple(self.known[v] for v in scope)
            if min(label) < 0 or not any(self.is_target[v] for v in scope):
                continue
            table = self.graph.factor(self.theta, f)
            agreeing = [
                float(table[joint])
                for joint in itertools.product(*(range(n) for n in table.shape))
                if all(self.given[v] in (-1, x) for v, x in zip(scope, joint, strict=True))
            ]
            total += math.log(sum(map(math.exp, agreeing))) - float(table[label])
        return total

    def independent(self, single=True):
        total = 0.0
        for v, scored in enumerate(self.is_target):
            if scored:
                logits = self.graph.node(self.theta, v).clone()
                for f in range(self.graph.num_factors if single else 0):
                    if self.graph.scope(f) == (v,):
                        logits = logits + self.graph.factor(self.theta, f)
                total -= float(logits.log_softmax(0)[self.known[v]])
        return total


def logistic(mu, x):
    return -math.log(mu[x])


def quadratic(mu, x):
    return -2 * mu[x] + sum(p * p for p in mu.values())


def smoothed(mu, x, alpha=5.0):
    rivals = [p for y, p in mu.items() if y != x]
    return 1 / (1 + math.exp(-alpha * (max(rivals) - mu[x]))) if rivals else 0.0


def half_squares(mu, x):
    return sum((p - (y == x)) ** 2 for y, p in mu.items()) / 2


def l1(mu, x, temperature=0.5):
    sharp = {y: p ** (1 / temperature) for y, p in mu.items()}
    return sum(abs(p / sum(sharp.values()) - (y == x)) for y, p in sharp.items()) / 2


DEFINITIONS = {
    "univariate-logistic": lambda n: n.over_variables(logistic),
    "univariate-quadratic": lambda n: n.over_variables(quadratic),
    "smoothed-classification": lambda n: n.over_variables(smoothed),
    "clique-logistic": lambda n: n.over_cliques(logistic),
    "clique-quadratic": lambda n: n.over_cliques(quadratic),
    "clique-smoothed-classification": lambda n: n.over_cliques(smoothed),
    "l1": lambda n: n.over_variables(l1),
    "mse": lambda n: n.over_variables(half_squares),
    "hybrid": lambda n: 0.3 * n.over_variables(logistic) + 0.7 * n.over_variables(half_squares),
    "surrogate-em": lambda n: n.log_total(n.given) - n.log_total(n.known),
    "hybrid-of-value": lambda n: 0.4 * (n.log_total(n.given) - n.log_total(n.known)) + 0.6 * n.over_cliques(logistic),
    "pseudolikelihood": Naive.pseudolikelihood,
    "piecewise": Naive.piecewise,
    "independent": Naive.independent,
}
