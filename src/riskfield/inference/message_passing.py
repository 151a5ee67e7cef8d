r"""Message passing on any counting-number entropy: loopy BP, tree-reweighted BP, convexified BP, and max-product.

Maximises theta . mu + H(mu) over the local polytope by the updates

    b_i(x_i)  propto  exp( (theta_i(x_i) + sum_{d containing i} c_d log m_d(x_i)) / c^_i )
    m_c(x_i)  propto  sum_{x_c \ i} exp(theta_c(x_c) / c_c) prod_{j in c \ i} b_j(x_j) / m_c(x_j)

(Domke 2013, eq. 18, when c^_i = 1); at the end mu_i = b_i and mu_c propto exp(theta_c/c_c) prod_{i in c} b_i / m_c.
Max-product replaces the sum by a maximum. State: a log-message per factor and slot, in the graph's message layout.
Exact on trees (with Bethe). Loopy BP need not converge on loopy graphs with strong couplings: damp it, or use TRW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from riskfield.devices import check_max_bytes
from riskfield.entropy import AbstractEntropy, Bethe, Counting, spanning_tree_rho
from riskfield.errors import ConvergenceWarning, TreewidthError, warn
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Parallel, Schedule, Sequential
from riskfield.inference._joint import decode, upper_bound
from riskfield.inference.algorithm import AbstractAlgorithm, AbstractOptimality, FixedPointMap, ValueIs
from riskfield.inference.exact import ExactMAP
from riskfield.inference.solution import inner_product, modes
from riskfield.kernels import ExactRun, MessagePassingProblem, Run, one_sweep


@dataclass(frozen=True)
class MessagePassing(AbstractAlgorithm):
    """Sum-product message passing.

    Arguments:
        entropy: `Bethe()` for loopy belief propagation (the default), `TRW(rho)`, or any `CountingNumbers`.
        schedule: `Sequential()` (the default, which usually needs the fewest sweeps), `Coloured()` (for GPUs) or
            `Parallel()`.
        damping: in [0, 1), by default 0. A new log-message is (1 - damping) times the update plus damping times the old
            one. The tolerance is compared with the undamped change, so damping is never mistaken for convergence. A
            tensor may require a gradient, as may the numbers of the entropy; `Unroll` computes it.

    >>> from riskfield import grid, infer
    >>> graph = grid(2, 2, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.node(theta, 0)[1] = 2.0
    >>> infer(graph, theta, MessagePassing()).node_marginals[0][0].round(decimals=4)
    tensor([0.1192, 0.8808], dtype=torch.float64)
    """

    symmetric_jacobian: ClassVar[bool] = True
    parameter_name: ClassVar[str] = "counting numbers"
    recorded_parameters: ClassVar[int] = 2

    entropy: AbstractEntropy = field(default_factory=Bethe)
    schedule: Schedule = field(default_factory=Sequential)
    damping: float | Tensor = 0.0

    def __post_init__(self) -> None:
        _check_settings(self.entropy, self.schedule, self.damping)

    def problem(self, graph: FactorGraph) -> MessagePassingProblem:
        """Sum-product."""
        return MessagePassingProblem(graph, self.entropy.counting(graph), self.schedule, _constant(self.damping))

    def parameters(self, graph: FactorGraph) -> tuple[Tensor, ...]:
        """The counting numbers c_c of factors and c^_i of variables."""
        counting = self.entropy.counting(graph)
        return counting.factor, counting.node_total

    def with_parameters(self, graph: FactorGraph, parameters: tuple[Tensor, ...]) -> MessagePassing:
        """The same algorithm with these counting numbers."""
        return replace(self, entropy=_Given(Counting(*parameters)))

    def optimality(self, graph: FactorGraph) -> AbstractOptimality:
        """The optimality conditions of theta . mu + H(mu) on the local polytope."""
        return _EntropyOptimality(graph, self.entropy.counting(graph))

    def fixed_point_maps(
        self, graph: FactorGraph, theta: Tensor, parameters: tuple[Tensor, ...]
    ) -> Iterator[FixedPointMap]:
        """Undamped sweeps that send all messages at once, a few large tensor operations; then the run's schedule."""
        for schedule in dict.fromkeys((Parallel(), self.schedule)):
            yield one_sweep(MessagePassingProblem(graph, Counting(*parameters), schedule), theta)

    def value_is(self, graph: FactorGraph, *, sweeps: int, converged: bool) -> ValueIs:
        """Exact with `Bethe` on a forest; an upper bound with a `TRW` that has converged and whose rho is valid.

        Rho is known to be valid if it is nowhere above the probabilities of the factors in a uniform spanning tree.
        """
        counting = self.entropy.counting(graph)
        plain = bool((counting.factor == 1).all() and (counting.node_total == 1).all())
        one_sweep_is_exact = self.schedule == Sequential() and not torch.as_tensor(self.damping).any()
        if plain and graph.is_forest and (converged or (sweeps > 0 and one_sweep_is_exact)):
            return "exact"
        trees = bool((counting.node_total == 1).all()) and all(group.arity <= 2 for group in graph.factor_groups)
        if converged and trees and bool((counting.factor <= spanning_tree_rho(graph) * (1 + 1e-12)).all()):
            return "upper bound"
        return "approximation"

    def value(self, run: Run) -> Callable[[], Tensor] | None:
        """log Z if the run is exact: there it is theta . mu + H(mu)."""
        return run.log_partition if isinstance(run, ExactRun) else None

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """theta . mu + H(mu)."""
        return inner_product(graph.expand(theta), mu) + self.entropy.counting(graph).value(graph, mu)


@dataclass(frozen=True)
class _Given(AbstractEntropy):
    """Counting numbers as they are."""

    numbers: Counting

    def counting(self, graph: FactorGraph) -> Counting:
        return self.numbers


@dataclass(frozen=True, eq=False)
class _EntropyOptimality(AbstractOptimality):
    """The entropy sum_c c_c H(mu_c) + sum_i c_i H(mu_i)."""

    graph: FactorGraph
    counting: Counting

    def curvature(self, mu: Tensor) -> Tensor:
        """c_i / mu_i and c_c / mu_c."""
        numbers = self._in_layout_of_mu().to(mu)
        return torch.where(mu > 0, numbers / mu, 0)

    def _in_layout_of_mu(self) -> Tensor:
        graph = self.graph
        node, factor = self.counting.node(graph).detach(), self.counting.factor.detach()
        parts = [node[index_tensor(g.variables)].repeat_interleave(g.num_states) for g in graph.node_groups]
        parts += [factor[index_tensor(g.factors)].repeat_interleave(g.table_size) for g in graph.factor_groups]
        return torch.cat(parts) if parts else node


@dataclass(frozen=True)
class MaxProduct(AbstractAlgorithm):
    """Max-product message passing: `solution.mode()` is its estimate of the most probable joint state (MAP).

    The "marginals" are normalised max-marginals. `mode()` fixes the variables one after the other, each at its best
    state given those before, so that ties and hard constraints are decided consistently; `log_partition` is the score
    theta . f(x) of that state. `solution.joint_mode()` says whether the state is certified as optimal: always on a
    forest (once converged), and with a concave entropy such as `TRW` wherever the beliefs agree on one state.

    If a decoded state is impossible, the most probable one is found by elimination (`ExactMAP`) where that fits into
    memory. If it does not fit, or if every state is impossible, a `ConvergenceWarning` says so, and the score is -inf.

    Arguments:
        entropy: as for `MessagePassing`, and so are `schedule` and `damping`.
        schedule: the order of updates.
        damping: the share of the old message.
        max_bytes: how much memory elimination may take.

    >>> from riskfield import chain, infer
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.node(theta, 0)[1] = 1.0
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 0.5  # neighbours tend to agree
    >>> infer(graph, theta, MaxProduct()).mode()
    tensor([1, 1, 1])
    """

    nonsmooth_because: ClassVar[str] = "a maximiser does not vary smoothly. Use MessagePassing."

    entropy: AbstractEntropy = field(default_factory=Bethe)
    schedule: Schedule = field(default_factory=Sequential)
    damping: float | Tensor = 0.0
    max_bytes: int = ExactMAP.max_bytes

    def __post_init__(self) -> None:
        _check_settings(self.entropy, self.schedule, self.damping)
        check_max_bytes(self.max_bytes)

    def problem(self, graph: FactorGraph) -> MessagePassingProblem:
        """Max-product."""
        counting, damping = self.entropy.counting(graph), _constant(self.damping)
        return MessagePassingProblem(graph, counting, self.schedule, damping, maximise=True)

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """The score of the state that `mode` returns."""
        return graph.score(theta, self.mode(graph, theta, mu))

    def mode(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """Fix the variables one after the other, each given those before."""
        batch = theta.shape[:-1]
        with torch.no_grad():
            flat = theta.detach().reshape(batch.numel(), theta.shape[-1])
            flat_mu = mu.detach().reshape(batch.numel(), mu.shape[-1])
            states = decode(graph, flat, flat_mu, self.entropy.counting(graph))
            known = torch.isnan(flat_mu.sum(-1))  # to be impossible
            impossible = ((graph.score(flat, states) == float("-inf")) & ~known).nonzero()[:, 0]
            if len(impossible):
                states[impossible] = _possible_states(graph, flat[impossible], states[impossible], self.max_bytes)
        return states.reshape(*batch, graph.num_variables)

    def upper_bound(self, graph: FactorGraph, theta: Tensor, mu: Tensor, messages: Tensor | None) -> Tensor:
        """The bound of the messages, where the entropy is concave."""
        shares = None if messages is None else self.entropy.concave_shares(graph)
        if messages is None or shares is None:
            return super().upper_bound(graph, theta, mu, messages)
        batch = theta.shape[:-1]
        theta, messages = (rows.reshape(batch.numel(), rows.shape[-1]) for rows in (theta, messages))
        return upper_bound(graph, theta, messages, self.entropy.counting(graph), shares).reshape(batch)


def _possible_states(graph: FactorGraph, theta: Tensor, states: Tensor, max_bytes: int) -> Tensor:
    """The best states by elimination, instead of impossible `states`; a warning if there are none."""
    found = f"`MaxProduct` found only impossible joint states for {len(theta)} batch items"
    try:
        mu = ExactMAP(max_bytes).start(graph, theta, None, None).marginals()
    except TreewidthError as error:
        warn(f"{found}, and elimination does not fit: {error}", ConvergenceWarning)
        return states
    impossible = torch.isnan(mu.sum(-1))
    if impossible.any():
        reason = "the evidence or the -inf entries of `theta` contradict"
        warn(f"Every joint state of {int(impossible.sum())} batch items is impossible: {reason}.", ConvergenceWarning)
    return torch.where(impossible.unsqueeze(-1), states, modes(graph, mu))


def _constant(damping: float | Tensor) -> float | Tensor:
    """A number, unless it requires a gradient."""
    return damping if isinstance(damping, Tensor) and damping.requires_grad else float(damping)


def _check_settings(entropy: object, schedule: object, damping: float | Tensor) -> None:
    if not isinstance(entropy, AbstractEntropy):
        raise TypeError(f"`entropy` must be an entropy such as `TRW(0.5)`. Got {entropy!r}.")
    if not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` must be `Sequential(...)`, `Coloured()` or `Parallel()`. Got {schedule!r}.")
    if isinstance(damping, Tensor) and damping.ndim:
        raise ValueError(f"`damping` must be one number. Got a tensor of shape {tuple(damping.shape)}.")
    if isinstance(damping, str) or not 0 <= damping < 1:
        raise ValueError(f"`damping` must lie in [0, 1). Got {damping!r}.")
