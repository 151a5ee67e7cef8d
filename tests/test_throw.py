"""Batches with impossible items: reported item by item where asked."""

import math
import sys
import warnings

import pytest
import torch

import riskfield as rf
from cases import rows
from riskfield.kernels import slow
from strategies import potentials


@rows()
def test_possible_items_do_not_suffer(case, kernels):
    if kernels == "native" and not case.kernels:
        pytest.skip("it has no kernels")
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 3), (0, 1, 3)])
    theta = potentials(graph, 0, "mild", 2, 2)
    graph.node(theta, 1)[0, 1] = -math.inf
    algorithm = case.make(graph, None)
    stop = rf.Stop(sweeps=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        with pytest.raises(rf.errors.ImpossibleEvidenceError, match="batch item 1"):
            rf.infer(graph, theta, algorithm, stop=stop, kernels=kernels)
        solution = rf.infer(graph, theta, algorithm, stop=stop, kernels=kernels, throw=False)
        assert solution.mu[0, 1].isnan().all()
        assert not solution.converged[0, 1]
        assert solution.log_partition[0, 1] == -math.inf
        assert solution.reasons[1] == "every joint state has probability zero"
        assert solution.mode().shape == (2, 2, 4)
        for k in ((0, 0), (1, 0), (1, 1)):
            alone = rf.infer(graph, theta[k], algorithm, stop=stop, kernels=kernels)
            torch.testing.assert_close(solution.mu[k], alone.mu, rtol=0, atol=1e-12)
            torch.testing.assert_close(solution.log_partition[k], alone.log_partition, rtol=0, atol=1e-12)
            assert solution.converged[k] == alone.converged
            assert solution.sweeps[k] == alone.sweeps
            assert torch.equal(solution.mode()[k], alone.mode())


def test_reasons():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0, "strong", 2)
    graph.node(theta, 4)[1] = -math.inf
    with pytest.warns(rf.errors.ConvergenceWarning, match="for 1 of 2 batch items"):
        solution = rf.infer(graph, theta, stop=rf.Stop(sweeps=1, tol=1e-12), throw=False)
    assert solution.reasons[0].startswith("the residual is ")
    assert solution.reasons[0].endswith(" and the tolerance 1e-12")
    assert solution.reasons[1] == "every joint state has probability zero"
    assert rf.infer(graph, theta[0], rf.Exact()).reasons == [""]
    assert rf.infer(graph, theta[0], stop=rf.Stop(2, None)).reasons == ["no tolerance was set"]


GMRES = rf.FixedPoint(solver=rf.adjoints.GMRES())
DIFFERENTIABLE = [
    *((rf.MessagePassing(), a) for a in (rf.Unroll(), rf.FixedPoint(), GMRES, rf.Perturb(), rf.KKT(), rf.Envelope())),
    *((rf.MeanField(), adjoint) for adjoint in (rf.Unroll(), rf.FixedPoint(), GMRES, rf.Perturb(), rf.Envelope())),
    *((rf.Exact(), adjoint) for adjoint in (rf.Unroll(), rf.Perturb(), rf.Envelope())),
    *((rf.ConvexFreeEnergy(), adjoint) for adjoint in (rf.Perturb(), rf.KKT(), rf.Envelope())),
]


@pytest.mark.parametrize(("algorithm", "adjoint"), DIFFERENTIABLE, ids=lambda value: type(value).__name__)
def test_gradients_of_the_possible_items(algorithm, adjoint):
    """An impossible item, whose marginals are NaN, has gradient 0; the others have what they would have alone."""
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0, "mild", 2)
    graph.node(theta, 1)[1] = -math.inf

    def gradient(theta, items):
        theta = theta.clone().requires_grad_()
        solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(tol=1e-10), adjoint=adjoint, throw=False)
        value = solution.log_partition[items]
        if not isinstance(adjoint, rf.Envelope):
            value = value + solution.mu[items].square().sum()
        return torch.autograd.grad(value, theta)[0]

    found = gradient(theta, 0)
    torch.testing.assert_close(found[0], gradient(theta[0], ...), rtol=0, atol=1e-8)
    assert (found[1] == 0).all()


def test_batched_weights_meet_batched_evidence():
    """Theta has no batch of its own: that of the evidence is what the weights must fit."""
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0)
    weights = 0.5 + torch.rand(4, graph.mu_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    evidence = torch.tensor([[0, -1, -1], [-1, 1, -1], [-1, -1, 0], [1, -1, 1]])

    def terms(weight):
        return rf.ConvexFreeEnergy(
            [rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weight), rf.inference.Term(rf.inference.SQUARE, 0.5)]
        )

    whole = rf.infer(graph, theta, terms(weights), evidence=evidence)
    for k in range(4):
        alone = rf.infer(graph, theta, terms(weights[k]), evidence=evidence[k])
        torch.testing.assert_close(whole.mu[k], alone.mu, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"`weight` must have no batch axes, or the last ones of .*\(3,\)"):
        rf.infer(graph, theta, terms(weights), evidence=evidence[:3])


def _here():
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("adjoint", [None, rf.FixedPoint(), rf.Perturb(tol=1e-15)], ids=str)
def test_warnings_name_the_line_that_led_to_them(adjoint):
    graph = rf.grid(2, 2, 2)
    theta = potentials(graph, 0, "strong").requires_grad_(adjoint is not None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line, solution = _here(), rf.infer(graph, theta, stop=rf.Stop(2, 1e-12), adjoint=adjoint)
        if adjoint is not None:
            loss, last = solution.mu.square().sum(), _here()
            loss.backward()
    assert caught
    assert {warning.filename for warning in caught} == {__file__}
    assert caught[0].lineno == line
    assert adjoint is None or caught[-1].lineno == last + 1


def test_max_product_says_that_a_gradient_makes_it_slow(monkeypatch):
    monkeypatch.setattr(slow, "_warned", set())
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0).requires_grad_()
    with pytest.warns(rf.errors.PerformanceWarning, match="`MaxProduct` with a `theta` that requires a gradient"):
        rf.infer(graph, theta, rf.MaxProduct())
    with torch.no_grad():
        rf.infer(graph, theta, rf.MaxProduct())
