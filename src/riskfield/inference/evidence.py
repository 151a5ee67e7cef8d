"""Evidence: clamp observed variables by making their other states impossible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy import broadcast_shapes  # torch's imports sympy, which takes a second
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph

Evidence: TypeAlias = Tensor | Mapping[int, int] | Mapping[str, int]


def clamp(graph: FactorGraph, theta: Tensor, evidence: Evidence) -> Tensor:
    """Theta with every unobserved state of every observed variable set to -inf. Differentiable.

    Arguments:
        graph: the structure.
        theta: of shape (*batch, graph.theta_size).
        evidence: a dict {variable: state}, with the numbers or the names of variables, or an integer tensor of shape
            (*batch, variable) with -1 for unobserved.

    The batch axes of theta and evidence broadcast, and the items may observe different variables.

    >>> from riskfield import chain
    >>> graph = chain(2, num_states=2)
    >>> graph.node_views(clamp(graph, graph.zeros(), {1: 0}))[0]
    tensor([[0., 0.],
            [0., -inf]], dtype=torch.float64)
    """
    graph.check_theta(theta)
    if isinstance(evidence, Mapping):
        evidence = _from_mapping(graph, evidence)
    elif not isinstance(evidence, Tensor):
        raise TypeError(f"`evidence` must be a dict or an integer tensor. Got {type(evidence).__name__}.")
    states = graph.check_states(evidence, "evidence", allow_unobserved=True).to(theta.device)
    try:
        batch = broadcast_shapes(theta.shape[:-1], states.shape[:-1])
    except ValueError:
        raise ValueError(
            f"`evidence` must have batch axes that broadcast with {tuple(theta.shape[:-1])}, those of theta. "
            f"Got {tuple(states.shape[:-1])}."
        ) from None
    excluded = torch.zeros(*batch, graph.theta_size, dtype=torch.bool, device=theta.device)
    for group, view in zip(graph.node_groups, graph.node_views(excluded), strict=True):
        observed = states[..., index_tensor(group.variables, theta.device)].unsqueeze(-1)
        view[...] = (observed >= 0) & (observed != torch.arange(group.num_states, device=theta.device))
    return torch.where(excluded, float("-inf"), theta)


def _from_mapping(graph: FactorGraph, evidence: Mapping[int, int] | Mapping[str, int]) -> Tensor:
    states = torch.full((graph.num_variables,), -1, dtype=torch.int64)
    for which, state in evidence.items():
        for what, number in (("variables", which), ("states", state)):
            is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if not is_integer and not (what == "variables" and isinstance(number, str)):
                raise TypeError(f"`evidence` must give {what} as integers. Got {number!r}.")
        if not isinstance(which, str) and not 0 <= which < graph.num_variables:
            raise ValueError(f"`evidence` must name variables in 0..{graph.num_variables - 1}. Got {which}.")
        variable = graph.variable(which)
        last = int(graph.num_states[variable]) - 1
        if not 0 <= state <= last:
            raise ValueError(f"`evidence` of variable {which} must lie in 0..{last}. Got {state}.")
        states[variable] = int(state)
    return states
