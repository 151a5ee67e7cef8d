"""`FixedPoint`: acceleration, failure, and memory."""

import re
import warnings

import numpy as np
import pytest
import torch

import riskfield as rf
from gradient_cases import gradient
from riskfield.adjoints.fixed_point import _Linearised, _Point, _warn_if_unsettled
from riskfield.kernels.torch_reference import MessagePassingRun
from strategies import potentials

STOP = rf.Stop(5000, 1e-13)


def repulsive():
    """Undamped sweeps move away from the fixed point that damped ones find."""
    graph = rf.from_edges(2, [(a, b) for a in range(5) for b in range(a)], num_variables=5)
    theta = 0.1 * potentials(graph, 0)
    graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = -1.5
    return graph, theta, rf.MessagePassing(schedule=rf.Parallel(), damping=0.6)


def test_acceleration_solves_what_iteration_cannot():
    graph, theta, algorithm = repulsive()
    expected = gradient(graph, theta, algorithm, STOP, rf.Unroll())
    for solver in (rf.adjoints.Iterate(), rf.adjoints.GMRES()):
        found = gradient(graph, theta, algorithm, STOP, rf.FixedPoint(solver=solver))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    # The run needed damping, and so does going back: the native kernels do it, the torch kernels leave it to GMRES.
    plain = rf.FixedPoint(solver=rf.adjoints.Iterate(fallback=None))
    damped = gradient(graph, theta, algorithm, STOP, plain)
    torch.testing.assert_close(damped, expected, rtol=1e-7, atol=1e-9)
    with pytest.raises(rf.errors.AdjointError, match=r"still change the gradient by .* \(relative\) after \d+ steps"):
        gradient(graph, theta, algorithm, STOP, plain, kernels="torch")


@pytest.mark.parametrize("algorithm", [rf.MessagePassing(rf.TRW(0.5)), rf.MeanField()], ids=["trw", "mean field"])
def test_backward_sweeps_in_float32_run_on_the_kernels_in_float64(algorithm, monkeypatch):
    graph = rf.grid(4, 4, 3)
    theta = torch.stack([0.3 * potentials(graph, k) for k in range(3)])
    expected = gradient(graph, theta, algorithm, STOP, rf.FixedPoint())
    monkeypatch.setattr(_Point, "_best", None)  # what autograd through the torch kernels would use
    found = gradient(graph, theta.float(), algorithm, rf.Stop(1000, 1e-6), rf.FixedPoint())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_falling_short_is_a_warning_and_failing_an_error():
    graph = rf.grid(4, 4, 2)
    theta, algorithm = potentials(graph, 0), rf.MessagePassing(rf.TRW(0.5))
    for kernels, solver in ((None, rf.adjoints.Iterate(fallback=None)), ("torch", rf.adjoints.Iterate())):
        adjoint = rf.FixedPoint(max_steps=2, solver=solver)
        with pytest.raises(rf.errors.AdjointError, match="after 2 steps; the tolerance is 1e-10"):
            gradient(graph, theta, algorithm, STOP, adjoint, kernels=kernels)
    with pytest.warns(rf.errors.AdjointWarning, match=r"after 12 steps; the tolerance is 1e-10. Allow more steps"):
        gradient(graph, theta, algorithm, STOP, rf.FixedPoint(max_steps=12, solver=rf.adjoints.Iterate(fallback=None)))


def test_messages_that_lag_behind_saturated_marginals_are_reported():
    before, after = torch.tensor([[0.0, -300.0, -torch.inf]]), torch.tensor([[0.0, -310.0, -torch.inf]])
    with pytest.warns(rf.errors.AdjointWarning, match="log-messages still change by 10"):
        _warn_if_unsettled(before, after)


