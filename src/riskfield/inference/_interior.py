r"""A primal-dual interior-point method for separable convex functions on the local polytope.

Minimises F(b) = sum_k F_k(b_k) subject to B b = d, b >= 0, following the central path

    F'(b) - B^T lambda - z = 0,        B b = d,        b z = nu        as nu falls to 0

by Newton steps with a predictor and a corrector (Mehrotra 1992), all batch items at once. The multipliers lambda need
not be kept: a step finds them anew. Where F' falls to -infinity at 0 the bound cannot be active; close to the solution
its multiplier z is let go there, and a step down is taken in log b, in which b log b is linear. So beliefs come out
right in the relative sense, however small.

Newton's equations are solved by block elimination. The beliefs of a factor, given those of its variables, depend on
nothing else: they go first, in batches of small dense systems. What is left has one unknown per state of each variable
and the sparsity of the graph, and is factorised as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph

# The mean of b z below which multipliers of bounds that cannot be active are let go.
_CLOSE = 1e-10
# A step stops short of the boundary by this share of the way to it.
_MARGIN = 0.01
# A warm start whose first step moves a belief by more is given up for a cold one; b and z of a bound start above this.
_FAR, _INWARD = 0.05, 1e-3
# Not before beliefs above the second number are right to this share of themselves has a run converged.
_LOG_CHANGE, _SMALL = 0.1, 1e-8
# Factors whose variables are bound to each other have singular blocks. Refinement takes the effect of this out again.
_REGULARISATION = 1e-13
_REFINEMENTS, _ROUNDING = 6, 1e-16
_NEGLIGIBLE = 1e-280  # smaller numbers lose digits, and then their inverses do
_ZERO = 1e-150  # beliefs that fall below it count as 0: the square of an inverse is still finite there


class Energy(Protocol):
    """A separable convex function F of the beliefs of a batch."""

    possible: Tensor  # (batch, mu)  states that may have a belief above 0
    steep: Tensor  # (batch, mu)  where F' falls to -infinity at 0

    def derivatives(self, b: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """F' and F'' at b > 0 of shape (len(items), mu)."""
        ...


class _Block(NamedTuple):
    """The constraints of one factor group."""

    start: int  # where its beliefs lie in mu
    stop: int
    entries: Tensor  # (factor, row)  the node belief that each row is about: rows are pairs of a slot and a state
    sums: Tensor  # (row, cell)  0 or 1: which cells of a table a row adds up
    ends: tuple[tuple[int, int], ...]  # the rows of each slot but the first


class Residual(NamedTuple):
    """What is missing in each constraint."""

    rows: list[Tensor]  # of the blocks, (batch, factor, row) each
    total: Tensor  # (batch, variable)


