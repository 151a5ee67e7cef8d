"""Exact sum-product on forests in C++: one pass from the leaves to the roots and one back, batch items as lanes.

Nothing but log Z is computed before it is asked for. In particular the marginals of factors, by far the largest result,
are never computed for losses on the log-partition function or on the marginals of variables.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from riskfield import _native
from riskfield.graph.factor_graph import FactorGraph
from riskfield.kernels.arrays import as_array, empty_array
from riskfield.kernels.initial_state import messages_like
from riskfield.kernels.protocols import ExactRun, Run
from riskfield.threads import get_num_threads

_RUNS = {torch.float32: _native.ForestRunFloat, torch.float64: _native.ForestRunDouble}
_wide = False  # compute with unlimited range, as the engine does for saturated items; tests set it


class ForestRun(ExactRun):
    """An `ExactRun` that can also be differentiated. One sweep is all it takes, from whatever messages.

    Arguments:
        graph: a forest.
        theta: of shape (batch, theta).
        messages: where an iterative run would start. They only matter if no sweep is run.
        unswept: makes a run that has not been swept, for the results in that case. None for an algorithm without
            sweeps and without messages.
        isa: the instruction set; by default the best one.
    """

    def __init__(
        self,
        graph: FactorGraph,
        theta: Tensor,
        messages: Tensor | None,
        unswept: Callable[[], Run] | None,
        *,
        isa: str = "",
    ):
        if messages is not None:
            messages_like(graph, theta, messages)  # raises if they do not fit
        self._graph, self._rows, self._dtype, self._unswept = graph, theta.shape[0], theta.dtype, unswept
        self._ran = False
        self.has_messages = unswept is not None
        plan = graph.derived(
            "forest", lambda: _native.make_forest_plan(graph.num_states, graph.node_start, _groups(graph))
        )
        self._run = _RUNS[theta.dtype](isa, plan, as_array(theta, theta.dtype), _wide, get_num_threads())
        self._log_z = np.empty(self._rows)
        self._run.log_partition(self._log_z)

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """One sweep is exact: its residual is 0, or NaN for an impossible model.

        Without a tolerance all sweeps count as run: those after the first would change nothing.
        """
        count = sweeps if tol < 0 else int(sweeps > 0 and not self._ran)
        self._ran |= sweeps > 0
        residual, ran = np.zeros(self._rows), np.empty(self._rows, np.int64)
        residual[self._log_z == -np.inf] = np.nan
        ran.fill(count)
        return torch.from_numpy(residual), torch.from_numpy(ran)

    def log_partition(self) -> Tensor:
        """log Z, of shape (batch,)."""
        return torch.from_numpy(self._log_z).to(self._dtype, copy=True)

    def statistics(self) -> Tensor:
        """d log Z / dtheta, of shape (batch, theta)."""
        out = empty_array(self._rows, self._graph.theta_size, self._dtype)
        self._run.statistics(out, get_num_threads())
        return torch.from_numpy(out)

    def node_marginals(self) -> Tensor:
        """The node part of mu."""
        if (before := self._before()) is not None:
            return before.marginals()[:, : self._graph.node_size]
        out = empty_array(self._rows, self._graph.node_size, self._dtype)
        self._run.marginals(out, True, get_num_threads())
        return torch.from_numpy(out)

    def marginals(self) -> Tensor:
        """Mu; NaN for an impossible model."""
        if (before := self._before()) is not None:
            return before.marginals()
        out = empty_array(self._rows, self._graph.mu_size, self._dtype)
        self._run.marginals(out, False, get_num_threads())
        return torch.from_numpy(out)

    def messages(self) -> Tensor:
        """Normalised log-messages."""
        if (before := self._before()) is not None:
            found = before.messages()
            assert found is not None
            return found
        out = empty_array(self._rows, self._graph.message_size, self._dtype)
        self._run.messages(out, get_num_threads())
        return torch.from_numpy(out)

    def backward(self, grad_mu: Tensor) -> Tensor:
        """d(grad_mu . mu) / dtheta; `grad_mu` may hold the node part alone."""
        out = empty_array(self._rows, self._graph.theta_size, self._dtype)
        nodes_only = grad_mu.shape[-1] == self._graph.node_size
        self._run.backward(as_array(grad_mu, self._dtype), nodes_only, out, get_num_threads())
        return torch.from_numpy(out)

    def backward_fixed_point(self, grad_mu: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same: the sweep is at its fixed point."""
        ones = torch.ones(self._rows, dtype=torch.int64)
        return self.backward(grad_mu), torch.zeros(self._rows, dtype=torch.float64), ones

    def _before(self) -> Run | None:
        """The run before its first sweep, if it is not past that."""
        return None if self._ran or self._unswept is None else self._unswept()


def _groups(graph: FactorGraph) -> list[tuple[object, ...]]:
    """The factor groups in the form in which the engine takes them, without packed tables to share."""
    return [
        (list(g.shape), g.variables, g.tables, None, g.theta_start, g.mu_start, g.message_start, 0)
        for g in graph.factor_groups
    ]
