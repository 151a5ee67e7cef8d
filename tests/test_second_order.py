"""Second and mixed derivatives, and forward derivatives."""

import pytest
import torch
from torch.autograd import forward_ad

import riskfield as rf
from cases import by_arity, rows
from gradient_cases import CONVERGED, TIED, TRUNCATED, free_entries, hard_theta, losses, solve
from strategies import potentials

# Second derivatives, forward derivatives, and derivatives in the algorithm's own numbers.


# torch compiles parts of its forward derivatives with a tool it has itself deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

GRAPH = rf.FactorGraph([2, 3, 2], [(0, 1), (2, 0), (0, 1, 2), (1,)])
STATES = [0, 0, 0]
has_marginals = lambda case: case.marginals and case.kernels  # noqa: E731


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
@rows(has_marginals)
def test_second_derivatives(case, kind):
    loss, x = objective(case, kind)
    assert torch.autograd.gradgradcheck(loss, x.requires_grad_(), fast_mode=True)


@rows(has_marginals)
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
@rows(has_marginals)
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
    with pytest.raises(ValueError, match=r"gradients with respect to theta only.*`FixedPoint` or `Unroll`"):
        rf.infer(GRAPH, GRAPH.zeros(), algorithm, adjoint=adjoint)


@pytest.mark.parametrize("theta_too", [False, True])
def test_native_kernels_refuse_gradients_they_do_not_have(theta_too):
    pytest.importorskip("riskfield._native")
    algorithm = rf.MessagePassing(damping=torch.tensor(0.5, requires_grad=True))
    with pytest.raises(ValueError, match="native kernels do not support autograd"):
        rf.infer(GRAPH, GRAPH.zeros().requires_grad_(theta_too), algorithm, kernels="native")


# Derivatives of gradients: right in the numbers of a loss; right or refused in theta and in counting numbers.


STOP = rf.Stop(5000, 1e-13)
GRID = rf.grid(2, 3, 2)
GRAPHS = {"grid": GRID, "tied": TIED}
FIRST_ORDER = [
    rf.FixedPoint(),
    rf.FixedPoint(solver=rf.adjoints.GMRES()),
    rf.Perturb(4),
    rf.KKT(),
    rf.KKT(rf.adjoints.Minres()),
]
ALGORITHMS = {
    "message-passing": rf.MessagePassing(rf.TRW(0.6)),
    "mean-field": rf.MeanField(),
    "exact": rf.Exact(),
    "convex": rf.ConvexFreeEnergy(
        [rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, 1.0), rf.inference.Term(rf.inference.SQUARE, 0.2)]
    ),
}
OFFERED = {
    "message-passing": FIRST_ORDER,
    "mean-field": [*FIRST_ORDER[:3]],
    "exact": [rf.Perturb(4)],
    "convex": [rf.Perturb(4), rf.KKT()],
}
PAIRS = [(name, adjoint) for name, adjoints in OFFERED.items() for adjoint in adjoints]
pairs = pytest.mark.parametrize(("name", "adjoint"), PAIRS, ids=[f"{name}-{adjoint}" for name, adjoint in PAIRS])


def marginals(graph, theta, algorithm, adjoint=None):
    return rf.infer(graph, theta, algorithm, stop=STOP, adjoint=adjoint).mu


def slope(graph, theta, algorithm, v):
    """The derivative of converged marginals along v, by four-sided differences."""
    step = 1e-3
    with torch.no_grad():
        far, near, back, farthest = (marginals(graph, theta + k * step * v, algorithm) for k in (2, 1, -1, -2))
    return (-far + 8 * near - 8 * back + farthest) / (12 * step)


