"""What only the native engine has: threads, instruction sets, plans kept with the graph."""

import contextlib
import gc
import math
import subprocess
import sys
import weakref
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import riskfield as rf
from cases import lanes
from riskfield import kernels, threads
from riskfield.inference.request import Request
from riskfield.kernels import native_available
from strategies import potentials

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
    yield "states", rf.grid(6, 5, 20)  # threads share levels where states fill the vectors
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


def test_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "_num_threads", None)
    for given, expected in (("1", 1), ("1,2", 1), ("", threads.num_processors()), ("²", threads.num_processors())):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert threads.get_num_threads() == expected
    rf.set_num_threads(np.int64(2))
    assert (threads.get_num_threads(), type(threads.get_num_threads())) == (2, int)
    for bad in (0, 1.5, True, "2", 10**6):
        with pytest.raises(ValueError, match=r"`count` must be an integer from 1 to \d+ \(16 per processor\)\. Got "):
            rf.set_num_threads(bad)
    assert threads.get_num_threads() == 2


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


def recorded(graph, algorithm, batch, adjoint):
    """Marginals of a run with a tape, and gradients of theta and of the counting numbers."""
    theta = torch.randn(*batch, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counting = torch.full((graph.num_factors,), 0.6, dtype=torch.float64, requires_grad=True)
    if algorithm is None:
        algorithm = rf.MessagePassing(rf.TRW(counting))
    theta.requires_grad_()
    mu = rf.infer(graph, theta, algorithm, stop=rf.Stop(sweeps=5, tol=None), kernels="native", adjoint=adjoint).mu
    return mu, *torch.autograd.grad(mu.square().sum(), (theta, counting), materialize_grads=True)


@pytest.mark.parametrize("batch", [(), (2,), (5,)])
@pytest.mark.parametrize(
    ("algorithm", "adjoint"),
    [
        (rf.MessagePassing(rf.TRW(0.7)), rf.Unroll()),
        (rf.MessagePassing(rf.TRW(0.7)), rf.Unroll(checkpoint=2)),
        (rf.MeanField(), rf.Unroll()),
        (None, rf.Unroll()),
    ],
    ids=["message passing", "checkpoints", "mean field", "counting numbers"],
)
@pytest.mark.parametrize("name", GRAPHS)
def test_threads_share_recorded_runs(name, algorithm, adjoint, batch, monkeypatch):
    """The same marginals. Gradients of theta are sums, whose order depends on how threads share the graph."""
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_WORTH_SHARING", 0)
    mu, *gradients = recorded(GRAPHS[name], algorithm, batch, adjoint)
    try:
        rf.set_num_threads(3)
        shared, *shared_gradients = recorded(GRAPHS[name], algorithm, batch, adjoint)
        native._native.assume_crowded(1000.0)  # seconds; one thread does the work of all of them
        crowded = recorded(GRAPHS[name], algorithm, batch, adjoint)
    finally:
        native._native.assume_crowded(0.0)
        rf.set_num_threads(1)
    assert torch.equal(shared, mu)
    assert all(map(torch.equal, crowded, [shared, *shared_gradients]))
    for ours, alone in zip(shared_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-13)


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
    graph = rf.grid(3, 3, 2)
    rf.infer(graph, graph.zeros(), kernels="native")
    assert plans_of(graph)
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

    graph = rf.grid(5, 5, 2, tied=True)
    for step in range(5):
        rf.infer(graph, graph.zeros(), rf.MessagePassing(rf.TRW(0.5 + 0.01 * step)), kernels="native")
    assert len(plans_of(graph)) == 1


def plans_of(graph):
    """The different plans kept for a graph."""
    return {id(plan) for plan in graph.derived("plans", dict).values()}


def test_counting_numbers_of_one_partition_share_a_plan():
    graph = rf.grid(2, 2, 2, tied=True)
    for numbers in ([0.5, 0.5, 0.7, 0.7], [0.9, 0.9, 0.7, 0.7], [0.2, 0.2, 0.3, 0.3]):
        entropy = rf.CountingNumbers(torch.tensor(numbers, dtype=torch.float64), 1.0)
        rf.infer(graph, graph.zeros(), rf.MessagePassing(entropy), stop=rf.Stop(2, tol=None), kernels="native")
    assert len(plans_of(graph)) == 1
    other = rf.CountingNumbers(torch.tensor([0.5, 0.7, 0.5, 0.7], dtype=torch.float64), 1.0)
    rf.infer(graph, graph.zeros(), rf.MessagePassing(other), stop=rf.Stop(2, tol=None), kernels="native")
    assert len(plans_of(graph)) == 2


def test_the_plans_of_a_graph_are_bounded():
    from riskfield.kernels import native

    graph, stop = rf.grid(3, 3, 2), rf.Stop(1, tol=None)
    orders = [torch.randperm(9, generator=torch.manual_seed(k)).tolist() for k in range(2 * native._MOST_PLANS)]
    for order in orders:
        rf.infer(graph, graph.zeros(), rf.MessagePassing(schedule=rf.Sequential(order)), stop=stop, kernels="native")
    assert len(plans_of(graph)) == native._MOST_PLANS


def test_a_plan_that_another_thread_drops_while_it_is_taken_is_no_error():
    class Dropping(OrderedDict):
        def get(self, key):
            plan = super().get(key)
            if len(self) > 1:
                self.pop(key, None)
            return plan

    graph = rf.grid(3, 3, 2)
    plans = graph.derived("plans", Dropping)
    for schedule in 2 * [rf.Sequential(), rf.Parallel(), rf.Coloured()]:
        rf.infer(graph, graph.zeros(), rf.MessagePassing(schedule=schedule), kernels="native")
    assert graph.derived("plans", dict) is plans


def test_one_plan_is_made_for_several_threads(monkeypatch):
    from riskfield.kernels import native

    made = []
    make_plan = native._make_plan
    monkeypatch.setattr(native, "_make_plan", lambda *arguments: made.append(arguments) or make_plan(*arguments))
    try:
        rf.set_num_threads(2)
        for graph in (rf.grid(4, 4, 2), rf.grid(100, 100, 8)):  # threads share the second one
            made.clear()
            for batch in ((), (1,)):
                rf.infer(graph, graph.zeros().expand(*batch, -1), stop=rf.Stop(1, tol=None), kernels="native")
            assert len(made) == 1
    finally:
        rf.set_num_threads(1)


def test_a_slip_in_the_kind_of_a_run_is_an_error(monkeypatch):
    from riskfield.kernels import native

    graph = rf.grid(3, 3, 2)
    for name, wrong in (("MEAN_FIELD", "mean field"), ("LEVEL_BY_LEVEL", "level by level")):
        monkeypatch.setattr(native, "Kind" if name == "MEAN_FIELD" else "Sweep", SimpleNamespace(**{name: wrong}))
        with pytest.raises(TypeError):
            rf.infer(graph, graph.zeros(), rf.MeanField(), kernels="native")


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_nan_survives(isa, dtype, algorithm, monkeypatch):
    """Arithmetic never turns NaN into a probability: every marginal of a model with a NaN in it is NaN."""
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", isa)
    try:
        native.engine_name()
    except ValueError:
        pytest.skip(f"this processor has no {isa}")
    nan = torch.tensor([0x7FF8000000000001], dtype=torch.int64).view(torch.float64)  # a payload must not matter
    for states, scale in ((2, 1.0), (3, 1.0), (3, 1000.0)):
        graph = rf.grid(3, 12, states)
        theta = scale * torch.randn(1, graph.theta_size, dtype=torch.float64, generator=torch.manual_seed(0))
        for place in (0, graph.node_size + 1):  # in a variable's potentials, in a table
            broken = theta.clone()
            broken[:, place] = nan
            run = start(graph, algorithm, broken.to(dtype))
            run.advance(40, -1.0)  # all at once, messages reach one neighbour in a sweep
            assert run.marginals()[:, : graph.node_size].real.isnan().all()


def start(graph, algorithm, theta):
    """A native run on numbers that `infer` would refuse."""
    from riskfield.kernels import native
    from riskfield.kernels.problem import MeanFieldProblem, MessagePassingProblem

    if isinstance(algorithm, rf.MeanField):
        return native.MeanFieldRun(MeanFieldProblem(graph), theta, None)
    maximise = isinstance(algorithm, rf.MaxProduct)
    entropy = rf.Bethe() if maximise else algorithm.entropy
    problem = MessagePassingProblem(
        graph, entropy.counting(graph), algorithm.schedule, float(algorithm.damping), maximise
    )
    return native.MessagePassingRun(problem, theta, None)


# Each of these works until it is interrupted.
LONG_CALLS = """
def sweeps(): run.advance(10**9, -1.0)
def sweeps_of_a_batch(): batch.advance(10**9, -1.0)
def gradient(): back.backward_fixed_point(torch.ones_like(back.marginals()), 10**9, -1.0)
def plan():
    while True:
        start(rf.grid(1000, 1000, 2), 1)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_end_native_calls(threads):
    """Ctrl-C is noticed within .3 s. Processor time is measured, which does not depend on other programs."""
    code = f"""
import os, signal, threading, time, torch
import riskfield as rf
from riskfield.kernels import LAST_SWEEP, native
from riskfield.kernels.problem import MessagePassingProblem

def start(graph, batch, **options):
    theta = torch.zeros(batch, graph.theta_size, dtype=torch.float64)
    problem = MessagePassingProblem(graph, rf.TRW(0.5).counting(graph), rf.Sequential(), 0.0, False)
    return native.MessagePassingRun(problem, theta, None, **options)

rf.set_num_threads({threads})
graph = rf.grid(300, 300, 4)
run, batch, back = start(graph, 1), start(rf.grid(30, 30, 4), 5), start(graph, 1, record=LAST_SWEEP)
back.advance(1, -1.0)
{LONG_CALLS}
for call in (sweeps, sweeps_of_a_batch, gradient, plan):
    sent = []
    def interrupt():
        sent.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Timer(0.3, interrupt).start()
    try:
        call()
    except KeyboardInterrupt:
        print(call.__name__, time.process_time() - sent[0])
try:
    run.marginals()
except RuntimeError as error:
    print("marginals", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *calls, marginals = done.stdout.splitlines()
    assert marginals == "marginals this run was interrupted in the middle of a sweep"
    assert len(calls) == 4
    for line in calls:
        assert float(line.split()[1]) < 0.3 * threads, line


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


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("rho", [0.5, 0.7, "different"])
@pytest.mark.parametrize("states", [2, 3, 6])
@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()])
def test_powers_of_messages_agree_with_the_reference(states, rho, damping, schedule):
    """Contiguous rows of messages and gathered ones, from uniform messages and from given ones, and checkpoints."""
    graph = rf.grid(3, 25, num_states=states)
    torch.manual_seed(states)
    if rho == "different":
        rho = torch.empty(graph.num_factors, dtype=torch.float64).uniform_(0.4, 1.2)
    algorithm = rf.MessagePassing(rf.TRW(rho), schedule, damping)
    theta = torch.empty(graph.theta_size, dtype=torch.float64).uniform_(-2, 2)
    stop = rf.Stop(sweeps=4, tol=None)
    messages = None
    for _ in range(2):
        native, reference = (
            rf.infer(graph, theta, algorithm, stop=stop, messages=messages, kernels=kernels)
            for kernels in ("native", "torch")
        )
        torch.testing.assert_close(native.mu, reference.mu, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(native.messages, reference.messages, rtol=1e-11, atol=1e-12)
        messages = reference.messages
    gradients = []
    for adjoint in (rf.Unroll(), rf.Unroll(checkpoint=2)):
        leaf = theta.clone().requires_grad_()
        mu = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint).mu
        gradients += torch.autograd.grad((mu * mu).sum(), leaf)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()])