class Polytope:
    """The constraints B b = d of the local polytope, by blocks."""

    def __init__(self, graph: FactorGraph):
        self.graph = graph
        self.nodes = graph.node_size
        groups = [np.repeat(group.variables, group.num_states) for group in graph.node_groups]
        self.variable = index_tensor(np.concatenate([np.empty(0, np.int64), *groups]))  # of each node belief
        self.blocks = [self._block(graph, group) for group in graph.factor_groups]
        self.places, self.size = self._places()

    @staticmethod
    def _block(graph: FactorGraph, group: Any) -> _Block:
        states = np.unravel_index(np.arange(group.table_size), group.shape)
        entries = [graph.node_start[group.variables[:, s]][:, None] + np.arange(n) for s, n in enumerate(group.shape)]
        sums = [np.arange(n)[:, None] == states[s] for s, n in enumerate(group.shape)]
        edges = np.cumsum([0, *group.shape]).tolist()
        return _Block(
            group.mu_start,
            group.mu_stop,
            index_tensor(np.concatenate(entries, axis=1)),
            index_tensor(np.concatenate(sums).astype(np.float64)),
            tuple(pairwise(edges[1:])),
        )

    def _places(self) -> tuple[tuple[Tensor, Tensor], int]:
        """Rows and columns of the entries of Newton's matrix, and its size: node beliefs, rows of blocks, totals."""
        nodes = torch.arange(self.nodes)
        rows, columns, start = [nodes], [nodes], self.nodes
        for block in self.blocks:
            count = block.entries.shape[1]
            own = start + torch.arange(block.entries.numel())
            table = own.reshape(-1, count, 1).expand(-1, count, count)
            rows += [table.reshape(-1), own, block.entries.reshape(-1)]
            columns += [table.transpose(1, 2).reshape(-1), block.entries.reshape(-1), own]
            start += len(own)
        rows += [start + self.variable, nodes]
        columns += [nodes, start + self.variable]
        return (torch.cat(rows), torch.cat(columns)), start + self.graph.num_variables

    def cells(self, b: Tensor, block: _Block) -> Tensor:
        """The beliefs of a block, of shape (batch, factor, cell)."""
        return b[:, block.start : block.stop].reshape(len(b), len(block.entries), block.sums.shape[1])

    def totals(self, nodes: Tensor) -> Tensor:
        """Sums over the states of each variable, of shape (batch, variable)."""
        return nodes.new_zeros(len(nodes), self.graph.num_variables).index_add(1, self.variable, nodes)

    def residual(self, b: Tensor, total: float | Tensor) -> Residual:
        """What is missing of sum_{x_c \\ i} b_c = b_i and of sum b_i = total."""
        rows = [b[:, block.entries] - self.cells(b, block) @ block.sums.T for block in self.blocks]
        return Residual(rows, total - self.totals(b[:, : self.nodes]))

    def uniform(self, possible: Tensor) -> Tensor:
        """Uniform beliefs over the possible states of each region; NaN where a region has none."""
        b = possible.to(torch.float64)
        nodes = b[:, : self.nodes] / self.totals(b[:, : self.nodes])[:, self.variable]
        parts = [nodes]
        for block in self.blocks:
            cells = self.cells(b, block)
            parts.append((cells / cells.sum(-1, keepdim=True)).flatten(1))
        return torch.cat(parts, dim=1)

    def consistent(self, possible: Tensor) -> Tensor:
        """The states left when those without a possible partner in some factor are struck out again and again."""
        while not possible.all():
            before = possible
            possible = before.clone()
            for block in self.blocks:
                supported = self.cells(possible.double(), block) @ block.sums.T > 0
                nodes = possible[:, : self.nodes].double()
                # A node state stays if every row about it has support.
                flat = block.entries.reshape(-1)
                lost = torch.zeros_like(nodes).index_add(1, flat, (~supported).double().flatten(1))
                possible[:, : self.nodes] &= lost == 0
                allowed = (~possible[:, block.entries]).double() @ block.sums == 0
                possible[:, block.start : block.stop] &= allowed.flatten(1)
            if torch.equal(possible, before):
                break
        return possible


