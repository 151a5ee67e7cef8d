"""Threads share the gradient of one graph: on several threads as on one, and as the torch kernels have it."""

import threading
import time

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.kernels import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the compiled extension is not installed")


def graphs():
    generator = np.random.default_rng(0)
    edges = generator.integers(0, 300, (700, 2))
    triples = np.argsort(generator.random((200, 120)), 1)[:, :3]
    yield "binary", rf.grid(30, 41, 2)
    yield "five states", rf.grid(37, 29, 5)
    yield "mixed states", rf.FactorGraph([2, 4, 3] * 100, edges[edges[:, 0] != edges[:, 1]])
    yield "arity 3", rf.FactorGraph([2, 3] * 60, triples)
    yield "tied", rf.grid(35, 33, 3, connectivity=8, tied=True)
    yield "tied, binary", rf.grid(30, 40, 2, tied=True)


GRAPHS = dict(graphs())
PASSING = rf.MessagePassing(rf.TRW(0.6))
CASES = {
    "tape": (PASSING, rf.Unroll()),
    "checkpoints": (PASSING, rf.Unroll(checkpoint=3)),
    "fixed point": (PASSING, rf.FixedPoint(tol=1e-9)),
    "damping": (rf.MessagePassing(rf.TRW(0.6), damping=0.3), rf.Unroll()),
    "counting numbers": (None, rf.Unroll()),
    "all at once": (rf.MessagePassing(rf.TRW(0.6), rf.Parallel()), rf.Unroll()),
    "all at once, damping, checkpoints": (rf.MessagePassing(rf.TRW(0.6), rf.Parallel(), 0.3), rf.Unroll(checkpoint=2)),
    "mean field": (rf.MeanField(), rf.Unroll()),
    "mean field, fixed point": (rf.MeanField(), rf.FixedPoint(tol=1e-9)),
}


@pytest.fixture(autouse=True)
def share_everything(monkeypatch):
    """Share small graphs too, and leave the settings of the process as they were."""
    if native_available():
        from riskfield.kernels import native

        monkeypatch.setattr(native, "_WORTH_SHARING", 0)
        monkeypatch.setattr(native, "_batch_lanes", False)
    yield
    rf.set_num_threads(1)


def gradients(graph, algorithm, adjoint, threads=1, kernels="native", *, batch=(), sweeps=10, scale=1.0, dtype=None):
    """Gradients of theta and of the counting numbers."""
    rf.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    theta = scale * torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=generator)
    theta = theta.to(dtype or torch.float64).requires_grad_()
    counting = torch.linspace(0.5, 0.9, graph.num_factors, dtype=torch.float64).requires_grad_()
    if algorithm is None:
        algorithm = rf.MessagePassing(rf.TRW(counting))
    converges = isinstance(adjoint, rf.FixedPoint)
    stop = rf.Stop(1000, tol=1e-10) if converges else rf.Stop(sweeps, tol=None)
    mu = rf.infer(graph, theta, algorithm, stop=stop, kernels=kernels, adjoint=adjoint).mu
    weights = torch.randn(graph.mu_size, dtype=torch.float64, generator=generator).to(theta)
    return torch.autograd.grad((mu * weights).sum(), (theta, counting), materialize_grads=True)


