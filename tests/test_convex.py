"""`ConvexFreeEnergy` against SciPy's general solver, message passing and differences; and what it refuses."""

import functools
import warnings

import numpy as np
import pytest
import torch

import riskfield as rf
from gradient_cases import TIED, finite_differences, free_entries, losses
from riskfield.inference.convex import factorise
from riskfield.inference.convex.newton import Newton
from riskfield.inference.convex.polytope import Polytope
from strategies import potentials

MIXED = rf.FactorGraph([2, 3, 2, 1, 2], [(0, 1), (1, 2), (2, 0), (0, 1, 2), (3, 2), (1,)])  # variable 4 is isolated
LOOP = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
TIGHT = rf.Stop(sweeps=100, tol=1e-12)

CUBE = rf.inference.ConvexFunction(lambda b: b**3, lambda b: 3 * b**2, lambda b: 6 * b)
ENERGIES = {
    "entropy": [rf.inference.NEGATIVE_ENTROPY],
    "log": [rf.inference.NEGATIVE_LOG],
    "square": [rf.inference.SQUARE],
    "entropy and square": [rf.inference.NEGATIVE_ENTROPY, rf.inference.SQUARE],
    "all, and one's own": [rf.inference.NEGATIVE_ENTROPY, rf.inference.NEGATIVE_LOG, rf.inference.SQUARE, CUBE],
}
NAMED = pytest.mark.parametrize("name", ENERGIES)


def random_weights(graph, functions, seed, *batch):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.uniform(0.05, 2.0, size=(*batch, graph.mu_size))) for _ in functions]


def energy(graph, name, seed=0, weights=None):
    functions = ENERGIES[name]
    weights = random_weights(graph, functions, seed) if weights is None else weights
    return rf.ConvexFreeEnergy([rf.inference.Term(f, w) for f, w in zip(functions, weights, strict=True)])


def constraints(graph):
    """B and d, row by row from the definition."""
    rows, right = [], []
    for v in range(graph.num_variables):
        row = torch.zeros(graph.mu_size, dtype=torch.float64)
        graph.node(row, v)[:] = 1
        rows.append(row)
        right.append(1.0)
    for group in graph.factor_groups:
        for k, scope in enumerate(group.variables.tolist()):
            for slot, v in enumerate(scope):
                for x in range(group.shape[slot]):
                    row = torch.zeros(graph.mu_size, dtype=torch.float64)
                    start = group.mu_start + k * group.table_size
                    block = row[start : start + group.table_size].unflatten(0, group.shape)
                    block.select(slot, x).fill_(1)
                    graph.node(row, v)[x] = -1
                    rows.append(row)
                    right.append(0.0)
    return torch.stack(rows).numpy(), np.array(right)


def scipy_minimum(graph, theta, algorithm):
    """The beliefs by `trust-constr`, on a basis of the null space of B so that only bounds are left."""
    from scipy.linalg import null_space
    from scipy.optimize import LinearConstraint, minimize

    matrix, right = constraints(graph)
    basis = null_space(matrix)
    inside = np.concatenate(
        [
            np.full(view.numel(), 1 / view.flatten(1).shape[1])
            for view in (*graph.node_views(torch.zeros(graph.mu_size)), *graph.factor_views(torch.zeros(graph.mu_size)))
        ]
    )
    np.testing.assert_allclose(matrix @ inside, right, atol=1e-12)
    linear = theta.numpy()

    def at(x, what):
        b = torch.from_numpy(np.maximum(inside + basis @ x, 1e-14))
        return sum((t.weight * getattr(t.function, what)(b)).numpy() for t in algorithm.terms)

    found = minimize(
        lambda x: float(at(x, "value").sum() - linear @ (inside + basis @ x)),
        np.zeros(basis.shape[1]),
        jac=lambda x: basis.T @ (at(x, "slope") - linear),
        hess=lambda x: basis.T @ (at(x, "curvature")[:, None] * basis),
        constraints=LinearConstraint(basis, -inside, np.inf, keep_feasible=True),
        method="trust-constr",
        options={"gtol": 1e-13, "xtol": 1e-16, "barrier_tol": 1e-15, "maxiter": 3000},
    )
    return torch.from_numpy(inside + basis @ found.x)


# -- beliefs --------------------------------------------------------------------------------------------------------


