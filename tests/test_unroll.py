"""What the native tape does beyond the conformance suite: checkpoints, dual numbers, counting numbers."""

import gc
import math
import os
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import riskfield as rf
from cases import rows
from gradient_cases import MIXED, TIED
from riskfield.kernels import EVERY_SWEEP, native, sweeps_that_fit
from riskfield.threads import num_threads
from strategies import potentials

# torch compiles parts of its forward derivatives with a tool it has itself deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

GRAPHS = [MIXED, TIED, rf.grid(4, 5, 2), rf.grid(3, 4, 3), rf.grid(3, 3, 2, tied=True)]
iterative = lambda case: case.marginals and case.iterative and case.kernels  # noqa: E731


def gradient(graph, algorithm, stop, adjoint, kernels=None, batch=(2,), seed=0):
    """Of a random quadratic in mu and of the log-partition value."""
    theta = potentials(graph, seed, "mild", *batch).requires_grad_()
    weights = torch.randn(graph.mu_size, dtype=theta.dtype, generator=torch.manual_seed(seed))
    solution = rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint, kernels=kernels)
    ((weights * solution.mu).sum() ** 2 + solution.log_partition.sum()).backward()
    return theta.grad


@pytest.mark.parametrize("every", [1, 3, True])
@rows(iterative)
def test_checkpoints_change_nothing(case, every):
    for graph in (MIXED, rf.grid(4, 5, 2)):
        algorithm = case.make(graph, None)
        for stop in (rf.Stop(7, tol=None), rf.Stop(500, tol=1e-6)):
            whole = gradient(graph, algorithm, stop, rf.Unroll())
            torch.testing.assert_close(
                gradient(graph, algorithm, stop, rf.Unroll(checkpoint=every)), whole, rtol=1e-12, atol=1e-13
            )


