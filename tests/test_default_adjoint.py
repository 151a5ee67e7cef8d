"""Without an adjoint `infer` is `infer` with `Unroll()`; without a gradient to compute it records nothing."""

import copy

import pytest
import torch
from torch.autograd import forward_ad

import riskfield as rf
from riskfield.inference.request import Request
from riskfield.kernels import torch_reference
from strategies import potentials

pytest.importorskip("riskfield._native")
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


def gradient(algorithm, **options):
    theta = THETA.clone().requires_grad_()
    rf.infer(GRAPH, theta, algorithm, **options).mu.square().sum().backward()
    return theta.grad


@algorithms
def test_the_default_is_unroll_on_native_kernels(algorithm, recorded):
    found = gradient(algorithm)
    assert recorded == [algorithm]
    assert torch.equal(found, gradient(algorithm, adjoint=rf.Unroll()))
    assert recorded == [algorithm] * 2


@algorithms
def test_losses_and_layers_leave_the_default_alone(algorithm, recorded):
    theta, labels = THETA.clone().requires_grad_(), torch.zeros(GRAPH.num_variables, dtype=torch.int64)
    how = rf.Inference(algorithm, rf.Stop(5, tol=None))
    rf.losses.empirical_risk(rf.losses.UnivariateLogistic(), GRAPH, theta, labels, how).backward()
    rf.losses.empirical_risk(rf.losses.SurrogateLikelihood(), GRAPH, theta, labels, how).backward()
    rf.nn.MarginalInference(GRAPH, rf.Inference(algorithm))(theta).sum().backward()
    assert recorded == [algorithm] * 3


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


def test_solutions_made_in_inference_mode_have_values():
    graph = rf.grid(3, 3, num_states=2)
    theta = potentials(graph, 0)
    with torch.inference_mode():
        found = rf.infer(graph, theta * 1.0).log_partition
    torch.testing.assert_close(found.clone(), rf.infer(graph, theta).log_partition)