class _Newton:
    """Newton's equations  H x + g = B^T y,  B x = r  at beliefs b, factorised for any g and r."""

    def __init__(self, polytope: Polytope, b: Tensor, curvature: Tensor, possible: Tensor):
        from scipy.sparse import coo_array
        from scipy.sparse.linalg import splu

        self.polytope, self.possible, self.curvature = polytope, possible, curvature
        self.inverse = torch.where(possible, 1 / curvature, 0.0)
        nodes, at_node = polytope.nodes, possible[:, : polytope.nodes]
        diagonal = torch.where(at_node, curvature[:, :nodes], 1.0)
        total = diagonal.clone()
        self.kept, self.scales, values = [], [], [diagonal]
        for block in polytope.blocks:
            matrix, size, kept = self._block(block, b)
            # Scaled to unit size, improbable states do no harm.
            scale = torch.where(kept, size, 1.0).rsqrt()
            total.index_add_(1, block.entries.reshape(-1), (kept * scale**2).flatten(1))
            pairs = kept.unsqueeze(-1) & kept.unsqueeze(-2)
            matrix = torch.where(pairs, matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2), 0.0)
            matrix = matrix + torch.diag_embed(torch.where(kept, _REGULARISATION, 1.0).double())
            values += [-matrix.flatten(1), (kept * scale).flatten(1), (kept * scale).flatten(1)]
            self.kept.append(kept)
            self.scales.append(scale)
        self.scale = total.rsqrt()
        values += [-at_node.double()] * 2
        entries = torch.cat(values, dim=1)
        row, column = polytope.places
        scale = torch.cat([self.scale, entries.new_ones(len(b), polytope.size - nodes)], dim=1)
        entries = entries * scale[:, row] * scale[:, column]
        self.factors: list[Callable[[Any], Any]] = []
        for item in entries.numpy():
            matrix = coo_array((item, (row.numpy(), column.numpy())), shape=(polytope.size,) * 2).tocsc()
            try:
                self.factors.append(splu(matrix).solve)
            except RuntimeError:  # exactly singular: no step
                self.factors.append(lambda right: np.full_like(right, np.nan))

    def _block(self, block: _Block, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_c H_c^-1 A_c^T, its diagonal, and which of its rows are independent."""
        inverse = self.polytope.cells(self.inverse, block)
        matrix = (inverse.unsqueeze(-2) * block.sums) @ block.sums.T
        size = matrix.diagonal(dim1=-2, dim2=-1)
        kept = size > _NEGLIGIBLE
        node = b[:, block.entries]
        for start, stop in block.ends:
            # Every slot repeats that the table sums to 1. The row of the most probable state is the one to leave out.
            kept[..., start:stop].scatter_(-1, node[..., start:stop].argmax(-1, keepdim=True), False)
        return matrix, size, kept

    def solve(self, slope: Tensor, residual: Residual) -> Tensor:
        """The step x for g = `slope` and r = `residual`, refined."""
        step, rows, total = self._solve_once(slope, residual)
        best, least = step, step.new_full((len(step), 1), float("inf"))
        for _ in range(_REFINEMENTS):
            left = torch.where(self.possible, slope + self.curvature * step - self._transposed(rows, total), 0.0)
            missing = self.polytope.residual(step, residual.total)
            missing = Residual([r + m for r, m in zip(residual.rows, missing.rows, strict=True)], missing.total)
            # In units of beliefs.
            errors = [left * self.inverse.clamp(max=1), missing.total, *(rows.flatten(1) for rows in missing.rows)]
            error = torch.cat(errors, dim=1).abs().amax(1, keepdim=True)
            better = error < least / 2
            best, least = torch.where(better, step, best), torch.where(better, error, least)
            if not (better & (error > _ROUNDING)).any():
                break
            more, more_rows, more_total = self._solve_once(left, missing)
            step, total = step + more, total + more_total
            rows = [a + b for a, b in zip(rows, more_rows, strict=True)]
        return best

    def _solve_once(self, slope: Tensor, residual: Residual) -> tuple[Tensor, list[Tensor], Tensor]:
        """x, and the multipliers y of the rows of the blocks and of the totals."""
        polytope, nodes = self.polytope, self.polytope.nodes
        slope = torch.where(self.possible, slope, 0.0)
        right = [-slope[:, :nodes] * self.scale]
        for block, scale, kept, missing in zip(polytope.blocks, self.scales, self.kept, residual.rows, strict=True):
            pull = polytope.cells(self.inverse * slope, block) @ block.sums.T
            right.append((-(missing + pull) * scale * kept).flatten(1))
        right.append(-residual.total)
        both = zip(self.factors, torch.cat(right, dim=1).numpy(), strict=True)
        solved = torch.from_numpy(np.stack([solve(r) for solve, r in both]))
        step = torch.where(self.possible[:, :nodes], solved[:, :nodes] * self.scale, 0.0)
        parts, rows, start = [step], [], nodes
        for block, scale in zip(polytope.blocks, self.scales, strict=True):
            y = solved[:, start : start + block.entries.numel()].reshape(scale.shape) * scale
            rows.append(y)
            start += block.entries.numel()
            cells = slice(block.start, block.stop)
            parts.append(self.inverse[:, cells] * ((y @ block.sums).flatten(1) - slope[:, cells]))
        return torch.cat(parts, dim=1), rows, solved[:, start:]

    def _transposed(self, rows: list[Tensor], total: Tensor) -> Tensor:
        """B^T y in the layout of mu."""
        polytope = self.polytope
        nodes, parts = total[:, polytope.variable], []
        for block, y in zip(polytope.blocks, rows, strict=True):
            nodes = nodes.index_add(1, block.entries.reshape(-1), -y.flatten(1))
            parts.append((y @ block.sums).flatten(1))
        return torch.cat([nodes, *parts], dim=1)


class InteriorPointRun:
    """Newton steps on a batch. State: log b and log z in the layout of mu, -inf for a z that was let go."""

    def __init__(self, graph: FactorGraph, energy: Energy, state: Tensor | None):
        self.energy, self.polytope = energy, Polytope(graph)
        self.possible = self.polytope.consistent(energy.possible)
        self.b = self.polytope.uniform(self.possible)
        items = len(self.b)
        # A region without possible states is a contradiction: NaN, of which `infer` makes an error.
        self.failed = torch.isnan(self.b).any(1)
        self.b = torch.where(self.possible, self.b, 0.0)
        self.z = torch.zeros_like(self.b)
        self.residual = torch.where(self.failed, float("nan"), float("inf")).double()
        self._restart(torch.arange(items))
        self.untried = torch.zeros(items, dtype=torch.bool)  # warm starts before their first step
        self.stuck = torch.zeros(items, dtype=torch.bool)  # no step could be computed; what was reached stays
        if state is not None:
            self._continue(state.to("cpu", torch.float64))

    def advance(self, sweeps: int, tol: float) -> tuple[Tensor, Tensor]:
        """A sweep is a Newton step; the residual, the largest change of a belief it asks for before damping.

        While multipliers remain, the residual is no less than what they say is left.
        """
        ran = torch.zeros(len(self.b), dtype=torch.int64)
        for _ in range(sweeps):
            items = torch.nonzero(~self.failed & ~self.stuck & ~(self.residual <= tol)).ravel()
            if not len(items):
                break
            self._step(items)
            ran[items] += 1
        return self.residual.clone(), ran

    def marginals(self) -> Tensor:
        """The beliefs; 0 where the bound b >= 0 is active."""
        b = torch.where((self.z > self.b) | (self.b <= _ZERO), 0.0, self.b)
        return torch.where(self.failed[:, None], float("nan"), b)

    def messages(self) -> Tensor:
        """log b and log z."""
        return torch.cat([self.b, self.z], dim=1).log()

    def _restart(self, items: Tensor) -> None:
        """Cold: uniform beliefs, multipliers of the size of the slopes."""
        if not self.b.shape[1]:
            return
        possible = self.possible[items]
        b = torch.where(possible, self.polytope.uniform(possible), 0.0)
        slope, curvature = self.energy.derivatives(torch.where(possible, b, 1.0), items)
        size = torch.where(possible, slope.abs() + curvature * b, 0.0).amax(1, keepdim=True)
        self.b[items] = b
        self.z[items] = torch.where(possible, size, 0.0)

    def _continue(self, state: Tensor) -> None:
        """Go on from the state of an earlier run; one of zeros, and one of other possible states, is a cold start."""
        b, z = state.exp().chunk(2, dim=1)
        bounded = (z > 0) | self.energy.steep | ~self.possible  # weights may have changed, and what is steep with them
        warm = (state != 0).any(1) & ((b > 0) == self.possible).all(1) & bounded.all(1) & ~self.failed
        self.b[warm], self.z[warm] = b[warm], z[warm]
        # A run that was on the way goes on as it was. One at its end may be in a corner that is now the wrong one.
        self.untried = warm & _is_close(b, z, self.possible)
        corner = self.untried[:, None] & (z > 0)
        self.b = torch.where(corner, self.b.clamp(min=_INWARD), self.b)
        self.z = torch.where(corner, self.z.clamp(min=_INWARD), self.z)

    def _step(self, items: Tensor) -> None:
        if not self.b.shape[1]:
            self.residual[items] = 0.0
            return
        b, z, possible = self.b[items], self.z[items], self.possible[items]
        inside = z > 0
        slope, curvature = self.energy.derivatives(torch.where(possible, b, 1.0), items)
        barrier = torch.where(inside, z / b, 0.0)
        newton = _Newton(self.polytope, b, torch.where(possible, curvature + barrier, 1.0), possible)
        residual = self.polytope.residual(b, 1.0)
        count = inside.sum(1, keepdim=True).clamp(min=1)
        nu = (b * z).sum(1, keepdim=True) / count

        # Predictor: straight for nu = 0. How far it gets says how much to centre.
        ahead = newton.solve(slope, residual)
        ahead_z = torch.where(inside, -z - barrier * ahead, 0.0)
        reach = _reach(b, z, ahead, ahead_z, inside).clamp(max=1)
        aimed = ((b + reach * ahead) * (z + reach * ahead_z) * inside).sum(1, keepdim=True) / count
        centre = (aimed / torch.where(nu > 0, nu, 1.0)).clamp(0, 1) ** 3 * nu
        target = torch.where(inside, (centre - ahead * ahead_z) / torch.where(inside, b, 1.0), 0.0)
        step, step_z = ahead, ahead_z
        if inside.any():
            step = newton.solve(slope - target, residual)
            step_z = torch.where(inside, target - z - barrier * step, 0.0)
        safe = torch.where(possible, b, 1.0)
        whole = torch.where(possible & ~inside & (step < 0), b * torch.expm1(step / safe), step)
        change = whole.abs().amax(1)
        far = self.untried[items] & ~(change <= _FAR)
        lost = ~far & ~torch.isfinite(step + step_z).all(1)
        self.untried[items] = False
        self.stuck[items[lost]] = True
        self.residual[items[lost]] = float("inf")
        if far.any():
            self._restart(items[far])
            self._step(items[far])
        keep = ~far & ~lost
        items = items[keep]
        if not len(items):
            return
        b, z, step, step_z, inside, possible, safe, change = (
            x[keep] for x in (b, z, step, step_z, inside, possible, safe, change)
        )
        length = ((1 - _MARGIN) * _reach(b, z, step, step_z, inside)).clamp(max=1)
        move = length * step
        moved = torch.where(possible & ~inside & (move < 0), b * (move / safe).exp(), b + move)
        self.b[items] = torch.where(possible, moved.clamp(min=_ZERO), 0.0)
        self.z[items] = torch.where(inside, (z + length * step_z).clamp(min=_ZERO), 0.0)
        self._settle(items, change, (step / safe).abs(), inside)

    def _settle(self, items: Tensor, change: Tensor, log_change: Tensor, inside: Tensor) -> None:
        """Let go of multipliers close to the solution, and say what is left to do."""
        b, z, steep = self.b[items], self.z[items], self.energy.steep[items]
        close = _is_close(b, z, self.possible[items])
        self.z[items] = torch.where(close[:, None] & steep, 0.0, z)
        unsure = inside & steep | (log_change > _LOG_CHANGE) & (b > _SMALL) & ~inside
        # Of b and z one is 0 at the solution: the smaller of them is an error of one or the other.
        left = torch.maximum(change, torch.minimum(b, z).amax(1))
        self.residual[items] = torch.where(unsure.any(1), left.clamp(min=_LOG_CHANGE), left)


def _is_close(b: Tensor, z: Tensor, possible: Tensor) -> Tensor:
    """Whether the duality gap says that the solution is near, of shape (batch,)."""
    return (b * z).sum(1) <= _CLOSE * possible.sum(1)


def _reach(b: Tensor, z: Tensor, step: Tensor, step_z: Tensor, inside: Tensor) -> Tensor:
    """The longest step that leaves b and z non-negative where both are kept, of shape (batch, 1)."""
    reach = b.new_full((len(b), 1), float("inf"))
    for x, dx in ((b, step), (z, step_z)):
        share = torch.where(inside & (dx < 0), x / -dx, float("inf"))
        reach = torch.minimum(reach, share.amin(1, keepdim=True))
    return reach