@NAMED
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("graph", [MIXED, LOOP], ids=["mixed", "loop"])
def test_beliefs_equal_those_of_a_general_solver(name, seed, graph):
    theta = 1.5 * potentials(graph, seed)
    algorithm = energy(graph, name, seed)
    solution = rf.infer(graph, theta, algorithm, stop=TIGHT)
    assert solution.converged
    torch.testing.assert_close(solution.mu, scipy_minimum(graph, theta, algorithm), rtol=0, atol=1e-6)


@NAMED
def test_beliefs_are_consistent_and_optimal(name):
    """Stationarity with multipliers of the right sign proves the minimum, since the problem is convex."""
    theta = 2 * potentials(MIXED, 3)
    algorithm = energy(MIXED, name, 3)
    mu = rf.infer(MIXED, theta, algorithm, stop=TIGHT).mu
    matrix, right = constraints(MIXED)
    np.testing.assert_allclose(matrix @ mu.numpy(), right, atol=1e-9)
    slope = sum(t.weight * t.function.slope(mu.clamp(min=1e-300)) for t in algorithm.terms) - theta
    positive = mu > 0
    multipliers = np.linalg.lstsq(matrix.T[positive.numpy()], slope[positive].numpy(), rcond=None)[0]
    reduced = slope.numpy() - matrix.T @ multipliers
    assert np.abs(reduced[positive.numpy()]).max() < 1e-7
    if name != "square":
        assert positive.all()


def test_a_square_alone_has_beliefs_of_zero():
    theta = 5 * potentials(LOOP, 0)
    solution = rf.infer(LOOP, theta, energy(LOOP, "square"), stop=TIGHT)
    assert (solution.mu == 0).any()
    assert solution.converged


@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("weight", [1e-3, 1.0, 100.0])
def test_strong_potentials_and_small_weights_converge(scale, weight):
    graph = rf.grid(6, 6, 3)
    theta = scale * potentials(graph, 1)
    weights = weight * random_weights(graph, [0], 1)[0]
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(60, 1e-9))
    for group, view in zip(graph.factor_groups, solution.factor_marginals, strict=True):
        for slot in range(2):
            node = solution.node_marginals[0][torch.tensor(group.variables[:, slot])]
            torch.testing.assert_close(view.sum(2 - slot), node, rtol=0, atol=1e-8)


def test_impossible_states_and_evidence():
    theta = potentials(MIXED, 4)
    MIXED.factor(theta, 0)[0, 1] = -torch.inf
    algorithm = energy(MIXED, "entropy and square", 4)
    solution = rf.infer(MIXED, theta, algorithm, stop=TIGHT, evidence={2: 1})
    assert MIXED.node(solution.mu, 2).tolist() == [0.0, pytest.approx(1.0, abs=1e-12)]
    assert MIXED.factor(solution.mu, 0)[0, 1] == 0
    barely = torch.where(theta == -torch.inf, -1e4, theta)
    MIXED.node(barely, 2)[0] = -1e4
    near = rf.infer(MIXED, barely, algorithm, stop=TIGHT)
    torch.testing.assert_close(solution.mu, near.mu, rtol=0, atol=1e-8)


def test_a_contradiction_is_an_error():
    theta = LOOP.zeros()
    LOOP.factor(theta, 0)[0] = -torch.inf  # variable 0 is not in state 0
    with pytest.raises(rf.errors.ImpossibleEvidenceError):
        rf.infer(LOOP, theta, energy(LOOP, "entropy"), evidence={0: 0})


# -- counting numbers -----------------------------------------------------------------------------------------------


def weights_of(graph, entropy):
    """Counting numbers in the layout of mu."""
    counting = entropy.counting(graph)
    weights = torch.empty(graph.mu_size, dtype=torch.float64)
    for v, number in enumerate(counting.node(graph).tolist()):
        graph.node(weights, v)[:] = number
    for f, number in enumerate(counting.factor.tolist()):
        graph.factor(weights, f)[:] = number
    return weights


@pytest.mark.parametrize("entropy", [rf.Bethe(), rf.TRW(0.5), rf.CountingNumbers(0.7, 0.3)], ids=lambda e: repr(e)[:5])
@pytest.mark.parametrize("graph", [MIXED, rf.grid(4, 5, 2)], ids=["mixed", "grid"])
def test_counting_numbers_are_message_passing(graph, entropy):
    theta = 0.5 * potentials(graph, 5)
    stop = rf.Stop(5000, 1e-13)
    expected = rf.infer(graph, theta, rf.MessagePassing(entropy), stop=stop)
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights_of(graph, entropy))])
    solution = rf.infer(graph, theta, algorithm, stop=stop)
    torch.testing.assert_close(solution.mu, expected.mu, rtol=0, atol=1e-12)
    torch.testing.assert_close(solution.log_partition, expected.log_partition)
    assert solution.sweeps == expected.sweeps


