"""Convergence: tolerances, sweeps, damping, warnings, and the claims of docs/inference.md."""

import warnings

import pytest
import torch

import claims
import riskfield as rf
from riskfield.kernels import torch_reference
from riskfield.kernels.convergence import Convergence, Gap
from strategies import potentials

# The loop: tolerances, sweeps, damping, warnings.


@pytest.fixture(scope="module")
def model():
    graph = rf.grid(3, 4, 3)
    return graph, potentials(graph, 0)


TREE_REWEIGHTED = rf.MessagePassing(rf.TRW(0.5))


@pytest.mark.parametrize("tol", [1e-4, 1e-8, 1e-14])
def test_tolerances_can_be_reached(kernels, model, tol):
    solution = rf.infer(*model, TREE_REWEIGHTED, stop=rf.Stop(tol=tol), kernels=kernels)
    assert solution.converged
    assert 0 <= float(solution.residual) <= tol
    exact = rf.infer(*model, TREE_REWEIGHTED, stop=rf.Stop(200, tol=None), kernels=kernels)
    torch.testing.assert_close(solution.mu, exact.mu, rtol=0, atol=100 * tol)


def test_tighter_tolerances_take_more_sweeps(kernels, model):
    counts = [
        int(rf.infer(*model, TREE_REWEIGHTED, stop=rf.Stop(tol=tol), kernels=kernels).sweeps)
        for tol in (1e-2, 1e-5, 1e-10)
    ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("damping", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()])
def test_damping_does_not_pass_for_convergence(kernels, damping, schedule):
    graph = rf.grid(2, 3, 2)
    theta = potentials(graph, 0)
    reference = rf.infer(graph, theta, TREE_REWEIGHTED, stop=rf.Stop(tol=1e-13), kernels=kernels)
    algorithm = rf.MessagePassing(rf.TRW(0.5), schedule, damping)
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(3000, tol=1e-6), kernels=kernels)
    assert solution.converged
    torch.testing.assert_close(solution.mu, reference.mu, rtol=0, atol=2e-5)


@pytest.mark.parametrize("damping", [0.0, 0.5, 0.9])
def test_damping_does_not_pass_for_convergence_where_marginals_saturate(kernels, damping):
    """From messages that are wrong by a factor of e^-900 a damped step changes no probability, yet much is to come."""
    graph = rf.chain(3, 2)
    extreme = graph.zeros()
    graph.node_views(extreme)[0][:, 1] = 900.0
    graph.factor_views(extreme)[0][:, [0, 1], [0, 1]] = 900.0
    stale = rf.infer(graph, extreme, kernels=kernels).messages
    theta = potentials(graph, 0)
    algorithm = rf.MessagePassing(damping=damping)
    one = rf.infer(graph, theta, algorithm, stop=rf.Stop(1, tol=None), messages=stale, kernels=kernels)
    exact = rf.infer(graph, theta, rf.Exact()).mu
    # Without damping the native kernels ignore messages on a forest and solve it in one sweep.
    assert float(one.residual) > 0.1 or torch.allclose(one.mu, exact, rtol=0, atol=1e-12)
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(5000, tol=1e-8), messages=stale, kernels=kernels)
    torch.testing.assert_close(solution.mu, exact, rtol=0, atol=1e-6)


def test_the_residual_is_the_undamped_change(kernels):
    """The first sweep of a damped parallel run would, undamped, have been the first sweep of an undamped one."""
    graph = rf.grid(2, 3, 2)
    theta = potentials(graph, 0)
    residuals = [
        float(
            rf.infer(
                graph,
                theta,
                rf.MessagePassing(rf.TRW(0.5), rf.Parallel(), damping),
                stop=rf.Stop(1, tol=None),
                kernels=kernels,
            ).residual
        )
        for damping in (0.0, 0.3, 0.9)
    ]
    assert residuals == pytest.approx([residuals[0]] * 3, rel=1e-10)