def assert_same(found, expected, rtol):
    """Up to the share `rtol` of the largest number."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rtol * (1e-30 + theirs.abs().max().item()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", GRAPHS)
def test_threads_share_a_gradient(name, case):
    graph, scale = GRAPHS[name], 0.3 if "fixed point" in case else 1.0
    alone = gradients(graph, *CASES[case], scale=scale)
    if case in ("tape", "fixed point", "counting numbers"):  # the torch kernels take long
        assert_same(alone, gradients(graph, *CASES[case], kernels="torch", scale=scale), 1e-7)
    for threads in (2, 3):
        shared = gradients(graph, *CASES[case], threads, scale=scale)
        assert_same(shared, alone, 1e-12)
        assert all(map(torch.equal, shared, gradients(graph, *CASES[case], threads, scale=scale)))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    "options",
    [
        {"sweeps": 1},
        {"sweeps": 3, "scale": 300.0},
        {"batch": (2,)},
        {"dtype": torch.float32, "scale": 0.3},
    ],
    ids=["one sweep", "logarithms", "a batch of two", "float32"],
)
def test_threads_share_other_gradients(name, options):
    rtol = 1e-5 if "dtype" in options else 1e-12
    alone = gradients(GRAPHS[name], PASSING, rf.Unroll(), **options)
    for threads in (2, 3):
        assert_same(gradients(GRAPHS[name], PASSING, rf.Unroll(), threads, **options), alone, rtol)


@pytest.mark.parametrize("case", CASES)
def test_one_thread_takes_over_on_a_busy_machine(case):
    from riskfield.kernels import native

    for name in ("binary", "tied", "arity 3"):
        shared = gradients(GRAPHS[name], *CASES[case], 3, scale=0.3)
        try:
            native._native.assume_crowded(1000.0)  # seconds
            crowded = gradients(GRAPHS[name], *CASES[case], 3, scale=0.3)
        finally:
            native._native.assume_crowded(0.0)
        assert all(map(torch.equal, crowded, shared))


@pytest.mark.parametrize("name", GRAPHS)
def test_threads_share_second_derivatives(name):
    graph = GRAPHS[name]
    generator = torch.Generator().manual_seed(1)
    theta, v = torch.randn(2, graph.theta_size, dtype=torch.float64, generator=generator)

    def loss(t):
        return rf.infer(graph, t, PASSING, stop=rf.Stop(3, tol=None), adjoint=rf.Unroll()).mu.square().sum()

    products = []
    for threads in (1, 2, 3):
        rf.set_num_threads(threads)
        products.append(rf.adjoints.hessian_vector_product(loss, theta, v))
    for product in products[1:]:
        assert_same([product], products[:1], 1e-11)


@pytest.mark.parametrize("adjoint", [rf.Unroll(), rf.Unroll(checkpoint=3), rf.FixedPoint(tol=1e-9)], ids=str)
@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_threads_share_batch_lanes(tied, schedule, adjoint, monkeypatch):
    """Also where some of the models have converged and are left as they are."""
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_batch_lanes", True)
    graph = rf.grid(13, 11, 3, tied=tied)
    scales = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)[:, None]
    theta = scales * torch.randn(3, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 2, 3):
        rf.set_num_threads(threads)
        leaf = theta.clone().requires_grad_()
        solution = rf.infer(
            graph, leaf, rf.MessagePassing(rf.TRW(0.6), schedule), stop=rf.Stop(200, tol=1e-8), adjoint=adjoint
        )
        found.append((solution.mu.detach(), solution.sweeps, *torch.autograd.grad(solution.mu.square().sum(), leaf)))
    assert len(set(found[0][1].tolist())) > 1
    for mu, sweeps, gradient in found[1:]:
        assert torch.equal(mu, found[0][0])
        assert torch.equal(sweeps, found[0][1])
        assert_same([gradient], [found[0][2]], 1e-12)


def test_python_threads_do_not_wait_for_each_other():
    from riskfield.kernels.native import MessagePassingRun
    from riskfield.kernels.problem import MessagePassingProblem

    rf.set_num_threads(2)

    def start(graph):
        problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential(), 0.0)
        return MessagePassingRun(problem, graph.zeros()[None], None)

    long, short = start(rf.grid(100, 100, 4)), start(rf.grid(90, 90, 4))
    caller = threading.Thread(target=long.advance, args=(8000, -1.0))
    caller.start()
    time.sleep(0.05)
    short.advance(1, -1.0)
    assert caller.is_alive()
    caller.join()
