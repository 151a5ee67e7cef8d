r"""From max-marginals to one joint state, and a bound on the score of every joint state.

*Sequential decoding.* Variables are fixed one after the other, breadth first. With F those fixed so far, i takes

    argmax_{x_i}  c^_i log b_i(x_i) + sum_c c_c [ max_{x_c \ i, F} log b_c(x_c) - log b_i(x_i) ],

the sum over the factors of i that contain variables in F, at the states chosen for these. On a forest the sum has at
most one term, and at a fixed point of max-product (Bethe) the result is a most probable state even where several states
tie; picking every variable's own maximum would mix them. On loopy graphs of pairwise factors it is the decoding of
TRW-S (Kolmogorov 2006).

*The bound.* Any messages rewrite the score exactly as

    theta . f(x) = sum_i (c_i + sum_c w_ci) log b_i(x_i) + sum_c [ c_c log b_c(x_c) - sum_{i in c} w_ci log b_i(x_i) ]

and the sum of the maxima of all terms bounds it. Where the entropy is concave there are w_ci >= 0 (`concave_shares`)
for which every term is largest at the best state of a fixed point, if the beliefs agree on one: the bound is tight.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from riskfield.entropy import Counting
from riskfield.graph._scopes import IntArray, index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup
from riskfield.graph.schedule import breadth_first_order, compile_levels

NEG_INF = float("-inf")
_CLEAR = 1e-3  # a best state that leads by so much in logarithm is no tie


def decode(graph: FactorGraph, theta: Tensor, mu: Tensor, counting: Counting) -> Tensor:
    """States of shape (batch, variable) for theta of shape (batch, theta) and max-marginals of shape (batch, mu)."""
    log_mu = mu.double().log()
    states, clear = _own_maxima(graph, log_mu)
    if graph.is_forest:
        # Where no variable ties, the maxima belong to one joint state.
        unclear = (~clear).nonzero()[:, 0]
        if not len(unclear):
            return states
        states[unclear] = _fix_in_turn(graph, theta[unclear].double(), log_mu[unclear], counting)
        return states
    return _fix_in_turn(graph, theta.double(), log_mu, counting)


def _own_maxima(graph: FactorGraph, log_mu: Tensor) -> tuple[Tensor, Tensor]:
    """Every variable's own maximum, and whether all of an item lead clearly, of shape (batch,)."""
    states = torch.empty(len(log_mu), graph.num_variables, dtype=torch.int64, device=log_mu.device)
    clear = torch.ones(len(log_mu), dtype=torch.bool, device=log_mu.device)
    for group, view in zip(graph.node_groups, graph.node_views(log_mu), strict=True):
        states[:, index_tensor(group.variables, log_mu.device)] = view.argmax(-1)
        if group.num_states > 1:
            best, second = view.topk(2, dim=-1).values.unbind(-1)
            clear &= (best - second >= _CLEAR).all(-1)
    return states, clear


def _fix_in_turn(graph: FactorGraph, theta: Tensor, log_mu: Tensor, counting: Counting) -> Tensor:
    """Sequential decoding, a level of variables that share no factor at a time."""
    device = log_mu.device
    level = compile_levels(graph, breadth_first_order(graph)).level
    num_levels = int(level.max(initial=-1)) + 1
    states = torch.zeros(len(log_mu), graph.num_variables, dtype=torch.int64, device=device)
    beliefs = log_mu[:, : graph.node_size].clone()
    # What the tables themselves say about a variable, for one that the beliefs leave no state.
    local = theta[:, : graph.node_size].clone()
    for nodes in graph.node_groups:
        weight = counting.node_total.detach()[index_tensor(nodes.variables)].to(device)
        beliefs[:, nodes.start : nodes.stop] *= weight.repeat_interleave(nodes.num_states)
    slots = [_Slot(group, slot, level) for group in graph.factor_groups for slot in range(group.arity)]
    log_tables, tables = graph.factor_views(log_mu), graph.factor_views(graph.expand(theta))
    members = [
        [nodes.variables[at] for at in _by_level(level[nodes.variables], num_levels)] for nodes in graph.node_groups
    ]
    table_of = {id(group): k for k, group in enumerate(graph.factor_groups)}
    for k in range(num_levels):
        for slot in slots:
            rows = slot.rows[k]
            if len(rows):
                entries = index_tensor(graph.node_entries(slot.group.variables[rows, slot.slot]), device)
                weight = counting.factor.detach()[index_tensor(slot.group.factors[rows])].to(device)
                number, own = table_of[id(slot.group)], log_mu[:, entries]
                change = weight[:, None] * (slot.given(log_tables[number], rows, states) - own)
                beliefs.index_add_(1, entries.flatten(), torch.where(own == NEG_INF, 0.0, change).flatten(1))
                local.index_add_(1, entries.flatten(), slot.given(tables[number], rows, states).flatten(1))
        for variables in (by_level[k] for by_level in members):
            if len(variables):
                entries = index_tensor(graph.node_entries(variables), device)
                scores = beliefs[:, entries]
                stuck = (scores == NEG_INF).all(-1, keepdim=True)
                states[:, index_tensor(variables, device)] = torch.where(stuck, local[:, entries], scores).argmax(-1)
    return states