@pytest.mark.parametrize("batch", [(), (8,)], ids=["one", "batch"])
def test_the_residual_of_damped_runs_ignores_impossible_states(batch):
    """Evidence makes states impossible; the residual must still see the other variables in the same vector lanes."""
    graph = rf.grid(4, 4, 2)
    theta = torch.stack([potentials(graph, k) for k in range(8)]) if batch else potentials(graph, 0)
    algorithm = rf.MessagePassing(rf.TRW(0.7), damping=0.5)
    residuals = [
        rf.infer(graph, theta, algorithm, stop=rf.Stop(1, tol=None), evidence={0: 1, 5: 0}, kernels=kernels).residual
        for kernels in ("native", "torch")
    ]
    torch.testing.assert_close(*residuals, rtol=1e-9, atol=0)


def test_running_out_of_sweeps_is_reported(kernels, model):
    with pytest.warns(rf.errors.ConvergenceWarning, match=r"still change by .* after 2 sweeps; the tolerance is 1e-09"):
        solution = rf.infer(*model, TREE_REWEIGHTED, stop=rf.Stop(2, 1e-9), kernels=kernels)
    assert not solution.converged
    assert solution.sweeps == 2
    assert float(solution.residual) > 1e-9


def test_the_warning_counts_batch_items(kernels, model):
    graph, theta = model
    batch = torch.stack([theta, 1e-12 * theta, theta])
    with pytest.warns(rf.errors.ConvergenceWarning, match="for 2 of 3 batch items"):
        solution = rf.infer(graph, batch, TREE_REWEIGHTED, stop=rf.Stop(3, 1e-9), kernels=kernels)
    assert solution.converged.tolist() == [False, True, False]