def test_the_interior_point_method_agrees_with_message_passing():
    """Weights that differ from counting numbers by less than can be seen are not message passing's."""
    graph = rf.grid(5, 5, 2)
    theta = potentials(graph, 6)
    entropy = rf.CountingNumbers(0.7, 0.3)
    expected = rf.infer(graph, theta, rf.MessagePassing(entropy), stop=rf.Stop(5000, 1e-14))
    weights = weights_of(graph, entropy)
    weights[0] *= 1 + 1e-15
    solution = rf.infer(
        graph, theta, rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)]), stop=TIGHT
    )
    assert solution.sweeps < 20
    torch.testing.assert_close(solution.mu, expected.mu, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(solution.log_partition, expected.log_partition)


# -- gradients ------------------------------------------------------------------------------------------------------


@NAMED
@pytest.mark.parametrize("solver", [rf.adjoints.Direct(), rf.adjoints.Minres()], ids=["direct", "minres"])
@pytest.mark.parametrize("graph", [MIXED, LOOP], ids=["mixed", "loop"])
def test_gradients_in_theta_and_all_weights(name, solver, graph):
    """Univariate and clique logistic losses, and a quadratic; the log-partition value too."""
    theta = 0.7 * potentials(graph, 8)
    weights = random_weights(graph, ENERGIES[name], 8)

    def outputs(theta, *logs):
        algorithm = energy(graph, name, weights=[w.exp() for w in logs])
        solution = rf.infer(graph, theta, algorithm, stop=TIGHT, adjoint=rf.KKT(solver))
        values = losses(graph, solution.mu.clamp(min=1e-3) if name == "square" else solution.mu, 8)
        return torch.cat([values, solution.log_partition[None]])

    inputs = [theta, *(w.log() for w in weights)]
    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs], fast_mode=True, atol=1e-5, rtol=1e-5)


@NAMED
def test_gradients_entry_by_entry(name):
    """Every weight against four-sided differences."""
    theta = 0.7 * potentials(LOOP, 9)
    weights = random_weights(LOOP, ENERGIES[name], 9)
    direction = torch.from_numpy(np.random.default_rng(9).normal(size=LOOP.mu_size))

    def loss(weights, adjoint=None):
        batch = max((w.shape[:-1] for w in weights), key=len)
        algorithm = energy(LOOP, name, weights=weights)
        mu = rf.infer(LOOP, theta.expand(*batch, -1), algorithm, stop=TIGHT, adjoint=adjoint).mu
        return (direction * mu + mu**2).sum(-1)

    leaves = [w.clone().requires_grad_() for w in weights]
    found = torch.autograd.grad(loss(leaves, rf.KKT()).sum(), leaves)
    for k, gradient in enumerate(found):
        expected = finite_differences(lambda w, k=k: loss([*weights[:k], w, *weights[k + 1 :]]), weights[k], step=1e-4)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["entropy", "square", "all, and one's own"])
def test_gradients_with_tied_tables_impossible_states_and_evidence(name):
    theta = 0.7 * potentials(TIED, 27)
    TIED.factor(theta, 3)[1, 1] = TIED.factor(theta, 0)[1, 1] = -torch.inf
    weights = random_weights(TIED, ENERGIES[name], 27)
    direction = torch.from_numpy(np.random.default_rng(27).normal(size=TIED.mu_size))
    free, whole = free_entries(theta)

    def loss(x, adjoint=None):
        algorithm = energy(TIED, name, weights=weights)
        mu = rf.infer(TIED, whole(x), algorithm, stop=TIGHT, evidence={3: 1}, adjoint=adjoint).mu
        return (direction * mu + mu**2).sum(-1)

    for k, weight in enumerate(weights):
        weights[k] = weight.clone().requires_grad_()
    leaf = free.clone().requires_grad_()
    found, *by_weight = torch.autograd.grad(loss(leaf, rf.KKT()), [leaf, *weights])
    weights = [w.detach() for w in weights]
    torch.testing.assert_close(found, finite_differences(loss, free), rtol=0, atol=1e-7)
    impossible = TIED.expand(theta) == -torch.inf
    for gradient in by_weight:
        assert torch.isfinite(gradient).all()
        assert (gradient[impossible] == 0).all()


