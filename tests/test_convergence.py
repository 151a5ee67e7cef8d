"""The loop: tolerances, sweeps, damping, warnings."""

import warnings

import pytest
import torch

import riskfield as rf
from strategies import potentials


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
    assert float(one.residual) > 0.1
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(5000, tol=1e-8), messages=stale, kernels=kernels)
    torch.testing.assert_close(solution.mu, rf.infer(graph, theta, rf.Exact()).mu, rtol=0, atol=1e-6)


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


def test_running_out_of_sweeps_is_reported(kernels, model):
    with pytest.warns(rf.ConvergenceWarning, match=r"still change by .* after 2 sweeps; the tolerance is 1e-09"):
        solution = rf.infer(*model, TREE_REWEIGHTED, stop=rf.Stop(2, 1e-9), kernels=kernels)
    assert not solution.converged
    assert solution.sweeps == 2
    assert float(solution.residual) > 1e-9


def test_the_warning_counts_batch_items(kernels, model):
    graph, theta = model
    batch = torch.stack([theta, 1e-12 * theta, theta])
    with pytest.warns(rf.ConvergenceWarning, match="for 2 of 3 batch items"):
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