@pytest.mark.parametrize("sweeps", [0, 1, 7])
def test_without_a_tolerance_exactly_so_many_sweeps_run(kernels, model, sweeps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = rf.infer(*model, stop=rf.Stop(sweeps, tol=None), kernels=kernels)
    assert solution.sweeps == sweeps
    assert not solution.converged


def test_sweeps_do_not_depend_on_how_the_loop_slices_them(kernels, model):
    """A run of 64 sweeps by doubling slices equals one that is advanced sweep by sweep through warm starts."""
    graph, theta = model
    whole = rf.infer(graph, theta, TREE_REWEIGHTED, stop=rf.Stop(12, tol=None), kernels=kernels)
    messages = None
    for _ in range(12):
        step = rf.infer(graph, theta, TREE_REWEIGHTED, stop=rf.Stop(1, tol=None), messages=messages, kernels=kernels)
        messages = step.messages
    torch.testing.assert_close(step.mu, whole.mu, rtol=0, atol=1e-12)
    assert float(step.residual) == pytest.approx(float(whole.residual), rel=1e-6, abs=1e-13)


def test_progress_changes_nothing(kernels, model, capsys):
    quiet, loud = (rf.infer(*model, TREE_REWEIGHTED, progress=shown, kernels=kernels) for shown in (False, True))
    assert torch.equal(quiet.mu, loud.mu)


@pytest.mark.parametrize("sweeps", [-1, 2.5, True, "3"])
def test_sweeps_must_be_a_count(sweeps):
    with pytest.raises(ValueError, match="`sweeps` must be a non-negative integer"):
        rf.Stop(sweeps=sweeps)


@pytest.mark.parametrize("tol", [-1e-9, float("nan"), float("inf")])
def test_tolerance_must_be_a_number(tol):
    with pytest.raises(ValueError, match="`tol` must be a non-negative number or None"):
        rf.Stop(tol=tol)


def _saturated_tree():
    """A tree whose marginals saturate in the first sweep while its messages are still on their way."""
    graph = rf.FactorGraph([2, 3, 2, 1], [(0, 2, 1), (0, 3)])
    theta = graph.zeros()
    for variable, values in enumerate([[-120.0, -72], [15, 49, 113], [-21, 61]]):
        graph.node(theta, variable)[:] = torch.tensor(values)
    graph.factor(theta, 0)[:] = torch.tensor([[[-400.0, 142, -16], [124, -207, 96]], [[-140, -14, -74], [93, 8, -72]]])
    graph.factor(theta, 1)[:] = torch.tensor([[-36.0], [178]])
    return graph, theta


@pytest.mark.parametrize("damping", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("algorithm", [rf.MessagePassing, rf.MaxProduct])
def test_saturated_marginals_do_not_pass_for_convergence(algorithm, damping, kernels):
    graph, theta = _saturated_tree()
    exact = rf.infer(graph, theta, rf.Exact())
    solution = rf.infer(graph, theta, algorithm(damping=damping), stop=rf.Stop(tol=1e-10), kernels=kernels)
    assert solution.converged
    torch.testing.assert_close(graph.node(solution.mu, 1), graph.node(exact.mu, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("damping", [0.0, 0.5, 0.9])
def test_strong_chains_converge_to_the_exact_answer(damping, kernels):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = torch.randperm(8, generator=generator)
        graph = rf.from_edges(2, torch.stack([order[:-1], order[1:]], 1).numpy(), num_variables=8)
        theta = 50 * torch.randn(graph.theta_size, dtype=torch.float64, generator=generator)
        solution = rf.infer(graph, theta, rf.MessagePassing(damping=damping), kernels=kernels)
        exact = rf.infer(graph, theta, rf.Exact())
        assert solution.converged
        torch.testing.assert_close(solution.mu, exact.mu, rtol=0, atol=1e-3)


def _cancelling_messages():
    """Two factors on one pair, tree-reweighted: their messages move in opposite directions and leave beliefs alone."""
    graph = rf.FactorGraph([2, 2], [(0, 1), (0, 1)])
    theta = [8.0, -9, -8, -7, 10, 0, -7, -13, 12, 22, -11, 20]
    return graph, torch.tensor(theta, dtype=torch.float64), rf.TRW(0.5)


def _strong_star():
    """A tree whose factor marginals lag behind the node marginals."""
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (0, 2)])
    theta = [1.0, 1, 18, -6, 7, -3, 5, -1, 6, 2, 4, -5, 3, -13]
    return graph, torch.tensor(theta, dtype=torch.float64), rf.Bethe()


@pytest.mark.parametrize("tol", [1e-6, 1e-12])
@pytest.mark.parametrize("damping", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("model", [_cancelling_messages, _strong_star])
def test_converged_means_close_to_the_fixed_point(model, damping, tol, kernels):
    graph, theta, entropy = model()
    fixed = rf.infer(graph, theta, rf.MessagePassing(entropy), stop=rf.Stop(100, None), kernels="torch")
    algorithm = rf.MessagePassing(entropy, damping=damping)
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(tol=tol), kernels=kernels)
    assert solution.converged
    torch.testing.assert_close(solution.mu, fixed.mu, rtol=0, atol=2 * tol)
    torch.testing.assert_close(solution.log_partition, fixed.log_partition, rtol=0, atol=4 * tol)


def test_slow_convergence_does_not_pass_for_convergence(kernels):
    """Near the critical coupling a sweep makes a small part of the way that is left."""
    graph = rf.grid(4, 4, 2)
    theta = graph.zeros()
    graph.node_views(theta)[0][:, 1] = 1e-3
    graph.factor_views(theta)[0][:] = 0.3 * (2 * torch.eye(2) - 1)
    fixed = rf.infer(graph, theta, rf.MeanField(), stop=rf.Stop(1000, None), kernels=kernels)
    solution = rf.infer(graph, theta, rf.MeanField(), stop=rf.Stop(tol=1e-6), kernels=kernels)
    assert solution.converged
    assert solution.sweeps > 100
    torch.testing.assert_close(solution.mu, fixed.mu, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-8])
def test_slow_belief_propagation_does_not_pass_for_convergence(tol, kernels):
    graph = rf.grid(4, 4, 2)
    theta = graph.zeros()
    graph.node_views(theta)[0][:, 1] = 1e-3
    graph.factor_views(theta)[0][:] = 0.5 * (2 * torch.eye(2) - 1)
    fixed = rf.infer(graph, theta, stop=rf.Stop(2000, None))
    solution = rf.infer(graph, theta, stop=rf.Stop(tol=tol), kernels=kernels)
    assert solution.converged
    assert solution.sweeps > 50
    torch.testing.assert_close(solution.mu, fixed.mu, rtol=0, atol=2 * tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 700.0])
