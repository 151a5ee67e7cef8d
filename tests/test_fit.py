"""`fit` as a whole: what it minimises, when it stops, what it leaves in the model, and that it repeats itself."""

import math
import sys
import time

import pytest
import torch

import riskfield as rf
from learning_cases import CHAIN, EXACT, TRUNCATED, chain_examples, chain_model, denoising, values
from riskfield.learning.objective import Objective

LOSS = rf.losses.UnivariateLogistic()
ADAM = rf.optim.Torch(torch.optim.Adam, {"lr": 0.05}, batch_size=8, epochs=4)
SMD = rf.optim.SMD(gain=0.3, batch_size=10, epochs=2)


def fit(model, data, *rest, **settings):
    return rf.fit(model, data, *(rest or (LOSS, EXACT)), **{"progress": False, **settings})


# -- what it finds ----------------------------------------------------------------------------------------------------


def test_exact_likelihood_matches_moments():
    """At the maximum likelihood of a generative model without ridge, marginals are the frequencies of the data."""
    graph = rf.chain(4, 2)
    labels = torch.randint(0, 2, (50, 4), generator=torch.Generator().manual_seed(1))
    model = rf.models.Generative(graph)
    result = fit(
        model,
        rf.Examples(graph, labels),
        rf.losses.SurrogateLikelihood(),
        EXACT,
        optimiser=rf.optim.LBFGS(change_tol=1e-15),
    )
    assert result.reason is rf.learning.Reason.CONVERGED
    mu = EXACT(graph, model(graph).detach()).mu
    pairs = torch.stack([labels[:, :-1], labels[:, 1:]], -1)
    for variable in range(4):
        assert torch.allclose(graph.node(mu, variable)[1], labels[:, variable].double().mean(), atol=1e-5)
    for factor in range(3):
        both = (pairs[:, factor] == 1).all(-1).double().mean()
        assert torch.allclose(graph.factor(mu, factor)[1, 1], both, atol=1e-5)


def test_ridge_is_relative_to_the_risk_per_variable():
    """The same ridge for twice the data, or twice the variables, gives the same parameters; a sum does not."""
    data, ridge = chain_examples(12), 1e-2
    twice = [data, data]
    tight = rf.optim.LBFGS(gradient_tol=1e-9, change_tol=1e-15)
    found = []
    for examples, per_variable, weight in ((data, True, 1), (twice, True, 1), (data, False, 60), (twice, False, 120)):
        model = chain_model()
        fit(model, examples, ridge=weight * ridge, per_variable=per_variable, optimiser=tight)
        found.append(values(model))
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-6)


def test_every_loss_trains_a_conditional_model():
    """Through truncated TRW or without inference, each criterion ends well below the error of guessing."""
    train, test = chain_examples(60), chain_examples(200, seed=1)
    losses = [
        *(
            rf.losses.UnivariateQuadratic(),
            rf.losses.SmoothedClassification(5.0),
            rf.losses.CliqueLogistic(),
            rf.losses.SurrogateEM(),
        ),
        *(
            rf.losses.Pseudolikelihood(),
            rf.losses.Piecewise(),
            rf.losses.Independent(),
            rf.losses.Hybrid(LOSS, rf.losses.MSE(), 0.5),
        ),
        lambda solution, labels, mask: LOSS.of_solution(solution, labels, mask),
    ]
    for loss in losses:
        model = chain_model()
        fit(model, train, loss, TRUNCATED, ridge=1e-3, optimiser=rf.optim.LBFGS(iterations=30))
        solution = TRUNCATED(CHAIN, model(CHAIN, test.inputs).detach())
        assert float((solution.mode() != test.labels).double().mean()) < 0.45, loss


def test_a_sum_over_graphs_of_different_sizes():
    data = [chain_examples(10), chain_examples(5, seed=2, graph=rf.chain(9, 3, tied=True))]
    model = chain_model()
    result = fit(model, data, ridge=1e-3)
    assert result.best.objective == pytest.approx(Objective(model, data, LOSS, EXACT, ridge=1e-3)().value, rel=1e-12)
    chunked = chain_model()
    fit(chunked, data, ridge=1e-3, chunk_size=3)
    assert torch.allclose(values(model), values(chunked), atol=1e-5)


# -- stochastic optimisers --------------------------------------------------------------------------------------------