@pytest.mark.parametrize("sides", [2, 4])
def test_perturb_and_kkt_agree_in_theta(sides):
    theta = potentials(MIXED, 10, "mild", 2)
    algorithm = energy(MIXED, "entropy and square", weights=random_weights(MIXED, range(2), 10, 2))
    gradients = []
    for adjoint in (rf.KKT(), rf.Perturb(sides)):
        leaf = theta.clone().requires_grad_()
        mu = rf.infer(MIXED, leaf, algorithm, stop=TIGHT, adjoint=adjoint).mu
        gradients.append(torch.autograd.grad(losses(MIXED, mu, 10).sum(), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_envelope():
    theta = potentials(MIXED, 11).requires_grad_()
    solution = rf.infer(MIXED, theta, energy(MIXED, "entropy and square"), stop=TIGHT, adjoint=rf.Envelope())
    (gradient,) = torch.autograd.grad(solution.log_partition, theta)
    assert torch.equal(gradient, solution.mu)
    objective = lambda t: rf.infer(MIXED, t, energy(MIXED, "entropy and square"), stop=TIGHT).log_partition  # noqa: E731
    step = 1e-5 * potentials(MIXED, 12)
    with torch.no_grad():
        expected = (objective(theta + step) - objective(theta - step)) / 2
    assert float(gradient @ step) == pytest.approx(float(expected), rel=1e-6)


def test_gradients_of_counting_numbers():
    """Also where message passing runs, each weight has its gradient."""
    graph = rf.grid(3, 3, 2)
    theta, direction = potentials(graph, 13), potentials(graph, 14)
    weights = weights_of(graph, rf.TRW(0.5))
    leaf = weights.clone().requires_grad_()
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, leaf)])
    mu = rf.infer(graph, theta, algorithm, stop=rf.Stop(5000, 1e-13), adjoint=rf.KKT()).mu
    (found,) = torch.autograd.grad(direction @ mu, leaf)
    counting = rf.TRW(0.5).counting(graph)
    factor, node = counting.factor.requires_grad_(), counting.node(graph).detach().requires_grad_()
    other = rf.MessagePassing(rf.CountingNumbers(factor, node))
    mu = rf.infer(graph, theta, other, stop=rf.Stop(5000, 1e-13), adjoint=rf.FixedPoint()).mu
    by_factor, by_node = torch.autograd.grad(direction @ mu, [factor, node])
    for v in range(graph.num_variables):
        assert float(graph.node(found, v).sum()) == pytest.approx(float(by_node[v]), abs=1e-8)
    for f in range(graph.num_factors):
        assert float(graph.factor(found, f).sum()) == pytest.approx(float(by_factor[f]), abs=1e-8)


def test_a_belief_about_to_leave_zero_is_reported():
    graph = rf.FactorGraph([2])
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.SQUARE)])
    theta = torch.tensor([0.0, -2.0], dtype=torch.float64, requires_grad=True)  # b = (1, 0), and its multiplier 0
    mu = rf.infer(graph, theta, algorithm, stop=rf.Stop(100, 1e-8), adjoint=rf.KKT()).mu
    torch.testing.assert_close(mu.detach(), torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-7)
    with pytest.warns(rf.errors.AdjointWarning, match="about to leave it"):
        mu[0].backward()