@pytest.mark.parametrize("states", [[3] * 20, [5] * 20, [7] * 20, [3, 4, 6, 2] * 5])
def test_gradients_of_tables_of_many_sweeps_agree_with_autograd(states, schedule):
    """More sweeps than gradients of tables are added up for at once, in full vectors and in single lanes."""
    edges = [(v, v + d) for d in (1, 10) for v in range(20 - d) if d == 10 or v != 9]  # two rows
    graph = rf.FactorGraph(states, edges)
    theta = torch.empty(graph.theta_size, dtype=torch.float64).uniform_(-1, 1, generator=torch.manual_seed(0))
    gradients = []
    for name in (None, "torch"):
        leaf = theta.clone().requires_grad_()
        algorithm = rf.MessagePassing(rf.TRW(0.7), schedule, 0.1)
        mu = rf.infer(graph, leaf, algorithm, stop=rf.Stop(19, tol=None), kernels=name).mu
        gradients += torch.autograd.grad((mu * mu).sum(), leaf)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


# Short levels of variables with many states: whole vectors of states and a rest, both slots of a table, one to three
# factors side by side, and a row of eight, which fills vectors with factors where states are few.
MANY_STATES = {
    "8": rf.grid(2, 3, 8),
    "9 and 17": rf.FactorGraph([9, 17] * 3, [(0, 1), (3, 0), (2, 1), (4, 3), (2, 3), (5, 4), (5, 0), (2, 5)]),
    "21, tied": rf.grid(4, 4, 21, tied=True),
    "33 and 16": rf.FactorGraph([33, 16, 33, 16], [(0, 1), (1, 2), (3, 2), (0, 3), (0, 2)]),
    "64": rf.grid(2, 2, 64),
    "70 and 5": rf.FactorGraph([70, 5, 70, 8], [(0, 1), (1, 2), (2, 0), (3, 0), (3, 2)]),
    "rows": rf.grid(8, 3, 12),
}
over_many_states = pytest.mark.parametrize("graph", MANY_STATES.values(), ids=MANY_STATES)
over_powers = pytest.mark.parametrize(
    "algorithm",
    [
        rf.MessagePassing(),
        rf.MessagePassing(rf.TRW(0.5), rf.Parallel()),
        rf.MessagePassing(rf.TRW(0.7), damping=0.2),
        rf.MessagePassing(rf.TRW(0.7), rf.Parallel(), 0.3),
    ],
    ids=repr,
)