def test_the_backward_pass_of_the_torch_kernels_records_one_sweep(monkeypatch):
    swept = []
    sweep = MessagePassingRun.sweep
    monkeypatch.setattr(MessagePassingRun, "sweep", lambda run: swept.append(1) or sweep(run))
    graph = rf.grid(4, 4, 2)
    theta = potentials(graph, 0).requires_grad_()
    algorithm = rf.MessagePassing(rf.TRW(0.5))
    solution = rf.infer(graph, theta, algorithm, stop=STOP, adjoint=rf.FixedPoint(), kernels="torch")
    assert int(solution.sweeps) > 10
    swept.clear()
    solution.mu.square().sum().backward()
    assert len(swept) == 1


def test_rho_of_one_is_back_belief_propagation():
    graph = rf.grid(3, 3, 3)
    theta = 0.5 * potentials(graph, 0)
    bp, trw = (
        gradient(graph, theta, rf.MessagePassing(entropy), STOP, rf.FixedPoint())
        for entropy in (rf.Bethe(), rf.TRW(1.0))
    )
    torch.testing.assert_close(bp, trw)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tol": 0.0}, r"`tol` must lie in \(0, 1\). Got 0.0"),
        ({"max_steps": 0}, "`max_steps` must be a positive integer. Got 0"),
        ({"solver": "gmres"}, r"`solver` must be an object such as `Iterate\(\)` or `GMRES\(\)`. Got 'gmres'"),
    ],
)
def test_bad_settings(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        rf.FixedPoint(**options)


def test_bad_settings_of_solvers():
    with pytest.raises(ValueError, match=r"`restart` must be a positive integer. Got 0"):
        rf.adjoints.GMRES(restart=0)
    with pytest.raises(TypeError, match=r"`fallback` must be an object such as `GMRES\(\)`, or None. Got 'gmres'"):
        rf.adjoints.Iterate(fallback="gmres")


def test_an_infinite_loss_gradient_is_refused():
    graph = rf.chain(2, 2)
    theta = graph.zeros().requires_grad_()
    solution = rf.infer(graph, theta, evidence={0: 0}, adjoint=rf.FixedPoint())
    with pytest.raises(
        rf.errors.AdjointError, match="`FixedPoint`: the gradient of the loss with respect to the marginals is -inf"
    ):
        (-graph.node(solution.mu, 0)[1].log()).backward()


@pytest.mark.parametrize("solver", [rf.adjoints.Iterate(), rf.adjoints.GMRES()], ids=repr)
def test_work_is_bounded_where_inference_did_not_converge(solver, monkeypatch):
    """Belief propagation that oscillates on a dense graph with strong couplings."""
    rng = np.random.default_rng(1)
    graph = rf.from_edges(2, [(a, b) for a in range(29) for b in range(a) if rng.random() < 0.3], num_variables=29)
    theta = 3 * torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.manual_seed(1))
    steps = []
    vjp = _Linearised.vjp

    def watched(linear, *args):
        found = vjp(linear, *args)
        steps.append(found[0].steps)
        return found

    monkeypatch.setattr(_Linearised, "vjp", watched)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", rf.errors.AdjointWarning)
        try:
            gradient(graph, theta, rf.MessagePassing(), rf.Stop(50, 1e-8), rf.FixedPoint(solver=solver))
            said = " ".join(str(warning.message) for warning in caught)
        except rf.errors.AdjointError as error:
            said = str(error)
    assert re.search(r"Inference did not converge: its residual is [0-9.e-]+ after 50 sweeps.* or `Unroll`", said)
    assert sum(steps) <= 110


@pytest.mark.parametrize("solver", [rf.adjoints.Iterate(), rf.adjoints.GMRES()])
def test_a_graph_without_variables_has_an_empty_gradient(solver):
    graph = rf.FactorGraph([])
    theta = graph.zeros(2).requires_grad_()
    mu = rf.infer(graph, theta, adjoint=rf.FixedPoint(solver=solver)).mu
    (gradient,) = torch.autograd.grad(mu.sum(), theta, create_graph=True)
    assert gradient.shape == theta.shape
