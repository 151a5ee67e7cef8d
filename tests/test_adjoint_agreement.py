"""The adjoints against each other and against differences, on grids; and the memory of those at convergence."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import riskfield as rf
from gradient_cases import METHODS, finite_differences, losses, solve
from strategies import potentials

TIGHT = rf.Stop(5000, 1e-13)
THREE = rf.Stop(3, None)
ENTROPIES = pytest.mark.parametrize("entropy", [rf.Bethe(), rf.TRW(0.5)], ids=["bethe", "trw"])
STATES = pytest.mark.parametrize("num_states", [2, 5])


def gradients(graph, theta, algorithm, stop, adjoint, labels):
    """dL/dtheta of each of the three losses."""
    theta = theta.clone().requires_grad_()
    solution = rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint)
    values = losses(graph, solution.mu, 5, labels)
    return torch.stack([torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values])


def gap(actual, expected):
    """The largest difference in any entry, in units of the largest entry of that loss's gradient."""
    return float(((actual - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


@STATES
@ENTROPIES
def test_all_agree_at_convergence(num_states, entropy):
    graph = rf.grid(10, 10, num_states)
    theta, algorithm = 0.5 * potentials(graph, 1), rf.MessagePassing(entropy)
    labels = np.random.default_rng(1).integers(num_states, size=100).tolist()
    found = {m.name: gradients(graph, theta, algorithm, TIGHT, m.adjoint, labels) for m in METHODS}
    reference = found.pop("Unroll")
    assert gap(found.pop("Perturb-1"), reference) < 1e-4
    for name, gradient in found.items():
        assert gap(gradient, reference) < 1e-6, name


@STATES
@ENTROPIES
def test_three_sweeps_against_differences(num_states, entropy):
    """`Unroll` has the gradient of the sweeps that ran, which is not that at convergence."""
    graph = rf.grid(4, 4, num_states)
    theta, algorithm = potentials(graph, 2), rf.MessagePassing(entropy)
    labels = np.random.default_rng(2).integers(num_states, size=16).tolist()
    unrolled = gradients(graph, theta, algorithm, THREE, rf.Unroll(), labels)
    for k in range(3):
        expected = finite_differences(
            lambda t, k=k: losses(graph, solve(graph, t, algorithm, THREE, None).mu, 5, labels)[..., k], theta
        )
        assert gap(unrolled[k], expected) < 1e-7
    assert gap(gradients(graph, theta, algorithm, TIGHT, rf.FixedPoint(), labels), unrolled) > 1e-6


@ENTROPIES
@pytest.mark.parametrize("seed", range(5))
def test_two_sided_perturbation_of_weakly_coupled_models(entropy, seed):
    graph = rf.grid(5, 5, 3)
    theta = potentials(graph, seed)
    theta[graph.node_size :] *= 0.2
    labels = np.random.default_rng(seed).integers(3, size=25).tolist()
    algorithm = rf.MessagePassing(entropy)
    perturbed = gradients(graph, theta, algorithm, TIGHT, rf.Perturb(2), labels)
    for k in range(3):
        expected = finite_differences(
            lambda t, k=k: losses(graph, solve(graph, t, algorithm, TIGHT, None).mu, 5, labels)[..., k], theta
        )
        assert gap(perturbed[k], expected) < 1e-6


# -- memory ---------------------------------------------------------------------------------------------------------

MEASURE = """
import torch, riskfield as rf

rf.set_num_threads(1)
graph = rf.grid(60, 60, 2)
generator = torch.Generator().manual_seed(0)
start = torch.randn(graph.theta_size, dtype=torch.float64, generator=generator)

def peak():
    # Not `resource.getrusage`, whose maximum begins with that of the process that started this one.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

def gradient(tol):
    theta = start.clone().requires_grad_()
    algorithm = rf.MessagePassing(rf.TRW(0.5), damping=0.7)
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(5000, tol), adjoint=ADJOINT)
    (solution.mu**2).sum().backward()
    assert solution.converged
    return int(solution.sweeps), peak()

gradient(1e-4)
few, before = gradient(1e-4)
many, after = gradient(1e-12)
print(many - few, after - before, graph.message_size * 8)
"""


def growth(adjoint):
    """How many more sweeps a tighter tolerance takes, and by how many sweeps' worth of messages the memory grows."""
    code = MEASURE.replace("ADJOINT", f"rf.{adjoint}")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    sweeps, grown, size = map(int, ran.stdout.split())
    return sweeps, grown / size


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("adjoint", ["FixedPoint()", "Perturb()", "KKT()", "KKT(rf.adjoints.Minres())"])
def test_memory_at_convergence_does_not_grow_with_the_sweeps(adjoint):
    sweeps, grown = growth(adjoint)
    assert sweeps > 200
    assert grown < 0.1 * sweeps


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_tape_does():
    """So the measure above sees what it is to see."""
    sweeps, grown = growth("Unroll()")
    assert grown > 0.4 * sweeps
