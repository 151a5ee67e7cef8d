"""Second derivatives, forward derivatives, and derivatives in the algorithm's own numbers."""

import pytest
import torch
from torch.autograd import forward_ad

import riskfield as rf
from cases import by_arity, rows
from gradient_cases import CONVERGED, TRUNCATED, free_entries, hard_theta, losses, solve
from strategies import potentials

# torch compiles parts of its forward derivatives with a tool it has itself deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

GRAPH = rf.FactorGraph([2, 3, 2], [(0, 1), (2, 0), (0, 1, 2), (1,)])
STATES = [0, 0, 0]
marginals = lambda case: case.marginals and case.kernels  # noqa: E731


def objective(case, kind="mild"):
    """A loss of the free entries of theta through `Unroll`, and a point."""
    algorithm = case.make(GRAPH, None)
    theta = potentials(GRAPH, 3)
    if kind == "impossible" and case.name != "mean-field":
        theta = hard_theta(GRAPH, kind, 3)
    x, whole = free_entries(theta)

    def loss(t):
        solution = solve(GRAPH, whole(t), algorithm, rf.Stop(2, tol=None), rf.Unroll())
        return losses(GRAPH, solution.mu, 0, STATES).sum() + solution.log_partition

    return loss, x


# -- to second order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mild", "impossible"])
@rows(marginals)
def test_second_derivatives(case, kind):
    loss, x = objective(case, kind)
    assert torch.autograd.gradgradcheck(loss, x.requires_grad_(), fast_mode=True)


@rows(marginals)
def test_hessian_vector_product_against_differences_of_gradients(case):
    loss, x = objective(case)
    v = torch.randn_like(x)
    product = rf.adjoints.hessian_vector_product(loss, x, v)

    def gradient(t):
        t = t.clone().requires_grad_()
        return torch.autograd.grad(loss(t), t)[0]

    step = 1e-5
    expected = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
    torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-6)
    assert not x.requires_grad


def test_hessian_vector_product_of_several_tensors():
    a, b = torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    v = (torch.randn_like(a), torch.randn_like(b))
    loss = lambda p: (p[0] ** 3).sum() * p[1].sum()  # noqa: E731
    found = rf.adjoints.hessian_vector_product(loss, [a, b], v)
    close = torch.testing.assert_close
    close(found[0], 6 * a * v[0] * b.sum() + 3 * a**2 * v[1].sum())
    close(found[1], (3 * a**2 * v[0]).sum().expand(2, 2))
    linear = rf.adjoints.hessian_vector_product(lambda p: p.sum(), a, v[0])
    assert torch.equal(linear, torch.zeros_like(a))
    partly = rf.adjoints.hessian_vector_product(lambda p: (p[0] ** 2).sum(), (a, b), v)
    close(partly, (2 * v[0], torch.zeros_like(b)))


def test_hessian_vector_product_refuses():
    a = torch.zeros(3)
    with pytest.raises(ValueError, match=r"`v` must have the shapes of `params`, \[\(3,\)\]. Got \[\(2,\)\]"):
        rf.adjoints.hessian_vector_product(torch.sum, a, a[:2])
    with pytest.raises(ValueError, match=r"must return one number. Got a tensor of shape \(3,\)"):
        rf.adjoints.hessian_vector_product(torch.exp, a, a)


def test_hessian_vector_product_refuses_a_loss_that_does_not_use_its_parameters():
    model = torch.nn.Linear(3, 1)
    params = list(model.parameters())
    v = [torch.ones_like(p) for p in params]
    for loss in (lambda _: model(torch.ones(3)).square().sum(), lambda _: torch.ones(())):
        with pytest.raises(ValueError, match=r"`loss_fn` must compute its loss from .*functional_call"):
            rf.adjoints.hessian_vector_product(loss, params, v)


@pytest.mark.parametrize("adjoint", [rf.FixedPoint(), rf.Envelope(), rf.Perturb()], ids=lambda a: type(a).__name__)
def test_adjoints_without_second_derivatives_say_so(adjoint):
    def loss(theta):
        solution = rf.infer(GRAPH, theta, stop=rf.Stop(tol=1e-8), adjoint=adjoint)
        of_marginals = 0 if adjoint == rf.Envelope() else (solution.mu**2).sum()
        return of_marginals + solution.log_partition**2

    with pytest.raises(rf.errors.AdjointError, match=r"first derivatives only\. Use `Unroll`"):
        rf.adjoints.hessian_vector_product(loss, 0.1 * potentials(GRAPH, 0), potentials(GRAPH, 1))