@over_many_states
@over_powers
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("isa", instruction_sets())
def test_many_states_agree_with_the_reference(graph, algorithm, dtype, tolerance, isa, monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", isa)
    theta = potentials(graph, 0, "mild", dtype=dtype)
    for stop in (rf.Stop(1, tol=None), rf.Stop(4, tol=None), rf.Stop(300, 1e-3)):
        found, reference = (rf.infer(graph, theta, algorithm, stop=stop, kernels=name) for name in (None, "torch"))
        torch.testing.assert_close(found.mu, reference.mu, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.messages, reference.messages, rtol=0, atol=10 * tolerance)
        assert torch.equal(found.sweeps, reference.sweeps)


@over_many_states
@over_powers
@pytest.mark.parametrize("isa", instruction_sets())
def test_gradients_with_many_states_agree_with_autograd(graph, algorithm, isa, monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_isa", isa)
    theta = potentials(graph, 0)
    weight = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64)

    def gradient(stop, adjoint, kernels=None):
        leaf = theta.clone().requires_grad_()
        mu = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=adjoint, kernels=kernels).mu
        return torch.autograd.grad((weight * mu).sum(), leaf)[0]

    for sweeps in (1, 5):
        stop = rf.Stop(sweeps, tol=None)
        expected = gradient(stop, rf.Unroll(), "torch")
        for adjoint in (rf.Unroll(), rf.Unroll(checkpoint=2)):
            close(gradient(stop, adjoint), expected)
    fixed_point = rf.Stop(1000, 1e-10)
    close(gradient(fixed_point, rf.FixedPoint()), gradient(fixed_point, rf.Unroll(), "torch"), 1e-6)


