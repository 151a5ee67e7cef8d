"""The gradient of every loss with respect to theta, with all algorithms and adjoints, against finite differences."""

import warnings
from dataclasses import replace

import pytest
import torch

import riskfield as rf
from cases import rows
from gradient_cases import CONVERGED, TRUNCATED, finite_differences
from loss_cases import draw, losses
from strategies import potentials

# Mixed states, arities 1 to 3, a tied pair, a loop.
MIXED = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (2, 1), (2, 0), (2, 1, 3), (3,)], tables=[0, 0, 1, 2, 3])
BINARY = rf.FactorGraph([2] * 5, [(0, 1), (1, 2), (2, 0), (2, 3, 4)])


def total(row, graph, theta, inference):
    """The summed loss of two examples with hidden and observed variables; theta has shape (*batch, theta)."""
    labels, evidence = draw(graph, 3, 2, hidden=0.3 * row.hidden, given=0.2)
    batch = theta.shape[:-1]
    labels, evidence = labels.expand(*batch, -1, -1), evidence.expand(*batch, -1, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        repeated = theta.unsqueeze(-2).expand(*batch, 2, -1)
        return row.loss(graph, repeated, labels, inference, evidence=evidence).sum(-1)


def check(row, inference):
    graph = BINARY if row.binary else MIXED
    theta = 0.5 * potentials(graph, 1)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(row, graph, leaf, inference), leaf)
    plain = replace(inference, adjoint=None)
    expected = finite_differences(lambda t: total(row, graph, t, plain), theta)
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7 * scale)


@rows(lambda case: case.marginals and case.kernels)
@losses(lambda row: row.infers)
def test_through_the_sweeps_that_ran(row, case):
    """This includes the truncated likelihood and truncated EM."""
    algorithm = case.make(BINARY if row.binary else MIXED, None)
    check(row, rf.Inference(algorithm, TRUNCATED, rf.Unroll()))


@rows(lambda case: case.marginals and case.kernels)
@losses(lambda row: row.value and not row.marginal)
def test_of_values_at_convergence(row, case):
    """Surrogate likelihood and EM, with dA/dtheta = mu."""
    algorithm = case.make(BINARY if row.binary else MIXED, None)
    check(row, rf.Inference(algorithm, CONVERGED))


@pytest.mark.parametrize("adjoint", [rf.FixedPoint(), rf.KKT(), rf.Perturb(sides=4)], ids=lambda a: type(a).__name__)
@losses(lambda row: row.marginal)
def test_at_convergence(row, adjoint):
    check(row, rf.Inference(rf.MessagePassing(rf.TRW(0.5)), CONVERGED, adjoint))


@losses(lambda row: row.marginal)
def test_of_mean_field_at_convergence(row):
    check(row, rf.Inference(rf.MeanField(), CONVERGED, rf.FixedPoint()))


@losses(lambda row: not row.infers)
def test_without_inference(row):
    theta = potentials(MIXED, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: total(row, MIXED, t, None), theta)


@pytest.mark.parametrize(
    "inference",
    [
        rf.Inference(rf.MessagePassing(rf.TRW(0.5)), TRUNCATED, rf.Unroll()),
        rf.Inference(rf.MessagePassing(), CONVERGED),
        rf.Inference(rf.MeanField(), CONVERGED),
        rf.Inference(rf.Exact()),
    ],
    ids=["truncated", "bp", "mean-field", "exact"],
)
def test_of_patches(inference):
    loss = rf.losses.PatchPseudolikelihood([0, 0, 1, 1])
    theta = 0.5 * potentials(MIXED, 1, "mild", 2)
    labels, evidence = draw(MIXED, 3, 2, hidden=0.2, given=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        value = lambda t: loss(MIXED, t, labels, inference, evidence=evidence)  # noqa: E731
        assert torch.autograd.gradcheck(value, theta.requires_grad_())


def test_the_gradient_of_the_likelihood_is_marginals_less_statistics():
    graph = rf.grid(3, 3, 2)
    theta, (labels, _) = potentials(graph, 1).requires_grad_(), draw(graph, 2)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-12))
    (gradient,) = torch.autograd.grad(rf.losses.SurrogateLikelihood()(graph, theta, labels, inference), theta)
    mu = inference(graph, theta.detach()).mu
    torch.testing.assert_close(gradient, mu - rf.inference.frequencies(graph, labels.unsqueeze(0)))


@losses(lambda row: row.marginal and not row.value)
def test_second_derivatives(row):
    graph = BINARY if row.binary else MIXED
    theta = 0.5 * potentials(graph, 1).requires_grad_()
    labels, _ = draw(graph, 3, hidden=0.3)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), TRUNCATED, rf.Unroll())
    assert torch.autograd.gradgradcheck(lambda t: row.loss(graph, t, labels, inference), theta, fast_mode=True)


def test_which_adjoint_serves_a_likelihood():
    from riskfield.losses.likelihood import value_inference

    truncated, exact = rf.Stop(5, None), rf.Exact()
    chosen = lambda *choice: value_inference(rf.Inference(*choice)).adjoint  # noqa: E731
    assert chosen() == rf.Envelope()
    assert chosen(rf.MeanField(), rf.Stop(), rf.FixedPoint()) == rf.Envelope()
    assert chosen(rf.MeanField(), rf.Stop(), rf.Unroll()) == rf.Unroll()
    assert chosen(rf.MeanField(), truncated) is None  # the default of `infer`, `Unroll()`
    assert chosen(rf.MeanField(), truncated, rf.Perturb()) == rf.Perturb()  # it raises its own error when it runs
    assert chosen(exact, truncated) == rf.Envelope()
