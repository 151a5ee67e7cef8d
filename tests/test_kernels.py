"""`kernels.start`: three kernels, each of which runs a task or names what it lacks."""

import pytest
import torch

import riskfield as rf
from riskfield import kernels
from riskfield.errors import KernelError
from riskfield.kernels import torch_reference
from strategies import potentials

GRAPH = rf.grid(3, 3, 2)
THETA = potentials(GRAPH, 0)[None]
PROBLEMS = {
    "message passing": rf.MessagePassing(rf.TRW(0.5), damping=0.2).problem(GRAPH),
    "max-product": rf.MaxProduct().problem(GRAPH),
    "mean field": rf.MeanField().problem(GRAPH),
}
STEPS = (torch.ones_like(THETA), torch.tensor([[0.0], [0.5]], dtype=torch.float64))


@pytest.mark.parametrize("name", PROBLEMS)
def test_native_and_torch_runs_agree(name):
    pytest.importorskip("riskfield._native")
    runs = [kernels.start(PROBLEMS[name], THETA, kernels=which) for which in ("native", "torch")]
    for run in runs:
        run.advance(5, -1.0)
    torch.testing.assert_close(runs[0].marginals(), runs[1].marginals())
    again = [kernels.start(PROBLEMS[name], THETA, runs[0].messages(), kernels=which) for which in ("native", "torch")]
    for run in again:
        run.advance(1, -1.0)
    torch.testing.assert_close(again[0].marginals(), again[1].marginals())


@pytest.mark.parametrize("name", ["message passing", "mean field"])
def test_every_option_of_native_runs_agrees_with_autograd(name):
    pytest.importorskip("riskfield._native")
    grad = torch.linspace(0, 1, GRAPH.mu_size, dtype=torch.float64)[None]
    tangent = potentials(GRAPH, 1)[None]

    def marginals(theta):
        run = kernels.start(PROBLEMS[name], theta, kernels="torch")
        run.advance(3, -1.0)
        return run.marginals()

    mu, slope = torch.autograd.functional.jvp(marginals, THETA, tangent)
    _, gradient = torch.autograd.functional.vjp(marginals, THETA, grad)
    run = kernels.start(PROBLEMS[name], THETA, record=kernels.EVERY_SWEEP, tangent=tangent)
    run.advance(3, -1.0)
    torch.testing.assert_close(run.marginals(), torch.complex(mu, slope))
    torch.testing.assert_close(run.backward(grad).real, gradient)
    steps = kernels.start(PROBLEMS[name], THETA, along=STEPS)
    steps.advance(3, -1.0)
    expected = torch.cat([mu, marginals(THETA + 0.5)])
    torch.testing.assert_close(steps.marginals(), expected)
    torch.testing.assert_close(steps.marginals(torch.tensor([[2.0], [3.0]])), expected[:1] * 2 + expected[1:] * 3)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"record": kernels.EVERY_SWEEP}, "tapes"),
        ({"record": kernels.LAST_SWEEP, "tangent": THETA}, "tapes"),
        ({"tangent": THETA}, "tangents"),
        ({"along": STEPS}, "several steps"),
    ],
    ids=["record", "record and tangent", "tangent", "along"],
)
def test_torch_kernels_name_what_they_lack(options, missing):
    with pytest.raises(KernelError, match=f"The torch kernels do not support {missing}"):
        kernels.start(PROBLEMS["message passing"], THETA, kernels="torch", **options)


def test_native_kernels_name_what_they_lack():
    pytest.importorskip("riskfield._native")

    def missing(problem="message passing", theta=THETA, **options):
        with pytest.raises(KernelError, match="The native kernels do not support") as caught:
            kernels.start(PROBLEMS[problem], theta, kernels="native", **options)
        return str(caught.value)

    assert "on meta" in missing(theta=THETA.to("meta"))
    assert "torch.float16" in missing(theta=THETA.half())
    assert "autograd" in missing(theta=THETA.clone().requires_grad_())
    assert "max-product" in missing("max-product", record=kernels.EVERY_SWEEP)
    said = []
    torch.func.vmap(lambda theta: said.append(missing(theta=theta)) or theta)(THETA[None])
    assert "torch.func" in said[0]


def test_gradients_choose_the_torch_kernels():
    run = kernels.start(PROBLEMS["message passing"], THETA.clone().requires_grad_())
    assert isinstance(run, torch_reference.MessagePassingRun)


def test_without_kernels_for_it_every_one_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "native_available", lambda: False)
    with pytest.raises(KernelError, match=r"native kernels do not support anything without.*torch kernels .* tapes"):
        kernels.start(PROBLEMS["mean field"], THETA, record=kernels.EVERY_SWEEP)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match=r'`kernels` must be "native", "gpu", "torch" or None\. Got'):
        rf.infer(GRAPH, THETA[0], kernels="cuda")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_tensors_inside_a_transformation_are_recognised():
    seen = []

    def look(x):
        seen.append(kernels.is_transformed(x))
        return x.sum()

    torch.func.grad(look)(THETA[0])
    torch.func.vmap(look)(THETA)
    torch.func.jvp(look, (THETA[0],), (THETA[0],))
    look(THETA[0].clone().requires_grad_())
    assert seen == [True, True, True, False]