@pytest.mark.parametrize("curvature", [rf.Unroll(), rf.FixedPoint(tol=1e-12)], ids=lambda a: type(a).__name__)
def test_the_curvature_of_a_log_partition_value(curvature):
    """Envelope with a curvature: the gradient is mu, and its own derivative that of mu."""
    theta, v = 0.5 * potentials(GRAPH, 0), potentials(GRAPH, 1)

    def gradient(t):
        return rf.infer(GRAPH, t, stop=rf.Stop(tol=1e-13), evidence={2: 1}).mu

    def value(t):
        adjoint = rf.Envelope(curvature)
        solution = rf.infer(GRAPH, t, stop=rf.Stop(tol=1e-13), evidence={2: 1}, adjoint=adjoint)
        with pytest.raises(rf.errors.AdjointError, match="`Envelope` differentiates the log-partition value only"):
            solution.mu.sum().backward()
        return solution.log_partition

    leaf = theta.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(value(leaf), leaf)[0], gradient(theta))
    difference = (gradient(theta + 1e-5 * v) - gradient(theta - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(rf.adjoints.hessian_vector_product(value, theta, v), difference, rtol=1e-6, atol=1e-8)
    with pytest.raises(TypeError, match=r"`curvature` must be an object such as `Unroll\(\)`, or None. Got 'unroll'"):
        rf.Envelope("unroll")


# -- forwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mild", "impossible"])
@rows(marginals)
def test_forward_derivatives(case, kind):
    loss, x = objective(case, kind)
    v = torch.randn_like(x)
    gradient = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    expected = (gradient * v).sum()
    with forward_ad.dual_level():
        value = loss(forward_ad.make_dual(x.detach(), v))
        torch.testing.assert_close(forward_ad.unpack_dual(value).tangent, expected)
    torch.testing.assert_close(torch.func.jvp(loss, (x.detach(),), (v,))[1], expected)


def test_a_dual_theta_is_not_left_to_native_kernels():
    theta, v = potentials(GRAPH, 0), potentials(GRAPH, 1)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(rf.infer(GRAPH, forward_ad.make_dual(theta, v)).mu).tangent
    assert tangent is not None
    assert tangent.abs().max() > 1e-3


# -- the algorithm's own numbers ------------------------------------------------------------------------------------

START = rf.infer(GRAPH, potentials(GRAPH, 5), stop=rf.Stop(1, tol=None)).messages
BELIEFS = rf.infer(GRAPH, potentials(GRAPH, 5), rf.MeanField(), stop=rf.Stop(1, tol=None)).messages
RHO = by_arity(GRAPH, [1.0, 0.6, 0.45])
NODE = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
HALF = torch.tensor(0.4, dtype=torch.float64)
NUMBERS = {
    "one rho": (HALF, lambda x: (rf.MessagePassing(rf.TRW(x)), None)),
    "rho per factor": (RHO, lambda x: (rf.MessagePassing(rf.TRW(x), rf.Parallel()), None)),
    "c_c": (RHO, lambda x: (rf.MessagePassing(rf.CountingNumbers(x, 0.3)), None)),
    "c_i": (NODE, lambda x: (rf.MessagePassing(rf.CountingNumbers(RHO, x)), None)),
    "damping": (HALF, lambda x: (rf.MessagePassing(damping=x), None)),
    "messages": (START, lambda x: (rf.MessagePassing(rf.TRW(0.5)), x)),
    "log marginals": (BELIEFS, lambda x: (rf.MeanField(), x)),
}


@pytest.mark.parametrize("kind", ["mild", "impossible"])
@pytest.mark.parametrize("name", NUMBERS)
def test_unroll_differentiates_the_algorithms_numbers(name, kind):
    """Theta itself needs no gradient."""
    x, make = NUMBERS[name]
    theta = potentials(GRAPH, 3)
    if kind == "impossible" and name != "log marginals":
        theta = hard_theta(GRAPH, kind, 3)

    def loss(t):
        algorithm, messages = make(t)
        solution = solve(GRAPH, theta, algorithm, TRUNCATED, None, messages=messages)
        return torch.stack([losses(GRAPH, solution.mu, 0, STATES).sum(), solution.log_partition])

    x = x.clone().requires_grad_()
    assert loss(x).requires_grad
    assert torch.autograd.gradcheck(loss, x)
    assert torch.autograd.grad(loss(x)[0], x)[0].abs().max() > 1e-6


def test_damping_of_zero_has_a_gradient():
    damping = torch.zeros((), dtype=torch.float64, requires_grad=True)
    theta = potentials(GRAPH, 3)
    loss = lambda d: (solve(GRAPH, theta, rf.MessagePassing(damping=d), TRUNCATED, None).mu ** 2).sum()  # noqa: E731
    (found,) = torch.autograd.grad(loss(damping), damping)
    step = 1e-5  # one-sided: damping is never negative
    expected = (-3 * loss(0.0) + 4 * loss(step) - loss(2 * step)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_damping_must_be_one_number():
    with pytest.raises(ValueError, match=r"`damping` must be one number. Got a tensor of shape \(2,\)"):
        rf.MessagePassing(damping=torch.zeros(2))


@pytest.mark.parametrize("kind", ["mild", "impossible"])
@pytest.mark.parametrize("name", ["one rho", "rho per factor", "c_c", "c_i"])
def test_fixed_point_differentiates_counting_numbers(name, kind):
    x, make = NUMBERS[name]
    theta = 0.5 * (potentials(GRAPH, 3) if kind == "mild" else hard_theta(GRAPH, kind, 3))

    def loss(t):
        solution = solve(GRAPH, theta, make(t)[0], CONVERGED, rf.FixedPoint())
        return torch.stack([losses(GRAPH, solution.mu, 0, STATES).sum(), solution.log_partition])

    assert torch.autograd.gradcheck(loss, x.clone().requires_grad_())


@pytest.mark.parametrize("adjoint", [rf.Envelope(), rf.Perturb()], ids=["Envelope", "Perturb"])
def test_adjoints_that_would_lose_the_gradient_of_rho_refuse(adjoint):
    algorithm = rf.MessagePassing(rf.TRW(torch.tensor(0.5, requires_grad=True)))
    with pytest.raises(ValueError, match=r"gradients to theta only.*`FixedPoint` or `Unroll`"):
        rf.infer(GRAPH, GRAPH.zeros(), algorithm, adjoint=adjoint)


@pytest.mark.parametrize("theta_too", [False, True])
def test_native_kernels_refuse_gradients_they_do_not_have(theta_too):
    pytest.importorskip("riskfield._native")
    algorithm = rf.MessagePassing(damping=torch.tensor(0.5, requires_grad=True))
    with pytest.raises(ValueError, match="native kernels do not support autograd"):
        rf.infer(GRAPH, GRAPH.zeros().requires_grad_(theta_too), algorithm, kernels="native")