def test_rounding_does_not_keep_a_run_from_converging(scale, dtype, kernels):
    """Log-messages of size 700 never come to rest: in floats they move by 1e-4, which the marginals do not show."""
    graph = rf.chain(6, 3)
    theta = (scale * potentials(graph, 3)).to(dtype)
    for damping in (0.0, 0.5):
        algorithm = rf.MessagePassing(damping=damping)
        assert rf.infer(graph, theta, algorithm, stop=rf.Stop(tol=1e-6), kernels=kernels).converged


def test_without_a_tolerance_nothing_is_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(torch_reference.MessagePassingRun, "gap", lambda run: measured.append(run))
    rf.infer(rf.chain(3, 2), rf.chain(3, 2).zeros(), stop=rf.Stop(5, None), kernels="torch")
    assert not measured


def _judged(gaps, tol=1e-6, damping=0.0):
    """The residuals of a run whose state is measured after every sweep, as far as the rule asks for it."""
    convergence = Convergence(1, damping)
    found = []
    for gap in gaps:
        gap = Gap(torch.tensor([gap], dtype=torch.float64), torch.zeros(1))
        convergence.judge(torch.tensor([True]), torch.zeros(1, dtype=torch.float64), 1, tol, lambda gap=gap: gap)
        found.append(float(convergence.residual))
    return found


def test_the_distance_follows_from_the_rate():
    gaps = [1e-7 * 0.9**k for k in range(3)]
    assert _judged(gaps)[:2] == pytest.approx([1e-6, 9e-7])  # unknown at first; then 9e-8 / (1 - 0.9)
    assert _judged(gaps, damping=0.5)[1] == pytest.approx(4.5e-7)
    assert _judged([1e-8, 1e-8])[1] == pytest.approx(1e-5)  # no progress: as slow as the rule can tell
    assert _judged([0.0, 0.0]) == [0.0, 0.0]


def test_the_next_measurement_waits_half_the_way():
    """From 1e-2 at half a sweep it takes 13 sweeps to 1e-6: after two measurements the next one comes after six."""
    residuals = _judged([1e-2 * 0.5**k for k in range(12)])
    assert len(set(residuals[1:7])) == 1
    assert residuals[7] < residuals[6]


@pytest.mark.parametrize("settings", [{"sweeps": 2**63}, {"tol": {}}, {"tol": 1j}, {"tol": 10**400}, {"tol": [1e-6]}])
def test_stop_refuses_what_no_run_can_use(settings):
    with pytest.raises(ValueError, match="must be"):
        rf.Stop(**settings)


# A slice of the claims of docs/inference.md on random models; `claims.py` tests 10,000 of each.


# What "a small multiple of the tolerance" is: of mu, and of log-partition values, to which every message contributes.
MARGINALS, VALUES = 4.0, 8.0
LIMITS = {"mu": MARGINALS, "value": VALUES, "below": VALUES, "above": 0.0, "fall": 0.0, "reference": 1.0}


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.__name__)
def test_the_claims_of_the_guide_hold_on_random_models(claim, kernels, monkeypatch):
    batches = 6
    if kernels == "torch":  # they are slow: one graph, and models that take thousands of sweeps are given up
        batches = 1
        monkeypatch.setattr(claims, "SWEEPS", 400)
    record = claims.examine(claim, batches * claims.BATCH, seed=0, kernels=kernels)
    assert record.settled > 0.5 * record.models
    for name, values in record.values.items():
        assert max(values) <= LIMITS[name], (name, max(values))
