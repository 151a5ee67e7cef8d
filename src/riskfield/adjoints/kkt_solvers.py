"""Solvers of the linear systems of `KKT`, direct and iterative, both refined until the residual is small."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from riskfield.errors import AdjointError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

FloatArray = npt.NDArray[np.float64]

# Hard constraints between variables can make further rows of B redundant. This much of the identity in place of the
# zero block keeps the factors finite; refinement against the true system takes its effect out again.
_REGULARISATION = 1e-10
_REFINEMENTS = 30
_LOOK_EVERY = 10  # steps between two looks at the residual, each of which costs about one more


@dataclass(frozen=True, eq=False)
class System:
    """A symmetric system, its equations scaled to unit size; the first `num_states` are those of stationarity."""

    matrix: csr_array
    rhs: FloatArray
    num_states: int
    weights: FloatArray  # of the equations, in units of probability
    remedy: str  # what to do where there is no solution

    def remainder(self, solution: FloatArray) -> tuple[FloatArray, float]:
        """What `solution` leaves of the right-hand side, and the relative size of that.

        The size is in the units of dL/dtheta: a loss that weighs one very improbable state most has a large entry on
        the right-hand side, against which errors in all the others would seem small.
        """
        left: FloatArray = self.rhs - self.matrix @ solution
        return left, float(np.linalg.norm(self.weights * left) / np.abs(self.weights * self.rhs).max())


class AbstractSolver(ABC):
    """How the linear system of `KKT` is solved."""

    @abstractmethod
    def solve(self, system: System) -> FloatArray:
        """Solve, or raise `AdjointError` with the residual."""


@dataclass(frozen=True)
class Direct(AbstractSolver):
    """A sparse factorisation with iterative refinement: the fastest for small and medium graphs.

    Arguments:
        tol: the relative residual above which the solve counts as failed.

    >>> from riskfield import KKT
    >>> from riskfield.adjoints import Direct
    >>> KKT(Direct())
    KKT(solver=Direct(tol=1e-08))
    """

    tol: float = 1e-8

    def __post_init__(self) -> None:
        _check_tol(self.tol)

    def solve(self, system: System) -> FloatArray:
        """Factorise the regularised matrix; refine until the residual of the true one falls no more."""
        from scipy.sparse import diags_array
        from scipy.sparse.linalg import splu

        shift = np.full(len(system.rhs), _REGULARISATION)
        shift[: system.num_states] = 0
        try:
            factors = splu((system.matrix + diags_array(shift)).tocsc())
        except RuntimeError as error:
            raise AdjointError(f"`KKT(Direct())`: the linear system could not be factorised: {error}.") from error
        return _refined(system, factors.solve, self.tol, "KKT(Direct())")


@dataclass(frozen=True)
class Minres(AbstractSolver):
    """The minimum-residual method: no factorisation, so only the matrix is stored. Slow on strong couplings.

    Arguments:
        tol: the relative residual to reach.
        max_steps: the maximum number of products with the matrix.

    >>> from riskfield import KKT
    >>> from riskfield.adjoints import Minres
    >>> KKT(Minres(tol=1e-8))
    KKT(solver=Minres(tol=1e-08, max_steps=20000))
    """

    tol: float = 1e-10
    max_steps: int = 20000

    def __post_init__(self) -> None:
        _check_tol(self.tol)
        if not self.max_steps > 0:
            raise ValueError(f"`max_steps` must be at least 1. Got {self.max_steps!r}.")

    def solve(self, system: System) -> FloatArray:
        """Iterate, and restart on the remaining residual while that helps."""
        from scipy.sparse.linalg import minres

        left, start = self.max_steps, np.zeros_like(system.rhs)

        # SciPy compares the residual with |A| |x|, which may stop it long before or long after ours is small enough.
        def watch(found: FloatArray) -> None:
            nonlocal left
            left -= 1
            if left % _LOOK_EVERY == 0 and system.remainder(start + found)[1] <= self.tol:
                raise _SmallEnough(found.copy())

        def correction(remainder: FloatArray) -> FloatArray | None:
            nonlocal start
            if left <= 0:
                return None
            try:
                found: FloatArray = minres(system.matrix, remainder, rtol=1e-14, maxiter=left, callback=watch)[0]
            except _SmallEnough as result:
                found = result.found
            start = start + found
            return found

        return _refined(system, correction, self.tol, f"KKT(Minres(max_steps={self.max_steps}))", enough=self.tol)


class _SmallEnough(Exception):
    """Ends an iteration from inside its callback."""

    def __init__(self, found: FloatArray):
        self.found = found


def _refined(
    system: System,
    correction: Callable[[FloatArray], FloatArray | None],
    tol: float,
    name: str,
    enough: float = 1e-15,
) -> FloatArray:
    """Add up corrections while they make the residual smaller, down to `enough`."""
    best = candidate = np.zeros_like(system.rhs)
    least, stalled = float("inf"), 0
    for _ in range(_REFINEMENTS):
        remainder, residual = system.remainder(candidate)
        # A correction that is good by the solver's own norm may need another one to be so by ours.
        stalled = 0 if residual < least / 2 else stalled + 1
        if residual < least:
            best, least = candidate, residual
        if residual <= enough or stalled > 2 or not residual < float("inf"):
            break
        change = correction(remainder)
        if change is None:
            break
        candidate = candidate + change
    if not least <= tol:
        raise AdjointError(
            f"`{name}`: the linear system is solved only to a relative residual of {least:.2g}; the tolerance is "
            f"{tol:.2g}. The marginals may be at a point where they are not differentiable. {system.remedy}"
        )
    return best


def _check_tol(tol: float) -> None:
    if isinstance(tol, str) or not 0 < tol < 1:
        raise ValueError(f"`tol` must lie between 0 and 1. Got {tol!r}.")