class _Slot:
    """One slot of a factor group: the factors whose variable in it has neighbours fixed at an earlier level."""

    def __init__(self, group: FactorGroup, slot: int, level: IntArray):
        self.group, self.slot = group, slot
        depth = level[group.variables]
        self.fixed = depth < depth[:, [slot]]  # (factor, slot)  variables fixed before the one in this slot
        useful = np.flatnonzero(self.fixed.any(axis=1))
        by_level = _by_level(depth[useful, slot], int(level.max(initial=-1)) + 1)
        self.rows = [useful[at] for at in by_level]  # by the level of the variable in this slot

    def given(self, table: Tensor, rows: IntArray, states: Tensor) -> Tensor:
        """The maximum of tables, (batch, factor, *shape), over all other variables, the fixed ones at their states."""
        table = table[:, index_tensor(rows, table.device)]
        chosen = states[:, index_tensor(self.group.variables[rows], table.device)]
        fixed = torch.tensor(self.fixed[rows], device=table.device)
        for slot, size in enumerate(self.group.shape):
            if slot != self.slot:
                excluded = (chosen[..., slot, None] != torch.arange(size, device=table.device)) & fixed[:, slot, None]
                shape = [*excluded.shape[:2], *[1] * self.group.arity]
                shape[2 + slot] = size
                table = table.masked_fill(excluded.reshape(shape), NEG_INF)
        return table.movedim(2 + self.slot, 2).flatten(3).amax(-1)


def _by_level(level: IntArray, num_levels: int) -> list[IntArray]:
    """Positions in `level`, one array per level."""
    return np.split(np.argsort(level, kind="stable"), np.cumsum(np.bincount(level, minlength=num_levels))[:-1])


def upper_bound(
    graph: FactorGraph, theta: Tensor, messages: Tensor, counting: Counting, shares: list[Tensor]
) -> Tensor:
    """A bound on the score of every joint state, of shape (batch,), for log-messages of shape (batch, message).

    Arguments:
        graph: the structure.
        theta: of shape (batch, theta).
        messages: any; they decide how tight the bound is.
        counting: the counting numbers.
        shares: w_ci, for each factor group of shape (factor, slot).
    """
    theta, messages, device = theta.double(), messages.double(), theta.device
    factor, node_total = counting.factor.detach().to(device), counting.node_total.detach().to(device)
    beliefs = theta[:, : graph.node_size].clone()
    share_of = counting.node(graph).detach().to(device)  # c_i + sum_c w_ci
    slots = []
    for group, share in zip(graph.factor_groups, shares, strict=True):
        weight = factor[index_tensor(group.factors, device)]
        for slot, size in enumerate(group.shape):
            start, stop = group.message_range(slot)
            message = messages[:, start:stop].unflatten(1, (group.num_factors, size))
            entries = index_tensor(graph.node_entries(group.variables[:, slot]), device)
            beliefs.index_add_(1, entries.flatten(), (weight[:, None] * message).flatten(1))
            share_of = share_of.index_add(0, index_tensor(group.variables[:, slot], device), share[:, slot].to(device))
            slots.append((message, entries, share[:, slot].to(device)))
    total = theta.new_zeros(len(theta))
    for nodes in graph.node_groups:
        variables, view = index_tensor(nodes.variables, device), beliefs[:, nodes.start : nodes.stop]
        view = view.unflatten(1, (len(nodes.variables), nodes.num_states))
        view /= node_total[variables][:, None]
        scaled = torch.where(view == NEG_INF, NEG_INF, share_of[variables][:, None] * view)
        total = total + scaled.amax(-1).sum(-1)
    each = iter(slots)
    for group, table in zip(graph.factor_groups, graph.factor_views(graph.expand(theta)), strict=True):
        weight = factor[index_tensor(group.factors, device)]
        for slot, size in enumerate(group.shape):
            message, entries, share = next(each)
            belief = beliefs[:, entries]
            # c_c (log b_i - log m_c) - w_ci log b_i
            part = weight[:, None] * (belief - message) - share[:, None] * belief
            part = torch.where(belief == NEG_INF, NEG_INF, part)
            shape = [*part.shape[:2], *[1] * group.arity]
            shape[2 + slot] = size
            table = table + part.reshape(shape)
        total = total + table.flatten(2).amax(-1).sum(-1)
    return total
