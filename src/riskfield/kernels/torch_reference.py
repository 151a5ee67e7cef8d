"""The reference kernels in plain torch: any device, log domain throughout, differentiable twice.

Messages and beliefs are log-probabilities in flat tensors of shape (batch, ...). A stage gathers what it needs and
writes its results in place; autograd allows that because gathering keeps no reference to the gathered values.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.schedule import Parallel
from riskfield.kernels.convergence import ROUNDING, Convergence, Gap
from riskfield.kernels.initial_state import starting_marginals, starting_messages
from riskfield.kernels.logspace import NEG_INF, expected, logsumexp, normalised, scaled
from riskfield.kernels.problem import (
    ForestProblem,
    MeanFieldProblem,
    MessagePassingProblem,
    Task,
    mean_field_levels,
    schedule_levels,
)
from riskfield.kernels.stages import Layout, Stage, colour_by_colour, flooding, forward_backward


def lacks(task: Task) -> str | None:
    """What these kernels would need for `task` and do not have; None if they can run it."""
    if isinstance(task.problem, ForestProblem):
        return "exact inference on forests: `inference.exact` has it in torch"
    if task.record is not None:
        return "tapes: autograd records their sweeps"
    if task.tangent is not None:
        return "tangents: use forward-mode autograd"
    if task.along is not None:
        return "several steps along a direction at once"
    return None


def start(task: Task) -> MessagePassingRun | MeanFieldRun:
    """Start a run. Autograd can differentiate it in theta, the messages and the numbers of the problem."""
    if isinstance(task.problem, MeanFieldProblem):
        return MeanFieldRun(task.problem, task.theta, task.messages)
    assert isinstance(task.problem, MessagePassingProblem)
    return MessagePassingRun(task.problem, task.theta, task.messages)


class MessagePassingRun:
    """Sum-product (or max-product) sweeps over a batch of thetas. See `inference.message_passing` for the update."""

    def __init__(self, problem: MessagePassingProblem, theta: Tensor, messages: Tensor | None):
        self.problem, self.theta = problem, theta
        graph = problem.graph
        self.layout = graph.derived(("layout", theta.device), lambda: Layout(graph, theta.device))
        self.counting = problem.counting.factor.to(theta)
        self.node_total = problem.counting.node_total.to(theta)
        self.damping = problem.damping.to(theta) if isinstance(problem.damping, Tensor) else problem.damping
        self.damped = isinstance(self.damping, Tensor) or self.damping > 0  # at zero a tensor still has a gradient
        self.begin_from(starting_messages(graph, theta, messages))
        self.convergence = Convergence(len(theta), float(torch.as_tensor(problem.damping).detach()))

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of a sweep."""
        graph, schedule, device = self.problem.graph, self.problem.schedule, self.theta.device
        if isinstance(schedule, Parallel):
            return flooding(graph, device)
        return forward_backward(graph, schedule_levels(graph, schedule), device)

    def begin_from(self, log_messages: Tensor) -> None:
        """Set the messages, zeros included. What is computed from here on is differentiable in them."""
        self.log_messages = log_messages.clone()
        self.log_beliefs = self.theta.new_zeros(len(self.theta), self.problem.graph.node_size)
        self._update_beliefs(torch.arange(self.problem.graph.num_variables, device=self.theta.device))

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep. Items that have reached `tol` do not change."""
        return _advance(self, sweeps, tol)

    def sweep(self) -> Tensor:
        """Run all stages once. Returns the largest change of a node belief, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        for stage in self.stages:
            sent = [(self.layout.messages[g][s][rows], self._send(g, s, rows)) for g, s, rows in stage.sends]
            for index, value in sent:
                self.log_messages.index_copy_(1, index.flatten(), value.flatten(1))
            change = torch.maximum(change, self._update_beliefs(stage.receivers))
        return change

    @torch.no_grad()
    def gap(self) -> Gap:
        """How inconsistent factor and node marginals are, and how far messages would move without damping.

        If an undamped update moves a log-message by s(x), up to a constant, then the factor's marginal of that variable
        is b(x) exp(s(x)), normalised. It differs from b(x) by v(x), which is at most b(x) |s(x)| if s is small. To
        first order, the error of the log-partition value is the sum over messages of c_c sum_x v(x) log(b(x) / m_c(x)).
        """
        marginals, steps = (self.theta.new_zeros(len(self.theta)) for _ in range(2))
        for g, group in enumerate(self.problem.graph.factor_groups):
            rows = torch.arange(group.num_factors, device=self.theta.device)
            counting = self.counting[index_tensor(group.factors, self.theta.device)][:, None]
            size = torch.stack([self._operand_size(g, slot) for slot in range(group.arity)]).sum(0)
            for slot in range(group.arity):
                belief, message = self._log_operands(g, slot)
                possible = belief > NEG_INF
                update = self._update(g, slot, rows)
                moved = torch.where(possible, normalised(update) - message, 0.0)
                step = moved - logsumexp(belief + moved, (2,), keepdim=True)
                sent = torch.where(update > NEG_INF, update.abs(), 0.0)
                rounding = ROUNDING * torch.finfo(step.dtype).eps * (1 + size + expected(belief, sent))
                step = torch.where(possible & (step.abs() > rounding[:, :, None]), step, 0.0)
                violation = torch.where(step < 1, belief.exp() * step.abs().clamp(max=1), (belief + step).exp())
                largest = violation.amax(2)
                if not self.problem.maximise:
                    cavity = torch.where(possible, belief - message, 0.0)
                    cavity = cavity - cavity.gather(2, belief.argmax(2, keepdim=True))
                    largest = torch.maximum(largest, (counting * cavity.abs() * violation).sum(2))
                marginals = torch.maximum(marginals, largest.amax(1))
                steps = torch.maximum(steps, (counting * step.abs()).amax((1, 2)))
        return Gap(marginals, steps)

    def _log_operands(self, g: int, slot: int) -> tuple[Tensor, Tensor]:
        """Log-beliefs and log-messages. A state impossible in either is -inf in the belief and 0 in the message."""
        belief = self.log_beliefs[:, self.layout.nodes[g][slot]]
        message = self.log_messages[:, self.layout.messages[g][slot]]
        possible = (belief > NEG_INF) & (message > NEG_INF)
        return torch.where(possible, belief, NEG_INF), torch.where(possible, message, 0.0)

    def _operand_size(self, g: int, slot: int) -> Tensor:
        """The expected magnitude of the numbers whose sum a log-cavity is, of shape (batch, factor)."""
        belief, message = self._log_operands(g, slot)
        variables = index_tensor(self.problem.graph.factor_groups[g].variables[:, slot], self.theta.device)
        given = self.theta[:, self.layout.nodes[g][slot]] / self.node_total[variables][:, None]
        return expected(belief, belief.abs() + message.abs() + given.abs())

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

    def one_sweep(self, log_messages: Tensor) -> tuple[Tensor, Tensor]:
        """The marginals at `log_messages`, and the messages one sweep later. Differentiable."""
        return _one_sweep(self, log_messages)

    def _send(self, g: int, slot: int, rows: Tensor) -> Tensor:
        """The new messages, damped."""
        update = normalised(self._update(g, slot, rows))
        if self.damped:
            old = self.log_messages[:, self.layout.messages[g][slot][rows]]
            mixed = scaled(update, 1 - self.damping) + scaled(old, self.damping)
            update = normalised(torch.where(update == NEG_INF, NEG_INF, mixed))
        return update

    def _update(self, g: int, slot: int, rows: Tensor) -> Tensor:
        """The new messages without damping, not normalised."""
        group = self.problem.graph.factor_groups[g]
        joint = self._scaled_table(g, rows)
        for other in range(group.arity):
            if other != slot:
                joint = joint + _along(self._cavity(g, other, rows), other, group.arity)
        others = tuple(2 + other for other in range(group.arity) if other != slot)
        if others:
            joint = joint.amax(others) if self.problem.maximise else logsumexp(joint, others)
        return joint

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
        """Recompute the beliefs of `variables`. Returns the largest change, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        layout = self.layout
        for members, index in layout.by_states(variables):
            owner, entries, factors = layout.incoming(members, index.shape[1])
            received = scaled(self.log_messages[:, entries], self.counting[factors][:, None])
            total = self.theta[:, index].index_add(1, owner, received)
            new = normalised(scaled(total, 1 / self.node_total[members][:, None]))
            old = self.log_beliefs[:, index]
            if len(members):
                change = torch.maximum(change, self._undamped_change(old.detach(), new.detach()).detach())
            self.log_beliefs.index_copy_(1, index.flatten(), new.flatten(1))
        return change

    def _undamped_change(self, old: Tensor, new: Tensor) -> Tensor:
        """The change of beliefs, of shape (batch, variable, state), that the update would have made without damping.

        Damping shortens the steps of all log-messages, and therefore of the log-beliefs, by one factor. The factor is
        undone in the log domain, because changes of probabilities near 0 or 1 are not proportional to it.
        """
        if self.damped:
            step = torch.where(new == NEG_INF, 0.0, new - old) / (1 - self.damping)
            new = normalised(torch.where(new == NEG_INF, NEG_INF, old + step))
        return (new.exp() - old.exp()).abs().amax((1, 2))


class MeanFieldRun:
    """Coordinate ascent on a product distribution. See `inference.mean_field` for the update."""

    def __init__(self, problem: MeanFieldProblem, theta: Tensor, messages: Tensor | None):
        graph = problem.graph
        self.graph, self.theta = graph, theta
        self.layout = graph.derived(("layout", theta.device), lambda: Layout(graph, theta.device))
        self.stages = colour_by_colour(graph, mean_field_levels(graph, problem.order), theta.device)
        self.begin_from(starting_marginals(graph, theta, messages))
        self.convergence = Convergence(len(theta), damping=0.0)
        self._change = theta.new_zeros(len(theta))  # of the last sweep

    def begin_from(self, log_beliefs: Tensor) -> None:
        """Set the log node marginals. What is computed from here on is differentiable in them."""
        self.log_beliefs = log_beliefs.clone()

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """Sweep. Items that have reached `tol` do not change."""
        return _advance(self, sweeps, tol)

    def sweep(self) -> Tensor:
        """Update every variable once. Returns the largest change of a marginal, of shape (batch,)."""
        change = self.theta.new_zeros(len(self.theta))
        for stage in self.stages:
            total = self.theta[:, : self.graph.node_size]
            for g, slot, rows in stage.sends:
                index = self.layout.nodes[g][slot][rows]
                total = total.index_add(1, index.flatten(), self._expectation(g, slot, rows).flatten(1))
            for _, index in self.layout.by_states(stage.receivers):
                new = normalised(total[:, index])
                old = self.log_beliefs[:, index]
                change = torch.maximum(change, (new.detach().exp() - old.detach().exp()).abs().amax((1, 2)))
                self.log_beliefs.index_copy_(1, index.flatten(), new.flatten(1))
        self._change = change
        return change

    @torch.no_grad()
    def gap(self) -> Gap:
        """The change of the last sweep, or 0 if it is below rounding. Mean field has no messages that could differ."""
        size = torch.zeros_like(self._change)
        mu = self.marginals()
        for weights, tables in zip(
            self.graph.factor_views(mu), self.graph.factor_views(self.graph.expand(self.theta)), strict=True
        ):
            size = torch.maximum(size, expected(weights.flatten(2).log(), tables.flatten(2).abs()).amax(1))
        rounding = ROUNDING * torch.finfo(size.dtype).eps * (1 + size)
        return Gap(torch.where(self._change > rounding, self._change, 0.0), torch.zeros_like(self._change))

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

    def one_sweep(self, log_beliefs: Tensor) -> tuple[Tensor, Tensor]:
        """The marginals at `log_beliefs`, and the beliefs one sweep later. Differentiable."""
        return _one_sweep(self, log_beliefs)

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
        # 0 * -inf is 0 here: a joint state of probability 0 adds nothing. Infinities are kept out of the products
        # because they would make the derivatives NaN.
        impossible = table == NEG_INF
        mean = torch.where(impossible, 0.0, table) * product
        excluded = impossible & (product > 0)
        if others:
            mean, excluded = mean.sum(others), excluded.any(others)
        return torch.where(excluded, NEG_INF, mean)


def _one_sweep(run: MessagePassingRun | MeanFieldRun, state: Tensor) -> tuple[Tensor, Tensor]:
    run.begin_from(state)
    mu = run.marginals()
    run.advance(1, -1.0)
    return mu, run.messages()


def _advance(run: MessagePassingRun | MeanFieldRun, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
    ran = torch.zeros(len(run.theta), dtype=torch.int64)
    for _ in range(sweeps):
        done = run.convergence.done(tol)
        if done.all():
            break
        saved = run.state() if done.any() else None
        change = run.sweep().detach().to("cpu", torch.float64)
        if saved is not None:
            run.restore(done.to(run.theta.device), saved)  # type: ignore[arg-type]
        run.convergence.judge(~done, change, 1, tol, run.gap)
        ran += ~done
    return run.convergence.residual.clone(), ran


def _along(values: Tensor, slot: int, arity: int) -> Tensor:
    """(batch, factor, state) values broadcast along axis `slot` of (batch, factor, *shape) tables."""
    return values.reshape(*values.shape[:2], *[1] * slot, values.shape[2], *[1] * (arity - 1 - slot))