def test_torch_optimisers_see_the_gradient_of_each_batch():
    """Two epochs by hand, on the batches of the same seeds."""
    from riskfield.learning.optimiser import seed_of

    data, model, other = chain_examples(20), chain_model(seed=1), chain_model(seed=1)
    optimiser = rf.optim.Torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, batch_size=6, epochs=2)
    result = fit(model, data, ridge=0.01, optimiser=optimiser, seed=7)
    objective = Objective(other, data, LOSS, EXACT)
    by_hand = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    for epoch in (1, 2):
        for batch in objective.batches(6, seed_of(7, epoch)):
            part = data.select(batch)
            by_hand.zero_grad()
            risk = rf.losses.empirical_risk(
                LOSS, CHAIN, other(CHAIN, part.inputs), part.labels, EXACT, per_variable=True
            )
            (risk + 0.01 * sum(p.square().sum() for p in other.parameters())).backward()
            by_hand.step()
    assert result.reason is rf.learning.Reason.ITERATIONS
    assert result.history[-1].evaluations == 8
    assert torch.allclose(values(model), values(other), rtol=1e-12)


def test_smd_is_its_recursion():
    """Gains, parameters and the past by hand, with Hessians from autograd."""
    data, model = chain_examples(4), chain_model(seed=1)
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(3, tol=None), rf.Unroll())
    optimiser = rf.optim.SMD(gain=0.2, meta_gain=0.5, decay=0.9, batch_size=4, epochs=4)
    start = values(model)
    fit(model, data, LOSS, inference, ridge=0.01, optimiser=optimiser)

    shadow = chain_model()
    names, shapes = zip(*[(name, p.shape) for name, p in shadow.named_parameters()], strict=True)

    def objective(gamma):
        parts = [part.view(shape) for part, shape in zip(gamma.split([s.numel() for s in shapes]), shapes, strict=True)]
        theta = torch.func.functional_call(shadow, dict(zip(names, parts, strict=True)), (CHAIN, data.inputs))
        risk = rf.losses.empirical_risk(LOSS, CHAIN, theta, data.labels, inference, per_variable=True)
        return risk + 0.01 * gamma.square().sum()

    gamma, gain, past = start, torch.full_like(start, 0.2), torch.zeros_like(start)
    for _ in range(4):
        gradient = torch.autograd.functional.jacobian(objective, gamma)
        hessian = torch.autograd.functional.hessian(objective, gamma)
        gain = gain * (1 - 0.5 * gradient * past).clamp(min=0.5)
        gamma = gamma - gain * gradient
        past = 0.9 * past - gain * (gradient + 0.9 * hessian @ past)
    assert (gain != 0.2).all()
    assert torch.allclose(values(model), gamma, rtol=1e-9)


def test_smd_beats_descent_with_the_gains_it_began_with():
    data = chain_examples(60)
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(2, tol=None), rf.Unroll())
    found = {}
    for meta_gain in (0.0, 20.0):
        smd = rf.optim.SMD(gain=0.3, meta_gain=meta_gain, batch_size=20, epochs=4)
        found[meta_gain] = fit(chain_model(), data, LOSS, inference, optimiser=smd).history[-1].objective
    assert found[20.0] < found[0.0] - 0.1


def test_smd_ends_when_a_pass_gains_too_little():
    data = chain_examples(60)
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(2, tol=None), rf.Unroll())
    smd = rf.optim.SMD(gain=1.0, batch_size=20, epochs=50, tol=0.05)
    result = fit(chain_model(), data, LOSS, inference, optimiser=smd)
    assert result.reason is rf.learning.Reason.CONVERGED
    assert "a pass lowered the objective by less than a fraction of 0.05" in result.explanation
    values = [record.objective for record in result.history]
    assert all(b <= 0.95 * min(values[: k + 1]) for k, b in enumerate(values[1:-1]))
    assert values[-1] > 0.95 * min(values[:-1])


def test_smd_needs_second_derivatives():
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(tol=1e-8), rf.FixedPoint())
    with pytest.raises(rf.errors.AdjointError, match=r"first derivatives only. Use `Unroll`"):
        fit(chain_model(), chain_examples(4), LOSS, inference, optimiser=SMD)


