"""Derivatives of gradients: right in the numbers of a loss; right or refused in theta and in counting numbers."""

import pytest
import torch

import riskfield as rf
from gradient_cases import TIED
from strategies import potentials

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
    with pytest.raises(ValueError, match=f"`{type(adjoint).__name__}` sends gradients to theta only"):
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
