"""An algorithm gets the adjoints it offers something for; the others say what is missing."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import riskfield as rf
from riskfield import adjoints
from strategies import potentials

GRAPH = rf.FactorGraph([3, 3, 3], [])


class SoftmaxRun:
    """Moves halfway to the softmax of theta in every sweep."""

    def __init__(self, theta, state):
        self.theta = theta
        self.state = torch.zeros_like(theta) if state is None else state
        self.residual = torch.full((len(theta),), torch.inf, dtype=torch.float64)

    def marginals(self):
        return self.state.unflatten(1, (3, 3)).softmax(-1).flatten(1)

    def sweep(self):
        self.state = (self.state + self.theta) / 2

    def advance(self, sweeps, tol):
        ran = torch.zeros(len(self.theta), dtype=torch.int64)
        for _ in range(sweeps):
            if (self.residual <= tol).all():
                break
            before = self.marginals().detach()
            self.sweep()
            self.residual = (self.marginals().detach() - before).abs().amax(1)
            ran += 1
        return self.residual, ran

    def messages(self):
        return self.state


@dataclass(frozen=True)
class Bare(rf.inference.AbstractAlgorithm):
    """Offers nothing but a run."""

    def start(self, graph, theta, messages, kernels):
        return SoftmaxRun(theta, messages)

    def log_partition(self, graph, theta, mu):
        return theta.unflatten(-1, (3, 3)).logsumexp(-1).sum(-1)


@dataclass(frozen=True)
class Generous(Bare):
    """Offers a sweep with a parameter, and a symmetric Jacobian."""

    symmetric_jacobian = True
    scale: torch.Tensor | None = None

    def start(self, graph, theta, messages, kernels):
        return SoftmaxRun(theta if self.scale is None else self.scale * theta, messages)

    def parameters(self, graph):
        return () if self.scale is None else (self.scale,)

    def fixed_point_maps(self, graph, theta, parameters):
        def sweep(state):
            run = SoftmaxRun(theta * parameters[0] if parameters else theta, state)
            mu = run.marginals()
            run.sweep()
            return mu, run.messages()

        return [sweep]


def gradient(algorithm, adjoint, *more):
    theta = potentials(GRAPH, 0, "mild", 2).requires_grad_()
    mu = rf.infer(GRAPH, theta, algorithm, stop=rf.Stop(200, 1e-14), adjoint=adjoint).mu
    return torch.autograd.grad(mu.square().sum(), (theta, *more))


@pytest.mark.parametrize("adjoint", [None, rf.Unroll(), rf.Unroll(checkpoint=2)])
def test_a_run_in_torch_is_enough_for_unroll(adjoint):
    theta = potentials(GRAPH, 0, "mild", 2).requires_grad_()
    exact = rf.infer(GRAPH, theta, rf.Exact()).mu
    expected = torch.autograd.grad(exact.square().sum(), theta)
    torch.testing.assert_close(gradient(Bare(), adjoint), expected)


@pytest.mark.parametrize(
    ("adjoint", "missing"),
    [
        (rf.FixedPoint(), r"`FixedPoint` needs a sweep .* \(`fixed_point_maps`\), which Bare does not offer"),
        (rf.KKT(), r"`KKT` needs optimality conditions .* \(`optimality`\), which Bare does not offer"),
        (rf.Perturb(), r"`Perturb` needs .* symmetric matrix \(`symmetric_jacobian`\), which Bare does not offer"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_names_what_is_missing(adjoint, missing):
    with pytest.raises(ValueError, match=missing + r"\. Use `Unroll`\.$"):
        gradient(Bare(), adjoint)


def test_a_refusal_names_what_the_algorithm_offers():
    with pytest.raises(ValueError, match=r"which Generous does not offer\. Use `FixedPoint`, `Perturb` or `Unroll`\.$"):
        gradient(Generous(), rf.KKT())


@pytest.mark.parametrize(
    "adjoint", [rf.FixedPoint(), rf.FixedPoint(solver=rf.adjoints.GMRES()), rf.Perturb(4)], ids=repr
)
def test_offers_are_taken_up(adjoint):
    torch.testing.assert_close(gradient(Generous(), adjoint), gradient(Bare(), rf.Unroll()), rtol=1e-7, atol=1e-8)


def test_parameters_of_ones_own():
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    algorithm = Generous(scale)
    expected = gradient(algorithm, rf.Unroll(), scale)
    torch.testing.assert_close(gradient(algorithm, rf.FixedPoint(), scale), expected)
    with pytest.raises(
        ValueError, match=r"`Perturb` sends gradients to theta only, and the parameters of the Generous"
    ):
        gradient(algorithm, rf.Perturb(), scale)


def test_adjoints_name_no_algorithm():
    """Neither by `isinstance` nor by importing the class."""
    for path in Path(adjoints.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("riskfield.inference."):
                module = node.module.removeprefix("riskfield.inference.")
                assert module in {
                    "algorithm",
                    "optimality",
                    "request",
                    "stop",
                    "solution",
                    "convex.newton",
                    "convex.polytope",
                }, path.name