@pytest.mark.parametrize("shape", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
@pairs
def test_gradients_are_linear_in_the_cotangent(name, adjoint, graph, shape):
    algorithm = ALGORITHMS[name]
    theta = (0.5 * potentials(graph, 0, "mild", *shape)).requires_grad_()
    cotangent = torch.randn(*shape, graph.mu_size, dtype=torch.float64, requires_grad=True)
    v = potentials(graph, 1, "mild", *shape)
    mu = marginals(graph, theta, algorithm, adjoint)
    (gradient,) = torch.autograd.grad(mu, theta, cotangent, create_graph=True)
    (found,) = torch.autograd.grad(gradient, cotangent, v)
    torch.testing.assert_close(found, slope(graph, theta.detach(), algorithm, v), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
@pairs
def test_the_weight_of_a_loss(name, adjoint, graph):
    """d/dw of |dL/dtheta|^2 + w^2 for L = w sum mu^2, where dL/dtheta is linear in w."""
    theta = (0.5 * potentials(graph, 0)).requires_grad_()
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    mu = marginals(graph, theta, ALGORITHMS[name], adjoint)
    (gradient,) = torch.autograd.grad(w * mu.square().sum(), theta, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum() + w**2, w)
    expected = 2 * gradient.detach().square().sum() / w.detach() + 2 * w.detach()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pairs
def test_derivatives_in_theta_are_refused_whole(name, adjoint):
    theta = (0.5 * potentials(GRID, 0)).requires_grad_()
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    mu = marginals(GRID, theta, ALGORITHMS[name], adjoint)
    (gradient,) = torch.autograd.grad(w * mu.square().sum(), theta, create_graph=True)
    for wanted in ((theta,), (w, theta)):
        with pytest.raises(rf.errors.AdjointError, match="first derivatives only"):
            torch.autograd.grad(gradient.square().sum(), wanted, retain_graph=True, allow_unused=True)
    with pytest.raises(rf.errors.AdjointError, match="first derivatives only"):
        gradient.square().sum().backward()
    # A third derivative goes through theta as well, even where the second does not.
    (gradient,) = torch.autograd.grad(w * mu.square().sum(), theta, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), w, create_graph=True)
    with pytest.raises(rf.errors.AdjointError, match="first derivatives only"):
        torch.autograd.grad(second, theta)


def test_a_weight_that_theta_depends_on_is_refused():
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    theta = w * potentials(GRID, 0)
    mu = marginals(GRID, theta, rf.MessagePassing(rf.TRW(0.6)), rf.FixedPoint())
    (gradient,) = torch.autograd.grad(w * mu.square().sum(), w, create_graph=True)
    with pytest.raises(rf.errors.AdjointError, match="first derivatives only"):
        torch.autograd.grad(gradient, w)


def test_unroll_is_right_in_everything():
    """Theta, the weight of the loss and counting numbers at once, against differences of gradients."""
    theta, rho = 0.5 * potentials(GRID, 0), torch.tensor(0.6, dtype=torch.float64)
    w = torch.tensor(1.3, dtype=torch.float64)

    def squared_gradient(theta, w, rho):
        mu = rf.infer(GRID, theta, rf.MessagePassing(rf.TRW(rho)), stop=rf.Stop(4, tol=None), adjoint=rf.Unroll()).mu
        gradients = torch.autograd.grad(w * mu.square().sum(), (theta, rho), create_graph=True)
        return sum(gradient.square().sum() for gradient in gradients)

    inputs = [number.clone().requires_grad_() for number in (theta, w, rho)]
    assert torch.autograd.gradcheck(squared_gradient, inputs, fast_mode=True)


# -- other numbers than theta -----------------------------------------------------------------------------------------


def test_fixed_points_in_counting_numbers():
    """The gradient in rho depends on the weight, rightly; its derivative in rho and in theta is refused."""
    theta = (0.5 * potentials(GRID, 0)).requires_grad_()
    rho = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    mu = marginals(GRID, theta, rf.MessagePassing(rf.TRW(rho)), rf.FixedPoint())
    gradients = torch.autograd.grad(w * mu.square().sum(), (theta, rho), create_graph=True)
    size = sum(gradient.square().sum() for gradient in gradients)
    (found,) = torch.autograd.grad(size, w, retain_graph=True)
    torch.testing.assert_close(found, 2 * size.detach() / w.detach(), rtol=1e-8, atol=0)
    for number in (theta, rho):
        with pytest.raises(rf.errors.AdjointError, match=r"first derivatives only\. Use `Unroll`"):
            torch.autograd.grad(gradients[0].sum(), number, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("adjoint", [rf.Perturb(), rf.KKT(), rf.Envelope()], ids=lambda a: type(a).__name__)
def test_adjoints_for_theta_alone_refuse_counting_numbers(adjoint):
    algorithm = rf.MessagePassing(rf.TRW(torch.tensor(0.6, requires_grad=True)))
    with pytest.raises(ValueError, match=f"`{type(adjoint).__name__}` computes gradients with respect to theta only"):
        marginals(GRID, GRID.zeros().requires_grad_(), algorithm, adjoint)


def test_weights_of_a_convex_free_energy():
    theta = (0.5 * potentials(GRID, 0)).requires_grad_()
    weight = torch.linspace(0.8, 1.5, GRID.mu_size, dtype=torch.float64).requires_grad_()
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weight)])
    mu = marginals(GRID, theta, algorithm, rf.KKT())
    gradients = torch.autograd.grad(w * mu.square().sum(), (theta, weight), create_graph=True)
    size = sum(gradient.square().sum() for gradient in gradients)
    (found,) = torch.autograd.grad(size, w, retain_graph=True)
    torch.testing.assert_close(found, 2 * size.detach() / w.detach(), rtol=1e-7, atol=0)
    for number in (theta, weight):
        with pytest.raises(rf.errors.AdjointError, match="first derivatives only"):
            torch.autograd.grad(size, number, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_envelope(algorithm):
    """dA/dtheta = mu: the weight of the value is right, the second derivative in theta refused or a curvature's."""
    theta = (0.5 * potentials(GRID, 0)).requires_grad_()
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    solution = rf.infer(GRID, theta, algorithm, stop=STOP, adjoint=rf.Envelope())
    (gradient,) = torch.autograd.grad(w * solution.log_partition, theta, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum() + w**2, w, retain_graph=True)
    torch.testing.assert_close(found, 2 * w.detach() * (solution.mu.square().sum() + 1))
    with pytest.raises(rf.errors.AdjointError, match="`Envelope` without `curvature` has first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), (w, theta))


def test_envelope_refuses_losses_on_marginals():
    """They would be constants, and part of the gradient would be missing."""
    theta = (0.5 * potentials(GRID, 0)).requires_grad_()
    solution = rf.infer(GRID, theta, rf.Exact(), adjoint=rf.Envelope())
    with pytest.raises(rf.errors.AdjointError, match=r"the loss depends on the marginals\. Use another adjoint"):
        (solution.log_partition + solution.mu.square().sum()).backward()
    (solution.log_partition + solution.mu.detach().square().sum()).backward()
    torch.testing.assert_close(theta.grad, solution.mu.detach())


@pytest.mark.parametrize("adjoint", [None, rf.adjoints.Envelope()], ids=["default", "Envelope"])
@pytest.mark.parametrize("algorithm", [rf.Exact(), rf.MessagePassing()], ids=["Exact", "MessagePassing"])
def test_a_batch_of_gradients_of_the_log_partition_function(algorithm, adjoint):
    graph = rf.chain(4, 3)
    theta = torch.stack([potentials(graph, seed) for seed in range(3)]).requires_grad_()
    solution = rf.infer(graph, theta, algorithm, adjoint=adjoint)
    (found,) = torch.autograd.grad(solution.log_partition, theta, torch.eye(3).double(), is_grads_batched=True)
    expected = torch.eye(3).double().unsqueeze(-1) * rf.infer(graph, theta.detach(), algorithm).statistics()
    torch.testing.assert_close(found, expected)
