r"""Every gradient method on one problem: its error against finite differences, and its time.

The model is a 12 x 12 grid with three states and random potentials. Inference is tree-reweighted belief propagation.
There are two losses: the univariate logistic loss -sum_i log mu_i(x_i) of random labels x, and the surrogate likelihood
A(theta) - theta . f(x). There are three runs:

    converged   until the residual is at most 1e-13: all methods give the same gradient
    truncated   five sweeps without a tolerance, as in truncated fitting: `Unroll` differentiates them, and the other
                methods raise an error
    missed      five sweeps with a tolerance that they do not reach: the other methods apply the formulas of convergence
                to messages that have not converged, and warn

    python examples/gradient_methods.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

import riskfield as rf

SWEEPS = 5
ALGORITHM = rf.MessagePassing(rf.TRW(0.5))
CONVERGED = rf.Stop(sweeps=10_000, tol=1e-13)
TRUNCATED = rf.Stop(SWEEPS, tol=None)
MISSED = rf.Stop(SWEEPS, tol=1e-6)


class Problem:
    """A random model, labels, and the two losses."""

    def __init__(self, side: int, num_states: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.graph = rf.grid(side, side, num_states)
        self.theta = torch.randn(self.graph.theta_size, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(num_states, (side * side,), generator=generator)
        self.features = self.graph.zeros()  # f(x): 1 at the states and pairs of states of x, else 0
        self.graph.node_views(self.features)[0].scatter_(1, self.labels[:, None], 1.0)
        pairs = self.labels[torch.tensor(self.graph.factor_groups[0].variables)]
        self.graph.factor_views(self.features)[0][torch.arange(len(pairs)), pairs[:, 0], pairs[:, 1]] = 1.0

    def univariate_logistic(self, solution: rf.Solution) -> Tensor:
        """-sum_i log mu_i(x_i)."""
        return -solution.node_marginals[0].gather(1, self.labels[:, None]).log().sum()

    def surrogate_likelihood(self, solution: rf.Solution) -> Tensor:
        """A(theta) - theta . f(x)."""
        return solution.log_partition - (solution.theta * self.features).sum()


def name_of(adjoint: rf.adjoints.AbstractAdjoint) -> str:
    """The name of a method, without settings that are at their defaults."""
    match adjoint:
        case rf.Perturb(sides=sides):
            return f"Perturb({sides})"
        case rf.KKT(solver=solver):
            return f"KKT({type(solver).__name__}())"
    return f"{type(adjoint).__name__}()"


def converged(problem: Problem, entries: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the first table: both losses at convergence."""
    yield "adjoint", "error, univariate logistic", "error, surrogate likelihood", "milliseconds"
    losses = (problem.univariate_logistic, problem.surrogate_likelihood)
    reports = [
        rf.check_gradients(problem.graph, problem.theta, ALGORITHM, loss, stop=CONVERGED, max_entries=entries)
        for loss in losses
    ]
    for first, second in zip(*(report.rows for report in reports), strict=True):
        errors = ("no gradient" if row.rel_error is None else f"{row.rel_error:.0e}" for row in (first, second))
        seconds = second.seconds if first.seconds is None else first.seconds
        yield name_of(first.adjoint), *errors, f"{1e3 * (seconds or 0):.1f}"


def truncated(problem: Problem, entries: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the second table: the univariate logistic loss after a few sweeps."""
    yield "adjoint", "error without a tolerance", "error with a tolerance that is missed", "milliseconds"
    loss = problem.univariate_logistic
    without = rf.check_gradients(problem.graph, problem.theta, ALGORITHM, loss, stop=TRUNCATED, max_entries=entries)
    missed = rf.check_gradients(problem.graph, problem.theta, ALGORITHM, loss, stop=MISSED, max_entries=1)
    truth = without.rows[0].gradient  # of `Unroll`, which has just been compared with finite differences
    assert truth is not None
    for row, missed_row in zip(without.rows, missed.rows, strict=True):
        if missed_row.gradient is None or missed_row.seconds is None:
            continue
        outcome = "refused" if row.rel_error is None else f"{row.rel_error:.0e}"
        gap = float((missed_row.gradient - truth).abs().max() / truth.abs().max())
        yield name_of(row.adjoint), outcome, f"{gap:.0e}" if gap else "the same", f"{1e3 * missed_row.seconds:.1f}"


def print_table(title: str, rows: Iterator[tuple[str, ...]]) -> None:
    """Print the rows as Markdown; the first one is the header."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    print(f"{title}\n")
    for line in lines:
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
    print()


def main(side: int = 12, num_states: int = 3, entries: int = 50) -> None:
    """Print both tables."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", rf.errors.ConvergenceWarning
        )  # the second table is about runs that did not converge
        list(converged(Problem(2, 2), entries=1))  # so that imports on first use are not timed
        problem = Problem(side, num_states)
        print_table("Converged to 1e-13", converged(problem, entries))
        print_table(f"Truncated after {SWEEPS} sweeps", truncated(problem, entries))
    print("An error is the largest error of any entry of dL/dtheta, divided by the largest entry.")


if __name__ == "__main__":
    main()