def test_contrastive_divergence_keeps_the_newest_parameters():
    graph = rf.chain(3, 2)
    truth = graph.zeros()
    truth[:] = torch.randn(graph.theta_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = rf.sample(graph, truth, 2000, seed=1).reshape(-1, 3)
    model = rf.models.Generative(graph)
    optimiser = rf.optim.Torch(torch.optim.Adam, {"lr": 0.05}, batch_size=200, epochs=15)
    result = fit(model, rf.Examples(graph, labels), rf.losses.ContrastiveDivergence(steps=3), None, optimiser=optimiser)
    assert result.best == result.history[-1]
    assert torch.allclose(EXACT(graph, model(graph).detach()).mu, EXACT(graph, truth).mu, atol=0.05)


# -- determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", [rf.optim.LBFGS(iterations=5), ADAM, SMD], ids=["lbfgs", "adam", "smd"])
def test_the_seed_decides_everything(optimiser):
    """With a model that draws random numbers; torch's own generator goes on as if nothing had happened."""

    def run(seed):
        model = torch.nn.ModuleDict({"drop": torch.nn.Dropout(0.3), "crf": chain_model()})
        model.forward = lambda graph, inputs: model["crf"](graph, {"nodes": model["drop"](inputs["nodes"])})
        torch.manual_seed(1)
        fit(model, chain_examples(20), LOSS, TRUNCATED, optimiser=optimiser, seed=seed)
        return values(model), float(torch.rand(1))

    (first, drawn), (again, drawn_again), (other, _) = run(0), run(0), run(1)
    torch.manual_seed(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert drawn == drawn_again == float(torch.rand(1))


# -- when it stops ----------------------------------------------------------------------------------------------------


def test_iterations_end_it():
    result = fit(chain_model(), chain_examples(), optimiser=rf.optim.LBFGS(iterations=3))
    assert result.reason is rf.learning.Reason.ITERATIONS
    assert [record.iteration for record in result.history] == [1, 2, 3]
    assert repr(result).startswith("Fit(3 iterations, objective 0.")


def test_callbacks_see_every_iteration_and_can_end_it():
    seen = []

    def callback(record, model):
        seen.append((record, values(model)))
        return record.iteration == 4

    model = chain_model()
    result = fit(model, chain_examples(), callbacks=[callback, lambda record, model: None])
    assert result.reason is rf.learning.Reason.CALLBACK
    assert tuple(record for record, _ in seen) == result.history
    assert len(seen) == 4
    assert torch.equal(seen[-1][1], values(model))


def test_validation_stops_early_and_keeps_the_best():
    """Six examples and thirty features: training goes on to improve long after validation does not."""
    train, held_out = chain_examples(6, features=30), chain_examples(50, seed=1, features=30)
    model = chain_model(30)
    result = fit(model, train, validation=rf.Validation(held_out, patience=4))
    looks = [record.validation for record in result.history]
    assert result.reason is rf.learning.Reason.VALIDATION
    assert result.best.validation == min(looks)
    assert result.best.iteration == len(looks) - 4
    assert result.history[-1].objective < result.best.objective
    assert Objective(model, held_out, LOSS, EXACT).risk() == pytest.approx(min(looks), rel=1e-12)


def test_validation_can_look_at_another_loss_now_and_then():
    held_out = chain_examples(20, seed=1)
    validation = rf.Validation(held_out, loss=rf.losses.UnivariateQuadratic(), inference=TRUNCATED, every=3)
    model = chain_model()
    result = fit(model, chain_examples(), validation=validation, optimiser=rf.optim.LBFGS(iterations=7))
    looks = [record.validation for record in result.history]
    assert [look is not None for look in looks] == [False, False, True, False, False, True, False]
    found = Objective(model, held_out, rf.losses.UnivariateQuadratic(), TRUNCATED).risk()
    assert found == pytest.approx(min(look for look in looks if look is not None), rel=1e-12)


def test_validation_puts_the_model_in_evaluation_mode_and_back():
    modes = []

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.crf, self.frozen = chain_model(), torch.nn.Dropout()
            self.frozen.eval()

        def forward(self, graph, inputs):
            modes.append((self.training, self.frozen.training, len(inputs["nodes"])))
            return self.crf(graph, inputs)

    model = Watched()
    fit(model, chain_examples(4), validation=chain_examples(3), optimiser=rf.optim.LBFGS(iterations=2))
    assert {mode for mode in modes if mode[2] == 4} == {(True, False, 4)}
    assert {mode for mode in modes if mode[2] == 3} == {(False, False, 3)}
    assert model.training
    assert not model.frozen.training


# -- divergence -------------------------------------------------------------------------------------------------------


def few_sweeps(sweeps):
    return rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps, tol=None), rf.Unroll())