def test_weights_stay_positive_while_they_are_learned():
    graph = rf.grid(3, 3, 2)
    raw = torch.zeros(graph.mu_size, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([raw], lr=50.0)
    values = []
    for _ in range(5):
        algorithm = rf.ConvexFreeEnergy([rf.inference.Term.from_log(rf.inference.NEGATIVE_ENTROPY, raw)])
        mu = rf.infer(graph, 2 * potentials(graph, 15), algorithm, stop=rf.Stop(200, 1e-10), adjoint=rf.KKT()).mu
        loss = -graph.node_views(mu)[0][:, 1].log().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    assert (raw.exp() > 0).all()


# -- batches, warm starts, dtypes -----------------------------------------------------------------------------------


@functools.cache
def batched():
    theta = potentials(MIXED, 16, "mild", 2, 3)
    weights = random_weights(MIXED, range(2), 16, 3)
    return theta, weights


def test_a_batch_is_a_loop_also_over_weights():
    theta, weights = batched()
    batch = rf.infer(MIXED, theta, energy(MIXED, "entropy and square", weights=weights), stop=TIGHT)
    for j in range(2):
        for k in range(3):
            alone = energy(MIXED, "entropy and square", weights=[w[k] for w in weights])
            single = rf.infer(MIXED, theta[j, k], alone, stop=TIGHT)
            torch.testing.assert_close(batch.mu[j, k], single.mu, rtol=0, atol=1e-11)
            torch.testing.assert_close(batch.log_partition[j, k], single.log_partition)
            assert batch.sweeps[j, k] == single.sweeps


def test_gradients_of_a_batch_reach_shared_and_separate_weights():
    theta, weights = batched()
    shared = random_weights(MIXED, [0], 17)[0].requires_grad_()
    separate = weights[1].clone().requires_grad_()
    algorithm = energy(MIXED, "entropy and square", weights=[shared, separate])
    mu = rf.infer(MIXED, theta, algorithm, stop=TIGHT, adjoint=rf.KKT()).mu
    whole = torch.autograd.grad((mu**2).sum(), [shared, separate])
    total = torch.zeros_like(shared)
    for k in range(3):
        algorithm = energy(MIXED, "entropy and square", weights=[shared, separate[k]])
        for j in range(2):
            mu = rf.infer(MIXED, theta[j, k], algorithm, stop=TIGHT, adjoint=rf.KKT()).mu
            total += torch.autograd.grad((mu**2).sum(), shared, retain_graph=True)[0]
    torch.testing.assert_close(whole[0], total, rtol=1e-8, atol=1e-9)
    assert whole[1].shape == separate.shape


@NAMED
def test_warm_starts(name):
    theta = potentials(MIXED, 18)
    algorithm = energy(MIXED, name, 18)
    cold = rf.infer(MIXED, theta, algorithm, stop=rf.Stop(100, 1e-10))
    again = rf.infer(MIXED, theta, algorithm, stop=rf.Stop(100, 1e-10), messages=cold.messages)
    assert again.sweeps < cold.sweeps
    for shift in (1e-3, 1.0, 30.0):
        moved = theta + shift * potentials(MIXED, 19)
        truth = rf.infer(MIXED, moved, algorithm, stop=rf.Stop(100, 1e-10))
        warm = rf.infer(MIXED, moved, algorithm, stop=rf.Stop(100, 1e-10), messages=cold.messages)
        assert warm.converged
        torch.testing.assert_close(warm.mu, truth.mu, rtol=0, atol=1e-7)
    zeros = rf.infer(MIXED, theta, algorithm, stop=rf.Stop(100, 1e-10), messages=torch.zeros_like(cold.messages))
    assert torch.equal(zeros.mu, cold.mu)


def test_messages_go_on_where_weights_become_counting_numbers_or_cease_to_be():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 20)
    weights = random_weights(graph, [0], 20)[0]
    plain, varied = (rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, w)]) for w in (1.0, weights))
    first = rf.infer(graph, theta, plain)
    second = rf.infer(graph, theta, varied, stop=TIGHT, messages=first.messages)
    third = rf.infer(graph, theta, plain, messages=second.messages)
    assert first.messages.shape == second.messages.shape == third.messages.shape
    assert second.converged
    assert third.converged


def test_warm_starts_from_another_set_of_functions():
    """A multiplier that was let go under an entropy is needed again without it."""
    theta = 5 * potentials(LOOP, 0)
    before = rf.infer(LOOP, theta, energy(LOOP, "entropy"), stop=TIGHT)
    cold = rf.infer(LOOP, theta, energy(LOOP, "square"), stop=TIGHT)
    warm = rf.infer(LOOP, theta, energy(LOOP, "square"), stop=TIGHT, messages=before.messages)
    assert (cold.mu == 0).any()
    torch.testing.assert_close(warm.mu, cold.mu, rtol=0, atol=1e-10)


def test_float32():
    theta = potentials(MIXED, 21)
    algorithm = energy(MIXED, "entropy and square")
    single, double = (rf.infer(MIXED, t, algorithm, stop=rf.Stop(100, 1e-8)).mu for t in (theta.float(), theta))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-6)


def test_the_gradients_of_a_image():
    graph, step = rf.grid(28, 28, 2), 1e-4
    at = potentials(graph, 22), random_weights(graph, [0], 22)[0]
    none = torch.zeros_like(at[0])

    def loss(theta, weights):
        algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY, weights)])
        mu = rf.infer(graph, theta, algorithm, stop=TIGHT, adjoint=rf.KKT()).mu
        return -graph.node_views(mu)[0][:, 0].log().sum()

    inputs = [tensor.clone().requires_grad_() for tensor in at]
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for along in ((potentials(graph, 23), none), (none, potentials(graph, 24))):
        ahead, behind = (loss(*(a + s * d for a, d in zip(at, along, strict=True))) for s in (step, -step))
        slope = sum(float(g @ d) for g, d in zip(gradients, along, strict=True))
        assert slope == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-5)


