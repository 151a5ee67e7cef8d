"""What only the native engine has: threads, instruction sets, plans kept with the graph."""

import gc
import weakref

import pytest
import torch

import riskfield as rf
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


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_every_instruction_set_gives_the_same_answer(isa, dtype, scale, monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", isa)
    try:
        native.engine_name()
    except ValueError:
        pytest.skip(f"this processor has no {isa}")
    # Strong random couplings magnify rounding, so only soft models are compared in single precision.
    if dtype == torch.float32 and scale > 1:
        pytest.skip("chaotic in single precision")
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


def test_a_star_costs_time_linear_in_its_degree():
    import time

    def seconds(leaves):
        graph = rf.from_edges(2, [(0, k) for k in range(1, leaves + 1)], num_variables=leaves + 1)
        theta = 0.1 * torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        stop = rf.Stop(sweeps=10, tol=None)
        rf.infer(graph, theta, stop=stop, kernels="native")
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            rf.infer(graph, theta, stop=stop, kernels="native")
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(100_000) < 40 * seconds(10_000)