def test_a_likelihood_of_too_few_sweeps_diverges_where_a_marginal_loss_does_not():
    """The remark below Table 2 of Domke (2013), on a smaller problem."""
    train, test, settings = denoising(), denoising(seed=1), {"ridge": 1e-3, "optimiser": rf.optim.LBFGS(iterations=60)}

    def error(model, inference):
        solution = inference(test.graph, model(test.graph, test.inputs).detach())
        return float((solution.mode() != test.labels).double().mean())

    model = rf.LinearModel(2, 2, 2)
    with pytest.warns(rf.errors.DivergenceWarning, match="Training diverged: the risk is -.*Try more sweeps"):
        result = fit(model, train, rf.losses.SurrogateLikelihood(), few_sweeps(2), **settings)
    assert result.reason is rf.learning.Reason.DIVERGED
    assert result.best.objective == min(record.objective for record in result.history)
    kept = Objective(model, train, rf.losses.SurrogateLikelihood(), few_sweeps(2), ridge=1e-3)()
    assert kept.value == pytest.approx(result.best.objective, rel=1e-12)
    diverged = error(model, few_sweeps(2))

    model = rf.LinearModel(2, 2, 2)
    with pytest.warns(rf.errors.DivergenceWarning, match=r"with 3 sweeps of inference, but .* with 6"):
        result = fit(model, train, rf.losses.SurrogateLikelihood(), few_sweeps(3), **settings)
    assert result.reason is not rf.learning.Reason.DIVERGED  # the ridge has held it at a risk above 0
    assert error(model, few_sweeps(3)) > 0.42

    errors = {}
    for loss, sweeps in ((rf.losses.SurrogateLikelihood(), 10), (LOSS, 2), (LOSS, 10)):
        model = rf.LinearModel(2, 2, 2)
        assert fit(model, train, loss, few_sweeps(sweeps), **settings).reason is not rf.learning.Reason.DIVERGED
        errors[type(loss).__name__, sweeps] = error(model, few_sweeps(sweeps))
    assert max(errors.values()) < 0.37 < 0.42 < diverged


def test_validation_by_a_marginal_loss_keeps_what_was_good_before_a_likelihood_diverged():
    validation = rf.Validation(denoising(seed=2), LOSS, patience=1000)
    model = rf.LinearModel(2, 2, 2)
    with pytest.warns(rf.errors.DivergenceWarning, match="the best parameters, those of iteration"):
        result = fit(
            model, denoising(), rf.losses.SurrogateLikelihood(), few_sweeps(2), ridge=1e-3, validation=validation
        )
    looks = [record.validation for record in result.history]
    assert result.best.validation == min(looks) < 0.66 < 1 < looks[-1]
    assert Objective(model, denoising(seed=2), LOSS, few_sweeps(2)).risk() == pytest.approx(min(looks), rel=1e-12)


def test_a_growing_objective_is_divergence():
    optimiser = rf.optim.Torch(torch.optim.SGD, {"lr": 300}, batch_size=5, epochs=50)
    model = chain_model()
    with pytest.warns(rf.errors.DivergenceWarning, match="the objective has grown from .* to "):
        result = fit(model, chain_examples(), rf.losses.SurrogateLikelihood(), EXACT, ridge=1e-2, optimiser=optimiser)
    assert result.reason is rf.learning.Reason.DIVERGED
    assert len(result.history) < 50
    assert result.best.objective == min(record.objective for record in result.history)


def test_potentials_beyond_precision_are_divergence():
    optimiser = rf.optim.Torch(torch.optim.SGD, {"lr": 1e3}, batch_size=5, epochs=50)
    loss = rf.losses.SurrogateLikelihood()
    with pytest.warns(rf.errors.DivergenceWarning, match="`theta` is too large for torch.float64"):
        result = fit(chain_model(), chain_examples(), loss, EXACT, ridge=1e-2, optimiser=optimiser)
    assert result.reason is rf.learning.Reason.DIVERGED


