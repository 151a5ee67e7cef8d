"""The fused GPU kernels: on a GPU where there is one, and their text compiled for the processor anywhere else."""

import ctypes
import shutil
import subprocess
from functools import partial

import pytest
import torch

import riskfield as rf
from riskfield.kernels import MessagePassingProblem, fused
from riskfield.kernels.torch_reference import MessagePassingRun, _swept

# One thread after the other in place of all at once: what has no data race gives the same.
EMULATED = """
#include <cmath>
#define __global__
#define __device__
#define __launch_bounds__(threads, blocks)
#define __syncthreads()
#define NEG_INF (-INFINITY)
using std::exp, std::log, std::max;
struct Dim { int x; };
static Dim blockIdx, gridDim, threadIdx{0}, blockDim{1};
SOURCE
#define GRAPH                                                                                                  \\
  (int*)a[0], (int*)a[1], (int*)a[2], (int*)a[3], (int*)a[4], (int*)a[5], (int*)a[6], (REAL*)a[7], (REAL*)a[8], \\
      (long long*)a[9], *(int*)a[10], *(int*)a[11], (REAL*)a[12], (REAL*)a[13], (REAL*)a[14], (REAL*)a[15],     \\
      (REAL*)a[16], (REAL*)a[17]
extern "C" {
void forward(int blocks, void** a) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) sweeps_forward(GRAPH);
}
void backward(int blocks, void** a) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) sweeps_backward(GRAPH, (REAL*)a[18], (REAL*)a[19]);
}
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fused")
    found = {}
    for states in (2, 3):
        (folder / "fused.cpp").write_text(EMULATED.replace("SOURCE", fused.source(torch.float64, states)))
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "fused.cpp", "-o", f"fused{states}.so"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        found[states] = ctypes.CDLL(str(folder / f"fused{states}.so"))
    return found


@pytest.fixture
def emulated(libraries, monkeypatch):
    def compiled(dtype, states, device):
        def launch(kernel, blocks, threads, arguments):
            assert threads % 32 == 0
            numbers = [argument if torch.is_tensor(argument) else ctypes.c_int(argument) for argument in arguments]
            places = [n.data_ptr() if torch.is_tensor(n) else ctypes.addressof(n) for n in numbers]
            emulated = getattr(libraries[states], kernel.removeprefix("sweeps_"))
            emulated(blocks, (ctypes.c_void_p * len(places))(*places))

        return launch

    monkeypatch.setattr(fused, "_compiled", compiled)


def graphs():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 12, (20, 2), generator=generator)
    yield "grid", rf.grid(4, 5, 2), rf.TRW(0.5)
    yield "states", rf.grid(3, 4, 3), rf.Bethe()
    yield "tied", rf.grid(3, 4, 3, connectivity=8, tied=True), rf.TRW(0.7)
    yield "parts", rf.Union([rf.grid(3, 3, 3), rf.chain(1, 3), rf.grid(2, 5, 3), rf.chain(4, 3)]).graph, rf.TRW(0.5)
    yield "irregular", rf.from_edges(3, edges[edges[:, 0] != edges[:, 1]].numpy(), num_variables=13), rf.Bethe()


GRAPHS = {name: (graph, entropy) for name, graph, entropy in graphs()}
SCHEDULES = {
    "numbering": lambda graph: rf.Sequential(),
    "colours": lambda graph: rf.Sequential(rf.graph.colour_order(graph)),
}


def runs(name, schedule, impossible=False, scale=1.0):
    graph, entropy = GRAPHS[name]
    generator = torch.Generator().manual_seed(1)
    theta = scale * torch.randn(2, graph.theta_size, dtype=torch.float64, generator=generator)
    if impossible:
        theta[0, 1] = theta[1, 3] = theta[0, -1] = -torch.inf
    theta.requires_grad_()
    problem = MessagePassingProblem(graph, entropy.counting(graph), SCHEDULES[schedule](graph), 0.0, False)
    messages = torch.randn(2, graph.message_size, dtype=torch.float64, generator=generator)
    run = MessagePassingRun(problem, theta, messages)
    return problem, run


@pytest.mark.parametrize(("impossible", "scale"), [(False, 1.0), (True, 1.0), (False, 500.0)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_sweeps_and_gradients(name, schedule, impossible, scale, emulated):
    problem, run = runs(name, schedule, impossible, scale)
    state = run.theta, run.log_messages.clone(), run.log_beliefs.clone()
    found = fused.run_sweeps(problem, *state, 3, partial(_swept, problem, 3))
    other = MessagePassingRun(problem, run.theta, None)
    other.log_messages, other.log_beliefs = found[:2]
    actual = other.marginals()
    for sweep in range(3):
        if sweep == 2:
            torch.testing.assert_close(found[2][0].exp(), run.log_beliefs.detach().exp(), rtol=1e-10, atol=1e-12)
        run.sweep()
    expected = run.marginals()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad(mu, run.theta, grad, retain_graph=True)[0] for mu in (actual, expected)]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_rounding_does_not_grow(emulated):
    graph = rf.grid(6, 6, 2)
    theta = torch.randn(1, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential(), 0.0, False)
    leaf = theta.clone().requires_grad_()
    run = MessagePassingRun(problem, leaf, None)
    state = leaf, run.log_messages, run.log_beliefs
    _, beliefs, _ = fused.run_sweeps(problem, *state, 60, partial(_swept, problem, 60))
    (actual,) = torch.autograd.grad(beliefs.exp()[0, ::2].sum(), leaf)
    stop = rf.Stop(60, tol=None)
    other = theta.clone().requires_grad_()
    mu = rf.infer(graph, other, stop=stop, adjoint=rf.Unroll(), kernels="torch").mu
    (expected,) = torch.autograd.grad(mu[0, : graph.node_size : 2].sum(), other)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["grid", "tied"])
def test_second_derivatives(name, emulated):
    problem, run = runs(name, "numbering")
    start = run.log_messages, run.log_beliefs
    found = fused.run_sweeps(problem, run.theta, *start, 3, partial(_swept, problem, 3))[:2]
    expected = _swept(problem, 3, run.theta, *start)
    products = []
    for messages, beliefs in (found, expected):
        loss = (messages.exp() ** 2).sum() + beliefs.exp()[:, 0].sum()
        (gradient,) = torch.autograd.grad(loss, run.theta, create_graph=True)
        products += torch.autograd.grad((gradient**2).sum(), run.theta, retain_graph=True)
    assert products[0].abs().max() > 1e-3
    torch.testing.assert_close(*products, rtol=1e-9, atol=1e-11)


def test_models_for_the_torch_kernels():
    theta = torch.zeros(1, 1)
    for graph, algorithm in (
        (rf.grid(2, 2, 2), rf.MessagePassing(schedule=rf.Parallel())),
        (rf.grid(2, 2, 2), rf.MessagePassing(damping=0.1)),
        (rf.FactorGraph([2, 3], [[0, 1]]), rf.MessagePassing()),
        (rf.FactorGraph([2, 2, 2], [[0, 1, 2]]), rf.MessagePassing()),
    ):
        counting = algorithm.entropy.counting(graph)
        problem = MessagePassingProblem(graph, counting, algorithm.schedule, algorithm.damping, False)
        assert not fused.available(problem, theta)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sweeps", [1, 7])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_gpu_gives_the_same(name, sweeps, dtype):
    graph, entropy = GRAPHS[name]
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(3, graph.theta_size, dtype=torch.float64, generator=generator)
    grad = torch.randn(3, graph.mu_size, dtype=torch.float64, generator=generator)
    results = []
    for place in (theta, theta.to("cuda", dtype)):
        leaf = place.clone().requires_grad_()
        stop = rf.Stop(sweeps, tol=None)
        mu = rf.infer(graph, leaf, rf.MessagePassing(entropy), stop=stop, adjoint=rf.Unroll()).mu
        results.append([mu, *torch.autograd.grad(mu, leaf, grad.to(mu))])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu.to(cpu), cpu, rtol=tolerance, atol=tolerance)


@pytest.fixture
def as_on_a_gpu(emulated, monkeypatch):
    """Runs of pairwise models on the processor go through the fused sweeps, as on a GPU."""
    launches = []
    emulate = fused._compiled

    def compiled(*key):
        def launch(kernel, blocks, threads, arguments):
            launches.append((kernel, blocks))
            emulate(*key)(kernel, blocks, threads, arguments)

        return launch

    def available(problem, theta):
        return not isinstance(problem.schedule, rf.Parallel) and problem.damping == 0

    monkeypatch.setattr(fused, "_compiled", compiled)
    monkeypatch.setattr(fused, "available", available)
    return launches


def of_unequal_strength(graph):
    theta = torch.randn(3, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return theta * torch.tensor([[0.1], [1.0], [2.0]], dtype=torch.float64)


@pytest.mark.parametrize("name", GRAPHS)
def test_runs_to_a_tolerance(name, as_on_a_gpu):
    graph, _ = GRAPHS[name]
    theta, algorithm, stop = of_unequal_strength(graph), rf.MessagePassing(rf.TRW(0.5)), rf.Stop(1000, 1e-9)
    found = rf.infer(graph, theta, algorithm, stop=stop, kernels="torch")
    assert as_on_a_gpu
    expected = rf.infer(graph, theta, algorithm, stop=rf.Stop(1000, 1e-13), kernels="native")
    torch.testing.assert_close(found.mu, expected.mu, rtol=0, atol=1e-7)
    assert found.converged.all()
    assert (found.residual <= 1e-9).all()
    # What has settled is left alone.
    assert found.sweeps.min() < found.sweeps.max()
    assert len({blocks for _, blocks in as_on_a_gpu}) > 1


def test_a_tolerance_that_is_not_reached(as_on_a_gpu):
    graph, _ = GRAPHS["grid"]
    with pytest.warns(rf.errors.ConvergenceWarning, match="after 4 sweeps for 2 of 3"):
        found = rf.infer(graph, of_unequal_strength(graph), stop=rf.Stop(4, 1e-6), kernels="torch")
    assert found.converged.tolist() == [True, False, False]
    assert found.sweeps[1:].tolist() == [4, 4]


def test_messages_that_still_move(as_on_a_gpu):
    graph = rf.from_edges(2, [[i, (i + 1) % 8] for i in range(8)], num_variables=8)
    theta = (
        2000 * torch.randn(8, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(22))[7:]
    )
    algorithm = rf.MessagePassing(rf.TRW(0.9), schedule=rf.Sequential(rf.graph.colour_order(graph)))
    found, expected = (
        rf.infer(graph, theta, algorithm, stop=rf.Stop(tol=1e-6), kernels=kernels) for kernels in ("torch", "native")
    )
    assert as_on_a_gpu
    assert found.sweeps > 1  # marginals of 0 and 1 do not change in the first sweep, messages do
    torch.testing.assert_close(found.mu, expected.mu, rtol=0, atol=1e-9)


def test_the_residual_is_the_largest_change_of_an_update(as_on_a_gpu):
    graph, _ = GRAPHS["grid"]
    theta = of_unequal_strength(graph)
    problem = MessagePassingProblem(graph, rf.TRW(0.5).counting(graph), rf.Sequential(), 0.0, False)
    run, reference = (MessagePassingRun(problem, theta, None) for _ in range(2))
    for _ in range(4):
        residual, _ = run.advance(1, 0.0)
        before = residual.clone()
        torch.testing.assert_close(residual, reference.sweep().cpu(), rtol=1e-9, atol=1e-15)
    run.advance(2, 0.0)
    assert (residual == before).all()  # what was handed out stays as it is


def test_impossible_evidence(as_on_a_gpu):
    graph = rf.grid(3, 3, 2)
    theta = torch.zeros(3, graph.theta_size, dtype=torch.float64)
    graph.factor_views(theta)[0][1, 0] = -torch.inf
    run = MessagePassingRun(
        MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential(), 0.0, False), theta, None
    )
    residual, _ = run.advance(20, 1e-6)
    assert torch.isnan(residual).tolist() == [False, True, False]
    assert (residual[[0, 2]] <= 1e-6).all()
    with pytest.raises(rf.errors.ImpossibleEvidenceError, match="batch item 1"):
        rf.infer(graph, theta, stop=rf.Stop(tol=1e-6), kernels="torch")
    assert as_on_a_gpu


def test_messages_in_any_order_of_memory(as_on_a_gpu):
    graph, _ = GRAPHS["grid"]
    theta = of_unequal_strength(graph)
    messages = torch.randn(graph.message_size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).T
    for tol in (None, 1e-10):
        stop = rf.Stop(2, tol=None) if tol is None else rf.Stop(tol=tol)
        found, expected = (
            rf.infer(graph, theta, stop=stop, messages=start, kernels="torch").mu
            for start in (messages, messages.contiguous())
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_empty_batch(as_on_a_gpu):
    graph, _ = GRAPHS["grid"]
    for stop, adjoint in ((rf.Stop(3, tol=None), rf.Unroll()), (rf.Stop(tol=1e-6), rf.FixedPoint())):
        leaf = torch.zeros(0, graph.theta_size, dtype=torch.float64, requires_grad=True)
        rf.infer(graph, leaf, stop=stop, adjoint=adjoint, kernels="torch").mu.sum().backward()
        assert leaf.grad.shape == leaf.shape
    assert not as_on_a_gpu  # a launch without blocks is an error


@pytest.mark.parametrize(
    "adjoint", [rf.FixedPoint(), rf.Perturb(), rf.FixedPoint(solver=rf.adjoints.Iterate(fallback=None))], ids=repr
)
@pytest.mark.parametrize("name", ["grid", "tied", "parts"])
def test_gradients_at_convergence(name, adjoint, as_on_a_gpu):
    graph, _ = GRAPHS[name]
    theta = of_unequal_strength(graph)
    gradients = []
    for kernels in ("torch", None):
        leaf = theta.clone().requires_grad_()
        as_on_a_gpu.clear()
        algorithm, stop = rf.MessagePassing(rf.TRW(0.5)), rf.Stop(2000, 1e-12)
        solution = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint, kernels=kernels)
        (solution.mu**2).sum().backward()
        gradients.append(leaf.grad)
        kinds = {kernel for kernel, _ in as_on_a_gpu}
        if kernels == "torch":
            assert ("sweeps_backward" in kinds) == isinstance(adjoint, rf.FixedPoint)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("adjoint", [rf.FixedPoint(1e-9), rf.Perturb()], ids=repr)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_gpu_converges_to_the_same(name, adjoint):
    graph, _ = GRAPHS[name]
    results = []
    for device in ("cpu", "cuda"):
        leaf = of_unequal_strength(graph).to(device).requires_grad_()
        algorithm, stop = rf.MessagePassing(rf.TRW(0.5)), rf.Stop(2000, 1e-12)
        mu = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint).mu
        results.append([mu, *torch.autograd.grad((mu**2).sum(), leaf)])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-5, atol=1e-6)
