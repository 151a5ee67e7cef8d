"""Every loss on random graphs, labels, evidence, masks and weights: gradients, and examples that are counted twice."""

from __future__ import annotations

import warnings

import torch

import riskfield as rf
from cases import CASES
from fuzz import Uninteresting
from fuzz.models import random_graph, random_theta
from gradient_cases import TRUNCATED, finite_differences
from loss_cases import LOSSES, draw

ALGORITHMS = [case for case in CASES if case.marginals and case.kernels]


def example(rng):
    row = LOSSES[rng.integers(len(LOSSES))]
    graph = random_graph(rng, max_variables=4, max_states=2 if row.binary else 3, max_arity=3)
    if graph.theta_size > 80 or (row.binary and (graph.num_states != 2).any()):
        raise Uninteresting
    theta = random_theta(graph, rng, kinds=("mild",))
    algorithm = ALGORITHMS[rng.integers(len(ALGORITHMS))].make(graph, None)
    inference = rf.Inference(algorithm, TRUNCATED, rf.Unroll())
    seed, number = int(rng.integers(2**31)), 3
    # The entropy of the custom loss has an infinite slope at the zeros that evidence makes.
    given = 0.0 if row.name == "custom" else 0.3
    labels, evidence = draw(graph, seed, number, hidden=0.3 * row.hidden, given=given)
    weights = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)

    def risk(values, picked=(0, 1, 2), own=None):
        index = torch.tensor(picked)
        expanded = values.unsqueeze(-2).expand(*values.shape[:-1], len(index), -1)
        batch = expanded.shape[:-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
            found = row.loss(
                graph,
                expanded,
                labels[index].expand(*batch, -1),
                inference,
                evidence=None if evidence is None else evidence[index].expand(*batch, -1),
            )
        return (found if own is None else found * own).sum(-1)

    try:
        leaf = theta.clone().requires_grad_()
        value = risk(leaf, own=weights)
    except ValueError as error:  # a loss refuses what it is not made for, by name
        assert "`" in str(error), f"{row.name} refuses without a name: {error}"
        raise Uninteresting from error
    (gradient,) = torch.autograd.grad(value, leaf) if value.requires_grad else (torch.zeros_like(theta),)
    # Smoothed classification has a kink where two wrong labels are equally probable: a shorter step does not cross it.
    steps = [finite_differences(lambda values: risk(values, own=weights), theta, step) for step in (3e-4, 3e-5, 3e-6)]
    scale = 1 + float(steps[0].abs().max())
    error = min(float((gradient - expected).abs().max()) for expected in steps)
    # The saddle-point loss has kinks, and contrastive divergence draws samples.
    if row.name not in ("saddle-point", "contrastive-divergence"):
        assert error <= 1e-6 * scale, f"{row.name}: the gradient is off by {error:.3g}"
        repeated = risk(theta, (0, 0, 1, 2, 2, 2))
        assert torch.allclose(value.detach(), repeated, rtol=1e-9, atol=1e-9), f"{row.name}: weights are not counts"