def test_nan_keeps_the_best_and_says_why():
    poisoned = chain_model()

    def poison(record, model):
        if record.iteration == 3:
            chosen.append(values(model))
            next(model.parameters()).data[0, 0] = math.nan

    chosen = []
    optimiser = rf.optim.Torch(torch.optim.SGD, {"lr": 0.1}, epochs=10)
    with pytest.warns(rf.errors.DivergenceWarning, match="the objective is nan: the model returned a theta with NaN"):
        result = fit(poisoned, chain_examples(), optimiser=optimiser, callbacks=[poison])
    assert result.reason is rf.learning.Reason.DIVERGED
    assert torch.equal(values(poisoned), chosen[0])


def test_a_start_that_is_not_finite_is_refused():
    model = chain_model()
    next(model.parameters()).data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"`model` must start where the objective is finite: .*theta with NaN"):
        fit(model, chain_examples())


def test_a_loss_on_marginals_refuses_an_adjoint_that_does_not_differentiate_them():
    envelope = rf.Inference(rf.MessagePassing(), rf.Stop(), rf.Envelope())
    for loss in (
        rf.losses.CliqueLogistic(),
        rf.losses.Hybrid(rf.losses.MSE(), LOSS, 0.5),
        lambda s, labels, mask: s.mu.sum(-1),
    ):
        model = chain_model()
        with pytest.raises(ValueError, match=r"`adjoint` must .* `Unroll\(\)` or `FixedPoint\(\)`.*Got Envelope\("):
            fit(model, chain_examples(), loss, envelope)
        assert not values(model).any()
    # Without a gradient there is nothing to lose: a likelihood trains by it, and a loss on marginals looks on.
    validation = rf.Validation(chain_examples(10, seed=1), loss=LOSS)
    result = fit(chain_model(), chain_examples(), rf.losses.SurrogateLikelihood(), envelope, validation=validation)
    assert math.isfinite(result.best.validation)


@pytest.mark.parametrize("optimiser", [rf.optim.LBFGS(), ADAM], ids=["lbfgs", "adam"])
@pytest.mark.parametrize(
    "loss",
    [lambda s, labels, mask: (s.mode() != labels).sum(-1), lambda s, labels, mask: s.mu.detach().square().sum(-1)],
    ids=["errors", "detached"],
)
def test_a_loss_without_a_gradient_is_refused(loss, optimiser):
    with pytest.raises(ValueError, match=r"`loss` must have a gradient with respect to theta\. `<lambda>` has none"):
        fit(chain_model(), chain_examples(), loss, EXACT, optimiser=optimiser)


def test_examples_that_the_loss_does_not_look_at_are_no_reason_to_refuse():
    """A clique loss sees nothing of single variables."""
    alone = rf.chain(1, 3, tied=True)
    data = [chain_examples(), chain_examples(5, graph=alone)]
    assert (
        fit(chain_model(), data, rf.losses.CliqueLogistic(), EXACT, ridge=1e-2).reason is rf.learning.Reason.CONVERGED
    )


def test_validation_that_is_never_finite_warns_and_keeps_what_was_trained():
    held_out = chain_examples(3, seed=1)
    held_out.inputs["nodes"][0, 0, 0] = math.nan
    model, alone = chain_model(), chain_model()
    with pytest.warns(rf.errors.DivergenceWarning, match=r"`validation` was never finite: it is nan.* of iteration 5"):
        result = fit(model, chain_examples(), validation=held_out, optimiser=rf.optim.LBFGS(iterations=5))
    expected = fit(alone, chain_examples(), optimiser=rf.optim.LBFGS(iterations=5))
    assert result.best.iteration == expected.best.iteration == 5
    assert torch.equal(values(model), values(alone))


def test_validation_that_was_not_reached_keeps_what_was_trained():
    validation = rf.Validation(chain_examples(3, seed=1), every=10)
    result = fit(chain_model(), chain_examples(), validation=validation, optimiser=rf.optim.LBFGS(iterations=5))
    assert result.best.iteration == 5


