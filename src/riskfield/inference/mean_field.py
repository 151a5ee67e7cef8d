r"""Naive mean field: the best fully factorised q, found by coordinate ascent.

Maximises E_q[theta] + H(q) over products q. A sweep updates every variable once, colour by colour, by

    mu_j(x_j)  propto  exp( theta_j(x_j) + sum_{c containing j} sum_{x_c \ j} theta_c(x_c) prod_{i in c \ j} mu_i(x_i) )

(Domke 2013, section 3.2, Mean Field Updates). The value never falls from one update to the next and is a lower bound on
the log-partition function. State: the log node marginals. Always converges, but to a local optimum that tends to be
overconfident; avoid it when calibrated marginals matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from riskfield.entropy import negative_xlogx
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import as_order
from riskfield.inference.algorithm import AbstractAlgorithm, FixedPointMap, ValueIs
from riskfield.inference.solution import inner_product
from riskfield.kernels import MeanFieldProblem, one_sweep


@dataclass(frozen=True)
class MeanField(AbstractAlgorithm):
    """Mean-field inference.

    Arguments:
        order: the order in which variables are updated, compiled into levels of independent updates; by default colour
            by colour of a greedy colouring.

    >>> from riskfield import grid, infer
    >>> graph = grid(8, 8, num_states=2)
    >>> solution = infer(graph, graph.zeros(), MeanField())
    >>> round(float(solution.log_partition), 4)  # 64 log 2
    44.3614
    """

    symmetric_jacobian: ClassVar[bool] = True

    order: Sequence[int] | None = None

    impossible_caveat: ClassVar[str] = (
        " Or the model is possible, but no product of marginals within reach avoids its -inf entries: mean field is not"
        " for hard constraints between variables; use `MessagePassing()`."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", as_order(self.order))

    def visits(self, graph: FactorGraph) -> Sequence[int] | None:
        """The order of `graph`'s variables; None for colour by colour."""
        return self.order

    def problem(self, graph: FactorGraph) -> MeanFieldProblem | None:
        """Coordinate ascent; its state is the log node marginals."""
        return MeanFieldProblem(graph, self.visits(graph))

    def fixed_point_maps(
        self, graph: FactorGraph, theta: Tensor, parameters: tuple[Tensor, ...]
    ) -> Iterator[FixedPointMap]:
        """A round of updates, of the log node marginals."""
        yield one_sweep(MeanFieldProblem(graph, self.visits(graph)), theta)

    def value_is(self, graph: FactorGraph, *, sweeps: int, converged: bool) -> ValueIs:
        """A lower bound: theta . mu + H(mu) of a distribution, if not of the best one."""
        return "lower bound"

    def log_partition(self, graph: FactorGraph, theta: Tensor, mu: Tensor) -> Tensor:
        """theta . mu + the entropy of the product of the node marginals."""
        entropy: Tensor = negative_xlogx(mu[..., : graph.node_size]).sum(-1)
        return inner_product(graph.expand(theta), mu) + entropy
