"""All adjoints with all algorithms: right gradients or refusals, and what an algorithm has to offer."""

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import riskfield as rf
from gradient_cases import (
    METHODS,
    MIXED,
    SETTLED,
    TIED,
    TRUNCATED,
    finite_differences,
    free_entries,
    hard_theta,
    loss_gradient,
    losses,
    objective,
    pairs,
    random_graph,
    run,
    solve,
)
from riskfield import adjoints
from strategies import potentials

# Every pair of an algorithm and an adjoint: the right gradient of what it claims, or a refusal with an alternative.


GRAPHS = {"mixed": MIXED, "tied": TIED, "random": random_graph(1)}


def close(actual, expected, tolerance):
    assert torch.isfinite(actual).all()
    scale = 1 + float(expected.abs().max()) if expected.numel() else 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


# -- pairs that are offered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
@pairs()
def test_gradcheck(case, method, name):
    """Univariate logistic, clique logistic, a random quadratic of all marginals; and the log-partition value."""
    graph = GRAPHS[name]
    algorithm = case.make(graph, None)

    def outputs(theta):
        solution = run(graph, theta, algorithm, method)
        return torch.cat([losses(graph, solution.mu, 1), solution.log_partition[None]])

    theta = 0.5 * potentials(graph, 0)
    assert torch.autograd.gradcheck(outputs, theta.requires_grad_(), fast_mode=True)


HARD = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0, 3), (3,)])
EVIDENCE = {1: 0, 5: 0}


@dataclass(frozen=True, eq=False)
class Model:
    """A model with labels, and evidence."""

    graph: rf.FactorGraph
    theta: torch.Tensor
    states: tuple[int, ...] | None = None
    evidence: dict[int, int] | None = None

    def gradient(self, case, method):
        algorithm = case.make(self.graph, None)
        return loss_gradient(
            self.graph, self.theta, algorithm, method, seed=3, states=self.states, evidence=self.evidence
        )


@functools.cache
def model(name, case):
    """A tame one, one with impossible states and evidence, and some with potentials of +-200."""
    if name == "tame":
        return Model(MIXED, 0.5 * potentials(MIXED, 2))
    if name == "impossible":
        theta = 0.5 * hard_theta(MIXED, "impossible", 7)
        if case.name == "mean-field":  # products cannot meet constraints between variables
            theta[MIXED.node_size :] = 0.5 * potentials(MIXED, 7)[MIXED.node_size :]
        return Model(MIXED, theta, (0,) * MIXED.num_variables, EVIDENCE)
    theta = hard_theta(HARD, "large", int(name.removeprefix("large")))
    # The most probable states: marginals that saturate, and losses that do not.
    return Model(HARD, theta, tuple(objective_mode(theta, case)))


def objective_mode(theta, case):
    return solve(HARD, theta, case.make(HARD, None), SETTLED, None).mode().tolist()


@functools.cache
def truth(name, case, converges):
    """dL/dtheta in the finite entries of theta by differences, after three sweeps or at convergence."""
    m = model(name, case)
    x, whole = free_entries(m.theta)

    def loss(t):
        mu = objective(m.graph, whole(t), case.make(m.graph, None), converges, evidence=m.evidence)
        return losses(m.graph, mu, 3, m.states).sum(-1)

    return finite_differences(loss, x)


@pytest.mark.parametrize("name", ["tame", "impossible", *(f"large{seed}" for seed in (0, 2, 4, 5, 7))])
@pairs()
def test_against_finite_differences(case, method, name):
    """Finite and right, also where states are impossible, variables observed and marginals saturated."""
    expected = truth(name, case, method.converges)
    found = model(name, case).gradient(case, method)
    finite = torch.isfinite(model(name, case).theta)
    accuracy = method.accuracy
    if name.startswith("large"):
        # The step of `Perturb` grows with the largest potential, and with it what differences leave out.
        accuracy = {"Perturb-2": 1e-6, "Perturb-4": 1e-3}.get(method.name, accuracy)
    close(found[finite], expected, accuracy)
    assert (found[~finite] == 0).all()


