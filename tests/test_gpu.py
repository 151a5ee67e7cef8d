"""The GPU engine: on a GPU where there is one, elsewhere with Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets kernels, and other tests may have imported it.
"""

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield import kernels
from riskfield.kernels import MessagePassingProblem
from riskfield.kernels.gpu import lacks
from riskfield.kernels.gpu.chains import ChainRun, chains_of
from riskfield.kernels.gpu.plan import make_plan
from riskfield.kernels.gpu.sharing import sharing_of
from riskfield.kernels.problem import ForestProblem, Task, schedule_levels
from riskfield.kernels.torch_reference import MeanFieldRun as MeanFieldReference
from riskfield.kernels.torch_reference import MessagePassingRun as Reference

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_engine = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or torch.cuda.is_available()),
    reason="run in a process of its own, or without Triton",
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter: log of 0, inf - inf


def mixed():
    """Several arities and numbers of states, two factors on the same variables, an isolated variable."""
    return rf.FactorGraph([2, 3, 2, 1, 3], [(0, 1), (1, 0), (2, 0, 1), (1,), (3, 2)])


def tree_like():
    return rf.FactorGraph([2] * 4, [(0, 1), (0, 2), (0, 3)])


def tied():
    return rf.FactorGraph([2] * 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)], tables=[0, 0, 1, 0, 1])


GRAPHS = {
    "grid": lambda: rf.grid(3, 3, 2),
    "pairs": lambda: rf.FactorGraph([2, 3, 2, 3], [(0, 1), (1, 2), (2, 0), (3, 1)]),
    "bipartite": lambda: rf.FactorGraph([3] * 6, [(0, 1), (2, 1), (2, 3), (0, 3), (0, 4)], tables=[0, 0, 1, 1, 1]),
    "mixed": mixed,
    "tied": tied,
    "four": lambda: rf.FactorGraph([2, 2, 3, 2], [(2, 0, 1, 3)]),
    "no factors": lambda: rf.FactorGraph([2, 3], []),
}
# Graph, entropy, schedule, damping, and which states are impossible: none, some of variables, or of factors, too.
CASES = [
    ("grid", rf.TRW(0.5), rf.Coloured(), 0.0, True),
    ("grid", rf.TRW(0.5), rf.Coloured(), 0.0, "of variables"),
    ("grid", rf.Bethe(), rf.Parallel(), 0.3, "of variables"),
    ("pairs", rf.Bethe(), rf.Sequential(), 0.3, "of variables"),
    ("pairs", rf.TRW(torch.tensor([0.7, 0.6, 0.8, 1.0])), rf.Coloured(), 0.0, False),
    ("bipartite", rf.TRW(0.7), rf.Coloured(), 0.0, False),
    ("mixed", rf.Bethe(), rf.Sequential(), 0.0, True),
    ("four", rf.Bethe(), rf.Parallel(), 0.2, True),
    ("tied", rf.TRW(torch.tensor([0.7, 0.6, 0.8, 0.7, 0.9])), rf.Sequential(), 0.0, False),
    ("no factors", rf.Bethe(), rf.Sequential(), 0.0, False),
]
MORE = [
    ("grid", rf.Bethe(), rf.Sequential(), 0.0, False),
    ("grid", rf.Bethe(), rf.Sequential(), 0.2, "of variables"),
    ("pairs", rf.Bethe(), rf.Parallel(), 0.0, "of variables"),
    ("mixed", rf.Bethe(), rf.Coloured(), 0.3, True),
    ("tied", rf.TRW(0.7), rf.Parallel(), 0.0, False),
    ("four", rf.Bethe(), rf.Sequential(), 0.0, False),
    ("mixed", rf.Bethe(), rf.Parallel(), 0.4, False),
]


def numbers(graph, batch=2, seed=0, impossible=False):
    generator = torch.Generator().manual_seed(seed)
    theta = 2 * torch.randn(batch, graph.theta_size, dtype=torch.float64, generator=generator)
    if impossible:
        for k, variable in enumerate(np.flatnonzero(graph.num_states > 1)):
            graph.node(theta, variable)[k % batch, k // batch % graph.num_states[variable]] = -torch.inf
        if impossible is True:
            theta[:, graph.node_size] = -torch.inf
    return theta


# Without Triton -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Coloured(), rf.Parallel()], ids=repr)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_plan_has_every_number_once_and_sends_what_the_torch_kernels_send(name, schedule):
    graph = GRAPHS[name]()
    at_once = isinstance(schedule, rf.Parallel)
    plan = make_plan(graph, schedule_levels(graph, schedule), at_once, torch.device("cpu"))

    def entries(places):
        there = places.start >= 0
        return (places.start[there][:, None] + places.offsets[places.order[there].long()]).flatten().tolist()

    nodes = [entry for own in plan.nodes.values() for entry in entries(own)]
    assert sorted(nodes) == list(range(graph.node_size))
    messages = [entry for own in plan.kinds.values() for entry in entries(own.messages)]
    assert sorted(messages) == list(range(graph.message_size))
    mu = [entry for own in plan.kinds.values() for entry in entries(own.mu)]
    assert sorted(mu) == list(range(graph.node_size, graph.mu_size))
    for own in plan.kinds.values():  # a variable's message slot, seen from its neighbours
        for o, kind in enumerate(own.other_kinds):
            there = own.neighbours[0] >= 0
            mates = plan.kinds[kind].slot_factor[own.cavities[o][there].long()]
            assert torch.equal(mates, own.slot_factor[there])
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), schedule, 0.0, False)
    reference = Reference(problem, graph.zeros()[None], None)
    expected = [
        sorted(int(reference.layout.messages[g][s][row, 0]) for g, s, rows in stage.sends for row in rows)
        for stage in reference.stages
    ]
    sent = [sorted(_sent(plan, stage)) for stage in plan.stages]
    assert list(filter(None, sent)) == list(filter(None, expected))