# -- refusals and diagnostics ---------------------------------------------------------------------------------------


def refuse(match, error=ValueError, graph=LOOP, theta=None, stop=None, adjoint=None, **options):
    def attempt():
        algorithm = rf.ConvexFreeEnergy([rf.inference.Term(**options)])
        rf.infer(graph, graph.zeros() if theta is None else theta, algorithm, stop=stop, adjoint=adjoint)

    with pytest.raises(error, match=match):
        attempt()


def test_weights_that_do_not_fit_are_refused():
    varied = torch.linspace(0.5, 1, LOOP.mu_size, dtype=torch.float64)
    negative = varied.clone()
    negative[4] = -0.1
    refuse(
        r"`weight` of terms\[0\] must not be negative.* Got -0.1 at \(4,\)",
        function=rf.inference.NEGATIVE_ENTROPY,
        weight=negative,
    )
    refuse("must not be negative", function=rf.inference.SQUARE, weight=-1.0)
    refuse("must not be negative", function=rf.inference.NEGATIVE_ENTROPY, weight=-1.0)
    refuse(r"`weight` .* shape \(\*batch, 18\), .* Got \(5,\)", function=rf.inference.SQUARE, weight=torch.ones(5))
    refuse("`weight` must be finite. Got nan", function=rf.inference.SQUARE, weight=float("nan"))
    refuse("strictly convex function with a weight above 0", function=rf.inference.SQUARE, weight=0.0)
    batch = varied.expand(3, -1)
    for shape in ((), (2,), (3, 5)):
        refuse("batch shape", function=rf.inference.SQUARE, weight=batch, theta=LOOP.zeros(*shape))
    refuse("`weight` must be a number or a tensor", TypeError, function=rf.inference.SQUARE, weight="1")
    refuse("`function` must be a ConvexFunction", TypeError, function=torch.exp)
    with pytest.raises(ValueError, match="`terms` must hold at least one"):
        rf.ConvexFreeEnergy([])
    with pytest.raises(TypeError, match=r"`terms\[0\]` must be a Term"):
        rf.ConvexFreeEnergy([rf.inference.SQUARE])


def test_functions_that_are_not_convex_are_refused():
    with pytest.raises(ValueError, match="`curvature` must not be negative"):
        rf.inference.ConvexFunction(torch.log, torch.reciprocal, lambda b: -(b**-2))
    with pytest.raises(ValueError, match="`slope` must give a finite number"):
        rf.inference.ConvexFunction(torch.square, lambda b: b * torch.nan, torch.ones_like)
    with pytest.raises(TypeError, match="`value` must be a function"):
        rf.inference.ConvexFunction(1.0, torch.square, torch.square)


@pytest.mark.parametrize("adjoint", [rf.Unroll(), None, rf.FixedPoint()])
def test_other_adjoints_name_the_alternative(adjoint):
    varied = torch.linspace(0.5, 1, LOOP.mu_size, dtype=torch.float64)
    name = "FixedPoint" if isinstance(adjoint, rf.FixedPoint) else "Unroll"
    options = {"function": rf.inference.NEGATIVE_ENTROPY, "adjoint": adjoint}
    match = f"`{name}`.* ConvexFreeEnergy.* Use `KKT` or `Perturb`"
    refuse(match, weight=varied, theta=LOOP.zeros().requires_grad_(), **options)
    refuse(match, weight=varied.clone().requires_grad_(), **options)


@pytest.mark.parametrize("adjoint", [rf.Perturb(), rf.Envelope()])
def test_weights_have_gradients_by_kkt_only(adjoint):
    varied = torch.linspace(0.5, 1, LOOP.mu_size, dtype=torch.float64).requires_grad_()
    match = f"`{type(adjoint).__name__}` computes gradients with respect to theta only.* Use `KKT`"
    refuse(match, function=rf.inference.NEGATIVE_ENTROPY, weight=varied, adjoint=adjoint)


@pytest.mark.parametrize("adjoint", [rf.Perturb(), rf.KKT()])
def test_truncated_runs_have_no_gradient(adjoint):
    name = type(adjoint).__name__
    refuse(f"`{name}` needs a run to convergence", function=rf.inference.SQUARE, stop=rf.Stop(5, None), adjoint=adjoint)


