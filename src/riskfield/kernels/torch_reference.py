"""The reference kernels in plain torch: any device, log domain throughout, differentiable twice.

Messages and beliefs are log-probabilities in flat tensors of shape (batch, ...). A stage gathers what it needs and
writes its results in place; autograd allows that because gathering keeps no reference to the gathered values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Levels, Parallel
from riskfield.kernels import fused
from riskfield.kernels.logspace import NEG_INF, logsumexp, normalised, scaled
from riskfield.kernels.problem import MessagePassingProblem, mean_field_levels, schedule_levels
from riskfield.kernels.start import starting_marginals, starting_messages

NATIVE = False

# While some stored log-message moves by more than this in a sweep, a run has not converged.
SETTLED = 0.1


@dataclass(frozen=True, eq=False)
class Stage:
    """Messages sent together, then the beliefs of the variables that received them."""

    sends: tuple[tuple[int, int, Tensor], ...]  # (factor group, slot, rows)
    receivers: Tensor  # (variable,)


class MessagePassingRun:
    """Sum-product (or max-product) sweeps over a batch of thetas. See `inference.message_passing` for the update."""

    def __init__(self, problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None):
        self.problem, self.theta = problem, theta
        graph = problem.graph
        self.layout = _Layout(graph, theta.device)
        self.counting = problem.counting.factor.to(theta)
        self.node_total = problem.counting.node_total.to(theta)
        self.damping = problem.damping.to(theta) if isinstance(problem.damping, Tensor) else problem.damping
        self.damped = isinstance(self.damping, Tensor) or self.damping > 0  # at zero a tensor still has a gradient
        self.begin_from(starting_messages(graph, theta, messages))
        self.residual = torch.full((len(theta),), float("inf"), dtype=torch.float64)

    @cached_property
    def stages(self) -> list[Stage]:
        """What a sweep consists of."""
        graph, schedule, device = self.problem.graph, self.problem.schedule, self.theta.device
        if isinstance(schedule, Parallel):
            return _flooding(graph, device)
        return _forward_backward(graph, schedule_levels(graph, schedule), device)

    def begin_from(self, log_messages: Tensor) -> None:
        """Set the messages, zeros and all; what is computed from here on is differentiable in them."""
        self.log_messages = log_messages.clone()
        self.log_beliefs = self.theta.new_zeros(len(self.theta), self.problem.graph.node_size)
        self._update_beliefs(torch.arange(self.problem.graph.num_variables, device=self.theta.device))

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep; items that reached `tol` are left as they are."""
        if tol < 0 and sweeps > 0 and fused.available(self.problem, self.theta):
            return self._advance_fused(sweeps)
        return _advance(self, sweeps, tol)

    def _advance_fused(self, sweeps: int) -> tuple[Tensor, Tensor]:
        state, reference = (self.theta, self.log_messages, self.log_beliefs), partial(_swept, self.problem, sweeps)
        self.log_messages, self.log_beliefs, before = fused.run_sweeps(self.problem, *state, sweeps, reference)
        change = (self.log_beliefs.detach().exp() - before.exp()).abs()
        self.residual = change.amax(1).to("cpu", torch.float64)
        return self.residual, torch.full((len(self.theta),), sweeps)

    def settled(self) -> Tensor:
        """Whether no message moved much in the last sweep, of shape (batch,).

        Marginals near 0 or 1 hide messages that still move by orders of magnitude and have yet to reach others.
        """
        return self.movement <= SETTLED * (1 - float(torch.as_tensor(self.problem.damping).detach()))

    def sweep(self) -> Tensor:
        """Run all stages once; the largest change of a node belief, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        self.movement = torch.zeros_like(change)
        for stage in self.stages:
            sent = [(self.layout.messages[g][s][rows], self._send(g, s, rows)) for g, s, rows in stage.sends]
            for (g, _, rows), (index, value) in zip(stage.sends, sent, strict=True):
                self._watch(g, rows, self.log_messages[:, index].detach(), value.detach())
                self.log_messages.index_copy_(1, index.flatten(), value.flatten(1))
            change = torch.maximum(change, self._update_beliefs(stage.receivers))
        return change

    def _watch(self, g: int, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Note how far stored log-messages c_c log m_c move."""
        if len(rows):
            factors = index_tensor(self.problem.graph.factor_groups[g].factors, self.theta.device)[rows]
            step = torch.where(new == old, 0.0, (new - old).abs()) * self.counting[factors].detach()[:, None]
            self.movement = torch.maximum(self.movement, step.amax((1, 2)))

    def restore(self, items: Tensor, saved: tuple[Tensor, Tensor]) -> None:
        """Put back the state of some batch items."""
        self.log_messages, self.log_beliefs = (
            torch.where(items[:, None], old, new)
            for old, new in zip(saved, (self.log_messages, self.log_beliefs), strict=True)
        )

    def state(self) -> tuple[Tensor, Tensor]:
        """A copy of messages and beliefs."""
        return self.log_messages.clone(), self.log_beliefs.clone()

    def messages(self) -> Tensor:
        """Normalised log-messages."""
        return self.log_messages

    def marginals(self) -> Tensor:
        """Node beliefs and factor beliefs exp(theta_c / c_c) prod_i b_i / m_c, normalised."""
        parts = [self.log_beliefs.exp()]
        for g, group in enumerate(self.problem.graph.factor_groups):
            rows = torch.arange(group.num_factors, device=self.theta.device)
            joint = self._scaled_table(g, rows)
            for slot in range(group.arity):
                joint = joint + _along(self._cavity(g, slot, rows), slot, group.arity)
            flat = joint.flatten(2)
            parts.append((flat - logsumexp(flat, (2,), keepdim=True)).exp().flatten(1))
        return torch.cat(parts, dim=1)

    def _send(self, g: int, slot: int, rows: Tensor) -> Tensor:
        group = self.problem.graph.factor_groups[g]
        joint = self._scaled_table(g, rows)
        for other in range(group.arity):
            if other != slot:
                joint = joint + _along(self._cavity(g, other, rows), other, group.arity)
        others = tuple(2 + other for other in range(group.arity) if other != slot)
        if others:
            joint = joint.amax(others) if self.problem.maximise else logsumexp(joint, others)
        update = normalised(joint)
        if self.damped:
            old = self.log_messages[:, self.layout.messages[g][slot][rows]]
            mixed = scaled(update, 1 - self.damping) + scaled(old, self.damping)
            update = normalised(torch.where(update == NEG_INF, NEG_INF, mixed))
        return update

    def _scaled_table(self, g: int, rows: Tensor) -> Tensor:
        group = self.problem.graph.factor_groups[g]
        tables = index_tensor(group.tables, self.theta.device)[rows]
        factors = index_tensor(group.factors, self.theta.device)[rows]
        table = self.problem.graph.factor_views(self.theta)[g][:, tables]
        return scaled(table, 1 / self.counting[factors].reshape(-1, *[1] * group.arity))

    def _cavity(self, g: int, slot: int, rows: Tensor) -> Tensor:
        """log b_i / m_c. A zero message means an impossible state, which stays impossible: 0 / 0 is 0 here."""
        message = self.log_messages[:, self.layout.messages[g][slot][rows]]
        belief = self.log_beliefs[:, self.layout.nodes[g][slot][rows]]
        return torch.where(message == NEG_INF, NEG_INF, belief - message)

    def _update_beliefs(self, variables: Tensor) -> Tensor:
        """Recompute the beliefs of `variables`; the largest change, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        layout = self.layout
        for size, members in layout.by_states(variables):
            index = layout.node_start[members][:, None] + torch.arange(size, device=members.device)
            owner, entries, factors = layout.incoming(members, size)
            received = scaled(self.log_messages[:, entries], self.counting[factors][:, None])
            total = self.theta[:, index].index_add(1, owner, received)
            new = normalised(scaled(total, 1 / self.node_total[members][:, None]))
            old = self.log_beliefs[:, index]
            if len(members):
                change = torch.maximum(change, self._undamped_change(old.detach(), new.detach()).detach())
            self.log_beliefs.index_copy_(1, index.flatten(), new.flatten(1))
        return change

    def _undamped_change(self, old: Tensor, new: Tensor) -> Tensor:
        """The change that beliefs of shape (batch, variable, state) would have made without damping.

        Damping shortens the step of every log-message, and so of the log-beliefs, by one factor; longer steps are not
        shorter ones scaled up once probabilities saturate, so the step is taken back in logarithms.
        """
        if self.damped:
            step = torch.where(new == NEG_INF, 0.0, new - old) / (1 - self.damping)
            new = normalised(torch.where(new == NEG_INF, NEG_INF, old + step))
        return (new.exp() - old.exp()).abs().amax((1, 2))


def _swept(
    problem: MessagePassingProblem, sweeps: int, theta: Tensor, messages: Tensor, beliefs: Tensor
) -> tuple[Tensor, Tensor]:
    """Messages and beliefs after so many more sweeps."""
    run = MessagePassingRun(problem, theta, None)
    run.log_messages, run.log_beliefs = messages.clone(), beliefs.clone()
    for _ in range(sweeps):
        run.sweep()
    return run.log_messages, run.log_beliefs


class MeanFieldRun:
    """Coordinate ascent on a product distribution. See `inference.mean_field` for the update."""

    def __init__(self, graph: FactorGraph, order: Sequence[int] | None, theta: Tensor, messages: Tensor | None):
        self.graph, self.theta = graph, theta
        self.layout = _Layout(graph, theta.device)
        self.stages = _colour_by_colour(graph, mean_field_levels(graph, order), theta.device)
        self.begin_from(starting_marginals(graph, theta, messages))
        self.residual = torch.full((len(theta),), float("inf"), dtype=torch.float64)

    def begin_from(self, log_beliefs: Tensor) -> None:
        """Set the log node marginals; what is computed from here on is differentiable in them."""
        self.log_beliefs = log_beliefs.clone()

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep; items that reached `tol` are left as they are."""
        return _advance(self, sweeps, tol)

    def settled(self) -> Tensor:
        """Always: the marginals are all there is."""
        return torch.ones(len(self.theta), dtype=torch.bool)

    def sweep(self) -> Tensor:
        """Update every variable once; the largest change of a marginal, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        for stage in self.stages:
            expected = self.theta[:, : self.graph.node_size]
            for g, slot, rows in stage.sends:
                index = self.layout.nodes[g][slot][rows]
                expected = expected.index_add(1, index.flatten(), self._expectation(g, slot, rows).flatten(1))
            for size, members in self.layout.by_states(stage.receivers):
                index = self.layout.node_start[members][:, None] + torch.arange(size, device=members.device)
                new = normalised(expected[:, index])
                old = self.log_beliefs[:, index]
                change = torch.maximum(change, (new.detach().exp() - old.detach().exp()).abs().amax((1, 2)))
                self.log_beliefs.index_copy_(1, index.flatten(), new.flatten(1))
        return change

    def restore(self, items: Tensor, saved: Tensor) -> None:
        """Put back the state of some batch items."""
        self.log_beliefs = torch.where(items[:, None], saved, self.log_beliefs)

    def state(self) -> Tensor:
        """A copy of the beliefs."""
        return self.log_beliefs.clone()

    def messages(self) -> Tensor:
        """Log node marginals."""
        return self.log_beliefs

    def marginals(self) -> Tensor:
        """Node marginals and their products."""
        parts = [self.log_beliefs.exp()]
        for g, group in enumerate(self.graph.factor_groups):
            rows = torch.arange(group.num_factors, device=self.theta.device)
            parts.append(self._product(g, None, rows).flatten(1))
        return torch.cat(parts, dim=1)

    def _product(self, g: int, left_out: int | None, rows: Tensor) -> Tensor:
        group = self.graph.factor_groups[g]
        product = self.theta.new_ones(1, 1, *[1] * group.arity)
        for slot in range(group.arity):
            if slot != left_out:
                belief = self.log_beliefs[:, self.layout.nodes[g][slot][rows]].exp()
                product = product * _along(belief, slot, group.arity)
        return product

    def _expectation(self, g: int, slot: int, rows: Tensor) -> Tensor:
        group = self.graph.factor_groups[g]
        tables = index_tensor(group.tables, self.theta.device)[rows]
        table = self.graph.factor_views(self.theta)[g][:, tables]
        product = self._product(g, slot, rows)
        others = tuple(2 + other for other in range(group.arity) if other != slot)
        # 0 * -inf is 0: a joint state that has no probability costs nothing. Infinities stay out of the products, whose
        # derivatives they would turn into NaN.
        impossible = table == NEG_INF
        expected = torch.where(impossible, 0.0, table) * product
        excluded = impossible & (product > 0)
        if others:
            expected, excluded = expected.sum(others), excluded.any(others)
        return torch.where(excluded, NEG_INF, expected)


class _Layout:
    """Index tensors from factors and variables into the flat vectors."""

    def __init__(self, graph: FactorGraph, device: torch.device):
        self.graph = graph
        self.num_states = index_tensor(graph.num_states, device)
        self.node_start = index_tensor(graph.node_start, device)
        self.messages: list[list[Tensor]] = []  # [group][slot]: (factor, state) positions in a message vector
        self.nodes: list[list[Tensor]] = []  # [group][slot]: (factor, state) positions in the node part
        owners, starts, factors = [], [], []
        for group in graph.factor_groups:
            message_rows, node_rows = [], []
            for slot, size in enumerate(group.shape):
                first, last = group.message_range(slot)
                message_rows.append(torch.arange(first, last, device=device).reshape(-1, size))
                variables = index_tensor(group.variables[:, slot], device)
                node_rows.append(self.node_start[variables][:, None] + torch.arange(size, device=device))
                owners.append(variables)
                starts.append(message_rows[-1][:, 0])
                factors.append(index_tensor(group.factors, device))
            self.messages.append(message_rows)
            self.nodes.append(node_rows)
        empty = torch.empty(0, dtype=torch.int64, device=device)
        order = torch.argsort(torch.cat(owners), stable=True) if owners else empty
        self._message_start = torch.cat(starts)[order] if owners else empty
        self._factor = torch.cat(factors)[order] if owners else empty
        self._degree = torch.bincount(torch.cat(owners) if owners else empty, minlength=graph.num_variables)
        self._first = self._degree.cumsum(0) - self._degree

    def by_states(self, variables: Tensor) -> list[tuple[int, Tensor]]:
        """`variables` split by their number of states."""
        sizes = self.num_states[variables]
        return [(int(size), variables[sizes == size]) for size in torch.unique(sizes)]

    def incoming(self, variables: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The messages to `variables`: which of them receives it, where it lies (message, state), and its factor."""
        degree = self._degree[variables]
        owner = torch.repeat_interleave(torch.arange(len(variables), device=variables.device), degree)
        within = torch.arange(len(owner), device=variables.device) - (degree.cumsum(0) - degree)[owner]
        position = self._first[variables][owner] + within
        entries = self._message_start[position][:, None] + torch.arange(size, device=variables.device)
        return owner, entries, self._factor[position]


