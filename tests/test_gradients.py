"""Gradients against differences, by adjoint and by default; `check_gradients`."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import forward_ad

import riskfield as rf
from cases import NEEDS_NATIVE, rows
from gradient_cases import CONVERGED, MIXED, TIED, TRUNCATED, finite_differences, gradient, hard_theta, losses, solve
from riskfield.inference.request import Request
from riskfield.kernels import torch_reference
from strategies import brute_force, forests, graphs, potentials, seeds

# Gradients by `Unroll`, `FixedPoint` and `Envelope` on any graph, against what each claims.


marginals = lambda case: case.marginals and case.kernels  # noqa: E731
sweeping = lambda case: case.marginals and case.iterative and case.kernels  # noqa: E731
small = graphs(max_variables=4, max_factors=4)


def close(actual, expected, tolerance):
    assert torch.isfinite(actual).all()
    scale = 1 + float(expected.abs().max()) if expected.numel() else 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def check(loss, theta):
    assert torch.autograd.gradcheck(loss, theta.clone().requires_grad_(), fast_mode=True)


# -- every pair that is offered -------------------------------------------------------------------------------------


@rows(marginals)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_unroll_differentiates_the_sweeps_that_ran(case, graph, seed):
    algorithm = case.make(graph, None)
    solution = lambda t: solve(graph, t, algorithm, TRUNCATED, rf.Unroll())  # noqa: E731
    check(lambda t: losses(graph, solution(t).mu, seed), potentials(graph, seed))


@rows(marginals)
@pytest.mark.parametrize("graph", [MIXED, TIED], ids=["mixed", "tied"])
def test_unroll_differentiates_the_truncated_log_partition(case, graph):
    """theta . mu_N + H(mu_N), through the N sweeps."""
    algorithm = case.make(graph, None)
    check(lambda t: solve(graph, t, algorithm, TRUNCATED, rf.Unroll()).log_partition, potentials(graph, 1))


@pytest.mark.filterwarnings("ignore:.MaxProduct. with a .theta.:riskfield.errors.PerformanceWarning")
@rows(lambda case: not case.marginals and case.kernels)
def test_unroll_differentiates_max_marginals(case):
    """Away from ties, where the maximiser stays the same."""
    algorithm = case.make(MIXED, None)
    check(lambda t: solve(MIXED, t, algorithm, TRUNCATED, rf.Unroll()).mu, potentials(MIXED, 1))


@rows(sweeping)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_fixed_point_differentiates_the_converged_marginals(case, graph, seed):
    algorithm = case.make(graph, None)
    solution = lambda t: solve(graph, t, algorithm, CONVERGED, rf.FixedPoint())  # noqa: E731
    theta = 0.5 * potentials(graph, seed)
    check(lambda t: losses(graph, solution(t).mu, seed), theta)
    check(lambda t: solution(t).log_partition, theta)


@rows(marginals)
@settings(max_examples=3)
@given(graph=small, seed=seeds)
def test_envelope_differentiates_the_log_partition(case, graph, seed):
    algorithm = case.make(graph, None)
    check(
        lambda t: solve(graph, t, algorithm, CONVERGED, rf.Envelope()).log_partition.clone(),
        0.5 * potentials(graph, seed),
    )


@rows(marginals)
def test_three_sweeps_against_finite_differences(case):
    graph, stop = rf.grid(3, 3, 3), TRUNCATED
    theta, algorithm = potentials(graph, 2), case.make(graph, None)

    def loss(t):
        return losses(graph, solve(graph, t, algorithm, stop, None).mu, 5).sum(-1)

    expected = finite_differences(loss, theta)
    close(gradient(graph, theta, algorithm, stop, rf.Unroll(), seed=5), expected, 1e-7)


@rows(sweeping)
def test_unroll_tends_to_fixed_point(case):
    theta, algorithm = 0.5 * potentials(MIXED, 3), case.make(MIXED, None)
    unrolled, solved = (
        gradient(MIXED, theta, algorithm, rf.Stop(400, 1e-13), adjoint) for adjoint in (rf.Unroll(), rf.FixedPoint())
    )
    close(solved, unrolled, 1e-8)


# -- pairs that are not ---------------------------------------------------------------------------------------------


@rows(lambda case: case.kernels)
def test_envelope_names_the_alternative(case):
    graph = rf.grid(2, 2, 2)
    algorithm = case.make(graph, None)
    theta = graph.zeros().requires_grad_()
    if not case.marginals:
        with pytest.raises(ValueError, match=r"`Envelope` cannot differentiate MaxProduct.*Use MessagePassing"):
            rf.infer(graph, theta, algorithm, adjoint=rf.Envelope())
    elif case.iterative:
        with pytest.raises(ValueError, match=r"`Envelope` needs a run to convergence.*use `Unroll`"):
            rf.infer(graph, theta, algorithm, stop=TRUNCATED, adjoint=rf.Envelope())


# -- impossible states and large potentials ---------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", [rf.Unroll(), rf.FixedPoint()], ids=["Unroll", "FixedPoint"])
@pytest.mark.parametrize("kind", ["impossible", "large"])
@settings(max_examples=10)
@given(graph=forests(max_variables=4, max_factors=4), seed=seeds)
def test_belief_propagation_on_forests_has_the_exact_gradient(adjoint, kind, graph, seed):
    theta = hard_theta(graph, kind, seed)
    truth = brute_force(graph, theta)
    states = [int(graph.node(truth.mu, v).argmax()) for v in range(graph.num_variables)]
    # The modes of marginals need not be jointly possible.
    if math.isinf(float(losses(graph, truth.mu, seed, states).sum())):
        return
    stop = rf.Stop(50, 1e-13)
    exact = gradient(graph, theta, rf.Exact(), stop, rf.Unroll(), seed=seed, states=states)
    close(gradient(graph, theta, rf.MessagePassing(), stop, adjoint, seed=seed, states=states), exact, 1e-8)


def test_the_value_does_not_follow_marginals_changed_in_place():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, stop=rf.Stop(tol=1e-10), adjoint=rf.Envelope())
    value = solution.log_partition
    solution.mu.mul_(2)
    with pytest.raises(rf.errors.AdjointError, match="were changed in place"):
        value.backward()


# `check_gradients` finds right gradients right, wrong ones wrong, and says what was refused.


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
    for loss in (lambda solution, labels, mask: solution.mu.sum(), rf.losses.UnivariateLogistic(), 1.0):
        with pytest.raises(
            TypeError, match=r"function of one argument.*lambda solution: loss\(solution, labels, mask\)"
        ):
            rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), loss)
    with pytest.raises(ValueError, match=r"`loss` must be finite at the solution. Got inf"):
        rf.check_gradients(graph, graph.zeros(), rf.MessagePassing(), quadratic, evidence={0: 1})


# Without an adjoint `infer` is `infer` with `Unroll()`; without a gradient to compute it records nothing.


GRAPH = rf.grid(10, 10, 2)
THETA = 0.5 * potentials(GRAPH, 0)
ALGORITHMS = [rf.MessagePassing(rf.TRW(0.5)), rf.MeanField()]
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)


@pytest.fixture
def recorded(monkeypatch):
    """The algorithms whose runs are recorded; no torch kernels may run."""
    calls = []
    start = Request.start_recording

    def counted(self, *args, **options):
        calls.append(self.algorithm)
        return start(self, *args, **options)

    monkeypatch.setattr(Request, "start_recording", counted)

    def refuse(*args, **options):
        raise AssertionError("the torch kernels ran")

    for kind in (torch_reference.MessagePassingRun, torch_reference.MeanFieldRun):
        monkeypatch.setattr(kind, "__init__", refuse)
    return calls


def default_gradient(algorithm, **options):
    theta = THETA.clone().requires_grad_()
    rf.infer(GRAPH, theta, algorithm, **options).mu.square().sum().backward()
    return theta.grad


@NEEDS_NATIVE
@algorithms
def test_the_default_is_unroll_on_native_kernels(algorithm, recorded):
    found = default_gradient(algorithm)
    assert recorded == [algorithm]
    assert torch.equal(found, default_gradient(algorithm, adjoint=rf.Unroll()))
    assert recorded == [algorithm] * 2


@NEEDS_NATIVE
@algorithms
def test_losses_and_layers_leave_the_default_alone(algorithm, recorded):
    theta, labels = THETA.clone().requires_grad_(), torch.zeros(GRAPH.num_variables, dtype=torch.int64)
    how = rf.Inference(algorithm, rf.Stop(5, tol=None))
    rf.losses.empirical_risk(rf.losses.UnivariateLogistic(), GRAPH, theta, labels, how).backward()
    rf.losses.empirical_risk(rf.losses.SurrogateLikelihood(), GRAPH, theta, labels, how).backward()
    rf.nn.MarginalInference(GRAPH, rf.Inference(algorithm))(theta).sum().backward()
    assert recorded == [algorithm] * 3


@NEEDS_NATIVE
@algorithms
def test_nothing_is_recorded_without_a_gradient(algorithm, recorded):
    mu = rf.infer(GRAPH, THETA, algorithm).mu
    with torch.no_grad():
        assert torch.equal(rf.infer(GRAPH, THETA.clone().requires_grad_(), algorithm).mu, mu)
    assert not mu.requires_grad
    assert recorded == []


# -- recording does not change the answer -----------------------------------------------------------------------------

ADJOINTS = [rf.Unroll(), rf.Unroll(checkpoint=3), rf.FixedPoint(), rf.Perturb(), rf.KKT(), rf.Envelope()]
DAMPED = rf.MessagePassing(rf.TRW(0.5), damping=0.5)


# torch compiles parts of its forward derivatives with a tool it has itself deprecated.
@NEEDS_NATIVE
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::riskfield.errors.ConvergenceWarning")
@pytest.mark.parametrize("algorithm", [rf.MessagePassing(), DAMPED, rf.MeanField()], ids=["bp", "damped", "mean-field"])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_every_adjoint_stops_where_plain_inference_does(algorithm, scale):
    """Also on models whose marginals saturate long before their messages settle, and on dual numbers."""
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 3), (3, 0), (0, 1, 2)])
    theta, v = scale * potentials(graph, 0, "mild", 20), potentials(graph, 1, "mild", 20)
    plain = rf.infer(graph, theta, algorithm)
    assert len(plain.sweeps.unique()) > 1
    adjoints = ADJOINTS if isinstance(algorithm, rf.MessagePassing) else [a for a in ADJOINTS if a != rf.KKT()]
    solutions = [rf.infer(graph, theta.clone().requires_grad_(), algorithm, adjoint=adjoint) for adjoint in adjoints]
    with forward_ad.dual_level():
        dual = rf.infer(graph, forward_ad.make_dual(theta, v), algorithm)
        solutions.append(dual.with_mu(forward_ad.unpack_dual(dual.mu).primal))
    for name, solution in zip([*adjoints, "forward mode"], solutions, strict=True):
        assert torch.equal(solution.sweeps, plain.sweeps), name
        assert torch.equal(solution.residual, plain.residual), name
        assert torch.equal(solution.mu, plain.mu), name


@NEEDS_NATIVE
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_theta_that_changed_since_inference_is_not_combined_with_old_marginals(requires_grad):
    graph = rf.grid(3, 3, num_states=2)
    theta = potentials(graph, 0).requires_grad_(requires_grad)
    solution, best = rf.infer(graph, theta), rf.infer(graph, theta.detach(), rf.MaxProduct())
    expected = rf.infer(graph, theta.detach().clone()).mode()
    with torch.no_grad():
        theta.add_(potentials(graph, 1))
    for read in (lambda: solution.log_partition, solution.joint_mode, best.mode, lambda: copy.deepcopy(solution)):
        with pytest.raises(RuntimeError, match="`theta` was changed in place after inference"):
            read()
    assert torch.equal(solution.mode(), expected)


@NEEDS_NATIVE
def test_solutions_made_in_inference_mode_have_values():
    graph = rf.grid(3, 3, num_states=2)
    theta = potentials(graph, 0)
    with torch.inference_mode():
        found = rf.infer(graph, theta * 1.0).log_partition
        risk = rf.losses.SurrogateLikelihood()(graph, theta * 1.0, torch.zeros(9).long(), rf.Inference())
    torch.testing.assert_close(found.clone(), rf.infer(graph, theta).log_partition)
    torch.testing.assert_close(risk.clone(), found - graph.score(theta, torch.zeros(9).long()))


@pytest.mark.parametrize("kernels", [pytest.param(None, marks=NEEDS_NATIVE), "torch"])
@pytest.mark.parametrize(
    "entropy", [rf.Bethe(), rf.TRW(0.5), rf.CountingNumbers(0.7, 0.2)], ids=["bethe", "trw", "own"]
)
def test_what_is_kept_with_a_graph_in_inference_mode_serves_gradients_later(kernels, entropy):
    def gradient(graph):
        theta = potentials(graph, 0).requires_grad_()
        adjoint, stop = rf.FixedPoint(solver=rf.adjoints.GMRES()), rf.Stop(tol=1e-10)
        mu = rf.infer(graph, theta, rf.MessagePassing(entropy), adjoint=adjoint, stop=stop, kernels=kernels).mu
        return torch.autograd.grad(mu.square().sum(), theta)[0]

    graph = rf.grid(3, 3, num_states=2, tied=True)
    with torch.inference_mode():
        rf.infer(graph, potentials(graph, 0) * 1.0, rf.MessagePassing(entropy), kernels=kernels).joint_mode()
    assert torch.equal(gradient(graph), gradient(rf.grid(3, 3, num_states=2, tied=True)))


def test_a_chain_model_used_in_inference_mode_can_be_trained():
    graph, model = rf.chain(4, 2, tied=True), rf.models.ChainModel(2, 3, 1, boundaries=True)
    inputs = {"nodes": torch.ones(1, 4, 3).double(), "factors": torch.ones(1, 1, 1).double()}
    with torch.inference_mode():
        model(graph, inputs)
    model(graph, inputs).sum().backward()
    assert model.ends["first"].grad.tolist() == [1.0, 1.0]


def test_a_misspelt_field_of_a_solution_is_refused():
    graph = rf.chain(2, 2)
    with pytest.raises(TypeError, match="A `Solution` has no _nu"):
        rf.infer(graph, graph.zeros()).replaced(_nu=graph.zeros())
