"""Every pair of an algorithm and an adjoint: the right gradient of what it claims, or a refusal with an alternative."""

import functools
from dataclasses import dataclass

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
from strategies import potentials

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