def _forward_backward(graph: FactorGraph, levels: Levels, device: torch.device) -> list[Stage]:
    """Forward: a variable hears from the factors in which it is not first; backward: in which it is not last."""
    forward: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    backward: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    for g, group in enumerate(graph.factor_groups):
        rank = levels.rank[group.variables]
        for slot in range(group.arity):
            level = levels.level[group.variables[:, slot]]
            not_first = (rank[:, slot] > rank.min(axis=1)) | (group.arity == 1)
            not_last = rank[:, slot] < rank.max(axis=1)
            for stages, chosen in ((forward, not_first), (backward, not_last)):
                for where, rows in _by_level(level, np.flatnonzero(chosen)):
                    stages[where].append((g, slot, rows))
    return [_stage(graph, sends, device) for sends in [*forward, *reversed(backward)] if sends]


def _colour_by_colour(graph: FactorGraph, levels: Levels, device: torch.device) -> list[Stage]:
    """Every variable hears from all its factors, level by level."""
    sends: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(levels.count)]
    for g, group in enumerate(graph.factor_groups):
        for slot in range(group.arity):
            level = levels.level[group.variables[:, slot]]
            for where, rows in _by_level(level, np.arange(group.num_factors)):
                sends[where].append((g, slot, rows))
    members = dict(_by_level(levels.level, np.arange(graph.num_variables)))
    return [
        Stage(
            tuple((g, slot, index_tensor(rows, device)) for g, slot, rows in sends[level]),
            index_tensor(members[level], device),
        )
        for level in range(levels.count)
    ]


