"""`python -m papers erm`: the models and their data, derivatives of all settings, the plans, the tables."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

import riskfield as rf
from papers.cells import FILE, CellFile, Cells
from papers.commands import main
from papers.erm import runs
from papers.erm.comparison import Comparison, paired_permutation_test
from papers.erm.draws import Draws
from papers.erm.landscape import Landscape
from papers.erm.random_models import RandomModel
from papers.erm.runs import BACK, LIKELIHOOD, RISKS, SETTINGS, losses_of, stages, started, train
from papers.erm.suite import MODELS, Suite
from papers.erm.tables import BEST, Overall, Pairs, Truncation
from papers.erm.tuning import SUPPLEMENTARY, Choice, Tuning
from papers.pictures.criteria import ApproximateLikelihood
from papers.study import reproduce, sections

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def drawn():
    return RandomModel.draw(12, 24, seed=1, num_examples=400)


# -- models and data ------------------------------------------------------------------------------------------------


def test_conditioning_on_the_inputs_is_clamping_them(drawn):
    whole = rf.from_edges(2, drawn.edges, num_variables=12)
    theta = whole.assemble([torch.zeros(12, 2, dtype=torch.float64)], [drawn.tables])
    evidence = torch.full((5, 12), -1)
    evidence[:, drawn.inputs] = drawn.states[:5, drawn.inputs]
    model = drawn.true_model()
    examples = drawn.examples(model, 0, 5)
    with torch.no_grad():
        given = rf.infer(model.graph, model(model.graph, examples.inputs), rf.Exact()).node_marginals[0]
    clamped = rf.infer(whole, theta, rf.Exact(), evidence=evidence).node_marginals[0]
    torch.testing.assert_close(given, clamped[:, model.others])
    assert examples.labels.shape == (5, 8)
    outputs = np.searchsorted(model.others, drawn.outputs)
    assert torch.equal(examples.labels[:, outputs], drawn.states[:5, drawn.outputs])
    assert (examples.labels >= 0).sum() == 5 * 4


@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_samples_are_those_of_the_model(spread):
    drawn = RandomModel.draw(12, 24, seed=1, num_examples=400, spread=spread)
    assert drawn.tables.std() == pytest.approx(spread, rel=0.15)
    assert drawn.sample_size > 0.8
    assert (len(drawn.inputs), len(drawn.outputs)) == (4, 4)
    assert not set(drawn.inputs) & set(drawn.outputs)
    whole = rf.from_edges(2, drawn.edges, num_variables=12)
    theta = whole.assemble([torch.zeros(12, 2, dtype=torch.float64)], [drawn.tables])
    expected = rf.infer(whole, theta, rf.Exact()).mu
    torch.testing.assert_close(rf.inference.frequencies(whole, drawn.states), expected, rtol=0, atol=4 * 0.5 / 400**0.5)


def test_mismatch_exchanges_a_share_of_the_edges(drawn):
    same, other = drawn.model(), drawn.model(mismatch=0.25)
    assert [tuple(p.shape) for p in same.parameters()] == [tuple(p.shape) for p in drawn.true_model().parameters()]
    old, new = (set(map(tuple, model.edges.tolist())) for model in (same, other))
    assert (len(old), len(new), len(old & new)) == (24, 24, 18)


# -- derivatives ----------------------------------------------------------------------------------------------------


def objective(drawn, setting, adjoint_stop):
    """The objective of the last stage of a setting on three examples, at random parameters."""
    model = started(drawn, restart=0)
    stage = stages(setting, 100, 1, 4)[-1]
    inference = rf.Inference(stage.inference.algorithm, adjoint_stop, stage.inference.adjoint)
    return rf.learning.Objective(model, drawn.examples(model, 0, 3), stage.loss, inference)


@pytest.mark.parametrize("setting", [*RISKS, LIKELIHOOD, BACK])
def test_gradients_and_hessian_products_against_differences(drawn, setting):
    """After a fixed number of iterations; the likelihood, whose gradient is that at convergence, there."""
    stop = rf.Stop(1000, tol=1e-13) if setting == LIKELIHOOD else rf.Stop(10, tol=None)
    at = objective(drawn, setting, stop)
    v = torch.randn(
        len(parameters_to_vector(at.parameters)), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    start, step = parameters_to_vector(at.parameters).detach(), 1e-5

    def moved(by):
        torch.nn.utils.vector_to_parameters(start + by * v, at.parameters)
        return at(None, along=v)

    here, ahead, behind = moved(0), moved(step), moved(-step)
    slope = (ahead.value - behind.value) / (2 * step)
    assert float(here.gradient @ v) == pytest.approx(slope, rel=1e-6, abs=1e-8)
    torch.testing.assert_close(here.product, (ahead.gradient - behind.gradient) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("setting", RISKS)
def test_second_derivatives_on_the_studys_models(drawn, setting):
    at = objective(drawn, setting, rf.Stop(4, tol=None))
    examples, model = at.data[0], at.model
    theta = model(examples.graph, examples.inputs).detach().requires_grad_()

    def loss(t):
        return at.loss(examples.graph, t, examples.labels, at.inference)

    assert torch.autograd.gradgradcheck(loss, theta, fast_mode=True)


# -- plans ----------------------------------------------------------------------------------------------------------


def plan(setting):
    return [stage.loss for stage in stages(setting, 30, 25, 4)]


def test_stages():
    (likelihood,) = stages(LIKELIHOOD, 30, 25, 4)
    assert likelihood.loss == ApproximateLikelihood()
    assert likelihood.inference.stop.sweeps == 30
    assert likelihood.optimiser.epochs == 25
    assert likelihood.inference.adjoint == rf.Envelope(curvature=rf.Unroll())
    (back,) = stages(BACK, 30, 25, 4)
    assert (back.loss, back.inference.adjoint) == (ApproximateLikelihood(), rf.Unroll())
    assert plan("frac-MSE") == [rf.losses.MSE()]
    first, second = stages("int-L1-in", 30, 25, 4)
    assert (first.loss, first.optimiser.epochs) == (ApproximateLikelihood(), 3)
    assert (second.loss, second.optimiser.epochs, second.optimiser.tol) == (RISKS["int-L1"], 25, 0)
    for setting, skipped in (("int-F-hyb", 0), ("int-F-hyb-in", 1)):
        hybrids = plan(setting)[skipped:]
        assert [(loss.a, loss.b, loss.weight) for loss in hybrids] == [
            (RISKS["int-F"], rf.losses.MSE(), weight) for weight in (0.0, 0.5, 1.0)
        ]
        assert sum(stage.optimiser.epochs for stage in stages(setting, 30, 25, 4)[skipped:]) == 25


def test_gains_grow_with_the_number_of_outputs():
    """A loss is a mean over outputs: the gradient of one parameter is the smaller, the more there are."""
    few, many = (stages("frac-MSE-in", 30, 25, outputs)[-1].optimiser for outputs in (4, 12))
    assert (many.gain, many.meta_gain) == (pytest.approx(3 * few.gain), pytest.approx(3 * few.meta_gain))
    first = stages("int-F-hyb-in", 30, 25, 4)[1].optimiser  # no share of F yet
    assert (first.gain, first.batch_size) == (few.gain, few.batch_size)


def test_the_pass_that_is_kept_is_the_best_on_all_training_examples(drawn):
    model = started(drawn, restart=0)
    examples = drawn.examples(model, 0, 200)
    plan = stages("frac-MSE", 10, 6, 4)
    (fit,) = train(model, examples, plan, seed=0)
    assert fit.best.validation == min(record.validation for record in fit.history)
    kept = rf.learning.Objective(model, examples, plan[0].loss, plan[0].inference).risk()
    assert kept == pytest.approx(fit.best.validation, rel=1e-12)


def test_recipes_name_these_choices():
    """Cells are found by these names: whoever changes a choice must give its settings new names."""
    gains = {name: (smd.gain, smd.meta_gain, smd.decay, smd.batch_size) for name, smd in runs.GAINS.items()}
    assert gains == {
        "frac-MSE": (0.15, 20.0, 0.9, 20),
        "int-F": (0.05, 5.0, 0.9, 50),
        "int-L1": (0.05, 5.0, 0.9, 50),
        LIKELIHOOD: (0.15, 0.5, 0.9, 5),
        BACK: (0.05, 0.5, 0.9, 5),
    }
    assert [RISKS[name].decoder.temperature for name in ("int-F", "int-L1")] == [0.1, 0.1]
    assert (runs._FIRST, runs._SHARES, runs._SPREAD) == (3, {0.0: 15, 0.5: 5, 1.0: 5}, 1.0)
    assert runs.RECIPES == {
        LIKELIHOOD: "6dbc08fc",
        BACK: "dccf2908",
        "frac-MSE": "23220df4",
        "frac-MSE-in": "efa42997",
        "int-F-hyb": "1c523f88",
        "int-F-in": "277d3d80",
        "int-F-hyb-in": "488b6602",
        "int-L1-hyb": "48a77748",
        "int-L1-in": "b2195df7",
        "int-L1-hyb-in": "0a99f663",
    }


def test_the_likelihood_may_fall_below_zero(drawn):
    model = started(drawn, restart=0)
    examples, (stage,) = drawn.examples(model, 0, 5), stages(LIKELIHOOD, 30, 25, 4)
    at = (examples.graph, model(examples.graph, examples.inputs), examples.labels, stage.inference)
    torch.testing.assert_close(stage.loss(*at), rf.losses.SurrogateEM()(*at), rtol=0, atol=0)
    assert (stage.loss.lower_bound, rf.losses.SurrogateEM().lower_bound) == (-np.inf, 0)


def test_losses_of_known_predictions(drawn):
    """A model that knows the answers loses nothing; one that knows nothing does, as its decoders have it."""
    model = started(drawn, restart=0)
    examples = drawn.examples(model, 0, 50)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = losses_of(model, examples, 100)
    labels = examples.labels[:, np.searchsorted(model.others, drawn.outputs)].double()
    assert found["frac-MSE"] == pytest.approx(0.25)
    assert found["int-L1"] == pytest.approx(float(labels.mean()))  # of two equal states the first is taken
    assert found["int-F"] == pytest.approx(float((labels.sum(-1) > 0).double().mean()))  # none lies above the median
    assert found[LIKELIHOOD] == pytest.approx(4 * np.log(2))


# -- comparisons ----------------------------------------------------------------------------------------------------


def test_paired_permutation_test_by_enumeration():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 7)) + np.array([[0.0], [0.7]])
    gaps = a - b
    signs = np.array(list(itertools.product((1, -1), repeat=7)))
    means = (signs * gaps).mean(1)
    one_sided = min((means <= gaps.mean() + 1e-12).mean(), (means >= gaps.mean() - 1e-12).mean())
    assert paired_permutation_test(a, b) == pytest.approx(2 * one_sided)
    assert paired_permutation_test([1.0], [2.0]) == 1.0


def test_wins_ties_and_losses():
    found = Comparison((0.1, 0.2, 0.30004, 0.5), (0.2, 0.1, 0.3, 0.6))
    assert found.wins == "2-1-1"
    assert found.mean == pytest.approx(0.27501)


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_models_are_those_of_the_paper():
    assert sorted(MODELS) == [
        *((50, 100), (50, 195), (50, 200), (100, 200), (100, 400), (100, 461)),
        *((150, 300), (150, 600), (150, 752), (200, 400), (200, 800), (200, 1051)),
    ]


@pytest.fixture
def quick(monkeypatch):
    """Tiny models, and few samples of them."""
    monkeypatch.setattr("papers.erm.random_models._BURN_IN", 20)
    monkeypatch.setattr("papers.erm.random_models._THINNING", 2)
    suite = Suite(models=((9, 12), (10, 14)), examples=20, epochs=1, restarts=2)
    monkeypatch.setattr("papers.commands.erm._QUICK", suite)
    lines = {1: Landscape(model=(9, 12), examples=20, epochs=1, alphas=(-0.5, 0.0, 0.5, 1.0))}
    monkeypatch.setattr("papers.commands.erm._QUICK_FIGURES", lines)
    return suite


def test_reproduce_erm(quick, tmp_path, capsys, written):
    from matplotlib.image import imread

    assert main(["erm", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote ") == 10
    records = written["table3"]
    # A truth, then the likelihood, three ways of each of two losses and two of the third; twice if not -in.
    assert len(records) == 2 * (1 + 2 + (2 + 1) + 2 * (2 + 1 + 1))
    for record in records:
        assert set(record["losses"]) == set(SETTINGS)
        assert ("parameters" in record) == (record["cell"] == "run")
    text = sections(tmp_path)["table3"]
    truths = {r["num_variables"]: r["losses"]["frac-MSE"] for r in records if r["cell"] == "truth"}
    runs = [r for r in records if r["cell"] == "run" and r["setting"] == "frac-MSE"]
    best = [min((r for r in runs if r["num_variables"] == n), key=lambda r: r["objective"]) for n in truths]
    delta = np.mean([r["losses"]["frac-MSE"] - truths[r["num_variables"]] for r in best])
    assert f"| frac-MSE | 0.00482 (5-0-7) | {delta:.5f} (" in text
    assert "2 of the paper's 12 models (9-12, 10-14), true parameters of standard deviation 1, 20 training" in text
    pairs = written["table6"]
    assert {r["setting"] for r in pairs if r["cell"] == "run"} == set(BEST.values())
    sweep = written["table5"]
    assert {r["sweeps"] for r in sweep} == {100, 30, 20, 10}
    assert {r["setting"] for r in sweep if r["cell"] == "run"} == {*BEST.values(), BACK}
    rows = [line for line in sections(tmp_path)["table5"].splitlines() if f"| {BACK}, here |" in line]
    assert len(rows) == 2 * len(SETTINGS)
    assert not any("not finished" in row for row in rows)
    # Model by model, what is finished on some of them is there, too.
    part = [r for r in sweep if not (r.get("setting") == BACK and (r["num_variables"], r["sweeps"]) == (9, 10))]
    text = Truncation(quick).tables(part)
    assert f"| {BACK}, here | not finished |" not in text
    assert text.count("not finished") == 2 * len(SETTINGS)
    by_model = [
        line.split(" | ") for line in text.partition("model by model")[2].splitlines() if line.startswith("| 9-")
    ]
    assert by_model[0][-1] == " |"
    one = [r for r in part if r.get("setting") == BACK and (r["num_variables"], r["sweeps"]) == (9, 100)]
    best = min(one, key=lambda r: r["objective"])
    assert by_model[0][5] == f"{best['losses']['frac-MSE'] - truths[9]:.5f}"
    # What tables 3, 5 and 6 have in common was computed once.
    keys = [line.key for line in CellFile(tmp_path).lines()]
    assert len(set(keys)) == len(keys)
    line = written["figure1"][0]["losses"]
    assert line[1]["frac-MSE"] == pytest.approx(truths[9])  # alpha = 0
    for name in ("table3", "table4", "table5", "table6", "figure1"):
        assert imread(tmp_path / f"{name}.png").shape[2] == 4


def test_finished_writes_what_is_there(quick, tmp_path, capsys):
    """Models with all their staged runs, and rows that are there for all of these."""
    command = ["erm", "--quick", "--finished", "--jobs", "1", "-q", "--out", str(tmp_path), "--table"]
    for other in ([], ["--tune"], ["--table", "6", "--figure", "1"]):  # which would compute
        assert main([*command[:-1], *other]) == 2
        assert "--finished applies to --table and --draws" in capsys.readouterr().err
    assert main([*command, "6"]) != 0
    assert "`finished` must not be given before likelihood and staged runs" in capsys.readouterr().err
    with Cells(tmp_path, 99) as cells:
        replace(Pairs(quick), suite=replace(quick, models=quick.models[:1])).measure(cells)
    assert main([*command, "6"]) == 0
    assert (
        "1 of the paper's 12 models (9-12), true parameters of standard deviation 1, 20 training"
        in sections(tmp_path)["table6"]
    )
    with Cells(tmp_path, 99) as cells:
        for cell in Overall(quick).cells():
            if cell.settings["num_edges"] == 12 and cell.settings.get("setting", "-in") != "int-L1-hyb":
                cells.get(cell.name, cell.compute, **cell.settings)
    assert main([*command, "3"]) == 0
    text = sections(tmp_path)["table3"]
    assert "| int-L1-hyb | 0.00398 (5-1-6) | not finished |" in text
    assert "| int-F-hyb | 0.00411 (7-0-5) | not finished |" not in text


def test_spread_is_of_tables_and_draws(capsys):
    for other in ([], ["--tune"], ["--table", "6", "--figure", "1"]):
        assert main(["erm", "--quick", "--spread", "2", *other]) == 2
        assert "--spread applies to --table and --draws" in capsys.readouterr().err


def test_tests_with_bp_to_convergence(quick, tmp_path):
    """The same parameters are tested twice; where training had as many iterations, it is the same test."""
    models = [(9, 12)]
    study = Truncation(replace(quick, models=tuple(models)), iterations=(100, 2))
    with Cells(tmp_path, 99) as cells:
        records = study.measure(cells)
    for record in (r for r in records if r["cell"] == "run"):
        assert (record["converged_losses"] == record["losses"]) == (record["sweeps"] == 100)
    (true,) = [r["losses"] for r in records if r["cell"] == "truth"]
    likelihoods = [r for r in records if r.get("setting") == LIKELIHOOD and r["sweeps"] == 2]
    best = min(likelihoods, key=lambda r: r["objective"])
    expected = [f"{best[key]['int-F'] - true['int-F']:.5f}" for key in ("losses", "converged_losses")]
    rows = study.tables(records).split("## ")[:2]
    found = [[line for line in part.splitlines() if f"| {LIKELIHOOD}, here" in line][1] for part in rows]
    assert [line[2:-2].split(" | ")[-1] for line in found] == expected
    # Records of an earlier version have no such tests.
    old = [{key: value for key, value in r.items() if key != "converged_losses"} for r in records]
    parts = study.tables(old).split("## ")
    assert "not finished" not in parts[0]
    assert parts[1].count("not finished") == len([*RISKS, *SETTINGS, *SETTINGS])


def test_draws_of_the_models(quick, tmp_path, written):
    command = ["erm", "--quick", "--draws", "2", "--jobs", "1", "-q", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "    python -m papers erm --draws 2 --quick" in sections(tmp_path)["draws"]
    records = written["draws"]
    deltas = {}
    for seed, variables in itertools.product((0, 1), (9, 10)):
        own = [r for r in records if (r["seed"], r["num_variables"]) == (seed, variables)]
        (true,) = [r for r in own if r["cell"] == "truth"]
        for setting, sweeps in itertools.product((LIKELIHOOD, BACK, "frac-MSE-in"), (100, 10)):
            runs = [r for r in own if (r.get("setting"), r["sweeps"]) == (setting, sweeps)]
            assert len(runs) == (1 if setting == "frac-MSE-in" else 2)
            best = min(runs, key=lambda r: r["objective"])
            delta = best["losses"]["frac-MSE"] - true["losses"]["frac-MSE"]
            deltas.setdefault((setting, sweeps), {})[seed, variables] = delta
    assert deltas[LIKELIHOOD, 100][0, 9] != deltas[LIKELIHOOD, 100][1, 9]
    text = sections(tmp_path)["draws"]
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = {(line[0], line[1]): line[2:] for line in lines}
    likelihood, staged = (deltas[setting, 10] for setting in (LIKELIHOOD, "frac-MSE-in"))
    one, other = (np.mean([losses[1, n] for n in (9, 10)]) for losses in (likelihood, staged))
    assert rows["1", LIKELIHOOD][1] == f"{one:.5f}"
    assert rows["1", LIKELIHOOD][6] == f"{one / other:.1f}"
    means = [np.mean(list(deltas[BACK, sweeps].values())) for sweeps in (100, 10)]
    assert rows["all", BACK][:2] == [f"{value:.5f}" for value in means]
    assert rows["all", BACK][3] == f"{means[1] / means[0]:.1f}"
    assert rows["paper", LIKELIHOOD] == ["0.00710", "0.02461", "0.02461", "3.5", "3.5", "12.5", "38.5", "38.5"]
    pooled = [tuple(deltas[BACK, sweeps].values()) for sweeps in (100, 10)]
    assert rows[f"{BACK}, 100 iterations", f"{BACK}, 10 iterations"][0] == Comparison(*pooled).wins
    assert rows["1", "9-12"][0] == f"{deltas[LIKELIHOOD, 100][1, 9]:.5f}"
    # What is not finished on one model is neither averaged nor tested.
    where = {"setting": BACK, "seed": 1, "sweeps": 10, "num_variables": 10}
    part = [r for r in records if any(r.get(key) != value for key, value in where.items())]
    text = Draws(quick, count=2).tables(part)
    assert text.count("not finished") == 2 * (2 + 2)
    # The models of the table are those that are finished in every draw.
    missing = {"num_edges": 14, "seed": 1, "setting": "frac-MSE-in"}
    kept = [line for line in CellFile(tmp_path).lines() if not missing.items() <= line.settings.items()]
    (tmp_path / FILE).unlink()
    CellFile(tmp_path).add(kept)
    assert main([*command, "--finished"]) == 0
    text = sections(tmp_path)["draws"]
    assert "1 of the paper's 12 models (9-12)" in text
    assert f"| 0 | {LIKELIHOOD} | {deltas[LIKELIHOOD, 100][0, 9]:.5f} |" in text
    assert "10-14" not in text
    assert main([*command[:3], "3", *command[4:], "--finished"]) == 2
    # Runs that the paper's claims need come first, whatever the draw.
    settings = [cell.settings.get("setting", LIKELIHOOD) for cell in Draws(quick).cells()]
    assert BACK not in settings[: -settings.count(BACK)]
    assert settings.count(BACK) == 3 * 2 * 2 * 2
    # The first draw is that of the tables.
    assert main([*command[:2], "--table", "6", *command[4:]]) == 0
    pairs = written["table6"]
    assert all(r in records for r in pairs if r.get("setting") == LIKELIHOOD)


def test_tuning_on_supplementary_models(quick, tmp_path, written):
    likelihood = Choice(LIKELIHOOD, 0.1, 1.0, batch_size=10)
    choices = (likelihood, *(Choice(setting, 0.1, 1.0, 10, temperature=0.2) for setting in ("int-F", "int-L1")))
    choices += tuple(Choice(BACK, 0.1, 1.0, 10, sweeps=sweeps) for sweeps in (100, 2))
    study = Tuning(((9, 12), (10, 14)), choices, examples=20, epochs=1)
    reproduce(study, tmp_path, "")
    records = written["tuning"]
    losses = [r["losses"]["int-F"] for r in records if r.get("setting") == "int-F"]
    truths = [r["losses"]["int-F"] for r in records if r["cell"] == "truth"]
    assert f"| {np.mean(losses) - np.mean(truths):.5f} |" in sections(tmp_path)["tuning"]
    back = [[r for r in records if r.get("setting") == BACK and r["sweeps"] == sweeps] for sweeps in (100, 2)]
    assert len(back[0]) == len(back[1]) == 2
    for one, other in zip(*back, strict=True):  # in training and in tests
        assert one["objective"] != other["objective"]
        assert one["losses"] != other["losses"]
    assert not set(SUPPLEMENTARY) & set(MODELS)
    assert {choice.setting for choice in Tuning().choices if choice.used} == {*SETTINGS, BACK}


def test_jobs_and_choices(quick, tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr(Cells, "prepare", lambda cells, wanted, jobs: prepared.append((list(wanted), jobs)))
    assert main(["erm", "--quick", "--table", "6", "--jobs", "3", "-q", "--out", str(tmp_path)]) == 0
    assert prepared == [(list(Pairs(quick).cells()), 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.jsonl.gz", "table6.png", "tables.md"]
    assert "python -m papers erm --table 6 --quick --out" in sections(tmp_path)["table6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--table", "7"], "'7' is not one of '3', '4', '5', '6'"), (["--figure", "2"], "less than or equal to 1")],
)
def test_refusals(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["erm", *arguments]) == 2
    assert message in capsys.readouterr().err