@over_powers
def test_second_derivatives_with_many_states(algorithm):
    graph = MANY_STATES["9 and 17"]
    theta = potentials(graph, 0).requires_grad_()

    def derivative(kernels):
        mu = rf.infer(graph, theta, algorithm, stop=rf.Stop(3, tol=None), adjoint=rf.Unroll(), kernels=kernels).mu
        (first,) = torch.autograd.grad((mu**3).sum(), theta, create_graph=True)
        return torch.autograd.grad((first**2).sum(), theta)[0]

    close(derivative("native"), derivative("torch"))


# -- what fills the lanes of vectors: the members of a level, or the models of a batch --------------------------------

LANE_GRAPHS = {
    "grid": rf.grid(3, 5, 2),
    "tied": rf.grid(3, 4, 3, tied=True),
    "mixed": rf.FactorGraph([2, 3, 2, 4, 1], [(0, 1), (1, 2), (2, 0, 3), (3,), (4, 3), (0, 3)]),
    # With level lanes, states fill the vectors (cpp/inside.hpp); with batch lanes they never do.
    "many states": rf.FactorGraph([17, 16, 33, 16, 21], [(0, 1), (2, 1), (1, 3), (0, 3), (4, 2), (4, 0), (3, 4)]),
    "many states, tied": rf.grid(2, 3, 19, tied=True),
    "no factors": rf.FactorGraph([2, 3], []),
}
LANE_ALGORITHMS = {
    "Bethe": rf.MessagePassing(),
    "TRW": rf.MessagePassing(rf.TRW(0.5)),
    "damped": rf.MessagePassing(rf.TRW(0.7), damping=0.2),
    "parallel": rf.MessagePassing(rf.TRW(0.6), schedule=rf.Parallel()),
    "max-product": rf.MaxProduct(),
    "mean field": rf.MeanField(),
}
BATCH = 19  # whole vectors and a rest, for every instruction set and both precisions
over_graphs = pytest.mark.parametrize("graph", LANE_GRAPHS.values(), ids=LANE_GRAPHS)


