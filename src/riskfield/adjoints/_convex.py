"""The linear system of `KKT` at the beliefs of a convex free energy, in batches and by elimination."""

from __future__ import annotations

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.convex.newton import Newton
from riskfield.inference.convex.polytope import polytope

_ENOUGH = 1e-12  # how right a solution has to be


def solve_convex(
    graph: FactorGraph, mu: Tensor, curvature: Tensor, grad: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """x of curvature x - grad = B^T y, B x = 0, at beliefs of shape (item, mu), and for which items it was found.

    It is 0 where a belief is below `smallest`. Curvatures of factors must be above 0 elsewhere.
    """
    possible = mu >= smallest
    curvature = torch.where(possible, curvature, 1.0)
    newton = Newton(polytope(graph), mu, curvature, possible)
    # In units of what it would be without constraints and under an entropy, so that an error is a relative one.
    size = torch.where(possible, grad * mu, 0.0).abs().amax(1, keepdim=True)
    unit = torch.where(size > 0, size, 1.0)
    found, solved = newton.solve(-grad / unit, newton.polytope.missing(mu).nothing(), _ENOUGH)
    return torch.where(size > 0, found * unit, 0.0), solved


def unsettled_convex(graph: FactorGraph, mu: Tensor, grad: Tensor, smallest: float) -> float:
    """How inconsistent beliefs are, relative to each and weighed by its share in the gradient: see `_Conditions`."""
    local = polytope(graph)
    # The last states, whose constraints follow from the others', are to be the most probable ones.
    order = local.relabelling(mu)
    mu, grad = mu.gather(1, order), grad.gather(1, order)
    share = (mu * grad).abs()
    most = share.amax(1)
    share = share / torch.where(most > 0, most, 1.0)[:, None]
    free, free_share, worst = local.free(mu), local.free(share), 0.0
    for block, missing in zip(local.blocks, local.missing(mu).rows, strict=True):
        node = block.rows(free)
        weight = block.rows(free_share) + block.sums @ block.cells(share).T
        gap = torch.where(node >= smallest, missing.abs() / node * weight, 0.0)
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst
