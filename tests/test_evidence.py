"""Evidence, impossible states and batch items, and potentials too large for their type."""

import math
import pickle
import sys
import warnings
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from cases import rows
from riskfield.inference.precision import largest_conflict
from strategies import brute_force, graphs, potentials, seeds

# Evidence and impossible states.


def conditional(graph, theta, states):
    """The truth given `states` (-1: unobserved): enumerate with the other states taken out."""
    clamped = theta.clone()
    for v, x in enumerate(states):
        if x >= 0:
            keep = graph.node(theta, v)[x].clone()
            graph.node(clamped, v)[:] = -math.inf
            graph.node(clamped, v)[x] = keep
    return brute_force(graph, clamped)


@settings(max_examples=100)
@given(graphs(), seeds)
def test_each_item_may_observe_other_variables(graph, seed):
    rng = np.random.default_rng(seed)
    theta = potentials(graph, seed)
    states = rng.integers(-1, graph.num_states, size=(3, graph.num_variables))
    solution = rf.infer(graph, theta, rf.Exact(), evidence=torch.from_numpy(states))
    for k in range(3):
        truth = conditional(graph, theta, states[k])
        torch.testing.assert_close(solution.mu[k], truth.mu, rtol=0, atol=1e-10)
        assert float(solution.log_partition[k]) == pytest.approx(truth.log_partition, abs=1e-10)


@settings(max_examples=50)
@given(graph=graphs(forest=True), seed=seeds)
def test_message_passing_conditions_too(kernels, graph, seed):
    rng = np.random.default_rng(seed)
    theta = potentials(graph, seed, "mild", 2)
    states = torch.from_numpy(rng.integers(-1, graph.num_states, size=(2, graph.num_variables)))
    exact = rf.infer(graph, theta, rf.Exact(), evidence=states)
    solution = rf.infer(graph, theta, evidence=states, stop=rf.Stop(tol=1e-12), kernels=kernels)
    torch.testing.assert_close(solution.mu, exact.mu, rtol=0, atol=1e-9)
    torch.testing.assert_close(solution.log_partition, exact.log_partition, rtol=0, atol=1e-9)


def test_a_dict_is_a_row_of_states():
    graph = rf.grid(2, 2, 3)
    theta = potentials(graph, 0, "mild", 2)
    row = torch.tensor([-1, 2, -1, 0])
    by_dict, by_row = (rf.infer(graph, theta, rf.Exact(), evidence=e) for e in ({1: 2, 3: 0}, row))
    assert torch.equal(by_dict.mu, by_row.mu)
    assert torch.equal(graph.node(by_dict.mu, 1), torch.tensor([[0.0, 0.0, 1.0]] * 2).double())


def test_the_solution_holds_the_clamped_theta_and_leaves_the_given_one():
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    solution = rf.infer(graph, theta, rf.Exact(), evidence={0: 1})
    assert float(graph.node(solution.theta, 0)[0]) == -math.inf
    assert float(theta.min()) == 0


def test_probability_of_the_evidence_is_a_difference_of_log_partitions():
    graph = rf.grid(2, 3, 2)
    theta = potentials(graph, 0)
    free, clamped = rf.infer(graph, theta, rf.Exact()), rf.infer(graph, theta, rf.Exact(), evidence={4: 1})
    probability = (clamped.log_partition - free.log_partition).exp()
    torch.testing.assert_close(probability, graph.node(free.mu, 4)[1], rtol=1e-12, atol=0)


def test_clamping_is_differentiable():
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, rf.Exact(), evidence={1: 0})
    (gradient,) = torch.autograd.grad(solution.log_partition, theta)
    torch.testing.assert_close(gradient, solution.mu.detach())


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({3: 0}, r"`evidence` must name variables in 0..2. Got 3"),
        ({-1: 0}, r"`evidence` must name variables in 0..2. Got -1"),
        ({0: -1}, r"`evidence` of variable 0 must lie in 0..1. Got -1"),
        ({1: 2}, r"`evidence` of variable 1 must lie in 0..1. Got 2"),
        (torch.tensor([0, 0]), r"`evidence` must have shape \(\*batch, 3\). Got \(2,\)"),
        (torch.tensor([0, 0, -2]), r"`evidence` of variable 2 must lie in -1..1. Got -2"),
    ],
)
def test_bad_evidence_is_refused(evidence, message):
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=message):
        rf.infer(graph, graph.zeros(), evidence=evidence)


def test_batches_of_evidence_fit_those_of_theta():
    graph = rf.chain(3, 2)
    with pytest.raises(ValueError, match=r"`evidence` must have batch axes that broadcast with \(4,\), .* Got \(2,\)"):
        rf.infer(graph, graph.zeros(4), evidence=torch.zeros(2, 3, dtype=torch.int64))


def test_evidence_must_be_integers():
    graph = rf.chain(3, 2)
    with pytest.raises(TypeError, match="`evidence` must be integers"):
        rf.infer(graph, graph.zeros(), evidence=torch.zeros(3))


@pytest.mark.parametrize(
    "algorithm",
    [
        rf.MessagePassing(),
        rf.MessagePassing(rf.TRW(0.5), rf.Parallel(), 0.5),
        rf.MaxProduct(),
        rf.MeanField(),
        rf.Exact(),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_contradictory_evidence_is_refused(kernels, algorithm):
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, 1, 0] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="Every joint state has probability zero"):
        rf.infer(graph, theta, algorithm, evidence={0: 1, 2: 0}, kernels=kernels)
    batch = torch.tensor([[0, -1, 1], [1, -1, 0]])
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match=r"batch item 1"):
        rf.infer(graph, theta, algorithm, evidence=batch, kernels=kernels)


def test_a_variable_without_possible_states_is_refused(kernels):
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.node(theta, 1)[:] = -math.inf
    for algorithm in (rf.MessagePassing(), rf.MeanField(), rf.Exact()):
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(graph, theta, algorithm, stop=rf.Stop(0, tol=None), kernels=kernels)


def test_impossible_models_are_found_out_soon(kernels):
    """Without going through all the sweeps that were allowed."""
    graph = rf.chain(3, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:] = -math.inf
    with pytest.raises(rf.errors.ImpossibleEvidenceError):
        rf.infer(graph, theta, stop=rf.Stop(10**9, tol=None), kernels=kernels)


def test_mean_field_says_that_hard_constraints_are_not_for_it(kernels):
    graph = rf.chain(2, 2)
    theta = graph.zeros()
    graph.factor_views(theta)[0][:, [0, 1], [1, 0]] = -math.inf  # both alike
    assert rf.infer(graph, theta, kernels=kernels).converged
    with pytest.raises(
        rf.errors.ImpossibleEvidenceError, match="mean field is not for hard constraints between variables"
    ):
        rf.infer(graph, theta, rf.MeanField(), kernels=kernels)


# Batches with impossible items: reported item by item where asked.


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
    monkeypatch.setattr(rf.errors, "_warned_slow", set())
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0).requires_grad_()
    with pytest.warns(rf.errors.PerformanceWarning, match="`MaxProduct` with a `theta` that requires a gradient"):
        rf.infer(graph, theta, rf.MaxProduct())
    with torch.no_grad():
        rf.infer(graph, theta, rf.MaxProduct())


# Large potentials: right as long as the floating-point type resolves them, refused beyond.


ALGORITHMS = [
    rf.MessagePassing(),
    rf.MessagePassing(schedule=rf.Parallel(), damping=0.3),
    rf.MessagePassing(rf.TRW(0.5)),
    rf.MeanField(),
    rf.MaxProduct(),
    rf.Exact(),
    rf.ExactMAP(),
]
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
all_algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
TIGHT = rf.Stop(tol=1e-5)


def rational_marginals(graph, theta):
    """Node marginals from exact sums: potentials are rational numbers, and only differences are exponentiated."""
    scores = {}
    for states in product(*(range(int(n)) for n in graph.num_states)):
        entries = [float(graph.node(theta, v)[states[v]]) for v in range(graph.num_variables)]
        for f in range(graph.num_factors):
            entries.append(float(graph.factor(theta, f)[tuple(states[v] for v in graph.scope(f))]))
        if -math.inf not in entries:
            scores[states] = sum(map(Fraction, entries))
    best = max(scores.values())
    mu = [torch.zeros(int(n), dtype=torch.float64) for n in graph.num_states]
    for states, score in scores.items():
        for v, state in enumerate(states):
            mu[v][state] += math.exp(float(score - best))
    return [m / m.sum() for m in mu]


@both_types
@all_algorithms
def test_constants_change_nothing(kernels, algorithm, dtype):
    """A constant in a table cancels, however large: the numbers are those of a model without it."""
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (0,)])
    plain = torch.randint(-3, 4, (graph.theta_size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    graph.node(plain, 0)[0] = graph.factor(plain, 1)[0, 0] = -math.inf
    large = plain.clone()
    constant = 2.0**20 if dtype == torch.float32 else 2.0**50  # representable with integers added
    graph.node(large, 1).add_(constant)
    graph.factor(large, 1).sub_(constant)
    expected = rf.infer(graph, plain, algorithm, stop=TIGHT, kernels=kernels)
    solution = rf.infer(graph, large, algorithm, stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(solution.mu, expected.mu, rtol=0, atol=1e-5)
    assert torch.equal(solution.theta, large)
    assert float(solution.log_partition) == pytest.approx(float(expected.log_partition), abs=1e-4)


@both_types
@all_algorithms
@pytest.mark.parametrize("size", [1e5, 1e17, 1e30])
def test_equal_potentials_give_equal_marginals(kernels, algorithm, dtype, size):
    graph = rf.chain(3, 3)
    theta = torch.full((graph.theta_size,), size, dtype=dtype)
    solution = rf.infer(graph, theta, algorithm, kernels=kernels)
    if not isinstance(algorithm, rf.ExactMAP):
        torch.testing.assert_close(solution.mu[:9], torch.full((9,), 1 / 3, dtype=dtype), rtol=0, atol=1e-6)
    assert float(solution.log_partition) == pytest.approx(5 * size, rel=1e-5)


@both_types
@all_algorithms
def test_masks_that_nobody_pays_are_harmless(kernels, algorithm, dtype):
    """-1e9 in place of -inf, as many write it, in float32 too."""
    graph = rf.chain(4, 3)
    theta = potentials(graph, 0, dtype=dtype)
    for variable in range(4):
        graph.node(theta, variable)[variable % 3] = -1e9
    masked = torch.where(theta < -1e8, -math.inf, theta)
    expected = rf.infer(graph, masked, algorithm, stop=TIGHT, kernels=kernels)
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)
    torch.testing.assert_close(solution.mu, expected.mu, rtol=0, atol=1e-5)


def conflict(size, dtype):
    """A node and a factor that disagree by about `size`: both states pay, and the difference is of order 1."""
    graph = rf.FactorGraph([2, 2], [(0, 1)])
    theta = graph.zeros(dtype=dtype)
    graph.node(theta, 0)[1] = -size
    graph.factor(theta, 0)[0] = torch.tensor([-size + 1, -size - 0.5], dtype=dtype)
    return graph, theta


@pytest.mark.filterwarnings("ignore::riskfield.errors.ConvergenceWarning")  # rounding keeps some from settling
@both_types
@all_algorithms
def test_conflicts_just_below_the_limit_are_resolved(kernels, algorithm, dtype):
    graph, theta = conflict(largest_conflict(dtype) * 0.7, dtype)
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)
    if isinstance(algorithm, rf.MaxProduct | rf.ExactMAP):
        best = [int(m.argmax()) for m in rational_marginals(graph, theta)]
        assert solution.mode().tolist() == best
    elif not isinstance(algorithm, rf.MeanField) and not isinstance(getattr(algorithm, "entropy", None), rf.TRW):
        for variable, expected in enumerate(rational_marginals(graph, theta)):
            torch.testing.assert_close(graph.node(solution.mu, variable).double(), expected, rtol=0, atol=3e-3)


@pytest.mark.filterwarnings("ignore::riskfield.errors.ConvergenceWarning")
@both_types
@all_algorithms
@pytest.mark.parametrize("factor", [3.0, 1e4, 1e15])
def test_conflicts_above_the_limit_are_refused(kernels, algorithm, dtype, factor):
    graph, theta = conflict(largest_conflict(dtype) * factor, dtype)
    with pytest.raises(
        ValueError, match=r"`theta` is too large for torch.float\d\d: in the tables of variable 0 .* probable states"
    ):
        rf.infer(graph, theta, algorithm, stop=TIGHT, kernels=kernels)


def test_gradients_pass_through_the_shift():
    graph = rf.chain(3, 2)
    plain = potentials(graph, 0)
    large = (plain + 2.0**50).requires_grad_()
    plain = (large.detach() - 2.0**50).requires_grad_()  # as large as its rounding left it
    for theta in (plain, large):
        solution = rf.infer(graph, theta, rf.MessagePassing())
        (solution.mu.square().sum() + solution.log_partition).backward()
    torch.testing.assert_close(large.grad, plain.grad, rtol=1e-9, atol=1e-9)


def test_solutions_of_shifted_potentials_can_be_pickled():
    graph = rf.chain(3, 2)
    solution = rf.infer(graph, potentials(graph, 0) + 2.0**50)
    loaded = pickle.loads(pickle.dumps(solution))
    assert torch.equal(loaded.log_partition, solution.log_partition)
    assert torch.equal(loaded.mu, solution.mu)
    assert torch.equal(loaded.statistics(), solution.statistics())