def over_algorithms(*without):
    names = [name for name in LANE_ALGORITHMS if name not in without]
    return pytest.mark.parametrize("algorithm", [LANE_ALGORITHMS[name] for name in names], ids=names)


def on_both(function):
    """Call a function with level lanes and with batch lanes."""
    results = []
    for batch_lanes in (False, True):
        with lanes(batch_lanes):
            results.append(function())
    return results


def models(graph, dtype=torch.float64):
    """Models that converge at different speeds; some need logarithms, one of them is impossible."""
    theta = potentials(graph, 3, "mild", BATCH) * torch.linspace(0, 3, BATCH, dtype=torch.float64)[:, None]
    theta[5] *= 300
    theta[11] = potentials(graph, 4, "impossible")
    theta[12, : graph.num_states[0]] = -math.inf
    return theta.to(dtype)


def possible(graph):
    theta = models(graph)
    theta[11:13] = potentials(graph, 5, "mild", 2)
    return theta


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def on(graph, algorithm, theta, messages=None, **options):
    return kernels.start(algorithm.problem(graph), theta, messages, kernels="native", **options)


@over_graphs
@over_algorithms()
@pytest.mark.parametrize("tol", [-1.0, 1e-3], ids=["three sweeps", "tolerance"])
def test_lanes_do_not_change_solutions(graph, algorithm, tol):
    theta = models(graph)

    def solve():
        run = on(graph, algorithm, theta)
        results = [*run.advance(3, tol), *run.advance(20, 10 * tol), run.marginals(), run.messages().exp()]
        warm = on(graph, algorithm, theta, run.messages())
        return [*results, *warm.advance(2, tol), warm.marginals()]

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-9)
    assert {12} <= set(level[4].isnan().any(1).nonzero().flatten().tolist()) <= {11, 12}


@over_graphs
@over_algorithms("max-product")
def test_single_precision_does_not_depend_on_lanes(graph, algorithm):
    theta = potentials(graph, 0, "mild", BATCH, dtype=torch.float32)
    grad = potentials(graph, 0, "mild", BATCH)[:, :1].float() * torch.ones(graph.mu_size)

    def solve():
        run = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP)
        run.advance(3, -1.0)
        return run.marginals(), run.backward(grad)

    (level, level_grad), (batch, batch_grad) = on_both(solve)
    torch.testing.assert_close(batch, level, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch_grad, level_grad, rtol=0, atol=1e-4)


@over_graphs
@over_algorithms("max-product")
@pytest.mark.parametrize("record", [kernels.EVERY_SWEEP, 2], ids=["tape", "checkpoints"])
def test_lanes_do_not_change_gradients(graph, algorithm, record):
    """Models of one vector that stop after different numbers of sweeps are differentiated through these alone."""
    theta = possible(graph)
    grad = potentials(graph, 1, "mild", BATCH).mean(1, keepdim=True) * torch.linspace(-1, 1, graph.mu_size)

    def solve():
        run = on(graph, algorithm, theta, record=record)
        _, first = run.advance(2, 1e-2)
        _, second = run.advance(9, 1e-4)  # those that had stopped go on
        return first + second, run.marginals(), run.backward(grad.double()), run.backward(grad.double())

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)
    close(batch[3], batch[2], 0.0)