def test_checkpoints_leave_the_run_as_it_was():
    graph, algorithm = rf.grid(4, 5, 2), rf.MessagePassing(rf.TRW(0.5))
    theta = potentials(graph, 0).requires_grad_()
    solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(5, tol=None), adjoint=rf.Unroll(checkpoint=2))
    first, second = (torch.autograd.grad(solution.mu[0], theta, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.fixture
def started(monkeypatch):
    """The native runs that were started and are still alive, and what each of all runs recorded."""
    alive, records, original = weakref.WeakSet(), [], native.start

    def start(task):
        run = original(task)
        alive.add(run)
        records.append(task.record)
        return run

    monkeypatch.setattr(native, "start", start)
    return alive, records


@pytest.mark.parametrize(
    "stop", [rf.Stop(7, tol=None), rf.Stop(500, tol=1e-6), rf.Stop(9, tol=1e-6)], ids=["truncated", "tol", "too few"]
)
@rows(iterative)
def test_a_tape_too_large_for_its_limit_becomes_checkpoints(case, stop, started):
    _, records = started
    graph = rf.grid(4, 5, 3)
    algorithm = case.make(graph, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        whole = gradient(graph, algorithm, stop, rf.Unroll(checkpoint=False))
        assert records == [EVERY_SWEEP]
        records.clear()
        torch.testing.assert_close(gradient(graph, algorithm, stop, rf.Unroll()), whole, rtol=0, atol=0)
        assert records == [EVERY_SWEEP]
        records.clear()
        little = gradient(graph, algorithm, stop, rf.Unroll(max_bytes=1))
        assert records == [math.isqrt(stop.sweeps)]
    torch.testing.assert_close(little, whole, rtol=1e-12, atol=1e-13)


def test_a_run_to_a_tolerance_has_a_whole_tape_if_it_converges_soon(started):
    _, records = started
    graph, algorithm, stop = rf.grid(4, 5, 3), rf.MessagePassing(rf.TRW(0.5)), rf.Stop(1000, tol=1e-6)
    per_sweep = 8 * 2 * graph.message_size  # two items in float64
    for sweeps, expected in ((100, [EVERY_SWEEP]), (2, [EVERY_SWEEP, 31])):
        records.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that the first attempt has not converged is no news
            gradient(graph, algorithm, stop, rf.Unroll(max_bytes=sweeps * per_sweep))
        assert records == expected


@pytest.mark.parametrize("states", [2, 3])
def test_what_the_backward_pass_writes_down_counts_as_tape(states):
    graph = rf.grid(4, 5, states)
    problem = rf.MessagePassing(rf.TRW(0.5)).problem(graph)
    theta = graph.zeros(2)
    tape = 8 * 2 * (graph.message_size if states > 2 else graph.message_size // 2)
    deferred = tape if states > 2 else 0  # with as many numbers as the messages, for up to 32 sweeps
    for sweeps in (1, 32, 33, 100):
        enough = sweeps * tape + min(sweeps, 32) * deferred
        assert sweeps_that_fit(problem, theta, enough) == sweeps
        assert sweeps_that_fit(problem, theta, enough - 1) == sweeps - 1


def test_of_a_large_batch_only_what_threads_work_on_is_written_down():
    graph = rf.grid(4, 5, 3)
    problem = rf.MessagePassing(rf.TRW(0.5)).problem(graph)
    per_item, sweeps = 8 * graph.message_size, 40
    with num_threads(2):  # each with at most eight doubles in a vector
        enough = sweeps * 1000 * per_item + 32 * 2 * 8 * per_item
        assert sweeps_that_fit(problem, graph.zeros(1000), enough) == sweeps
        assert sweeps_that_fit(problem, graph.zeros(1000), enough - 1) == sweeps - 1


def test_gradients_of_counting_numbers_keep_the_whole_tape(started):
    _, records = started
    graph = rf.grid(3, 3, 2)
    rho = torch.full((graph.num_factors,), 0.6, dtype=torch.float64, requires_grad=True)
    adjoint, stop = rf.Unroll(max_bytes=1), rf.Stop(4, tol=None)
    rf.infer(graph, potentials(graph, 0), rf.MessagePassing(rf.TRW(rho)), stop=stop, adjoint=adjoint).mu[0].backward()
    assert records == [EVERY_SWEEP]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_must_be_positive(limit):
    with pytest.raises(ValueError, match="`max_bytes` must be positive"):
        rf.Unroll(max_bytes=limit)


ENDS = [(rf.Unroll(), rf.Stop(5, tol=None)), (rf.Unroll(checkpoint=2), rf.Stop(5, tol=None)), (rf.FixedPoint(), None)]


@pytest.mark.parametrize(("adjoint", "stop"), ENDS, ids=["Unroll", "checkpoints", "FixedPoint"])
@rows(iterative)
def test_tapes_are_freed_by_the_backward_pass(case, adjoint, stop, started):
    alive, _ = started
    graph = rf.grid(3, 4, 3)
    theta = potentials(graph, 0, "mild").requires_grad_()
    solution = rf.infer(graph, theta, case.make(graph, None), stop=stop, adjoint=adjoint)
    loss, other = (solution.mu**2).sum(), (solution.mu**3).sum()
    assert len(alive) == 1
    first = torch.autograd.grad(loss, theta, retain_graph=True)
    assert len(alive) == 1  # retained
    again = torch.autograd.grad(loss, theta)
    assert torch.equal(first[0], again[0])
    gc.collect()
    assert not alive  # although loss and solution live
    for dead in (loss, other):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dead.backward()
    assert solution.messages is not None


def test_a_graph_of_the_gradient_keeps_its_tape(started):
    alive, _ = started
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    loss = (rf.infer(graph, theta, stop=rf.Stop(4, tol=None)).mu ** 2).sum()
    (first,) = torch.autograd.grad(loss, theta, create_graph=True)
    assert len(alive) == 1
    (second,) = torch.autograd.grad(first.sum(), theta, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, theta)[0], first)
    assert not alive
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("wrong", [-1, 2.5, "2"])
def test_what_is_no_number_of_sweeps_is_refused(wrong):
    with pytest.raises(ValueError, match="`checkpoint` must be a positive number of sweeps"):
        rf.Unroll(checkpoint=wrong)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gradients_of_counting_numbers_equal_those_of_autograd(schedule, damping, scale):
    for graph in GRAPHS:
        theta = scale * potentials(graph, 1, "mild", 2)
        rho = torch.rand(graph.num_factors, dtype=torch.float64, generator=torch.manual_seed(2)) * 0.4 + 0.5
        weights = torch.randn(graph.mu_size, dtype=torch.float64, generator=torch.manual_seed(3))
        found = []
        for kernels in (None, "torch"):
            leaf, numbers = theta.clone().requires_grad_(), rho.clone().requires_grad_()
            algorithm = rf.MessagePassing(rf.TRW(numbers), schedule=schedule, damping=damping)
            solution = rf.infer(graph, leaf, algorithm, stop=rf.Stop(4, tol=None), adjoint=rf.Unroll(), kernels=kernels)
            ((weights * solution.mu).sum() + solution.log_partition.sum()).backward()
            found.append((leaf.grad, numbers.grad))
        for ours, reference in zip(*found, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-11)


def test_counting_numbers_are_differentiated_natively(monkeypatch):
    calls = []
    original = native.MessagePassingRun.backward_counting
    monkeypatch.setattr(
        native.MessagePassingRun, "backward_counting", lambda run, grad: calls.append(1) or original(run, grad)
    )
    graph = rf.grid(3, 3, 2)
    theta, rho = potentials(graph, 0), torch.full((graph.num_factors,), 0.6, dtype=torch.float64)

    def loss(numbers):
        algorithm = rf.MessagePassing(rf.TRW(numbers))
        return rf.infer(graph, theta, algorithm, stop=rf.Stop(3, tol=None), adjoint=rf.Unroll()).mu[:4]

    assert torch.autograd.gradcheck(loss, rho.requires_grad_(), fast_mode=True)
    assert calls


@rows(iterative)
def test_second_derivatives_and_slopes_equal_those_of_autograd(case, monkeypatch):
    started = []
    original = native._RUNS[torch.complex128]
    monkeypatch.setitem(native._RUNS, torch.complex128, lambda *a: started.append(1) or original(*a))
    for graph in GRAPHS:
        algorithm = case.make(graph, None)
        theta, v = (potentials(graph, seed, "mild", 2) for seed in (4, 5))
        weights = torch.randn(graph.mu_size, dtype=torch.float64, generator=torch.manual_seed(6))
        found = []
        for kernels in (None, "torch"):

            def mu(t, kernels=kernels, graph=graph, algorithm=algorithm):
                stop = rf.Stop(4, tol=None)
                return rf.infer(graph, t, algorithm, stop=stop, adjoint=rf.Unroll(), kernels=kernels).mu

            product = rf.adjoints.hessian_vector_product(lambda t, mu=mu, w=weights: (w * mu(t) ** 2).sum(), theta, v)
            with torch.autograd.forward_ad.dual_level():
                slope = torch.autograd.forward_ad.unpack_dual(mu(torch.autograd.forward_ad.make_dual(theta, v))).tangent
            found.append((product, slope))
        for ours, reference in zip(*found, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-11)
    assert started


@pytest.mark.parametrize("rho", [torch.tensor(0.6, dtype=torch.float64), torch.tensor(0.6)])
def test_one_rho_for_all_factors_to_second_order(rho):
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0).requires_grad_()
    rho = rho.clone().requires_grad_()

    def gradient(kernels, create_graph):
        algorithm = rf.MessagePassing(rf.TRW(rho))
        solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(50, 1e-2), adjoint=rf.Unroll(), kernels=kernels)
        return torch.autograd.grad((solution.mu**3).sum(), (theta, rho), create_graph=create_graph)

    plain, twice = gradient(None, False), gradient(None, True)
    for first, second in zip(plain, twice, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)
    assert twice[1].abs() > 1e-3
    assert torch.isfinite(torch.autograd.grad(twice[1], rho)[0])


def test_third_derivatives():
    graph = rf.chain(3, 2)
    theta = potentials(graph, 0).requires_grad_()

    def loss(t):
        return (rf.infer(graph, t, stop=rf.Stop(2, tol=None), adjoint=rf.Unroll()).mu ** 3).sum()

    def gradient(t):
        return torch.autograd.grad(loss(t), t, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(lambda t: (gradient(t) ** 2).sum(), theta, fast_mode=True)


def test_potentials_made_from_counting_numbers():
    graph = rf.grid(3, 3, 2)
    first = potentials(graph, 0)
    rho = torch.full((graph.num_factors,), 0.7, dtype=torch.float64, requires_grad=True)
    nodes, tables = first[: graph.node_size], first[graph.node_size :].reshape(-1, 4)

    def gradient(create_graph):
        theta = torch.cat([nodes, (tables * rho[:, None]).flatten()])
        stop = rf.Stop(2, tol=None)
        mu = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(rho)), stop=stop, adjoint=rf.Unroll()).mu
        return torch.autograd.grad((mu**2).sum(), rho, create_graph=create_graph)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


