r"""Newton's equations on the local polytope, by elimination of everything but the beliefs of variables.

For a diagonal H > 0 and the constraints B of the local polytope,

    H x + g = B^T y,        B x = r

the beliefs x_c of a factor, given those of its variables, depend on nothing else. They go first, in batches of small
dense systems: with P = 1 / H and R the sums of the table's cells that make up its variables' beliefs,

    x_c = P (R^T y_c + s - g),        (R P R^T - (R P)(R P)^T / sum P) y_c = x_i - ...

is a covariance matrix C_c for every factor. Of every variable one state, the most probable, follows from the others. So
is left a symmetric positive definite matrix of one unknown for each other state, with the sparsity of the graph,

    K = H_i + sum_c C_c^-1

which a Cholesky factorisation of its band or, on large graphs, a sparse LU factorisation solves.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from riskfield.graph._scopes import IntArray, index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference._factorise import Solve, Sparsity, no_solution

# Variables that are all but bound to each other make C_c all but singular. This share of its diagonal is added, and
# refinement takes the effect out again.
_REGULARISATION, _LITTLE = 1e-12, 1e-13
_REFINEMENTS, _ENOUGH, _ROUNDING = 8, 1e-6, 1e-14
_NEGLIGIBLE = 1e-280  # smaller numbers lose digits, and then their inverses do


class _Block(NamedTuple):
    """The constraints of one factor group. A row is a slot and a state of its variable, but the last one."""

    start: int  # where its beliefs lie in mu
    stop: int
    shape: tuple[int, ...]
    variables: Tensor  # (factor, slot)
    unknowns: Tensor  # (row, factor)  the unknown that each row is about
    sums: Tensor  # (row, cell)  0 or 1: which cells of a table a row adds up
    others: Tensor  # (row, cell)  the opposite
    pairs: Tensor  # (row * row, cell)  cells that two rows have in common

    @property
    def num_rows(self) -> int:
        """How many rows a factor has."""
        return len(self.sums)

    def cells(self, vector: Tensor) -> Tensor:
        """Its part of a vector of shape (item, mu), as (item * factor, cell)."""
        return vector[:, self.start : self.stop].reshape(-1, self.sums.shape[1])

    def rows(self, free: Tensor) -> Tensor:
        """The unknowns, given as (item, unknown), that its rows are about: of shape (row, item * factor)."""
        return free[:, self.unknowns].transpose(0, 1).flatten(1)

    def add_rows(self, free: Tensor, values: Tensor) -> None:
        """Add numbers of shape (row, item * factor) to the unknowns that the rows are about."""
        values = values.unflatten(1, (len(free), len(self.variables))).transpose(0, 1).flatten(1)
        free.scatter_add_(1, self.unknowns.reshape(1, -1).expand(len(free), -1), values)

    def whole(self, cells: Tensor, items: int) -> Tensor:
        """The opposite of `cells`."""
        return cells.reshape(items, self.stop - self.start)


class _Nodes(NamedTuple):
    """The variables with `size` states."""

    start: int  # where their beliefs lie in mu
    stop: int
    size: int
    variables: Tensor  # (node,)
    first: int  # of their unknowns

    def view(self, vector: Tensor) -> Tensor:
        """Their part of a vector of shape (item, mu), as (item, node, state)."""
        view: Tensor = vector[:, self.start : self.stop].unflatten(1, (len(self.variables), self.size))
        return view

    def unknowns(self, free: Tensor) -> Tensor:
        """Their unknowns, as (item, node, state but the last)."""
        count = len(self.variables) * (self.size - 1)
        view: Tensor = free[:, self.first : self.first + count].unflatten(1, (len(self.variables), self.size - 1))
        return view


class Polytope:
    """The local polytope of a graph: what of Newton's equations does not depend on numbers."""

    def __init__(self, graph: FactorGraph):
        self.num_nodes, self.num_variables = graph.node_size, graph.num_variables
        self.nodes, first = [], 0
        unknown = np.empty(graph.num_variables, np.int64)  # the first one of each variable
        for group in graph.node_groups:
            self.nodes.append(_Nodes(group.start, group.stop, group.num_states, index_tensor(group.variables), first))
            unknown[group.variables] = first + (group.num_states - 1) * np.arange(len(group.variables))
            first += (group.num_states - 1) * len(group.variables)
        self.num_unknowns = first
        self.node_start = index_tensor(graph.node_start)
        self.blocks = [_block(group, unknown) for group in graph.factor_groups]
        self.reduced = _Places(self)

    def free(self, vector: Tensor) -> Tensor:
        """Node entries but the last of each variable, of shape (item, unknown)."""
        return torch.cat([vector[:, :0], *(nodes.view(vector)[..., :-1].flatten(1) for nodes in self.nodes)], dim=1)

    def last(self, vector: Tensor) -> list[Tensor]:
        """The last node entry of each variable, of shape (item, node) for each number of states."""
        return [nodes.view(vector)[..., -1] for nodes in self.nodes]

    def spread(self, values: list[Tensor]) -> Tensor:
        """A number per variable, repeated for its unknowns."""
        parts = [v.repeat_interleave(n.size - 1, dim=1) for v, n in zip(values, self.nodes, strict=True)]
        return torch.cat(parts, dim=1) if parts else torch.zeros(0, 0, dtype=torch.float64)

    def missing(self, b: Tensor) -> Missing:
        """What beliefs lack of the constraints."""
        nodes = [1 - n.view(b).sum(-1) for n in self.nodes]
        free = self.free(b)
        rows = [block.rows(free) - block.sums @ block.cells(b).T for block in self.blocks]
        return Missing(nodes, rows, [1 - block.cells(b).sum(1) for block in self.blocks])

    def uniform(self, possible: Tensor) -> Tensor:
        """Uniform beliefs over the possible states of each region; NaN where a region has none."""
        b = possible.to(torch.float64)
        parts = [(n.view(b) / n.view(b).sum(-1, keepdim=True)).flatten(1) for n in self.nodes]
        for block in self.blocks:
            cells = block.cells(b)
            parts.append(block.whole(cells / cells.sum(1, keepdim=True), len(b)))
        return torch.cat([b[:, :0], *parts], dim=1)

    def consistent(self, possible: Tensor) -> Tensor:
        """The states left when those without a possible partner in some factor are struck out again and again."""
        while not possible.all():
            before = possible
            possible = before.clone()
            for block in self.blocks:
                table = possible[:, block.start : block.stop].unflatten(1, (-1, *block.shape))
                for slot, size in enumerate(block.shape):
                    entries = self.node_start[block.variables[:, slot]][:, None] + torch.arange(size)  # (factor, state)
                    supported = table.movedim(2 + slot, 2).reshape(*table.shape[:2], size, -1).any(-1)
                    lost = torch.zeros(len(possible), self.num_nodes, dtype=torch.int64)
                    where = entries.reshape(1, -1).expand(len(possible), -1)
                    lost.scatter_add_(1, where, (~supported).long().flatten(1))
                    possible[:, : self.num_nodes] &= lost == 0
                    view = [1] * table.ndim
                    view[0], view[1], view[2 + slot] = len(possible), len(entries), size
                    table &= possible[:, entries].reshape(view)
            if torch.equal(possible, before):
                break
        return possible

    def relabelling(self, b: Tensor) -> Tensor:
        """Where each entry of mu goes when the most probable state of each variable swaps places with the last.

        Of shape (item, mu), and its own inverse.
        """
        items, states, parts = len(b), torch.empty(len(b), self.num_nodes, dtype=torch.int64), []
        for nodes in self.nodes:
            best = nodes.view(b).argmax(-1, keepdim=True)
            own = nodes.view(states)
            own[:] = torch.arange(nodes.size)
            own[..., -1:] = best
            own.scatter_(-1, best, nodes.size - 1)
            places = nodes.start + nodes.size * torch.arange(len(nodes.variables))
            parts.append((places[:, None] + own).flatten(1))
        for block in self.blocks:
            table_size, place = block.sums.shape[1], torch.zeros((), dtype=torch.int64)
            for slot, size in enumerate(block.shape):
                of_slot = states[:, self.node_start[block.variables[:, slot]][:, None] + torch.arange(size)]
                place = (place * size).unsqueeze(-1) + of_slot.reshape(items, -1, *[1] * slot, size)
            starts = block.start + table_size * torch.arange(len(block.variables))
            parts.append((place.reshape(items, -1, table_size) + starts[:, None]).flatten(1))
        return torch.cat([torch.empty(items, 0, dtype=torch.int64), *parts], dim=1)