def _sent(plan, stage):
    """Where the messages that a stage sends begin."""
    for block, direction in stage:
        for part in block.parts:
            own = plan.kinds[part.kind]
            low, high = part.fresh[direction]
            for slot in range(part.first + low * block.count, part.first + high * block.count):
                if own.messages.start[slot] >= 0 and own.updated[slot] >> direction & 1:
                    yield int(own.messages.start[slot])


def test_plans_sum_gradients_of_tied_tables():
    for tables in ([0, 0, 1, 0, 1], [0, 1, 0, 1, 2], [0, 1, 1, 0, 0]):
        graph = rf.FactorGraph([2] * 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)], tables=tables)
        plan = make_plan(graph, schedule_levels(graph, rf.Sequential()), False, torch.device("cpu"))
        gradient = torch.randn(3, graph.mu_size, dtype=torch.float64)
        torch.testing.assert_close(plan.ties.collapse(gradient.t()).t(), graph.collapse(gradient))


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_what_the_engine_lacks_has_a_name():
    graph = rf.chain(3, 2)

    def found(graph=graph, theta=None, damping=0.0, maximise=False, **options):
        theta = graph.zeros()[None] if theta is None else theta
        problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential(), damping, maximise)
        return lacks(Task(problem, theta, **options))

    assert found() is None
    assert found(record=kernels.EVERY_SWEEP) is None
    assert found(record=3) is None
    assert found(record=kernels.LAST_SWEEP) is None
    assert "more than 4 variables" in found(rf.FactorGraph([2] * 5, [(0, 1, 2, 3, 4)]))
    assert "8192 entries" in found(rf.chain(2, 100), damping=0.1)
    assert found(rf.chain(2, 100)) is None  # as a chain
    loop = rf.FactorGraph([2, 2], [(0, 1), (0, 1)])
    rho = rf.TRW(torch.tensor([0.5, 0.6], requires_grad=True)).counting(loop)
    learned = MessagePassingProblem(loop, rho, rf.Sequential(), 0.0, False)
    assert lacks(Task(learned, loop.zeros()[None], record=kernels.EVERY_SWEEP)) is None
    assert "counting numbers with checkpoints" in lacks(Task(learned, loop.zeros()[None], record=2))
    assert "damping" in found(damping=torch.tensor(0.1, requires_grad=True))
    assert "complex128" in found(theta=graph.zeros()[None].to(torch.complex128))
    assert "autograd" in found(theta=graph.zeros()[None].requires_grad_())
    assert "autograd" in found(tree_like(), tree_like().zeros()[None].requires_grad_())
    assert "forward mode" in found(tangent=graph.zeros()[None])
    assert "several steps" in found(along=(graph.zeros()[None], torch.ones(2, 1)))
    assert lacks(Task(ForestProblem(tree_like()), tree_like().zeros()[None])) is None
    assert lacks(Task(ForestProblem(graph), graph.zeros()[None])) is None
    assert "max-product" in found(maximise=True, record=kernels.EVERY_SWEEP)
    assert lacks(Task(kernels.MeanFieldProblem(graph), graph.zeros()[None])) is None


@pytest.mark.skipif(TRITON, reason="Triton is installed")
def test_without_triton_the_torch_kernels_run_and_say_so(monkeypatch):
    monkeypatch.setattr(kernels, "_GPUS", {"cpu"})
    monkeypatch.setattr(rf.errors, "_warned_slow", set())
    graph = rf.chain(3, 2)
    with pytest.warns(rf.errors.PerformanceWarning, match="without Triton"):
        rf.infer(graph, graph.zeros())
    rf.infer(graph, graph.zeros())  # once


@pytest.mark.skipif(not TRITON or INTERPRETED or DEVICE == "cuda", reason="runs here, or not at all")
def test_with_the_interpreter_of_triton():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