@pairs()
def test_batches_are_loops(case, method):
    graph, algorithm = TIED, case.make(TIED, None)
    theta = 0.5 * potentials(graph, 4, "mild", 2, 2)
    evidence = torch.tensor([[0, -1, -1, -1], [-1, 1, -1, 2]])
    states = [0, 1, 0, 2]
    batch = loss_gradient(graph, theta, algorithm, method, states=states, evidence=evidence)
    for j in range(2):
        for k in range(2):
            alone = loss_gradient(graph, theta[j, k], algorithm, method, states=states, evidence=evidence[k])
            close(batch[j, k], alone, method.accuracy)
    if method.converges:
        empty = torch.zeros(0, graph.theta_size, dtype=torch.float64)
        assert loss_gradient(graph, empty, algorithm, method).shape == empty.shape


@pairs(lambda case, method: method.offers(case) and case.marginals and method.name != "Perturb-1")
def test_float32_gradients_are_near_float64(case, method):
    """One-sided differences are too coarse for it, and warn."""
    algorithm = case.make(MIXED, None)
    theta = (0.5 * potentials(MIXED, 6)).float()
    single, double = (loss_gradient(MIXED, t, algorithm, method) for t in (theta, theta.double()))
    assert single.dtype == torch.float32
    close(single.double(), double, 1e-2 if "Perturb" in method.name else 2e-4)


# -- pairs that are not ---------------------------------------------------------------------------------------------


@pairs(lambda case, method: not method.offers(case))
def test_pairs_not_offered_name_the_alternative(case, method):
    graph, name = rf.grid(2, 2, 2), type(method.adjoint).__name__
    if not case.marginals:
        message = f"`{name}` cannot differentiate (MaxProduct|ExactMAP): .* Use MessagePassing"
    elif case.name == "mean-field":
        message = f"`{name}` .* MeanField .* Use `FixedPoint`, `Perturb` or `Unroll`"
    else:
        message = f"`{name}` .* Exact .* Use `Perturb` or `Unroll`"
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros().requires_grad_(), case.make(graph, None), adjoint=method.adjoint)


@pairs(lambda case, method: method.offers(case) and case.iterative and method.converges)
def test_truncated_runs_are_for_unroll(case, method):
    graph = rf.grid(2, 2, 2)
    message = f"`{type(method.adjoint).__name__}` needs a run to convergence: .* use `Unroll`"
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros().requires_grad_(), case.make(graph, None), stop=TRUNCATED, adjoint=method.adjoint)


def test_every_adjoint_is_in_the_table():
    there = {type(method.adjoint) for method in METHODS} | {rf.Envelope}
    assert there == {
        cls for cls in rf.adjoints.AbstractAdjoint.__subclasses__() if cls.__module__.startswith("riskfield.")
    }


# The adjoints against each other and against differences, on grids; and the memory of those at convergence.


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


# An algorithm gets the adjoints it offers something for; the others say what is missing.


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


def test_other_kernels_do_not_run_an_own_algorithm():
    theta = potentials(GRAPH, 0, "mild", 2)
    assert torch.equal(rf.infer(GRAPH, theta, Bare(), kernels="torch").mu, rf.infer(GRAPH, theta, Bare()).mu)
    for kernels in ("native", "gpu"):
        with pytest.raises(rf.errors.KernelError, match=f"The {kernels} kernels cannot run `Bare`"):
            rf.infer(GRAPH, theta, Bare(), kernels=kernels)


@pytest.mark.parametrize("throw", [True, False])
def test_nan_of_an_own_algorithm_is_not_an_impossible_model(throw, monkeypatch):
    theta = potentials(GRAPH, 0, "mild", 2)
    monkeypatch.setattr(SoftmaxRun, "marginals", lambda run: run.theta * torch.tensor([[1.0], [torch.nan]]))
    for evidence in (None, {0: 1}):
        with pytest.raises(
            ValueError, match="`Bare` returned NaN for batch item 1, but the model has possible"
        ) as caught:
            rf.infer(GRAPH, theta, Bare(), evidence=evidence, throw=throw)
        assert not isinstance(caught.value, rf.errors.ImpossibleEvidenceError)
    theta[1, :3] = -torch.inf
    if throw:
        with pytest.raises(rf.errors.ImpossibleEvidenceError, match=r"probability zero \(batch item 1\)"):
            rf.infer(GRAPH, theta, Bare())
    else:
        assert rf.infer(GRAPH, theta, Bare(), throw=False).reasons[1] == "every joint state has probability zero"


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
        (rf.Perturb(), r"`Perturb` needs .* symmetric \(`symmetric_jacobian`\), which Bare does not offer"),
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
        ValueError, match=r"`Perturb` computes gradients with respect to theta only, and the parameters of the Generous"
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