@over_graphs
@over_algorithms("max-product", "parallel")
def test_lanes_do_not_change_gradients_at_fixed_points(graph, algorithm):
    theta = 0.3 * potentials(graph, 2, "mild", BATCH)
    theta[3:6] = 0.0
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)

    def solve():
        run = on(graph, algorithm, theta, record=kernels.LAST_SWEEP)
        run.advance(50, 1e-8)
        return run.marginals(), *run.backward_fixed_point(grad, 30, 1e-6)

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


@over_graphs
@over_algorithms("max-product")
def test_lanes_do_not_change_derivatives_along_directions(graph, algorithm):
    theta, tangent = possible(graph), potentials(graph, 6, "mild", BATCH)
    steps = torch.linspace(-0.2, 0.3, 2 * BATCH, dtype=torch.float64).reshape(2, BATCH)
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)

    def solve():
        dual = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP, tangent=tangent)
        dual.advance(3, -1.0)
        along = on(graph, algorithm, theta, along=(tangent, steps))
        along.advance(3, -1.0)
        return dual.marginals(), dual.backward(grad), along.marginals(), along.marginals(1 + steps)

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


@over_graphs
def test_lanes_do_not_change_gradients_of_counting_numbers(graph):
    theta = possible(graph)
    grad = torch.linspace(-1, 1, graph.mu_size, dtype=torch.float64).expand(BATCH, -1)
    rho = torch.linspace(0.4, 0.9, graph.num_factors, dtype=torch.float64)

    def solve():
        algorithm = rf.MessagePassing(rf.TRW(rho.clone().requires_grad_()), damping=0.1)
        run = on(graph, algorithm, theta, record=kernels.EVERY_SWEEP)
        run.advance(6, 1e-2)
        return run.backward_counting(grad)[:2]

    level, batch = on_both(solve)
    for one, other in zip(level, batch, strict=True):
        close(other, one, 1e-8)


def test_one_saturated_model_leaves_the_others_in_probabilities():
    """The logarithms of one model would change the last bits of those that share its vector."""
    graph = LANE_GRAPHS["grid"]
    theta = potentials(graph, 0, "mild", BATCH)
    saturated = theta.clone()
    saturated[2] *= 1000
    algorithm = rf.MessagePassing(rf.TRW(0.7))

    def solve(given):
        run = on(graph, algorithm, given)
        run.advance(5, -1.0)
        return run.marginals()

    _, alone = on_both(lambda: solve(theta))
    _, together = on_both(lambda: solve(saturated))
    others = [k for k in range(BATCH) if k != 2]
    assert torch.equal(together[others], alone[others])
    _, logarithms = on_both(lambda: solve(1000 * theta))
    close(together[2], logarithms[2], 0.0)


def test_small_graphs_in_batches_get_batch_lanes(monkeypatch):
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_batch_lanes", None)

    def batch_lanes(graph, batch):
        theta = torch.zeros(batch, graph.theta_size, dtype=torch.float64)
        native.MessagePassingRun(rf.MessagePassing().problem(graph), theta, None)
        return list(graph.derived("plans", dict))[-1][-2]

    small, large = rf.grid(6, 6, 2), rf.grid(120, 160, 2)
    assert batch_lanes(small, 256)
    assert not batch_lanes(small, 1)
    assert not batch_lanes(large, 2)