def test_validation_that_is_finite_later_is_what_decides():
    looks = iter([math.inf, math.nan, 2.0, math.inf, 3.0])

    def scripted(solution, labels, mask):
        return torch.full(labels.shape[:-1], next(looks) * labels.shape[-1], dtype=torch.float64)

    validation = rf.Validation(chain_examples(3, seed=1), loss=scripted)
    result = fit(chain_model(), chain_examples(), validation=validation, optimiser=rf.optim.LBFGS(iterations=5))
    assert result.best.iteration == 3
    assert result.best.validation == 2.0


# -- seeing and asking ------------------------------------------------------------------------------------------------


def test_the_progress_bar_shows_loss_gradient_and_speed(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def wait(record, model):
        time.sleep(0.15)

    rf.fit(
        chain_model(),
        chain_examples(),
        LOSS,
        EXACT,
        optimiser=rf.optim.LBFGS(iterations=6),
        callbacks=[wait],
        validation=chain_examples(3),
        progress=True,
    )
    shown = capsys.readouterr().err
    for part in ("/6 [", "loss=", "gradient=", "validation=", "eval/s="):
        assert part in shown


def test_progress_is_printed_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("riskfield.progress.SECONDS", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it is an error
    rf.fit(chain_model(), chain_examples(), LOSS, EXACT, optimiser=rf.optim.LBFGS(iterations=3), progress=True)
    said = capsys.readouterr().err
    assert "\r" not in said
    assert [line.split(", ")[0] for line in said.splitlines()] == [f"training: {k} of 3" for k in (1, 2, 3)]
    assert ", loss " in said


def test_no_bar_is_shown_unless_asked_for(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it is an error
    rf.fit(chain_model(), chain_examples(), LOSS, EXACT, optimiser=rf.optim.LBFGS(iterations=1))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"optimiser": "lbfgs"}, TypeError, r"`optimiser` must be an object such as `LBFGS\(\)`.* Got 'lbfgs'."),
        ({"ridge": -1}, ValueError, "`ridge` must be a non-negative number. Got -1."),
        ({"chunk_size": 0}, ValueError, "`chunk_size` must be a positive integer. Got 0."),
        ({"seed": -3}, ValueError, r"`seed` must be an integer from 0 to 2\*\*63 - 1. Got -3."),
        ({"resume": True}, ValueError, "`resume` needs `checkpoint`"),
        ({"checkpoint": 3}, TypeError, r"`checkpoint` must be a folder or `Checkpoints\(...\)`. Got 3."),
        ({"validation": [3]}, TypeError, "`validation` must be `Examples` or a sequence of them. Got int."),
    ],
)
def test_bad_arguments_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fit(chain_model(), chain_examples(), **settings)


def test_validation_needs_labels():
    unlabelled = rf.Examples(rf.chain(3, 2), torch.full((4, 3), -1))
    with pytest.raises(ValueError, match="`validation` must hold an example of positive weight"):
        fit(chain_model(), chain_examples(), validation=unlabelled)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rf.optim.Torch(torch.optim.Adam(chain_model().parameters())), TypeError, "must be a class such as"),
        (lambda: rf.optim.Torch(torch.optim.LBFGS), ValueError, r"use riskfield's own `LBFGS\(\)`"),
        (lambda: rf.optim.Torch(batch_size=0), ValueError, "`batch_size` must be a positive integer. Got 0."),
        (lambda: rf.optim.SMD(tol=1.0), ValueError, r"`tol` must lie in \[0, 1\). Got 1.0."),
        (lambda: rf.optim.SMD(decay=1.0), ValueError, r"`decay` must lie in \[0, 1\). Got 1.0."),
        (lambda: rf.optim.SMD(meta_gain=-1), ValueError, "`meta_gain` must be a non-negative number. Got -1."),
        (lambda: rf.optim.SMD(gain=0), ValueError, "`gain` must be a positive number. Got 0."),
        (lambda: rf.Validation(chain_examples(2), patience=0), ValueError, "`patience` must be a positive integer"),
        (lambda: rf.Checkpoints("x", every=0), ValueError, "`every` must be a positive integer"),
    ],
)
def test_bad_settings_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("saved", [torch.zeros(2, 2), [1], None], ids=["tensor", "list", "None"])
def test_what_is_no_saved_fit_is_refused(saved):
    from riskfield.learning.result import load_fit

    with pytest.raises(TypeError, match=r"a fit must be a dictionary\. Got"):
        load_fit(saved)