def test_the_solver_is_a_choice():
    theta, terms = potentials(LOOP, 23), [rf.inference.Term(rf.inference.NEGATIVE_ENTROPY)]
    runs = {
        solver: rf.infer(LOOP, theta, rf.ConvexFreeEnergy(terms, solver), stop=rf.Stop(tol=1e-8))
        for solver in (None, rf.inference.SumProduct(), rf.inference.InteriorPoint())
    }
    assert torch.equal(runs[None].mu, runs[rf.inference.SumProduct()].mu)
    torch.testing.assert_close(runs[rf.inference.InteriorPoint()].mu, runs[None].mu, rtol=0, atol=1e-6)
    assert runs[rf.inference.InteriorPoint()].sweeps != runs[None].sweeps
    with pytest.raises(ValueError, match=r"`solver=SumProduct\(\)` needs weights .* counting numbers.* `InteriorPoint"):
        rf.infer(LOOP, theta, rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.SQUARE)], rf.inference.SumProduct()))
    with pytest.raises(TypeError, match=r"`solver` must be `InteriorPoint\(\)`, `SumProduct\(\)` or None. Got True"):
        rf.ConvexFreeEnergy(terms, True)


@pytest.mark.parametrize("solver", [rf.inference.SumProduct(), rf.inference.InteriorPoint()])
def test_too_few_sweeps_are_reported(solver):
    """With advice that holds whichever ran."""
    algorithm = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.NEGATIVE_ENTROPY)], solver)
    assert (algorithm.counting_numbers(LOOP) is not None) == (solver == rf.inference.SumProduct())
    with pytest.warns(rf.errors.ConvergenceWarning, match=r"after 3 sweeps; .* Allow more sweeps\.") as caught:
        solution = rf.infer(LOOP, potentials(LOOP, 23), algorithm, stop=rf.Stop(3, 1e-10))
    assert not solution.converged
    assert solution.residual > 1e-10
    assert "message passing ran; if none is negative, `solver=InteriorPoint()`" in str(caught[0].message)


@pytest.mark.parametrize("name", ["entropy", "log", "entropy and square"])
def test_beliefs_that_the_polytope_holds_at_zero(name):
    """Around the loop 0 implies 0, so that of the joint state (1, 0) is 0 as well: there is no interior."""
    theta = TIED.zeros()
    TIED.factor(theta, 0)[0, 1] = -torch.inf
    stop = rf.Stop(50, 1e-8)
    solution = rf.infer(TIED, theta, energy(TIED, name), stop=stop)
    TIED.factor(theta, 0)[1, 0] = -torch.inf
    torch.testing.assert_close(solution.mu, rf.infer(TIED, theta, energy(TIED, name), stop=stop).mu, rtol=0, atol=1e-6)


def test_second_derivatives_are_refused():
    theta = potentials(LOOP, 24).requires_grad_()
    mu = rf.infer(LOOP, theta, energy(LOOP, "entropy"), stop=TIGHT, adjoint=rf.KKT()).mu
    (first,) = torch.autograd.grad((mu**2).sum(), theta, create_graph=True)
    with pytest.raises(rf.errors.AdjointError, match=r"has first derivatives only\.$"):
        first.sum().backward()


def test_a_gradient_that_is_not_found_is_an_error():
    """And not one that `Unroll` could mend."""
    graph = rf.grid(4, 4, 2)
    theta = potentials(graph, 0).requires_grad_()
    mu = rf.infer(
        graph, theta, energy(graph, "entropy"), stop=TIGHT, adjoint=rf.KKT(rf.adjoints.Minres(max_steps=3))
    ).mu
    with pytest.raises(
        rf.errors.AdjointError, match=r"relative residual of .* give all configurations more NEGATIVE_ENTROPY"
    ):
        (mu**2).sum().backward()


# -- Newton's equations, and factorisations ---------------------------------------------------------------------------

WAYS = pytest.mark.parametrize("band", [64, -1], ids=["band", "sparse"])


def numbers(graph, items, seed, spread):
    """Beliefs of tilted uniform regions, which lack something of every constraint, and curvatures of a wide range."""
    rng = np.random.default_rng(seed)
    b = Polytope(graph).uniform(torch.ones(items, graph.mu_size, dtype=torch.bool))
    b = b * torch.from_numpy(rng.uniform(0.9, 1.1, size=b.shape))
    curvature = torch.from_numpy(10.0 ** rng.uniform(-spread, spread, size=b.shape))
    return b, curvature, torch.from_numpy(rng.normal(size=b.shape))