# On the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=INTERPRETED)
def unwritten_numbers_are_nan():
    """Fill new memory with NaN, so that a number that is read before it is written shows in results."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu(monkeypatch):
    """Let the engine serve the device of the tests."""
    monkeypatch.setattr(kernels, "_GPUS", {DEVICE})
    monkeypatch.setattr(rf.errors, "_warned_slow", set())


def check(name, entropy, schedule, damping, impossible, sweeps=2):
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = GRAPHS[name]()
    theta = numbers(graph, impossible=impossible).to(DEVICE).requires_grad_()
    messages = torch.randn(2, graph.message_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    messages = None if damping else messages.to(DEVICE)
    problem = MessagePassingProblem(graph, entropy.counting(graph), schedule, damping, False)
    reference = Reference(problem, theta, messages)
    run = MessagePassingRun(problem, theta, messages, record=kernels.EVERY_SWEEP)
    # With several counting numbers every factor has a table of its own.
    own_tables = name in ("grid", "pairs", "mixed") or (
        name == "tied" and not sharing_of(graph, problem.counting).tables
    )
    assert bool(run._engine.canonical) == (own_tables and impossible is not True)
    assert run._engine.odds == (own_tables and name in ("grid", "tied") and impossible is not True)
    for count in (sweeps + 1, sweeps, 1):
        residuals = [one.advance(count, -1.0)[0] for one in (run, reference)]
        if name != "no factors":
            torch.testing.assert_close(*residuals, rtol=1e-9, atol=1e-12)
    expected = reference.marginals()
    torch.testing.assert_close(run.marginals(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.messages(), reference.messages(), rtol=1e-9, atol=1e-11)
    found, gap = run._gap(), reference.gap()
    torch.testing.assert_close(found.marginals, gap.marginals, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(found.messages, gap.messages, rtol=1e-7, atol=1e-12)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (gradient,) = torch.autograd.grad(expected, theta, grad)
    found = [run.backward(grad) for _ in range(2 if DEVICE == "cpu" else 4)]  # from the third on a replay
    torch.testing.assert_close(found[0], gradient, rtol=1e-9, atol=1e-11)
    for again in found[1:]:
        assert torch.equal(again, found[0])  # in a fixed order


@on_engine
@pytest.mark.parametrize(("name", "entropy", "schedule", "damping", "impossible"), CASES)
def test_the_same_sweeps_and_gradients(name, entropy, schedule, damping, impossible):
    check(name, entropy, schedule, damping, impossible)


@on_engine
@pytest.mark.slow
@pytest.mark.parametrize(("name", "entropy", "schedule", "damping", "impossible"), MORE)
def test_more_sweeps_and_gradients(name, entropy, schedule, damping, impossible):
    check(name, entropy, schedule, damping, impossible)


@on_engine
@pytest.mark.parametrize("schedule", [rf.Coloured(), rf.Parallel()], ids=repr)
def test_checkpoints_give_the_same_gradient(schedule):
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    theta = numbers(graph).to(DEVICE)
    problem = MessagePassingProblem(graph, rf.TRW(0.7).counting(graph), schedule, 0.0, False)
    grad = torch.ones(2, graph.mu_size, dtype=torch.float64, device=DEVICE).cumsum(1)
    found = []
    for record in (kernels.EVERY_SWEEP, 2):
        run = MessagePassingRun(problem, theta, None, record=record)
        for sweeps in (1, 2):
            run.advance(sweeps, -1.0)
        before = run.marginals(), run.messages()
        found.append([run.backward(grad), run.backward(grad), run.marginals(), run.messages()])
        assert all(map(torch.equal, before, found[-1][2:]))
    for whole, again in zip(*found, strict=True):
        torch.testing.assert_close(whole, again, rtol=1e-12, atol=1e-13)


@on_engine
def test_the_gradient_of_a_fixed_point(gpu):
    graph = rf.FactorGraph([2, 2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    theta = 0.2 * numbers(graph)
    algorithm, stop = rf.MessagePassing(rf.TRW(0.7), rf.Coloured()), rf.Stop(100, 1e-9)
    results = []
    for device, names in ((DEVICE, None), ("cpu", "torch")):
        leaf = theta.to(device).requires_grad_()
        solution = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=rf.FixedPoint(1e-8), kernels=names)
        results.append(torch.autograd.grad((solution.mu**2).sum(), leaf)[0].cpu())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)
    leaf = theta.to(DEVICE, torch.float32).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", rf.errors.PerformanceWarning)  # nothing runs on the torch kernels
        solution = rf.infer(graph, leaf, algorithm, stop=rf.Stop(100, 1e-5), adjoint=rf.FixedPoint(1e-8))
        (found,) = torch.autograd.grad((solution.mu**2).sum(), leaf)
    torch.testing.assert_close(found.cpu().double(), results[1], rtol=1e-4, atol=1e-5)


@on_engine
@pytest.mark.parametrize(
    ("name", "impossible"), [("mixed", True), ("tied", False), ("four", True), ("no factors", False)]
)
def test_mean_field_and_its_gradient(name, impossible):
    from riskfield.kernels.gpu.mean_field import MeanFieldRun

    graph = GRAPHS[name]()
    theta = numbers(graph, impossible=impossible).to(DEVICE).requires_grad_()
    start = torch.randn(2, graph.node_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    problem = kernels.MeanFieldProblem(graph)
    reference = MeanFieldReference(problem, theta, start)
    run = MeanFieldRun(problem, theta, start, record=kernels.EVERY_SWEEP)
    for sweeps in (1, 2):
        residuals = [one.advance(sweeps, -1.0)[0] for one in (run, reference)]
        torch.testing.assert_close(*residuals, rtol=1e-9, atol=1e-12)
    expected = reference.marginals()
    torch.testing.assert_close(run.marginals(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.messages(), reference.messages(), rtol=1e-9, atol=1e-11)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (gradient,) = torch.autograd.grad(expected, theta, grad)
    found = [run.backward(grad) for _ in range(2 if DEVICE == "cpu" else 4)]
    torch.testing.assert_close(found[0], gradient, rtol=1e-9, atol=1e-11)
    assert all(torch.equal(again, found[0]) for again in found[1:])


@on_engine
def test_mean_field_to_a_tolerance(gpu):
    graph = rf.FactorGraph([2, 2, 3], [(0, 1), (1, 2), (2, 0)])
    theta = 0.5 * numbers(graph) * torch.tensor([[0.01], [1.0]], dtype=torch.float64)
    for adjoint in (rf.Unroll(), rf.FixedPoint(1e-8)):
        results = []
        for device, names in ((DEVICE, None), ("cpu", "torch")):
            leaf = theta.to(device).requires_grad_()
            solution = rf.infer(graph, leaf, rf.MeanField(), stop=rf.Stop(100, 1e-9), adjoint=adjoint, kernels=names)
            assert solution.converged.all()
            results.append([solution.mu.cpu(), *(g.cpu() for g in torch.autograd.grad((solution.mu**2).sum(), leaf))])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


CHAINS = {  # a graph, and whether some states are impossible
    "chain": (lambda: rf.chain(4, 3), True),
    "one table": (lambda: rf.chain(4, 3, tied=True), False),
    "several": (
        lambda: rf.FactorGraph([2] * 8, [(1, 0), (1, 2), (4, 3), (6, 5), (5, 4)], tables=[0, 0, 1, 0, 1]),
        False,
    ),
    "several, one table": (lambda: rf.FactorGraph([3] * 7, [(0, 1), (1, 2), (4, 3), (5, 6)], tables=[0] * 4), False),
    "no factors": (lambda: rf.FactorGraph([3] * 3, []), False),
}


@on_engine
@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_solved_exactly(name):
    make, impossible = CHAINS[name]
    graph = make()
    theta = numbers(graph).to(DEVICE).requires_grad_()
    if impossible:
        with torch.no_grad():
            theta[0, 1] = theta[1, 4] = theta[0, -2] = -torch.inf
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential())
    reference = Reference(problem, theta, None)
    reference.advance(1, -1.0)
    mu = reference.marginals()
    chains = chains_of(graph, theta.device)
    given = theta.detach().clone()
    run = ChainRun(graph, chains, given, None, lambda: reference)
    given.zero_()  # results that are not computed yet do not change
    run.advance(1, -1.0)
    nodes = mu[:, : graph.node_size]
    value = rf.MessagePassing().log_partition(graph, theta.detach(), mu.detach())
    for found, expected in (
        (run.marginals(), mu),
        (run.node_marginals(), nodes),
        (run.statistics(), graph.collapse(mu)),
        (run.messages(), reference.messages()),
        (run.log_partition(), value),
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-11)
    for part in (mu, nodes):
        grad = torch.randn(part.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        (gradient,) = torch.autograd.grad(part, theta, grad, retain_graph=True)
        torch.testing.assert_close(run.backward(grad), gradient, rtol=1e-8, atol=1e-10)


FORESTS = {  # a graph, and whether some states are impossible
    "star": (lambda: rf.FactorGraph([3] * 5, [(0, 1), (2, 0), (0, 3)], tables=[0, 0, 1]), False),
    "mixed": (lambda: rf.FactorGraph([2, 3, 2, 1, 3, 2], [(0, 4, 2), (1,), (3, 4), (4, 1)]), True),
    "of four": (lambda: rf.FactorGraph([2, 2, 3, 2, 2], [(2, 0, 1, 3), (4, 2)]), True),
    "no factors": (lambda: rf.FactorGraph([2, 3], []), False),
}


@on_engine
@pytest.mark.parametrize("name", FORESTS)
def test_forests_are_solved_exactly(gpu, name):
    from riskfield.kernels.gpu.run import ForestRun

    make, impossible = FORESTS[name]
    graph = make()
    theta = numbers(graph, 3)
    if impossible:
        theta[0, 1] = theta[1, graph.node_size] = -torch.inf
        graph.node(theta, 2)[2] = -torch.inf  # an impossible model
    given = theta.to(DEVICE, copy=True)
    run = kernels.start(ForestProblem(graph), given, record=kernels.EVERY_SWEEP)
    given.zero_()  # results that are not computed yet do not change
    assert isinstance(run, ForestRun)
    residual, _ = run.advance(1, 1.0)
    assert torch.isnan(residual).tolist() == [False, False, impossible]
    leaf = theta.to(DEVICE).requires_grad_()
    truth = rf.Exact().start(graph, leaf, None, "torch")
    mu = truth.marginals()
    nodes = mu[:, : graph.node_size]
    for found, expected in (
        (run.log_partition(), truth.log_partition()),
        (run.node_marginals(), nodes),
        (run.statistics(), graph.collapse(mu)),
        (run.marginals(), mu),
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-11, equal_nan=True)
    for part in (mu[:2], nodes[:2]):
        grad = torch.randn(part.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        (gradient,) = torch.autograd.grad(part, leaf, grad, retain_graph=True)
        cotangent = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
        torch.testing.assert_close(run.backward(cotangent)[:2], gradient[:2], rtol=1e-8, atol=1e-10)


@on_engine
def test_infer_solves_forests_exactly(gpu):
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (1, 3)])
    theta, weights = numbers(graph), torch.arange(graph.mu_size, dtype=torch.float64)
    expected = rf.infer(graph, theta, rf.Exact(), evidence={2: 1}, kernels="torch")
    start = torch.randn(2, graph.message_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for algorithm, given in ((rf.Exact(), {}), (rf.MessagePassing(), {"messages": start.to(DEVICE)})):
        for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            leaf = theta.to(DEVICE, dtype, copy=True).requires_grad_()
            found = rf.infer(graph, leaf, algorithm, stop=rf.Stop(5), evidence={2: 1}, **given)
            assert found.lazy
            (gradient,) = torch.autograd.grad(found.log_partition.sum(), leaf, retain_graph=True)
            for one, other in (
                (found.mu, expected.mu),
                (gradient, expected.mu),
                (found.log_partition, expected.log_partition),
            ):
                torch.testing.assert_close(one.detach().cpu().double(), other, rtol=tol, atol=tol)
    other = theta.clone().requires_grad_()
    loss = (rf.infer(graph, other, rf.Exact(), evidence={2: 1}, kernels="torch").mu ** 2 * weights).sum()
    (gradient,) = torch.autograd.grad((found.mu**2 * weights.to(found.mu)).sum(), leaf)
    torch.testing.assert_close(gradient.cpu().double(), torch.autograd.grad(loss, other)[0], rtol=1e-3, atol=1e-3)
    unswept = rf.MessagePassing().start(graph, theta.to(DEVICE), start.to(DEVICE), None)
    reference = Reference(rf.MessagePassing().problem(graph), theta, start)
    torch.testing.assert_close(unswept.messages().cpu(), reference.messages())


@on_engine
def test_infer_solves_chains_exactly(gpu):
    graph = rf.chain(3, 2)
    theta = numbers(graph, 3)
    graph.factor_views(theta)[0][1, 0] = -torch.inf
    run = rf.Exact().start(graph, theta.to(DEVICE), None, None)
    assert isinstance(run, ChainRun)
    assert isinstance(run, kernels.ExactRun)  # its results are computed when they are needed
    residual, _ = run.advance(1, 1.0)
    assert torch.isnan(residual).tolist() == [False, True, False]
    assert torch.isnan(run.marginals().sum(1)).tolist() == [False, True, False]
    assert run.log_partition()[1] == -torch.inf
    leaf = theta[:1].to(DEVICE).requires_grad_()
    solution = rf.infer(graph, leaf, stop=rf.Stop(1, tol=1.0), adjoint=rf.Envelope())
    (gradient,) = torch.autograd.grad(solution.log_partition.sum(), leaf)
    expected = rf.infer(graph, theta[:1], rf.Exact(), kernels="torch")
    torch.testing.assert_close(gradient.cpu(), expected.mu)
    torch.testing.assert_close(solution.log_partition.detach().cpu(), expected.log_partition)
    assert chains_of(tree_like(), torch.device("cpu")) is None


@on_engine
@pytest.mark.parametrize(("schedule", "damping"), [(rf.Sequential(), 0.0), (rf.Parallel(), 0.3)])
def test_gradients_of_counting_numbers(gpu, schedule, damping):
    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (1, 2), (2, 0), (0, 1, 2)], tables=[0, 1, 2, 3])
    theta = numbers(graph, impossible=True)
    results = []
    for device, names in ((DEVICE, None), ("cpu", "torch")):
        rho = torch.tensor([0.5, 0.6, 0.7, 0.8], dtype=torch.float64, requires_grad=True)
        leaf = theta.to(device).requires_grad_()
        node = torch.tensor([0.3, -0.2, -0.4], dtype=torch.float64, requires_grad=True)
        algorithm = rf.MessagePassing(rf.CountingNumbers(rho, node), schedule, damping)
        mu = rf.infer(graph, leaf, algorithm, stop=rf.Stop(2, tol=None), kernels=names).mu
        grads = torch.autograd.grad((mu**2 * torch.arange(mu.shape[-1], device=device)).sum(), [leaf, rho, node])
        results.append([mu.detach().cpu(), *(grad.cpu() for grad in grads)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@on_engine
def test_rounding_does_not_grow():
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.grid(3, 3, 2)
    theta = numbers(graph, batch=1).to(DEVICE).requires_grad_()
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured(), 0.0, False)
    run, reference = (
        MessagePassingRun(problem, theta, None, record=kernels.EVERY_SWEEP),
        Reference(problem, theta, None),
    )
    for one in (run, reference):
        one.advance(14, -1.0)
    expected = reference.marginals()
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (gradient,) = torch.autograd.grad(expected, theta, grad)
    torch.testing.assert_close(run.backward(grad), gradient, rtol=1e-10, atol=1e-12)


@on_engine
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_do_not_depend_on_the_order_of_threads(dtype):
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.grid(*((60, 80) if DEVICE == "cuda" else (3, 3)), 2)  # many programs of several warps
    theta = (0.5 * numbers(graph)).to(DEVICE).requires_grad_()
    problem = MessagePassingProblem(graph, rf.TRW(0.5).counting(graph), rf.Coloured())
    reference = Reference(problem, theta, None)
    run = MessagePassingRun(problem, theta.to(dtype), None, record=kernels.EVERY_SWEEP)
    for one in (run, reference):
        one.advance(3, -1.0)
    expected = reference.marginals()
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    (gradient,) = torch.autograd.grad(expected, theta, grad)
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    for _ in range(2 if DEVICE == "cpu" else 5):
        torch.testing.assert_close(run.backward(grad.to(dtype)).double(), gradient, rtol=tol, atol=tol)


@on_engine
@pytest.mark.parametrize("record", [kernels.LAST_SWEEP, 1])
def test_an_interrupted_backward_pass_leaves_the_run_as_it_was(monkeypatch, record):
    from riskfield.kernels.gpu.backward import _Backward
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.chain(2, 2)
    theta = numbers(graph).to(DEVICE)
    grad = torch.ones(2, graph.mu_size, dtype=torch.float64, device=DEVICE).cumsum(1)
    problem = MessagePassingProblem(graph, rf.TRW(0.7).counting(graph), rf.Parallel())

    def gradient(run):
        return run.backward(grad) if record > 0 else run.backward_fixed_point(grad, 2, 0.0)[0]

    original, found = _Backward._sweep, []

    def sweep(self, number, place, last):  # to the first one, in a state that is not the final one
        if number == 0:
            raise KeyboardInterrupt
        original(self, number, place, last)

    for interrupted in (False, True):
        run = MessagePassingRun(problem, theta, None, record=record)
        run.advance(2, -1.0)
        if interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(_Backward, "_sweep", sweep)
                with pytest.raises(KeyboardInterrupt):
                    gradient(run)
        found.append([run.marginals(), gradient(run)])
    assert all(map(torch.equal, *found))


@on_engine
def test_all_launches_go_to_the_device_and_buffers_stay_on_their_stream(gpu, monkeypatch):
    from contextlib import contextmanager

    from riskfield.kernels.gpu import backward, buffers, chains, engine, mean_field, packing
    from riskfield.kernels.gpu.run import MessagePassingRun

    entered, launched = [], []

    @contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.pop()

    for module in (backward, buffers, chains, engine, mean_field, packing):
        monkeypatch.setattr(module, "on_device", on_device)
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor as Launch
    else:
        from triton.runtime.jit import JITFunction as Launch
    name = "__call__" if INTERPRETED else "run"
    original = getattr(Launch, name)

    def launch(*arguments, **options):
        launched.append(bool(entered))
        return original(*arguments, **options)

    monkeypatch.setattr(Launch, name, launch)
    loop, chain = rf.FactorGraph([2, 2], [(0, 1), (0, 1)]), rf.chain(2, 2)
    tree = rf.FactorGraph([2, 3], [(0, 1)])
    start = torch.zeros(1, loop.message_size, device=DEVICE, dtype=torch.float64)
    for graph, algorithm, adjoint, messages in (
        (loop, rf.MessagePassing(schedule=rf.Coloured()), rf.Unroll(checkpoint=1), start),
        (loop, rf.MessagePassing(rf.TRW(0.5)), rf.FixedPoint(), None),
        (loop, rf.MeanField(), rf.FixedPoint(), None),
        (loop, rf.MeanField(), rf.Unroll(), None),
        (tree, rf.Exact(), rf.Unroll(), None),
        (chain, rf.Exact(), rf.Unroll(), None),
    ):
        theta = graph.zeros()[None].to(DEVICE).requires_grad_()
        solution = rf.infer(graph, theta, algorithm, stop=rf.Stop(2, 1.0), messages=messages, adjoint=adjoint)
        (solution.mu**2).sum().backward()
    assert launched
    assert all(launched)
    problem, theta, used = rf.MessagePassing(rf.TRW(0.5)).problem(loop), loop.zeros()[None].to(DEVICE), []
    for stream in "aaab":
        for module in (buffers, engine):
            monkeypatch.setattr(module, "current_stream", lambda device, stream=stream: stream)
        run = MessagePassingRun(problem, theta, None)
        used.append(run._buffers)
        del run
    assert used[1] is used[2]
    assert used[3] is not used[2]


@on_engine
def test_a_damping_that_requires_a_gradient_is_a_number_without_one(gpu):
    graph = rf.FactorGraph([2, 2], [(0, 1), (0, 1)])
    theta, stop = numbers(graph).to(DEVICE), rf.Stop(2, tol=None)
    expected = rf.infer(graph, theta, rf.MessagePassing(damping=0.3), stop=stop)
    with torch.no_grad():
        algorithm = rf.MessagePassing(damping=torch.tensor(0.3, dtype=torch.float64, requires_grad=True))
        assert torch.equal(rf.infer(graph, theta, algorithm, stop=stop).mu, expected.mu)
        runs = [algorithm.start(graph, theta, None, None) for _ in range(2)]
    assert runs[0]._engine is runs[1]._engine


@on_engine
@pytest.mark.parametrize("schedule", [rf.Sequential(), rf.Coloured(), rf.Parallel()], ids=repr)
def test_the_estimate_of_a_tape_is_close(schedule):
    from riskfield.kernels.gpu.engine import engine_of
    from riskfield.kernels.tape_size import sweeps_that_fit

    graph = rf.grid(12, 12, 2)
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), schedule)
    theta = torch.zeros(32, graph.theta_size, device="meta")
    engine = engine_of(problem, theta)
    needed = 4 * (engine.tape_size + engine.grad_size)
    assert needed <= 1.1 * 10**12 / sweeps_that_fit(problem, theta, 10**12) <= 1.5 * needed


@on_engine
def test_results_outlive_the_buffers_of_their_run():
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.chain(2, 2)
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured(), 0.0, False)
    results = []
    for seed in (0, 1):
        theta = numbers(graph, 1, seed).to(DEVICE)
        run = MessagePassingRun(problem, theta, None, record=kernels.EVERY_SWEEP)
        run.advance(1, -1.0)
        results.append([run.marginals(), run.messages(), run.backward(torch.ones(1, graph.mu_size).to(theta) * theta)])
        del run
        results.append([tensor.clone() for tensor in results[-1]])
    for kept, copied in zip(results[0], results[1], strict=True):
        assert torch.equal(kept, copied)
    assert not torch.equal(results[0][0], results[2][0])


@on_engine
def test_addresses_of_64_bits():
    from riskfield.kernels.gpu.engine import engine_of
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.FactorGraph([2, 3, 2], [(0, 1), (0, 1, 2)])
    theta = numbers(graph).to(DEVICE)
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Sequential(), 0.0, False)
    found = []
    for wide in (False, True):
        engine_of(problem, theta, canonical=True).wide = wide
        run = MessagePassingRun(problem, theta, None, record=kernels.EVERY_SWEEP)
        assert run._engine.canonical
        assert run._engine.wide == wide
        run.advance(1, -1.0)
        found.append([run.marginals(), run.backward(theta.new_ones(2, graph.mu_size).cumsum(1))])
    for narrow, wide in zip(*found, strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_large_transposes_have_addresses_of_64_bits(monkeypatch):
    from riskfield.kernels.gpu import packing

    launched = []

    class Transpose:
        def __getitem__(self, grid):
            return lambda *arguments, WIDE, **tile: launched.append(WIDE)

    monkeypatch.setattr(packing, "transpose", Transpose())
    monkeypatch.setattr(packing, "on_device", lambda device: nullcontext())
    for height, width, expanded in ((256, 10_000_000, True), (256, 10_000_000, False), (256, 1000, True)):
        theta = torch.empty(1 if expanded else height, width, device="meta").expand(height, -1)
        packing.turn(theta, torch.empty(width, height, device="meta"))
    assert launched == [True, True, False]


@on_engine
@pytest.mark.parametrize("name", ["mixed", "pairs", "grid"])
def test_max_product_in_single_precision(name):
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = GRAPHS[name]()
    theta = numbers(graph).to(DEVICE, torch.float32)
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured(), 0.0, True)
    run, reference = MessagePassingRun(problem, theta, None), Reference(problem, theta, None)
    for one in (run, reference):
        one.advance(2, -1.0)
    torch.testing.assert_close(run.marginals(), reference.marginals(), rtol=1e-4, atol=1e-5)


@on_engine
@pytest.mark.parametrize("name", ["grid", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tables_are_canonical_up_to_their_limit(name, dtype):
    from riskfield.kernels.gpu.packing import _LARGEST
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph, entropy, limit = GRAPHS[name](), rf.TRW(0.5), 0.5 * _LARGEST[dtype]
    generator = torch.Generator().manual_seed(0)
    theta = limit * (2 * torch.rand(2, graph.theta_size, dtype=torch.float64, generator=generator) - 1)
    theta[:, graph.node_size] = -limit
    problem = MessagePassingProblem(graph, entropy.counting(graph), rf.Coloured())
    messages = 0.1 * limit * torch.randn(2, graph.message_size, dtype=torch.float64, generator=generator)
    tol = 1e-9 if dtype == torch.float64 else 1e-3
    for scale in (1.0, 1.01, 30.0):
        theta, messages = (scale * theta).to(DEVICE, dtype), messages.to(DEVICE, dtype)
        exact = theta.double().requires_grad_()
        run = MessagePassingRun(problem, theta, messages, record=kernels.EVERY_SWEEP)
        assert bool(run._engine.canonical) == (scale == 1.0)
        reference = Reference(problem, exact, messages.double())
        for one in (run, reference):
            one.advance(3, -1.0)
        expected = reference.marginals()
        torch.testing.assert_close(run.marginals().double(), expected, rtol=tol, atol=tol)
        (gradient,) = torch.autograd.grad((expected**2).sum(), exact)
        found = run.backward(2 * expected.detach().to(dtype))
        torch.testing.assert_close(found.double(), gradient, rtol=tol, atol=tol)


@on_engine
@pytest.mark.parametrize(("dtype", "unary"), [(torch.float64, -124.0), (torch.float32, -20.0)], ids=str)
def test_marginals_of_canonical_factors_do_not_underflow(dtype, unary):
    from riskfield.kernels.gpu.packing import _LARGEST
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph, limit = rf.FactorGraph([3, 3], [(0, 1)]), _LARGEST[dtype]
    nodes = torch.tensor([-5 * limit, unary, 0.0] * 2)
    table = torch.full((3, 3), -limit)
    for x, y in ((0, 0), (1, 1), (0, 2), (2, 0)):
        table[x, y] = limit
    theta = torch.cat([nodes, table.flatten()])[None].to(DEVICE, dtype)
    exact = theta.double().requires_grad_()
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured())
    run, reference = (
        MessagePassingRun(problem, theta, None, record=kernels.EVERY_SWEEP),
        Reference(problem, exact, None),
    )
    assert run._engine.canonical
    for one in (run, reference):
        one.advance(1, -1.0)
    expected, tol = reference.marginals(), 1e-9 if dtype == torch.float64 else 1e-4
    likely = int(torch.argmax(expected[0, graph.node_size :]))
    assert (likely == 4) == (dtype == torch.float64)  # (1, 1), where both weights are small
    torch.testing.assert_close(run.marginals().double(), expected, rtol=tol, atol=1e-9)
    grad = torch.arange(graph.mu_size, dtype=torch.float64, device=DEVICE)[None] ** 2
    (gradient,) = torch.autograd.grad(expected, exact, grad)
    torch.testing.assert_close(run.backward(grad.to(dtype)).double(), gradient, rtol=tol, atol=tol)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_which_tables_can_be_canonical():
    from riskfield.kernels.gpu.packing import _LARGEST, is_bounded

    def bounded(graph, *entries, dtype=torch.float32, entropy=None):
        theta = graph.zeros()[None].to(dtype)
        theta[0, 0] = -torch.inf  # of a variable
        theta[0, graph.node_size : graph.node_size + len(entries)] = torch.tensor(entries)
        return is_bounded(MessagePassingProblem(graph, (entropy or rf.Bethe()).counting(graph), rf.Coloured()), theta)

    graph, limit = rf.FactorGraph([2, 2, 3], [(0, 1), (1, 2), (2, 1)]), _LARGEST[torch.float32]
    assert bounded(graph, limit, -limit)
    assert bounded(graph, 2 * limit, dtype=torch.float64)
    for entry in (1.1 * limit, -1.1 * limit, -torch.inf, torch.nan):
        assert not bounded(graph, entry)
    least = rf.TRW(torch.tensor([1.0, 0.5, 1.0]))
    assert bounded(graph, 0.5 * limit, entropy=least)
    assert not bounded(graph, 0.6 * limit, entropy=least)  # of the table divided by its counting number
    assert not bounded(tied())
    assert not bounded(rf.FactorGraph([2, 2, 2], [(0, 1, 2), (1,)]))
    assert bounded(rf.FactorGraph([2, 2, 2], [(0, 1), (0, 1, 2)]), 0, 0, 0, 0, -torch.inf)
    star = rf.FactorGraph([2] * 513, [(0, leaf) for leaf in range(1, 513)])
    assert bounded(star, 1.9)
    assert not bounded(star, 2.0)  # 512 messages lose what theta gains: their rounding errors add up
    assert bounded(star, 128.0, dtype=torch.float64)


@on_engine
def test_gradients_of_impossible_states_are_zero():
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.grid(3, 3, 2)
    theta = numbers(graph, impossible="of variables").to(DEVICE, torch.float32)
    problem = MessagePassingProblem(graph, rf.TRW(0.5).counting(graph), rf.Coloured())
    run = MessagePassingRun(problem, theta, None, record=kernels.EVERY_SWEEP)
    assert run._engine.odds
    run.advance(3, -1.0)
    grad = torch.randn(2, graph.mu_size, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert (run.backward(grad)[theta == -torch.inf] == 0).all()


@on_engine
def test_without_pairs_there_is_one_engine():
    from riskfield.kernels.gpu.engine import engine_of

    for graph, same in ((tied(), True), (rf.FactorGraph([2, 2], [(0, 1), (0, 1)]), False)):
        problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured())
        found = [engine_of(problem, graph.zeros()[None].to(DEVICE), canonical=canonical) for canonical in (True, False)]
        assert (found[0] is found[1]) == same


@on_engine
def test_hubs_lose_no_precision():
    from riskfield.kernels.gpu.run import MessagePassingRun

    leaves = 128
    graph = rf.FactorGraph([2] * (leaves + 1), [(0, leaf) for leaf in range(1, leaves + 1)])
    theta = 0.3 * torch.randn(1, graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta[:, : graph.node_size] = torch.tensor([-60.0, 0.0]).repeat(leaves + 1)
    theta[:, :2] = 0.0
    graph.factor_views(theta)[0][..., 0] += torch.tensor([13.0, -13.0])
    theta = theta.to(DEVICE, torch.float32)
    problem = MessagePassingProblem(graph, rf.Bethe().counting(graph), rf.Coloured())
    run, reference = MessagePassingRun(problem, theta, None), Reference(problem, theta.double(), None)
    for one in (run, reference):
        one.advance(1, -1.0)
    torch.testing.assert_close(run.marginals().double(), reference.marginals(), rtol=1e-5, atol=1e-5)


@on_engine
@pytest.mark.parametrize("table", [[0.5, -1.0, 1.5, 0.0], [30.0, -30.0, -30.0, 30.0], [-torch.inf, 1.0, 1.0, 0.0]])
def test_tied_tables_with_several_counting_numbers(table):
    from riskfield.kernels.gpu.run import MessagePassingRun

    graph = rf.FactorGraph([2, 2, 2, 3, 3], [(0, 1), (1, 2), (3, 4)], tables=[0, 0, 1])
    theta = numbers(graph).to(DEVICE, torch.float32)
    theta[:, graph.node_size : graph.node_size + 4] = torch.tensor(table)
    counting = rf.TRW(torch.tensor([0.7, 0.6, 0.9])).counting(graph)
    problem = MessagePassingProblem(graph, counting, rf.Coloured())
    run, reference = MessagePassingRun(problem, theta, None), Reference(problem, theta.double(), None)
    assert bool(run._engine.canonical) == (table[0] == 0.5)
    for one in (run, reference):
        one.advance(2, -1.0)
    torch.testing.assert_close(run.marginals().double(), reference.marginals(), rtol=1e-4, atol=1e-5)


@on_engine
def test_runs_to_a_tolerance_and_their_gradients(gpu):
    graph = rf.chain(3, 2)
    theta = numbers(graph) * torch.tensor([[0.01], [1.0]], dtype=torch.float64)
    algorithm, stop = rf.MessagePassing(rf.TRW(0.7), rf.Coloured(), 0.3), rf.Stop(100, 1e-9)
    results = []
    for device, names in ((DEVICE, None), ("cpu", "torch")):
        leaf = theta.to(device).requires_grad_()
        solution = rf.infer(graph, leaf, algorithm, stop=stop, adjoint=rf.Unroll(), kernels=names)
        assert solution.converged.all()
        results.append([solution.mu.cpu(), *(g.cpu() for g in torch.autograd.grad((solution.mu**2).sum(), leaf))])
        if names is None:
            assert solution.sweeps[0] < solution.sweeps[1]  # what has converged is left alone
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@on_engine
def test_impossible_models(gpu):
    graph = rf.grid(2, 2, 2)
    theta = torch.zeros(3, graph.theta_size, dtype=torch.float64)
    graph.factor_views(theta)[0][1, 0] = -torch.inf
    algorithm = rf.MessagePassing(schedule=rf.Coloured())
    run = algorithm.start(graph, theta.to(DEVICE), None, None)
    residual, _ = run.advance(20, 1e-6)
    assert torch.isnan(residual).tolist() == [False, True, False]
    assert torch.isnan(run.marginals().sum(-1)).tolist() == [False, True, False]


@on_engine
def test_infer_takes_the_engine_and_names_what_it_lacks(gpu):
    graph = rf.FactorGraph([2, 2], [(0, 1), (0, 1)])
    theta = numbers(graph).to(DEVICE)
    algorithm, stop = rf.MessagePassing(), rf.Stop(1, tol=None)
    assert type(algorithm.start(graph, theta, None, None)).__module__ == "riskfield.kernels.gpu.run"
    leaf = theta.clone().requires_grad_()
    (first,) = torch.autograd.grad((rf.infer(graph, leaf, algorithm, stop=stop).mu ** 3).sum(), leaf, create_graph=True)
    with pytest.warns(rf.errors.PerformanceWarning, match="second derivatives"):
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
    other = theta.clone().requires_grad_()
    mu = rf.infer(graph, other, algorithm, stop=stop, kernels="torch").mu
    (expected,) = torch.autograd.grad((mu**3).sum(), other, create_graph=True)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, torch.autograd.grad((expected**2).sum(), other)[0])
    damped = rf.MessagePassing(damping=torch.tensor(0.1, requires_grad=True))
    with pytest.warns(rf.errors.PerformanceWarning, match="damping"):
        rf.infer(graph, leaf, damped, stop=stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rf.errors.PerformanceWarning)
        rf.infer(graph, leaf, damped, stop=stop)  # said once
    empty = torch.zeros(0, graph.theta_size, dtype=torch.float64, device=DEVICE)
    assert rf.infer(graph, empty, algorithm, stop=stop).mu.shape == (0, graph.mu_size)


@on_engine
def test_deep_schedules_are_named(gpu):
    graph = rf.grid(2, 70, 2)
    theta = graph.zeros()[None].to(DEVICE)
    with pytest.warns(rf.errors.PerformanceWarning, match=r"Sequential.*Coloured\(\)"):
        rf.MessagePassing().start(graph, theta, None, None)
    rf.MessagePassing(schedule=rf.Coloured()).start(graph, theta, None, None)
    rf.MessagePassing().start(rf.chain(300, 2), rf.chain(300, 2).zeros()[None].to(DEVICE), None, None)


def test_a_coloured_grid_has_two_stages():
    graph = rf.grid(4, 5, 2)
    plan = make_plan(graph, schedule_levels(graph, rf.Coloured()), False, torch.device("cpu"))
    assert [sum(block.count for block, _ in stage) for stage in plan.stages] == [10, 10]
    if TRITON:
        from riskfield.kernels.gpu.two_colours import two_coloured

        assert two_coloured(plan)
