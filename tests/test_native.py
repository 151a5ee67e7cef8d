"""What only the native engine has: threads, instruction sets, plans kept with the graph."""

import contextlib
import gc
import weakref
from dataclasses import replace

import pytest
import torch

import riskfield as rf
from riskfield.inference.request import Request
from riskfield.kernels import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the compiled extension is not installed")

ALGORITHMS = [
    rf.MessagePassing(rf.TRW(0.5)),
    rf.MessagePassing(rf.TRW(0.7), damping=0.2),
    rf.MessagePassing(schedule=rf.Parallel()),
    rf.MaxProduct(),
    rf.MeanField(),
]


def graphs():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 60, (150, 2), generator=generator)
    triples = torch.rand(40, 60, generator=generator).argsort(1)[:, :3]
    yield "grid", rf.grid(9, 13, 2)
    yield "tied", rf.grid(7, 11, 3, connectivity=8, tied=True)
    yield "irregular", rf.from_edges(4, edges[edges[:, 0] != edges[:, 1]].numpy(), num_variables=60)
    yield "triples", rf.FactorGraph([2, 3] * 30, triples.numpy())


GRAPHS = dict(graphs())


def instruction_sets():
    """Those that this processor has."""
    if not native_available():
        return []
    from riskfield.kernels import native

    found = []
    for isa in ("baseline", "avx2", "avx512"):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ValueError):
            patch.setattr(native, "_isa", isa)
            found.append(native.engine_name())
    return found