def test_mean_field_skips_impossible_joint_states_that_evidence_avoids():
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0), (2, 1, 3), (3,)])
    theta = potentials(graph, 0)
    graph.node(theta, 0)[1] = -torch.inf
    graph.factor_views(theta)[0][0, 0, 1] = -torch.inf
    found = []
    for kernels in (None, "torch"):
        leaf = theta.clone().requires_grad_()
        solution = rf.infer(
            graph,
            leaf,
            rf.MeanField(),
            stop=rf.Stop(3, tol=None),
            evidence={0: 0, 1: 0, 2: 0},
            adjoint=rf.Unroll(),
            kernels=kernels,
        )
        (solution.mu**2).sum().backward()
        found.append(leaf.grad)
    assert torch.isfinite(found[0]).all()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_several_threads_may_go_back_through_one_run():
    graph = rf.grid(20, 20, 2)
    theta = potentials(graph, 0).requires_grad_()
    for adjoint in (rf.Unroll(), rf.Unroll(checkpoint=2)):
        solution = rf.infer(graph, theta, rf.MessagePassing(), stop=rf.Stop(6, tol=None), adjoint=adjoint)
        losses = [solution.mu[k] for k in range(40)]
        expected = [torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda loss: torch.autograd.grad(loss, theta, retain_graph=True)[0], losses))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_graph_without_variables():
    graph = rf.FactorGraph([], [])
    for adjoint in (rf.Unroll(), rf.FixedPoint()):
        theta = graph.zeros().requires_grad_()
        rf.infer(graph, theta, adjoint=adjoint).mu.sum().backward()
        assert theta.grad.shape == (0,)


