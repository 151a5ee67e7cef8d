"""`check_gradients` finds right gradients right, wrong ones wrong, and says what was refused."""

import math
from dataclasses import dataclass

import pytest
import torch

import riskfield as rf
from strategies import potentials


def quadratic(solution):
    return (solution.mu**2).sum() - solution.node_marginals[0][:, 0].log().sum()


def likelihood(solution):
    return solution.log_partition - solution.theta[3]


def row(report, adjoint):
    (found,) = [row for row in report.rows if row.adjoint == adjoint]
    return found


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        (rf.MessagePassing(), {"Envelope"}),
        (rf.MessagePassing(rf.TRW(0.5)), {"Envelope"}),
        (rf.MessagePassing(rf.CountingNumbers(0.6, 0.0)), {"Envelope"}),
        (rf.MeanField(), {"KKT", "Envelope"}),
        (rf.Exact(), {"FixedPoint", "KKT", "Envelope"}),
    ],
)
def test_all_adjoints_agree_at_convergence(algorithm, refused):
    graph = rf.grid(3, 3, 2)
    report = rf.check_gradients(graph, potentials(graph, 0), algorithm, quadratic, max_entries=30)
    assert report.num_checked == 30
    assert report.num_entries == graph.theta_size
    assert report.residual <= 1e-13
    assert {type(r.adjoint).__name__ for r in report.rows if r.gradient is None} == refused
    for r in report.rows:
        if r.gradient is None:
            assert r.note
            assert r.rel_error is None
        else:
            assert r.rel_error < (1e-4 if r.adjoint == rf.Perturb(1) else 1e-6)
            assert r.seconds > 0
    assert report.disagreement < 1e-4
    assert report.worst < 1e-4


def test_losses_of_the_log_partition_suit_every_adjoint():
    graph = rf.grid(3, 2, 2, tied=True)
    report = rf.check_gradients(graph, potentials(graph, 0), rf.MessagePassing(rf.TRW(0.5)), likelihood)
    assert all(r.gradient is not None for r in report.rows)
    assert report.worst < 1e-6
    assert report.num_checked == report.num_entries == graph.theta_size


def test_truncated_runs_are_for_unroll_only():
    graph = rf.grid(3, 3, 2)
    report = rf.check_gradients(graph, potentials(graph, 0), rf.MessagePassing(), quadratic, stop=rf.Stop(3, None))
    assert row(report, rf.Unroll()).rel_error < 1e-8
    assert "use `Unroll` for a truncated run" in row(report, rf.KKT()).note
    assert "use `Unroll` for a truncated run" in row(report, rf.Perturb()).note
    assert report.disagreement == 0


def test_loose_runs_are_held_against_what_each_adjoint_claims():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0, "strong")
    report = rf.check_gradients(graph, theta, rf.MessagePassing(rf.TRW(0.5)), quadratic, stop=rf.Stop(1000, 1e-3))
    assert row(report, rf.Unroll()).rel_error < 1e-6  # of the sweeps that ran
    assert row(report, rf.KKT()).rel_error > 1e-6  # of the converged marginals, which these are not
    assert report.disagreement > 1e-6


def test_sweeps_that_run_out_do_not_spoil_the_truth():
    """Unconverged, only `Unroll` has the gradient it claims, whatever the tolerance was."""
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    report = rf.check_gradients(graph, theta, rf.MessagePassing(rf.TRW(0.5)), quadratic, stop=rf.Stop(3, 1e-6))
    assert report.residual <= 1e-13
    for r in report.rows:
        if r.gradient is not None:
            assert (r.rel_error < 1e-8) == (r.adjoint == rf.Unroll()), r.adjoint


def test_evidence_and_impossible_states():
    graph = rf.grid(3, 3, 3)
    theta = potentials(graph, 0)
    theta[5] = -math.inf

    def loss(solution):
        return (solution.mu**2).sum()

    report = rf.check_gradients(graph, theta, rf.MessagePassing(), loss, evidence={0: 1})
    assert report.num_entries == graph.theta_size - 3
    assert report.worst < 1e-6


