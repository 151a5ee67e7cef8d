r"""Newton's equations on the local polytope, by elimination of everything but the beliefs of variables.

For a diagonal H > 0 and the constraints B of the local polytope,

    H x + g = B^T y,        B x = r

the beliefs x_c of a factor depend only on the beliefs of its variables. They are eliminated first, in batches of small
dense systems: with P = 1 / H, and R the matrix that sums the cells of a table to the beliefs of its variables,

    x_c = P (R^T y_c + s - g),        (R P R^T - (R P)(R P)^T / sum P) y_c = x_i - ...

has a covariance matrix C_c for every factor. One state of every variable, the most probable, follows from the others.
There remains a symmetric positive definite matrix with one unknown for each other state and the sparsity of the graph,

    K = H_i + sum_c C_c^-1

which is solved by a Cholesky factorisation of its band or, on large graphs, by a sparse LU factorisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.inference.convex.factorise import Solve, no_solution
from riskfield.inference.convex.polytope import Block, Missing, Polytope

# C_c is almost singular if variables almost determine each other. This share of its diagonal is added, and iterative
# refinement removes the effect.
_REGULARISATION, _LITTLE = 1e-12, 1e-13
_REFINEMENTS, _ENOUGH, _ROUNDING = 8, 1e-6, 1e-14
_NEGLIGIBLE = 1e-280  # smaller numbers, and their inverses, lose digits


class Newton:
    """Newton's equations at beliefs b, factorised for any g.

    Arguments:
        polytope: the constraints.
        b: beliefs of shape (item, mu).
        curvature: H, above 0 where possible.
        possible: where x may differ from 0.
        tight: keep the multipliers of factors among the unknowns. This is several times slower, and necessary if
            variables almost determine each other. `step` uses it when it is needed.
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
        """The step x for g = `slope`, of shape (item, mu), to beliefs that satisfy the constraints."""
        step, solved = self.solve(slope, self.polytope.missing(self.b))
        if not solved.all():
            items, newton = self._tightened(~solved)
            step[items], _ = newton.solve(slope[items], newton.polytope.missing(newton.b))
        return step

    def solve(self, slope: Tensor, missing: Missing, enough: float = _ENOUGH) -> tuple[Tensor, Tensor]:
        """x for g = `slope` and r = `missing`, and for which items its relative error is at most `enough`."""
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
        """The residuals of g and of r, and their size in units of beliefs, of shape (item, 1)."""
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
    """The factors of one group, with their own beliefs eliminated."""

    def __init__(self, block: Block, inverse: Tensor):
        self.block, self.items = block, len(inverse)
        self.inverse = block.cells(inverse)
        total = self.inverse.sum(1)
        self.total = torch.where(total > 0, total, 1.0)
        self.mass = block.sums @ self.inverse.T
        self.share = self.mass / self.total
        variance = self.share * (block.others @ self.inverse.T)  # without the cancellation of the lines below
        kept = variance > _NEGLIGIBLE
        # Scaled by its diagonal, so that improbable states do not make it ill-conditioned.
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
        """C_c scaled to a unit diagonal, plus `share` on the diagonal."""
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
    """The largest absolute value of an entry, of shape (item, 1)."""
    return torch.nn.functional.pad(vectors, (0, 1)).abs().amax(1, keepdim=True)


def _solved(solvers: list[Solve], right: Tensor) -> Tensor:
    solved = [solve(item) for solve, item in zip(solvers, right.numpy(), strict=True)]
    return torch.from_numpy(np.stack(solved)) if solved else right


def _times(stiffness: Tensor, rows: Tensor) -> Tensor:
    return (stiffness * rows).sum(1)


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