class Missing(NamedTuple):
    """What is missing in each constraint: r."""

    nodes: list[Tensor]  # (item, node) for each number of states: of sum b_i = 1
    rows: list[Tensor]  # (row, item * factor) for each block: of sum_{x_c \\ i} b_c = b_i
    tables: list[Tensor]  # (item * factor,) for each block: of sum b_c = 1

    def nothing(self) -> Missing:
        """As many zeros."""
        return Missing(*([torch.zeros_like(part) for part in parts] for parts in self))


_polytopes: WeakKeyDictionary[FactorGraph, Polytope] = WeakKeyDictionary()


def polytope(graph: FactorGraph) -> Polytope:
    """The polytope of a graph, which is kept as long as the graph."""
    found = _polytopes.get(graph)
    if found is None:
        found = _polytopes[graph] = Polytope(graph)
    return found


class Newton:
    """Newton's equations at beliefs b, factorised for any g.

    Arguments:
        polytope: the constraints.
        b: beliefs of shape (item, mu).
        curvature: H, above 0 where possible.
        possible: where x may differ from 0.
        tight: keep the multipliers of factors among the unknowns. That is several times slower, and needed where
            variables are all but bound to each other: `step` sees to it by itself.
    """

    def __init__(self, polytope: Polytope, b: Tensor, curvature: Tensor, possible: Tensor, tight: bool = False):
        self.polytope, self.given, self.tight = polytope, (b, curvature, possible), tight
        self.order = polytope.relabelling(b)
        self.b, possible = b.gather(1, self.order), possible.gather(1, self.order)
        curvature = curvature.gather(1, self.order)
        self.possible, self.inverse = possible, torch.where(possible, 1 / curvature, 0.0)
        self.at_free = polytope.free(possible)
        self.free_curvature = torch.where(self.at_free, polytope.free(curvature), 1.0)
        self.last_curvature = polytope.last(curvature)
        self.blocks = [_Factors(block, self.inverse) for block in polytope.blocks]
        self.equations: _Reduced | _Augmented = (_Augmented if tight else _Reduced)(self)
        self.tighter: tuple[Tensor, Newton] | None = None

    def step(self, slope: Tensor) -> Tensor:
        """The step x for g = `slope`, of shape (item, mu), to beliefs that keep the constraints."""
        step, solved = self.solve(slope, self.polytope.missing(self.b))
        if not solved.all():
            items, newton = self._tightened(~solved)
            step[items], _ = newton.solve(slope[items], newton.polytope.missing(newton.b))
        return step

    def solve(self, slope: Tensor, missing: Missing, enough: float = _ENOUGH) -> tuple[Tensor, Tensor]:
        """x for g = `slope` and r = `missing`, and of which items it is right to `enough` of its size."""
        slope = torch.where(self.possible, slope.gather(1, self.order), 0.0)
        step, pulls = self._solve_once(slope, missing)
        best, least = step, step.new_full((len(step), 1), float("inf"))
        for _ in range(_REFINEMENTS):
            left, still, error = self._remainder(step, pulls, slope, missing)
            better = error < least / 2
            best, least = torch.where(better, step, best), torch.where(better, error, least)
            solved = least <= enough * _largest(step).clamp(max=1) + _ROUNDING
            if not (better & ~solved).any():
                break
            more, more_pulls = self._solve_once(left, still)
            step, pulls = step + more, [a + b for a, b in zip(pulls, more_pulls, strict=True)]
        return best.gather(1, self.order), solved.ravel()

    def _tightened(self, unsolved: Tensor) -> tuple[Tensor, Newton]:
        if self.tighter is None or not torch.equal(self.tighter[0], unsolved):
            b, curvature, possible = (part[unsolved] for part in self.given)
            self.tighter = unsolved, Newton(self.polytope, b, curvature, possible, tight=True)
        return self.tighter

    def _solve_once(self, slope: Tensor, missing: Missing) -> tuple[Tensor, list[Tensor]]:
        """x, and the multipliers y of the rows of the blocks."""
        polytope = self.polytope
        last = [h * r + g for h, r, g in zip(self.last_curvature, missing.nodes, polytope.last(slope), strict=True)]
        right = polytope.spread(last) - polytope.free(slope)
        weighted = self.inverse * slope
        both = list(zip(self.blocks, missing.rows, missing.tables, strict=True))
        free, pulls = self.equations.solve(right, [block.right(weighted, rows, total) for block, rows, total in both])
        parts: list[Tensor] = [slope[:, :0]]
        for nodes, total in zip(polytope.nodes, missing.nodes, strict=True):
            own = nodes.unknowns(free)
            parts.append(torch.cat([own, (total - own.sum(-1)).unsqueeze(-1)], dim=-1).flatten(1))
        parts += [block.step(weighted, y, total) for (block, _, total), y in zip(both, pulls, strict=True)]
        return torch.cat(parts, dim=1), pulls

    def _remainder(
        self, step: Tensor, pulls: list[Tensor], slope: Tensor, missing: Missing
    ) -> tuple[Tensor, Missing, Tensor]:
        """What a solution leaves of g and of r, and how much that is in units of beliefs, of shape (item, 1)."""
        polytope, free = self.polytope, self.polytope.free(step)
        last = [
            h * x + g for h, x, g in zip(self.last_curvature, polytope.last(step), polytope.last(slope), strict=True)
        ]
        left = self.free_curvature * free + polytope.free(slope) - polytope.spread(last)
        rows, tables, errors = [], [], []
        for block, y, row, total in zip(polytope.blocks, pulls, missing.rows, missing.tables, strict=True):
            block.add_rows(left, y)
            cells = block.cells(step)
            rows.append(row + block.rows(free) - block.sums @ cells.T)
            tables.append(total - cells.sum(1))
            errors += [rows[-1].unflatten(1, (len(step), len(block.variables))).transpose(0, 1).flatten(1)]
            errors += [tables[-1].reshape(len(step), -1)]
        left = torch.where(self.at_free, left, 0.0)
        errors.append(left / self.equations.diagonal)
        whole = torch.zeros_like(slope)
        for nodes in polytope.nodes:
            nodes.view(whole)[..., :-1] = nodes.unknowns(left)
        none = [torch.zeros_like(total) for total in missing.nodes]
        return whole, Missing(none, rows, tables), _largest(torch.cat(errors, dim=1))