def dense(graph, b, curvature, slope, possible):
    """x of H x + g = B^T y, B x = d - B b, with x = 0 where it must not move."""
    matrix, right = constraints(graph)
    free = possible.numpy()
    matrix = matrix[:, free]
    size, rows = matrix.shape[1], len(matrix)
    whole = np.block([[np.diag(curvature.numpy()[free]), -matrix.T], [matrix, np.zeros((rows, rows))]])
    found = np.linalg.lstsq(whole, np.concatenate([-slope.numpy()[free], right - matrix @ b.numpy()[free]]), rcond=None)
    out = np.zeros(graph.mu_size)
    out[free] = found[0][:size]
    return torch.from_numpy(out)


@WAYS
@pytest.mark.parametrize("tight", [False, True], ids=["reduced", "augmented"])
@pytest.mark.parametrize("graph", [MIXED, rf.grid(3, 4, 2), rf.grid(2, 3, 3)], ids=["mixed", "binary", "ternary"])
def test_steps_equal_a_dense_solve(graph, tight, band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    polytope = Polytope(graph)
    b, curvature, slope = numbers(graph, 3, 0, 1.0)
    # Scaled so that all constraints can be kept: each region sums to the same.
    possible = torch.ones_like(b, dtype=torch.bool)
    newton = Newton(polytope, b, curvature, possible, tight=tight)
    found, solved = newton.solve(slope, polytope.missing(newton.b), 1e-12)
    assert solved.all()
    for k in range(3):
        expected = dense(graph, b[k], curvature[k], slope[k], possible[k])
        torch.testing.assert_close(found[k], expected, rtol=1e-9, atol=1e-10)


@WAYS
def test_impossible_states_do_not_move(band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    theta = potentials(MIXED, 0)
    MIXED.factor(theta, 0)[0, 1] = MIXED.node(theta, 2)[0] = -torch.inf
    polytope = Polytope(MIXED)
    possible = polytope.consistent((theta > -torch.inf)[None])
    assert not possible.all()
    b, curvature, slope = numbers(MIXED, 1, 1, 1.0)
    b = torch.where(possible, b, 0.0)
    newton = Newton(polytope, b, curvature, possible)
    found, solved = newton.solve(slope, polytope.missing(newton.b), 1e-12)
    assert solved.all()
    expected = dense(MIXED, b[0], curvature[0], slope[0], possible[0])
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-10)
    assert (found[~possible] == 0).all()


def test_variables_that_are_all_but_bound_to_each_other():
    """All but nothing of each pair is in (0, 0) and (1, 1), around a loop."""
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    b = torch.full((1, graph.mu_size), 0.5, dtype=torch.float64)
    for f in range(3):
        graph.factor(b, f)[0, [0, 1], [1, 0]] = 1e-6 * (1 + f)
    curvature, slope, possible = 1 / b, potentials(graph, 2)[None], torch.ones_like(b, dtype=torch.bool)
    expected = dense(graph, b[0], curvature[0], slope[0], possible[0])
    tight = Newton(Polytope(graph), b, curvature, possible, tight=True)
    found, solved = tight.solve(slope, tight.polytope.missing(tight.b), 1e-10)
    assert solved.all()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-8)
    # A step is as right as a step needs to be.
    step = Newton(Polytope(graph), b, curvature, possible).step(slope)
    torch.testing.assert_close(step[0], expected, rtol=0, atol=1e-6)


@WAYS
def test_factorisations_solve(band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    rng = np.random.default_rng(0)
    rows, columns = np.tril_indices(12)
    kept = (rows == columns) | (rng.random(len(rows)) < 0.2)
    sparsity = factorise.Sparsity(12, rows[kept], columns[kept])
    assert sparsity.banded == (band > 0)
    values = rng.normal(size=kept.sum())
    values[sparsity.diagonal] = 10.0
    matrix = np.zeros((12, 12))
    matrix[rows[kept], columns[kept]] = matrix[columns[kept], rows[kept]] = values
    right = rng.normal(size=12)
    np.testing.assert_allclose(sparsity.factorise(values)(right), np.linalg.solve(matrix, right), rtol=1e-12)
    assert np.isnan(sparsity.factorise(np.zeros_like(values))(right)).all()


def test_a_polytope_does_not_keep_its_graph_alive():
    import gc
    import weakref

    graph = rf.grid(2, 2, 2)
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.SQUARE)])
    rf.infer(graph, graph.zeros(), energy)
    there = weakref.ref(graph)
    del graph
    gc.collect()
    assert there() is None