def test_steep_losses_of_certain_single_precision_marginals():
    graph = rf.FactorGraph([2], [])
    theta = torch.tensor([75.0, 0.0], requires_grad=True)
    (1e8 * rf.infer(graph, theta, adjoint=rf.Unroll()).mu[0]).backward()
    assert torch.isfinite(theta.grad).all()


def test_slopes_say_when_inference_did_not_converge():
    graph = rf.grid(3, 3, 2)
    theta = potentials(graph, 0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(theta, torch.ones_like(theta))
        with pytest.warns(rf.errors.ConvergenceWarning):
            rf.infer(graph, dual, stop=rf.Stop(1, tol=1e-9), adjoint=rf.Unroll())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_the_tape():
    code = """
import pathlib, re, torch, riskfield as rf
rf.set_num_threads(1)
graph = rf.grid(100, 150, 2)
theta = torch.zeros(graph.theta_size, dtype=torch.float64).uniform_(-1, 1).requires_grad_()
def gradient(sweeps, adjoint):
    algorithm, stop = rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps, None)
    rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint).mu.sum().backward()
# Not getrusage: what it says of a process includes the one it was forked from.
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
gradient(1, rf.Unroll())
start = peak()
gradient(400, rf.Unroll(checkpoint=True))
middle = peak()
gradient(400, rf.Unroll())
sweep = 2 * graph.num_factors * 8
print((middle - start) / sweep, (peak() - start) / sweep)
"""
    # Without this, torch's tensors leave gaps in the heap, and how many of them is a matter of chance.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    with_checkpoints, whole = map(float, done.stdout.split())
    assert 0.9 * 400 < whole < 1.3 * 400
    assert 20 < with_checkpoints < 2 * 20 + 12  # a constant: the gradients, and pages of memory


# -- derivatives are of the sweeps that ran ---------------------------------------------------------------------------


def test_dual_numbers_repeat_the_sweeps_that_ran(monkeypatch):
    """Slopes and second derivatives do not look at the tolerance again: rounding might stop them elsewhere."""
    graph, algorithm = rf.grid(4, 4, 2), rf.MessagePassing(rf.TRW(0.5))
    theta = torch.stack([scale * potentials(graph, 0) for scale in (0.1, 1.0, 0.1, 3.0)])
    v = potentials(graph, 1, "mild", 4)
    plain = rf.infer(graph, theta, algorithm)
    assert len(plain.sweeps.unique()) == 3
    ran = []
    advance = native.MessagePassingRun.advance

    def watched(run, sweeps, tol):
        found = advance(run, sweeps, tol)
        if run.marginals().is_complex():
            ran.append((sweeps, tol, len(found[0])))
        return found

    monkeypatch.setattr(native.MessagePassingRun, "advance", watched)
    expected = [(count, -1.0, int((plain.sweeps == count).sum())) for count in plain.sweeps.unique().tolist()]

    def loss(t):
        return rf.infer(graph, t, algorithm).mu.square().sum()

    rf.adjoints.hessian_vector_product(loss, theta, v)
    assert ran == expected
    ran.clear()
    with torch.autograd.forward_ad.dual_level():
        dual = rf.infer(graph, torch.autograd.forward_ad.make_dual(theta, v), algorithm)
        slope = torch.autograd.forward_ad.unpack_dual(dual.mu).tangent
    assert ran == expected
    assert torch.equal(dual.sweeps, plain.sweeps)
    for k in range(4):
        stop = rf.Stop(int(plain.sweeps[k]), tol=None)
        ahead, behind = (rf.infer(graph, theta[k] + h * v[k], algorithm, stop=stop).mu for h in (1e-5, -1e-5))
        torch.testing.assert_close(slope[k], (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)