class _Reduced:
    """K x = right: one equation for every free belief of a variable."""

    def __init__(self, newton: Newton):
        polytope = newton.polytope
        self.blocks, self.at_free = newton.blocks, newton.at_free
        self.stiffness = [block.stiffness() for block in self.blocks]
        entries = polytope.reduced.entries(newton.free_curvature, newton.last_curvature, self.at_free, self.stiffness)
        self.diagonal = entries[:, polytope.reduced.sparsity.diagonal]
        self.solvers = [polytope.reduced.sparsity.factorise(item) for item in entries.numpy()]

    def solve(self, right: Tensor, rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Beliefs of variables and multipliers of rows: H v + sum y = right, C y - v = rows."""
        begun = [_times(stiffness, row) for stiffness, row in zip(self.stiffness, rows, strict=True)]
        for block, pull in zip(self.blocks, begun, strict=True):
            block.block.add_rows(right, -pull)
        free = _solved(self.solvers, torch.where(self.at_free, right, 0.0))
        both = zip(self.blocks, self.stiffness, begun, strict=True)
        return free, [pull + _times(stiffness, block.block.rows(free)) for block, stiffness, pull in both]


class _Augmented:
    """The same equations with the multipliers among the unknowns: [H E^T; E -C], scaled to unit size."""

    def __init__(self, newton: Newton):
        from scipy.sparse import coo_array
        from scipy.sparse.linalg import splu

        self.blocks, self.at_free = newton.blocks, newton.at_free
        system, count = newton.polytope.reduced, newton.at_free.shape[1]
        nothing = [block.covariance.new_zeros(block.covariance.shape) for block in self.blocks]
        entries = system.entries(newton.free_curvature, newton.last_curvature, self.at_free, nothing)
        diagonal = entries[:, system.sparsity.diagonal]
        self.diagonal = diagonal.clone()
        for block in self.blocks:
            block.block.add_rows(self.diagonal, block.scale**2)
        self.scale = self.diagonal.rsqrt()
        low, high = system.low, system.high
        values = entries * self.scale[:, low] * self.scale[:, high]
        off = low != high
        row, column, parts, start = [low, high[off]], [high, low[off]], [values, values[:, off]], count
        for block in self.blocks:
            rows, factors = block.block.unknowns.shape
            own = start + torch.arange(rows * factors).reshape(rows, factors)
            covariance = block.regular(_LITTLE).reshape(rows, rows, len(entries), factors).movedim(2, 0)
            row += [own.unsqueeze(1).expand(rows, rows, factors).reshape(-1), own.reshape(-1)]
            column += [own.expand(rows, rows, factors).reshape(-1), block.block.unknowns.reshape(-1)]
            link = block.scale.reshape(rows, len(entries), factors).transpose(0, 1).flatten(1)
            link = link * self.scale[:, block.block.unknowns.reshape(-1)]
            parts += [-covariance.flatten(1), link, link]
            row.append(column[-1])
            column.append(row[-2])
            start += rows * factors
        places: Any = tuple(torch.cat(part).numpy() for part in (row, column))
        self.solvers: list[Solve] = []
        for item in torch.cat(parts, dim=1).numpy():
            matrix = coo_array((item, places), shape=(start, start)).tocsc()
            try:
                self.solvers.append(splu(matrix, permc_spec="MMD_AT_PLUS_A").solve)
            except RuntimeError:  # exactly singular: no step
                self.solvers.append(no_solution)

    def solve(self, right: Tensor, rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As for `_Reduced`."""
        parts = [torch.where(self.at_free, right, 0.0) * self.scale]
        for block, row in zip(self.blocks, rows, strict=True):
            parts.append(-(row * block.scale).unflatten(1, (len(right), -1)).transpose(0, 1).flatten(1))
        solved, start = _solved(self.solvers, torch.cat(parts, dim=1)), right.shape[1]
        pulls = []
        for block in self.blocks:
            rows_, factors = block.block.unknowns.shape
            y = solved[:, start : start + rows_ * factors].reshape(-1, rows_, factors).transpose(0, 1)
            pulls.append(y.reshape(rows_, -1) * block.scale)
            start += rows_ * factors
        return torch.where(self.at_free, solved[:, : right.shape[1]] * self.scale, 0.0), pulls


class _Factors:
    """The factors of one group, their own beliefs eliminated."""

    def __init__(self, block: _Block, inverse: Tensor):
        self.block, self.items = block, len(inverse)
        self.inverse = block.cells(inverse)
        total = self.inverse.sum(1)
        self.total = torch.where(total > 0, total, 1.0)
        self.mass = block.sums @ self.inverse.T
        self.share = self.mass / self.total
        variance = self.share * (block.others @ self.inverse.T)  # without the cancellation of the lines below
        kept = variance > _NEGLIGIBLE
        # In units of its diagonal, so that improbable states do no harm.
        self.scale = torch.where(kept, torch.where(kept, variance, 1.0).rsqrt(), 0.0)
        covariance = (block.pairs @ self.inverse.T).reshape(block.num_rows, block.num_rows, len(self.inverse))
        covariance -= self.share.unsqueeze(1) * self.mass
        covariance *= self.scale.unsqueeze(1) * self.scale
        covariance.diagonal(dim1=0, dim2=1).fill_(1.0)
        self.covariance = covariance  # C_c, of shape (row, row, item * factor)

    def stiffness(self) -> Tensor:
        """C_c^-1, of shape (row, row, item * factor)."""
        return _invert(self.regular(_REGULARISATION)) * (self.scale.unsqueeze(1) * self.scale)

    def regular(self, share: float) -> Tensor:
        """C_c in units of its diagonal, of which a share is added."""
        matrix = self.covariance.clone()
        matrix.diagonal(dim1=0, dim2=1).add_(share)
        return matrix

    def right(self, weighted: Tensor, missing: Tensor, total: Tensor) -> Tensor:
        """C_c y - x_i, of shape (row, item * factor)."""
        own = self.block.cells(weighted)
        return missing + self.block.sums @ own.T - self.share * (total + own.sum(1))

    def step(self, weighted: Tensor, y: Tensor, total: Tensor) -> Tensor:
        """The steps of their beliefs, of shape (item, cell)."""
        own = self.block.cells(weighted)
        level = (total + own.sum(1) - (self.mass * y).sum(0)) / self.total
        return self.block.whole(self.inverse * (y.T @ self.block.sums + level.unsqueeze(1)) - own, self.items)


def _largest(vectors: Tensor) -> Tensor:
    """The largest size of an entry, of shape (item, 1)."""
    return torch.nn.functional.pad(vectors, (0, 1)).abs().amax(1, keepdim=True)


def _solved(solvers: list[Solve], right: Tensor) -> Tensor:
    solved = [solve(item) for solve, item in zip(solvers, right.numpy(), strict=True)]
    return torch.from_numpy(np.stack(solved)) if solved else right


def _times(stiffness: Tensor, rows: Tensor) -> Tensor:
    return (stiffness * rows).sum(1)


class _Places:
    """Where the entries of K come from: the curvatures of nodes, and the stiffness of factors."""

    def __init__(self, polytope: Polytope):
        unknowns = np.arange(polytope.num_unknowns)
        self.below: list[tuple[Tensor, Tensor]] = []  # pairs of states of one variable, for each number of states
        rows, columns = [unknowns], [unknowns]
        for nodes in polytope.nodes:
            k, j = np.tril_indices(nodes.size - 1)
            first = nodes.first + (nodes.size - 1) * np.arange(len(nodes.variables))[:, None]
            rows.append((first + k).ravel())
            columns.append((first + j).ravel())
            self.below.append((index_tensor(k), index_tensor(j)))
        self.pairs: list[tuple[Tensor, Tensor]] = []  # of the rows of each block
        for block in polytope.blocks:
            k, j = np.tril_indices(block.num_rows)
            rows.append(block.unknowns.numpy()[k].ravel())
            columns.append(block.unknowns.numpy()[j].ravel())
            self.pairs.append((index_tensor(k), index_tensor(j)))
        row, column = np.concatenate(rows), np.concatenate(columns)
        low, high = np.maximum(row, column), np.minimum(row, column)
        places, entry = np.unique(low * max(polytope.num_unknowns, 1) + high, return_inverse=True)
        self.entry = index_tensor(entry.reshape(-1))
        low, high = np.divmod(places, max(polytope.num_unknowns, 1))
        self.low, self.high = index_tensor(low), index_tensor(high)
        self.sparsity = Sparsity(polytope.num_unknowns, low, high)
        self.num_entries = len(places)

    def entries(self, free: Tensor, last: list[Tensor], at_free: Tensor, stiffness: list[Tensor]) -> Tensor:
        """The lower triangle of K, of shape (item, entry)."""
        parts, items, start = [free], len(free), 0
        for (k, j), own in zip(self.below, last, strict=True):
            count = int(k[-1]) + 1 if len(k) else 0
            there = at_free[:, start : start + count * own.shape[1]].reshape(items, own.shape[1], count)
            parts.append(torch.where(there[..., k] & there[..., j], own.unsqueeze(-1), 0.0).flatten(1))
            start += count * own.shape[1]
        for (k, j), own in zip(self.pairs, stiffness, strict=True):
            parts.append(own[k, j].unflatten(1, (items, own.shape[2] // items)).transpose(0, 1).flatten(1))
        values = torch.cat(parts, dim=1)
        out = values.new_zeros(items, self.num_entries)
        return out.scatter_add_(1, self.entry.expand(items, -1), values)


def _invert(matrix: Tensor) -> Tensor:
    """The inverse of positive definite matrices of shape (row, row, batch), by Gauss-Jordan elimination in place."""
    for k in range(len(matrix)):
        pivot = 1 / matrix[k, k]
        row = matrix[k] * pivot
        column = matrix[:, k].clone()
        column[k] = 0
        matrix -= column.unsqueeze(1) * row
        matrix[k] = row
        matrix[:, k] = -column * pivot
        matrix[k, k] = pivot
    return matrix


def _block(group: Any, unknown: IntArray) -> _Block:
    states = np.unravel_index(np.arange(group.table_size), group.shape)
    sums = [np.arange(n - 1)[:, None] == states[s] for s, n in enumerate(group.shape)]
    table = np.concatenate([np.zeros((0, group.table_size), bool), *sums])
    unknowns = [unknown[group.variables[:, s]] + np.arange(n - 1)[:, None] for s, n in enumerate(group.shape)]
    pairs = (table[:, None] & table).reshape(-1, group.table_size)
    return _Block(
        group.mu_start,
        group.mu_stop,
        group.shape,
        index_tensor(group.variables),
        index_tensor(np.concatenate([np.zeros((0, group.num_factors), np.int64), *unknowns])),
        *(torch.from_numpy(part.astype(np.float64)) for part in (table, ~table, pairs)),
    )
