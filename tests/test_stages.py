"""Training that continues: in stages, in increments, and from the messages of earlier iterations."""

import sys

import pytest
import torch

import riskfield as rf
from learning_cases import EXACT, TRUNCATED, chain_examples, chain_model, denoising, values
from riskfield.learning.objective import Objective

# Staged and incremental training.


LOSS = rf.losses.UnivariateLogistic()


def test_a_stage_starts_where_the_one_before_it_ended():
    data = chain_examples(40)
    alone = chain_model()
    rf.fit(alone, data, rf.losses.Independent(), ridge=1e-3, progress=False)
    staged = chain_model()
    stages = [
        rf.learning.Stage(rf.losses.Independent(), ridge=1e-3),
        rf.learning.Stage(LOSS, TRUNCATED, rf.optim.LBFGS(iterations=4)),
    ]
    first, second = rf.learning.fit_stages(staged, data, stages, progress=False)
    by_hand = rf.fit(alone, data, LOSS, TRUNCATED, optimiser=rf.optim.LBFGS(iterations=4), progress=False)
    assert [record.objective for record in second.history] == [record.objective for record in by_hand.history]
    assert torch.equal(values(staged), values(alone))
    cold = rf.fit(chain_model(), data, LOSS, TRUNCATED, optimiser=rf.optim.LBFGS(iterations=1), progress=False)
    assert second.history[0].objective < cold.history[0].objective
    assert first.reason is rf.learning.Reason.CONVERGED


def test_incremental_training_doubles_examples_and_halves_iterations():
    stages = rf.learning.incremental(rf.learning.Stage(LOSS, EXACT, rf.optim.LBFGS(iterations=1000), ridge=1e-3), 200)
    plan = [(stage.examples, stage.optimiser.iterations) for stage in stages]
    assert plan == [(32, 1000), (64, 500), (128, 250), (None, 125)]
    assert all(stage.ridge == 1e-3 and stage.inference is EXACT for stage in stages)
    assert [stage.examples for stage in rf.learning.incremental(rf.learning.Stage(LOSS), 32)] == [None]


def test_incremental_training_reaches_the_optimum_of_all_examples():
    data = chain_examples(100)
    tight = rf.optim.LBFGS(iterations=3200, gradient_tol=1e-8, change_tol=1e-15)
    found, whole = chain_model(), chain_model()
    stages = rf.learning.incremental(rf.learning.Stage(LOSS, EXACT, tight, ridge=1e-2), len(data), start=8)
    results = rf.learning.fit_stages(found, data, stages, progress=False)
    rf.fit(whole, data, LOSS, EXACT, optimiser=tight, ridge=1e-2, progress=False)
    assert len(results) == 5
    assert torch.allclose(values(found), values(whole), atol=1e-5)


def test_small_stages_are_parts_of_larger_ones():
    from riskfield.learning.ranks import Ranks
    from riskfield.learning.stages import _subset

    def labels(number, ranks=None):
        blocks = _subset([chain_examples(20), chain_examples(10, seed=1)], number, 3, ranks or Ranks())
        return {tuple(row) for block in blocks for row in block.inputs["nodes"].flatten(1).tolist()}

    assert labels(4) < labels(9) < labels(30)
    assert [len(labels(k)) for k in (4, 9, 30)] == [4, 9, 30]


def test_a_diverged_stage_is_the_last_one():
    def poison(record, model):
        next(model.parameters()).data.fill_(float("nan"))

    stages = [rf.learning.Stage(LOSS, EXACT, rf.optim.Torch(epochs=3)), rf.learning.Stage(LOSS, EXACT)]
    with pytest.warns(rf.errors.DivergenceWarning):
        results = rf.learning.fit_stages(chain_model(), chain_examples(), stages, callbacks=[poison], progress=False)
    assert [result.reason for result in results] == [rf.learning.Reason.DIVERGED]


def test_stages_resume_where_they_were(tmp_path):
    data = chain_examples(40)
    stages = rf.learning.incremental(
        rf.learning.Stage(LOSS, EXACT, rf.optim.LBFGS(iterations=8), ridge=1e-3), len(data), start=10
    )
    whole = chain_model()
    rf.learning.fit_stages(whole, data, stages, progress=False)
    calls = []

    def interrupt(record, model):
        calls.append(record)
        if len(calls) == 11:
            raise KeyboardInterrupt

    settings = {"checkpoint": rf.Checkpoints(tmp_path / "run", every=2), "progress": False}
    cut, resumed = chain_model(), chain_model()
    results = rf.learning.fit_stages(cut, data, stages, callbacks=[interrupt], **settings)
    assert [result.reason for result in results] == [rf.learning.Reason.ITERATIONS, rf.learning.Reason.INTERRUPTED]
    results = rf.learning.fit_stages(resumed, data, stages, resume=True, **settings)
    assert len(results) == 3
    assert torch.equal(values(resumed), values(whole))


def test_bad_stages_are_refused():
    with pytest.raises(TypeError, match="`stage` must use `LBFGS`"):
        rf.learning.incremental(rf.learning.Stage(LOSS, EXACT, rf.optim.Torch()), 100)
    with pytest.raises(ValueError, match=r"`start` must be a positive integer. Got 0."):
        rf.learning.incremental(rf.learning.Stage(LOSS), 100, start=0)
    with pytest.raises(ValueError, match=r"`examples` must be a positive integer. Got 0."):
        rf.learning.fit_stages(chain_model(), chain_examples(), [rf.learning.Stage(LOSS, EXACT, examples=0)])


def test_objective_of_a_stage_is_that_of_its_examples():
    """The last record of a stage on 5 examples is the objective of 5 of them."""
    data, model = chain_examples(20), chain_model()
    stage = rf.learning.Stage(LOSS, EXACT, rf.optim.LBFGS(iterations=2), examples=5)
    (result,) = rf.learning.fit_stages(model, data, [stage], progress=False, seed=4)
    chosen = torch.randperm(20, generator=torch.Generator().manual_seed(4))[:5]
    assert result.best.risk == pytest.approx(Objective(model, data.select(chosen), LOSS, EXACT).risk(), rel=1e-12)


# Warm starts: the same optimum in fewer sweeps.


module = sys.modules["riskfield.infer"]  # `rf.infer` is the function

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


def test_a_patch_pseudolikelihood_leaves_the_messages_of_the_examples_alone():
    """Its runs have an axis for the colours of patches, which those of other losses do not have."""
    graph = rf.grid(3, 4, 2)
    data = rf.Examples(graph, torch.randint(2, (5, 12), generator=torch.Generator().manual_seed(0)))
    patches = rf.losses.PatchPseudolikelihood(torch.arange(3).repeat_interleave(4))
    loss = rf.losses.Hybrid(rf.losses.UnivariateLogistic(), patches, weight=0.5)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-10), rf.FixedPoint())
    for own in (patches, loss):
        cold, warm = rf.models.Generative(graph), rf.models.Generative(graph)
        for model, warm_start in ((cold, False), (warm, True)):
            rf.fit(model, data, own, inference, ridge=0.1, warm_start=warm_start)
        assert torch.allclose(values(cold), values(warm), atol=1e-5)


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
    with pytest.raises(TypeError, match="`memory` must be an object with the methods `recall` and `keep`"):
        rf.Inference(memory=[0.0])