def _flooding(graph: FactorGraph, device: torch.device) -> list[Stage]:
    sends = [
        (g, slot, np.arange(group.num_factors))
        for g, group in enumerate(graph.factor_groups)
        for slot in range(group.arity)
    ]
    return [_stage(graph, sends, device)] if sends else []


def _stage(graph: FactorGraph, sends: list[tuple[int, int, np.ndarray]], device: torch.device) -> Stage:
    receivers = np.unique(np.concatenate([graph.factor_groups[g].variables[rows, slot] for g, slot, rows in sends]))
    return Stage(
        tuple((g, slot, index_tensor(rows, device)) for g, slot, rows in sends),
        index_tensor(receivers, device),
    )


def _by_level(level: np.ndarray, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    ordered = rows[np.argsort(level[rows], kind="stable")]
    values, starts = np.unique(level[ordered], return_index=True)
    return [(int(v), ordered[a:b]) for v, a, b in zip(values, starts, [*starts, len(ordered)][1:], strict=True)]


def _advance(run: MessagePassingRun | MeanFieldRun, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
    ran = torch.zeros(len(run.theta), dtype=torch.int64)
    for _ in range(sweeps):
        # An impossible model has beliefs of NaN, which no sweep can mend.
        done = (run.residual <= tol) | torch.isnan(run.residual)
        if done.all():
            break
        saved = run.state() if done.any() else None
        change = run.sweep().detach().to("cpu", torch.float64)
        change = torch.where((change <= tol) & ~run.settled().cpu(), change.clamp(min=SETTLED), change)
        if saved is not None:
            run.restore(done.to(run.theta.device), saved)  # type: ignore[arg-type]
        run.residual = torch.where(done, run.residual, change)
        ran += ~done
    return run.residual, ran


def _along(values: Tensor, slot: int, arity: int) -> Tensor:
    """(batch, factor, state) values broadcast along axis `slot` of (batch, factor, *shape) tables."""
    return values.reshape(*values.shape[:2], *[1] * slot, values.shape[2], *[1] * (arity - 1 - slot))