def marginals(graph, algorithm, batch, dtype=torch.float64, scale=1.0):
    theta = scale * torch.randn(*batch, graph.theta_size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return rf.infer(graph, theta, algorithm, stop=rf.Stop(sweeps=5, tol=None), kernels="native").mu


@pytest.mark.parametrize("batch", [(), (5,)])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("name", GRAPHS)
def test_threads_do_not_change_the_answer(name, algorithm, batch, monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_WORTH_SHARING", 0)
    rf.set_num_threads(1)
    alone = marginals(GRAPHS[name], algorithm, batch)
    try:
        rf.set_num_threads(3)
        assert torch.equal(marginals(GRAPHS[name], algorithm, batch), alone)
    finally:
        rf.set_num_threads(1)


# Strong random couplings magnify rounding, so only soft models are compared in single precision.
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float64, 1.0), (torch.float64, 300.0), (torch.float32, 1.0)], ids=str
)
def test_every_instruction_set_gives_the_same_answer(isa, dtype, scale, monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", isa)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for graph in GRAPHS.values():
        for algorithm in ALGORITHMS[:1] + ALGORITHMS[4:]:
            theta = scale * torch.randn(graph.theta_size, dtype=dtype, generator=torch.Generator().manual_seed(1))
            stop = rf.Stop(sweeps=2, tol=None)
            mu = rf.infer(graph, theta, algorithm, stop=stop, kernels="native").mu
            reference = rf.infer(graph, theta.double(), algorithm, stop=stop, kernels="torch").mu
            torch.testing.assert_close(mu.double(), reference, rtol=0, atol=tolerance)


def test_plans_live_as_long_as_their_graph():
    from riskfield.kernels import native

    graph = rf.grid(3, 3, 2)
    rf.infer(graph, graph.zeros(), kernels="native")
    assert graph in native._plans
    reference = weakref.ref(graph)
    del graph
    gc.collect()
    assert reference() is None


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", "sse9")
    with pytest.raises(ValueError, match="no engine named 'sse9'"):
        native.engine_name()


@pytest.mark.parametrize("states", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_hubs_do_not_underflow(states, dtype):
    """Many factors at one variable, each of little weight: products of their messages must stay in range."""
    leaves = 700
    graph = rf.from_edges(states, [(0, k) for k in range(1, leaves + 1)], num_variables=leaves + 1)
    theta = 0.01 * torch.randn(graph.theta_size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    stop = rf.Stop(sweeps=3, tol=None)
    for algorithm in (rf.MessagePassing(), rf.MessagePassing(rf.CountingNumbers(5.0, 1.0))):
        mu = rf.infer(graph, theta, algorithm, stop=stop, kernels="native").mu
        reference = rf.infer(graph, theta.double(), algorithm, stop=stop, kernels="torch").mu
        torch.testing.assert_close(mu.double(), reference, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-4)


# Many sweeps of large graphs are slow on the torch kernels.
RECORDED = [*((name, 1) for name in GRAPHS), ("grid", 40)]


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if not isinstance(a, rf.MaxProduct)], ids=repr)
@pytest.mark.parametrize(("name", "sweeps"), RECORDED)
def test_the_recorded_gradient_equals_autograd(name, algorithm, scale, sweeps):
    graph, generator = GRAPHS[name], torch.Generator().manual_seed(2)
    theta = scale * torch.randn(2, graph.theta_size, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, graph.mu_size, dtype=torch.float64, generator=generator)
    theta.requires_grad_()
    stop = rf.Stop(sweeps=sweeps, tol=None)

    def gradient(kernels):
        mu = rf.infer(graph, theta, algorithm, stop=stop, adjoint=rf.Unroll(), kernels=kernels).mu
        return torch.autograd.grad((weight * mu).sum(), theta)[0]

    native, reference = gradient("native"), gradient("torch")
    torch.testing.assert_close(native, reference, rtol=0, atol=1e-10 * float(reference.abs().max().clamp(min=1)))


def test_going_back_twice_gives_the_same_gradient():
    graph = GRAPHS["grid"]
    theta = graph.zeros().requires_grad_()
    mu = rf.infer(graph, theta, stop=rf.Stop(sweeps=3, tol=None), adjoint=rf.Unroll()).mu
    loss = mu.square().sum()
    (first,) = torch.autograd.grad(loss, theta, retain_graph=True)
    (second,) = torch.autograd.grad(loss, theta)
    assert torch.equal(first, second)


def test_changing_rho_on_a_tied_graph_keeps_one_plan():
    from riskfield.kernels import native

    graph = rf.grid(5, 5, 2, tied=True)
    for step in range(5):
        rf.infer(graph, graph.zeros(), rf.MessagePassing(rf.TRW(0.5 + 0.01 * step)), kernels="native")
    assert len(native._plans[graph]) == 1


def test_a_lone_variable_with_more_states_than_any_table_has_entries():
    graph = rf.FactorGraph([2, 2, 2, 2, 20], [(0, 1), (1, 2), (2, 3)])
    theta = torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.manual_seed(0))
    algorithm, stop = rf.MessagePassing(damping=0.5), rf.Stop(3, tol=None)
    native, reference = (rf.infer(graph, theta, algorithm, stop=stop, kernels=k).mu for k in ("native", "torch"))
    torch.testing.assert_close(native, reference)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if not isinstance(a, rf.MaxProduct)], ids=repr)
@pytest.mark.parametrize("name", GRAPHS)
def test_steps_along_a_direction(name, algorithm, batch, threads):
    graph, generator = GRAPHS[name], torch.Generator().manual_seed(2)
    theta = torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=generator)
    direction = torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=generator)
    steps = torch.randn(4, *batch, dtype=torch.float64, generator=generator)
    weights = torch.randn(4, *batch, dtype=torch.float64, generator=generator)
    before = rf.infer(graph, theta, algorithm, stop=rf.Stop(2, tol=None)).messages
    request = Request(graph, theta, algorithm, rf.Stop(3, tol=None), before, None, False)
    expected = replace(request, kernels="torch").solve_steps(direction, steps, weights)
    try:
        rf.set_num_threads(threads)
        actual = request.solve_steps(direction, steps, weights)
    finally:
        rf.set_num_threads(1)
    torch.testing.assert_close(actual.mu, expected.mu, rtol=1e-10, atol=1e-12)
