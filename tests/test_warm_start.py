"""Warm starts: the same optimum in fewer sweeps."""

import sys

import pytest
import torch

import riskfield as rf
from learning_cases import chain_examples, chain_model, denoising, values

module = sys.modules["riskfield.infer"]  # `rf.infer` is the function
LOSS = rf.losses.UnivariateLogistic()
HOW = (rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-9), rf.FixedPoint(tol=1e-9))


@pytest.fixture
def sweeps(monkeypatch):
    """The sweeps of every run of inference, and whether it was given messages."""
    ran, infer = [], module.infer

    def counting(*arguments, **settings):
        solution = infer(*arguments, **settings)
        ran.append((settings["messages"] is not None, solution.sweeps.double().mean().item()))
        return solution

    monkeypatch.setattr(module, "infer", counting)
    return ran


def test_the_same_optimum_in_fewer_sweeps(sweeps):
    data = denoising(6, side=6)
    cold, warm = rf.LinearModel(2, 2, 2), rf.LinearModel(2, 2, 2)
    settings = {"ridge": 1e-2, "progress": False, "optimiser": rf.optim.LBFGS(iterations=40)}
    rf.fit(cold, data, LOSS, rf.Inference(*HOW), **settings)
    assert not any(given for given, _ in sweeps)
    sweeps.clear()
    rf.fit(warm, data, LOSS, rf.Inference(*HOW), warm_start=True, **settings)
    assert torch.allclose(values(cold), values(warm), atol=1e-4)
    assert [given for given, _ in sweeps] == [False] + [True] * (len(sweeps) - 1)
    last = [count for _, count in sweeps[-3:]]
    needed = rf.Inference(*HOW)(data.graph, cold(data.graph, data.inputs).detach()).sweeps.double().mean()
    assert max(last) < 0.75 * float(needed)


def test_examples_find_their_own_messages_in_batches(sweeps):
    """At fixed parameters a second pass finds every example converged, in whatever batch it comes."""
    data = [chain_examples(7), chain_examples(4, seed=1, graph=rf.chain(8, 3, tied=True))]
    optimiser = rf.optim.Torch(torch.optim.SGD, {"lr": 0.0}, batch_size=3, epochs=2)
    rf.fit(chain_model(seed=0), data, LOSS, rf.Inference(*HOW), warm_start=True, optimiser=optimiser, progress=False)
    half = len(sweeps) // 2
    assert min(count for _, count in sweeps[:half]) >= 2
    assert {count for _, count in sweeps[half:]} == {1.0}


def test_one_theta_for_all_examples_has_one_set_of_messages(sweeps):
    """A generative model with hidden variables: a free run of one theta, and a clamped one per example."""
    graph = rf.grid(2, 3, 2)
    labels = torch.randint(-1, 2, (5, 6), generator=torch.Generator().manual_seed(0))
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-10), rf.Envelope())
    cold, warm = rf.models.Generative(graph), rf.models.Generative(graph)
    settings = {"ridge": 0.05, "progress": False, "optimiser": rf.optim.LBFGS(gradient_tol=1e-7, change_tol=1e-12)}
    rf.fit(warm, rf.Examples(graph, labels), rf.losses.SurrogateEM(), inference, warm_start=True, **settings)
    assert [given for given, _ in sweeps[:4]] == [False, False, True, True]
    rf.fit(cold, rf.Examples(graph, labels), rf.losses.SurrogateEM(), inference, **settings)
    assert torch.allclose(values(cold), values(warm), atol=1e-5)


def test_messages_are_let_go_at_checkpoints(sweeps, tmp_path):
    data, optimiser = denoising(3, side=4), rf.optim.LBFGS(iterations=4, line_search=1)
    settings = {"progress": False, "checkpoint": rf.Checkpoints(tmp_path, every=2), "optimiser": optimiser}
    rf.fit(rf.LinearModel(2, 2, 2), data, LOSS, rf.Inference(*HOW), warm_start=True, ridge=1e-2, **settings)
    assert [given for given, _ in sweeps].count(False) == 2


def test_forests_among_loopy_graphs_are_solved_exactly(sweeps):
    data = [denoising(2, side=3), denoising(2, side=1)]
    choice = rf.ExactOnForests(rf.Inference(*HOW))
    optimiser = rf.optim.LBFGS(iterations=3)
    rf.fit(rf.LinearModel(2, 2, 2), data, LOSS, choice, warm_start=True, optimiser=optimiser, progress=False)
    assert [given for given, _ in sweeps[:4]] == [False, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((rf.MessagePassing(), rf.Stop(5, tol=None), rf.FixedPoint()), "stops at a tolerance. Got a fixed number"),
        ((rf.MessagePassing(), rf.Stop(tol=1e-5), rf.Unroll()), "holds at convergence.* Got Unroll"),
        ((rf.MessagePassing(), rf.Stop(tol=1e-5)), "holds at convergence.* Got None"),
        (None, "`warm_start` needs `inference`. Got None."),
    ],
)
def test_what_cannot_be_warm_started_is_refused(arguments, message):
    inference = None if arguments is None else rf.Inference(*arguments)
    with pytest.raises(ValueError, match=message):
        rf.fit(chain_model(), chain_examples(), LOSS, inference, warm_start=True)


def test_a_memory_must_keep_messages():
    with pytest.raises(TypeError, match="`memory` must keep messages"):
        rf.Inference(memory=[0.0])