@pytest.mark.parametrize("states", [2, 3, 4, 5, 9])
def test_log_messages_of_any_size(states):
    """A constraint can make a nearly impossible state the best one left; loops let such numbers grow without bound."""
    graph = rf.chain(4, states)
    theta = graph.zeros()
    nodes, factors = graph.node_views(theta)[0], graph.factor_views(theta)[0]
    nodes[0, 1:] = -1e25 * torch.arange(1, states)
    factors[:, 0, 1:] = -torch.inf
    algorithm, stop = rf.MessagePassing(damping=0.5), rf.Stop(60, tol=None)
    messages = [rf.infer(graph, theta, algorithm, stop=stop, kernels=k).messages for k in ("native", "torch")]
    torch.testing.assert_close(*messages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_states", [2, 3, 5])
@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_a_graph_gives_the_same_bits_when_joined_with_others(num_states, rho):
    """Other tiles are filled, gathered or cut short then. With more states, these may fill the vectors."""
    graphs = [rf.grid(12, 14, num_states), rf.grid(5, 14, num_states)]
    union, generator = rf.graph.Union(graphs), torch.Generator().manual_seed(0)
    thetas = [torch.randn(graph.theta_size, dtype=torch.float64, generator=generator) for graph in graphs]
    algorithm, stop = rf.MessagePassing(rf.TRW(rho)), rf.Stop(5, tol=None)
    joined = union.split(rf.infer(union.graph, union.join(thetas), algorithm, stop=stop).mu)
    for graph, theta, mu in zip(graphs, thetas, joined, strict=True):
        assert torch.equal(mu, rf.infer(graph, theta, algorithm, stop=stop).mu)


def graphs_of_pairs():
    """Mostly graphs with factors between two binary variables, whose tables the engine keeps as one number."""
    rows = rf.grid(5, 6, 2)
    pairs = rows.factor_groups[0].variables
    yield "pairs", rows
    yield "tied", rf.grid(5, 6, 2, tied=True)
    chains = np.stack([np.arange(29), np.arange(1, 30)], axis=1)
    yield "short levels", rf.FactorGraph([2] * 30, chains[::-1, ::-1])
    triples = np.array([[0, 7, 20], [3, 11, 25], [29, 1, 14]])
    yield "others", rf.FactorGraph([2] * 28 + [3, 1], [*map(tuple, pairs), *map(tuple, triples), (4,), (28, 29)])
    yield "apart", rf.FactorGraph([2] * 30 + [3, 1, 2, 5, 1], pairs)  # variables without factors
    yield "three states", rf.grid(5, 6, 3)


PAIRS = dict(graphs_of_pairs())


@pytest.mark.parametrize("threads_used", [1, 3])
@pytest.mark.parametrize("batch", [1, 5, 19])
@pytest.mark.parametrize(
    "algorithm",
    [
        rf.MessagePassing(rf.TRW(0.5)),
        rf.MessagePassing(rf.TRW(0.7), damping=0.3),
        rf.MessagePassing(rf.TRW(0.5), schedule=rf.Parallel()),
        rf.MessagePassing(schedule=rf.Coloured()),
    ],
    ids=["half", "damped", "parallel", "coloured"],
)
@pytest.mark.parametrize("name", PAIRS)
def test_tables_kept_as_one_number(name, algorithm, batch, threads_used, monkeypatch):
    """Marginals, messages and gradients, from uniform and from given messages; some models have impossible states."""
    from riskfield.kernels import native

    monkeypatch.setattr(native, "_WORTH_SHARING", 0)
    graph, generator = PAIRS[name], torch.Generator().manual_seed(3)
    theta = torch.randn(batch, graph.theta_size, dtype=torch.float64, generator=generator)
    if batch > 1:
        several = next(k for k, group in enumerate(graph.node_groups) if group.num_states > 1)
        graph.node_views(theta)[several][1, 0, 1] = -torch.inf  # state 1 of a variable
        theta[2, graph.node_size + 1] = -torch.inf  # an entry of a table
        theta[3] *= 200  # too strong for probabilities
    weight = torch.randn(batch, graph.mu_size, dtype=torch.float64, generator=generator)
    messages = None
    try:
        rf.set_num_threads(threads_used)
        for _ in range(2):
            found = []
            for which in ("native", "torch"):
                leaf = theta.clone().requires_grad_()
                stop = rf.Stop(3, tol=None)
                solution = rf.infer(graph, leaf, algorithm, stop=stop, messages=messages, kernels=which)
                found.append([*torch.autograd.grad((solution.mu * weight).sum(), leaf), solution.mu, solution.messages])
            for ours, reference in zip(*found, strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-10)
            messages = found[1][2].detach()
    finally:
        rf.set_num_threads(1)


@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Parallel()])
@pytest.mark.parametrize("tied", [False, True])
def test_tables_kept_as_one_number_at_a_fixed_point(schedule, tied):
    graph = rf.grid(3, 4, 2, tied=tied)
    theta = torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    weight = torch.randn(graph.mu_size, dtype=torch.float64, generator=torch.manual_seed(1))
    algorithm, stop = rf.MessagePassing(rf.TRW(0.5), schedule, 0.3), rf.Stop(2000, tol=1e-12)
    found = []
    for adjoint in (rf.FixedPoint(), rf.Unroll(checkpoint=False)):
        mu = rf.infer(graph, theta, algorithm, stop=stop, adjoint=adjoint).mu
        found += torch.autograd.grad((mu * weight).sum(), theta)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)
