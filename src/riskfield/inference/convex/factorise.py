r"""Positive definite matrices of one sparsity, factorised one by one.

The order of the unknowns is found once: by reverse Cuthill-McKee where that leaves a narrow band, which LAPACK then
factorises as such, else by minimum degree for SuperLU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from riskfield.graph._scopes import IntArray

FloatArray = npt.NDArray[np.float64]
Solve = Callable[[FloatArray], FloatArray]

# Narrower bands are factorised as bands: their zeros cost less than the pointers of a sparse method.
_BAND = 64
# A matrix that rounding has made indefinite gets this share of its diagonal more.
_SHIFT = 1e-8


class Sparsity:
    """The places of the lower triangle of symmetric matrices of `size` unknowns, each named once."""

    def __init__(self, size: int, rows: IntArray, columns: IntArray):
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        self.size = size
        self.diagonal = np.flatnonzero(rows == columns)
        self.diagonal = self.diagonal[np.argsort(rows[self.diagonal])]
        off = rows != columns
        ones, both = np.ones(2 * off.sum()), (np.r_[rows[off], columns[off]], np.r_[columns[off], rows[off]])
        pattern = coo_array((ones, both), shape=(size, size)).tocsr()
        order = reverse_cuthill_mckee(pattern, symmetric_mode=True) if size else np.empty(0, np.int64)
        place = _inverse(order)
        self.width = int(np.abs(place[rows] - place[columns]).max(initial=0))
        self.banded = self.width <= _BAND
        if not self.banded:
            order = _minimum_degree(pattern)
            place = _inverse(order)
        self.order, self.place = order, place
        low, high = np.maximum(place[rows], place[columns]), np.minimum(place[rows], place[columns])
        if self.banded:
            self.target = high * (self.width + 1) + low - high
        else:
            self._prepare_columns(low, high)

    def _prepare_columns(self, low: IntArray, high: IntArray) -> None:
        """Where the entries of a matrix in compressed columns come from."""
        number = np.arange(len(low))
        off = low != high
        row, column, source = np.r_[low, high[off]], np.r_[high, low[off]], np.r_[number, number[off]]
        sort = np.lexsort((row, column))
        self.source, self.rows = source[sort], row[sort].astype(np.int32)
        self.starts = np.searchsorted(column[sort], np.arange(self.size + 1)).astype(np.int32)

    def factorise(self, values: FloatArray) -> Solve:
        """What solves the system with these entries; it gives NaN where that is singular."""
        solve = self._try(values)
        if solve is None:
            values = values.copy()
            values[self.diagonal] *= 1 + _SHIFT
            solve = self._try(values)
        return no_solution if solve is None else solve

    def _try(self, values: FloatArray) -> Solve | None:
        return self._cholesky(values) if self.banded else self._lu(values)

    def _cholesky(self, values: FloatArray) -> Solve | None:
        from scipy.linalg.lapack import dpbtrf, dpbtrs

        if not self.size:
            return np.copy
        band = np.zeros((self.size, self.width + 1))
        band.reshape(-1)[self.target] = values
        factor, info = dpbtrf(band.T, lower=1, overwrite_ab=1)
        if info or not np.isfinite(factor[0, -1]):
            return None

        def solve(right: FloatArray) -> FloatArray:
            out: FloatArray = dpbtrs(factor, right[self.order], lower=1, overwrite_b=1)[0][self.place]
            return out

        return solve

    def _lu(self, values: FloatArray) -> Solve | None:
        from scipy.sparse import csc_array

        matrix = csc_array((values[self.source], self.rows, self.starts), shape=(self.size, self.size))
        try:
            factors = _superlu(matrix, "NATURAL")
        except RuntimeError:  # singular
            return None

        def solve(right: FloatArray) -> FloatArray:
            out: FloatArray = factors.solve(right[self.order])[self.place]
            return out

        return solve


def _superlu(matrix, ordering):  # type: ignore[no-untyped-def]
    from scipy.sparse.linalg import splu

    return splu(matrix, permc_spec=ordering, diag_pivot_thresh=0.0, options={"SymmetricMode": True})


def _minimum_degree(pattern) -> IntArray:  # type: ignore[no-untyped-def]
    from scipy.sparse import diags_array

    # Something to factorise, that orders as it goes.
    dominant = diags_array(1.0 + pattern.sum(axis=1)) - pattern
    return np.argsort(_superlu(dominant.tocsc(), "MMD_AT_PLUS_A").perm_c)


def _inverse(order: IntArray) -> IntArray:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def no_solution(right: FloatArray) -> FloatArray:
    """What a singular matrix gives."""
    return np.full_like(right, np.nan)