def test_float32():
    graph = rf.grid(3, 3, 2)
    report = rf.check_gradients(graph, potentials(graph, 0).float(), rf.MessagePassing(rf.TRW(0.5)), quadratic)
    assert row(report, rf.KKT()).gradient.dtype == torch.float32
    assert row(report, rf.KKT()).rel_error < 1e-4
    assert row(report, rf.Perturb()).rel_error < 1e-2


def test_losses_that_bend_sharply_get_smaller_steps():
    """The step that suits a smooth loss is off by 4 % here."""
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    centre = float(rf.infer(graph, theta, algorithm, stop=rf.Stop(tol=1e-14)).mu[0])

    def loss(solution):
        return torch.tanh(3000 * (solution.mu[0] - centre))

    report = rf.check_gradients(graph, theta, algorithm, loss, adjoints=[rf.Unroll(), rf.KKT()])
    assert report.worst < 1e-6
    assert 1e-9 < report.uncertainty < 1e-2
    smooth = rf.check_gradients(graph, theta, algorithm, quadratic, adjoints=[rf.Unroll()])
    assert smooth.worst < 1e-8
    assert smooth.uncertainty < 1e-8


@dataclass(frozen=True)
class Doubled(rf.adjoints.AbstractAdjoint):
    """Twice the gradient."""

    def apply(self, request):
        solution = rf.Perturb().apply(request)
        return solution.with_mu(2 * solution.mu - solution.mu.detach())


def test_a_wrong_gradient_shows():
    graph = rf.grid(3, 3, 2)
    adjoints = [rf.Perturb(), Doubled()]
    report = rf.check_gradients(graph, potentials(graph, 0), rf.MessagePassing(), quadratic, adjoints=adjoints)
    assert report.rows[0].rel_error < 1e-6
    assert report.rows[1].rel_error == pytest.approx(1, abs=1e-3)
    assert report.worst == report.rows[1].rel_error
    assert report.disagreement == pytest.approx(0.5, abs=1e-3)


def test_failures_and_warnings_are_reported():
    graph = rf.grid(3, 3, 2)
    adjoints = [rf.KKT(rf.adjoints.Minres(max_steps=2)), rf.Perturb(tol=0.0)]
    stop = rf.Stop(60, 1e-13)
    report = rf.check_gradients(
        graph, potentials(graph, 0), rf.MessagePassing(), quadratic, adjoints=adjoints, stop=stop
    )
    assert "relative residual" in report.rows[0].note
    assert report.rows[0].gradient is None
    assert math.isfinite(report.rows[1].rel_error)


def test_the_table():
    graph = rf.chain(3, 2)
    report = rf.check_gradients(graph, potentials(graph, 0), rf.MeanField(), quadratic)
    lines = str(report).splitlines()
    assert lines[0].split() == ["adjoint", "abs", "error", "rel", "error", "seconds"]
    assert len(lines) == len(report.rows) + 2
    assert lines[1].startswith("Unroll(")
    assert (
        "`KKT` needs optimality conditions on the local polytope (`optimality`), which MeanField does not offer"
        in str(report)
    )
    assert "errors against finite differences in 14 of 14 entries of theta" in lines[-1]


def test_bad_input():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=r"`theta` must have shape \(14,\), without batch axes. Got \(2, 14\)"):
        rf.check_gradients(graph, graph.zeros(2), rf.MessagePassing(), quadratic)
    with pytest.raises(ValueError, match="`max_entries` must be at least 1"):
        rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), quadratic, max_entries=0)
    with pytest.raises(ValueError, match="`loss` must return a scalar tensor"):
        rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), lambda solution: solution.mu)
    with pytest.raises(ValueError, match="`loss` must return a scalar tensor"):
        rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), lambda solution: torch.zeros(()))
    with pytest.raises(ValueError, match=r"`loss` must be finite at the solution. Got inf"):
        rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), quadratic, evidence={0: 1})
