"""Conversion of models from and to pgmpy. Only `to_pgmpy` needs pgmpy to be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph


@dataclass(frozen=True, eq=False)
class PgmpyModel:
    """A model of pgmpy as a graph and its log-potentials.

    The variables keep their names: `graph.variable("rain")` is the number of a variable, `graph.names` has all names.

    Arguments:
        graph: the structure.
        theta: float64 log-potentials of shape (theta,), -inf for zeros.
        states: the names of the states of each variable, {name of the variable: names of its states}.
    """

    graph: FactorGraph
    theta: Tensor
    states: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def evidence(self, observed: Mapping[str, Any]) -> dict[int, int]:
        """Return evidence for `infer`, as {variable: state}.

        Arguments:
            observed: {name of the variable: name of its state}, as in pgmpy.

        Raises:
            ValueError: if a variable or a state has no such name.
        """
        numbers = {}
        for name, state in observed.items():
            variable = self.graph.variable(name)
            if state not in self.states[name]:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, self.states[name]))}. Got {state!r}.")
            numbers[variable] = self.states[name].index(state)
        return numbers


def from_pgmpy(model: Any) -> PgmpyModel:
    """Convert a discrete Markov network, Bayesian network or factor graph of pgmpy.

    Every factor, or conditional distribution, becomes a factor of the graph, in the same order. The exact log-partition
    value of a Bayesian network is 0.

    Arguments:
        model: a `DiscreteMarkovNetwork`, `DiscreteBayesianNetwork` or `FactorGraph`, or an object with their methods.

    Raises:
        TypeError: if the model is none of these, or is not discrete.
        ValueError: if a variable has no factor, or in a Bayesian network no conditional distribution of its own; if
            factors disagree about the states of a variable; or if a factor has negative or infinite entries.
    """
    list_factors = getattr(model, "get_cpds", None) or getattr(model, "get_factors", None)
    list_variables = getattr(model, "get_variable_nodes", None)
    if list_factors is None:
        raise TypeError(
            "`model` must be a DiscreteMarkovNetwork, DiscreteBayesianNetwork or FactorGraph of pgmpy. "
            f"Got {type(model).__name__}."
        )
    factors = list(list_factors())
    nodes = list(model.nodes if list_variables is None else list_variables())
    states: dict[Any, tuple[Any, ...]] = {}
    tables = []
    for factor in factors:
        if getattr(factor, "values", None) is None:
            raise TypeError(f"`model` must be discrete. Got a factor of type {type(factor).__name__}.")
        tables.append(_table(factor))
        for variable, size in zip(factor.variables, tables[-1].shape, strict=True):
            own = tuple(factor.state_names[variable])
            if len(own) != size or states.setdefault(variable, own) != own:
                raise ValueError(f"`model` must give {variable!r} the same states in all factors. Got {own!r}.")
    missing = [variable for variable in nodes if variable not in states]
    if missing:
        raise ValueError(f"`model` must have a factor for every variable. Variable {missing[0]!r} has none.")
    conditional = {factor.variables[0] for factor in factors} if hasattr(model, "get_cpds") else set(nodes)
    without = [variable for variable in nodes if variable not in conditional]
    if without:  # the conditional distribution of a child may name its states nevertheless
        raise ValueError(f"`model` must have a CPD for every variable. Variable {without[0]!r} has none.")
    number = {variable: k for k, variable in enumerate(nodes)}
    unknown = [variable for variable in states if variable not in number]
    if unknown:
        raise ValueError(f"`model` must have variables as nodes. Its factors name {unknown[0]!r}, which is not a node.")
    scopes = [tuple(number[variable] for variable in factor.variables) for factor in factors]
    names = [str(variable) for variable in nodes]
    graph = FactorGraph([len(states[variable]) for variable in nodes], scopes, names=names)
    theta = graph.zeros()
    for k, table in enumerate(tables):
        graph.factor(theta, k)[...] = table.log()
    return PgmpyModel(graph, theta, {str(variable): states[variable] for variable in nodes})


def to_pgmpy(graph: FactorGraph, theta: Tensor, states: Mapping[str, Sequence[Any]] | None = None) -> Any:
    """Return a `DiscreteMarkovNetwork` of pgmpy with the same distribution and the same partition function.

    Arguments:
        graph: the structure. Variables without names are called "x0", "x1", ...
        theta: log-potentials of shape (theta,).
        states: {name of a variable: names of its states}. States without names are called 0, 1, ...

    Raises:
        ImportError: if pgmpy is not installed.
        ValueError: if theta has a batch, or an entry whose exponential is too large, or if `states` names a variable
            that the graph does not have.
    """
    from pgmpy.factors.discrete import DiscreteFactor
    from pgmpy.models import DiscreteMarkovNetwork

    graph.check_values(theta)
    if theta.ndim != 1:
        raise ValueError(f"`theta` must have shape ({graph.theta_size},). Got {tuple(theta.shape)}.")
    values = theta.detach().cpu().double().exp()
    if not torch.isfinite(values).all():
        raise ValueError(f"`theta` must be below 709: pgmpy stores its exponential. Got {float(theta.max()):.4g}.")
    names = graph.names or tuple(f"x{k}" for k in range(graph.num_variables))
    given: Mapping[str, Sequence[Any]] = {} if states is None else states
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"`states` must name variables of the graph. Got {unknown[0]!r}.")
    of_states = {name: list(given.get(name, range(n))) for name, n in zip(names, graph.num_states, strict=True)}
    scopes = [tuple(graph.scope(k)) for k in range(graph.num_factors)]
    tables = [graph.factor(values, k) for k in range(graph.num_factors)]
    in_factors = {variable for scope in scopes for variable in scope}
    for variable in range(graph.num_variables):  # a variable needs a factor, and one that says nothing is left out
        table = graph.node(values, variable)
        if variable not in in_factors or bool((table != 1).any()):
            scopes.append((variable,))
            tables.append(table)
    model = DiscreteMarkovNetwork()
    model.add_nodes_from(names)
    for scope, table in zip(scopes, tables, strict=True):
        own = [names[variable] for variable in scope]
        model.add_edges_from(combinations(own, 2))
        model.add_factors(
            DiscreteFactor(own, list(table.shape), table.numpy(), {name: of_states[name] for name in own})
        )
    return model


def _table(factor: Any) -> Tensor:
    table = torch.as_tensor(factor.values).detach().cpu().double()
    if not ((table >= 0) & torch.isfinite(table)).all():
        raise ValueError(
            f"`model` must have finite, non-negative factors. The factor of {factor.variables} has other values."
        )
    return table
