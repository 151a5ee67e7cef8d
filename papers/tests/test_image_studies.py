"""`python -m papers denoising`, `horses` and `backgrounds`, at sizes that take seconds, on pictures laid out as the
public data sets are.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import riskfield as rf
from naive import NaiveMeanField
from papers import horses
from papers.backgrounds import table as backgrounds
from papers.cells import Cells, with_parameters
from papers.commands import main
from papers.commands.pictures import QUICK
from papers.denoising import table_2010 as denoising_2010
from papers.denoising import table_2013 as denoising
from papers.pictures.criteria import ApproximateLikelihood, Criterion, closure, fit_all, train
from papers.pictures.scenes import Scenes, describe, evaluate, predict
from papers.pictures.truncated import CONVERGED, Mode, RowByRow, Trainer
from papers.side_by_side import could_be_pictures, gallery, shade, shade_labels
from papers.splits import Recorded
from papers.study import sections

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, quality=95)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few pictures of each data set, under names that the recorded splits have."""
    root = tmp_path_factory.mktemp("data")
    camera = rf.datasets.bundled_images().select(["camera"])[0].image
    (root / "BSDS500/data/images/val").mkdir(parents=True)
    for split in (Recorded.BERKELEY_2010, Recorded.BERKELEY_2013):
        for k, name in enumerate(split.read()[0].train[:2] + split.read()[0].test[:2]):
            save(root / f"BSDS500/data/images/train/{name}.jpg", camera[60 * k :: 8, 40 * k :: 6][:40, :60])
    (split,) = Recorded.HORSES.read()
    for k, name in enumerate((*split.train[:2], *split.test[:2], *sorted((*split.train, *split.test))[-2:])):
        (picture,) = rf.datasets.mosaics(1, (40 + 2 * k, 50), seed=k)
        save(root / f"weizmann_horse_db/rgb/{name}.jpg", np.stack([picture.image] * 3, axis=-1))
        save(root / f"weizmann_horse_db/figure_ground/{name}.jpg", (255 * (picture.labels == 1)).astype(np.uint8))
    for k, name in enumerate(Recorded.BACKGROUNDS.read()[0].train[:3] + Recorded.BACKGROUNDS.read()[0].test[:2]):
        (picture,) = rf.datasets.mosaics(1, (48, 64 - 8 * (k == 1)), seed=k)
        save(root / f"iccv09Data/images/{name}.jpg", np.stack([picture.image] * 3, axis=-1))
        labels = np.where(picture.image > 250, -1, picture.labels + k)
        (root / "iccv09Data/labels").mkdir(exist_ok=True)
        np.savetxt(root / f"iccv09Data/labels/{name}.regions.txt", labels, fmt="%d")
    return root


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the commands ----------------------------------------------------------------------------------------------------


def test_denoising_gives_the_table_of_2013(data, folder, monkeypatch, capsys, written):
    sizes = {"num_train": 2, "num_test": 2, "shape": (12, 18), "levels": (5.0,), "again": False}
    monkeypatch.setitem(QUICK, "denoising 2013", sizes)
    assert main(["denoising", "--data", str(data), "--quick", "--out", "out", "--table", "2013"]) == 0
    assert "wrote out/table-2013.png" in capsys.readouterr().out
    records = written["table-2013"]
    assert {record["row"] for record in records} == set(denoising.PAPER)
    by_row = {record["row"]: record for record in records}
    assert by_row["univariate logistic"]["errors"][0] < by_row["independent"]["errors"][0]
    text = sections(folder / "out")["table-2013"]
    assert "| surrogate likelihood | .031 / **" in text
    assert "| independent | .129 / **" in text
    assert (folder / "out/table-2013.png").stat().st_size > 10_000


def test_denoising_gives_the_table_of_2010(data, folder, monkeypatch, written):
    sizes = {"num_pictures": 2, "num_tests": 2, "shape": (12, 18), "tol": 1e-3}
    monkeypatch.setitem(QUICK, "denoising 2010", sizes)
    monkeypatch.setattr(denoising_2010, "STAND_INS", {"Gaussian": denoising_2010.STAND_INS["Gaussian"]})
    command = ["denoising", "--data", str(data), "--quick", "--out", "out", "--table", "2010"]
    assert main([*command, "--rows", "univariate likelihood"]) == 0
    records = written["table-2010"]
    likelihood, univariate = (record for record in records if record["data"] == "Berkeley")
    assert likelihood["row"] == "surrogate likelihood"
    assert likelihood["scores"]["surrogate likelihood"][0] < univariate["scores"]["surrogate likelihood"][0]
    assert univariate["scores"]["univariate likelihood"][0] < likelihood["scores"]["univariate likelihood"][0]
    text = sections(folder / "out")["table-2010"]
    assert "| univariate likelihood | .301 / **" in text
    assert "| smooth class. error | .281 / -" in text


def test_horses_in_parts(data, folder, monkeypatch, written):
    tiny = {"num_train": 2, "num_test": 2, "iterations": 3, "scale": 0.2, "sweeps": (1, 2)}
    monkeypatch.setitem(QUICK, "horses", tiny)
    command = ["horses", "--data", str(data), "--quick", "--out", "out", "--quiet"]
    assert main([*command, "--rows", "smooth class. 5"]) == 0
    first = written["scale-0.2"]
    assert {record["row"] for record in first} == {"independent", "surrogate likelihood", "smooth class. 5"}
    shown = []
    monkeypatch.setattr(horses, "gallery", lambda heads, rows: shown.append(rows) or gallery(heads, rows))
    assert main(command) == 0
    assert all(any(cell is not None for cell in cells) for _, cells in shown[0])
    everything = written["scale-0.2"]
    assert len(everything) == 2 * (6 + 3 + 2) + 5
    assert main([*command, "--finished"]) == 0
    assert written["scale-0.2"] == everything
    assert "--finished" in sections(folder / "out")["scale-0.2"]


def test_horses_in_order(data, folder, monkeypatch, written):
    tiny = {"num_train": 2, "num_test": 2, "iterations": 3, "scale": 0.2, "sweeps": (1,)}
    monkeypatch.setitem(QUICK, "horses", tiny)
    command = [
        "horses",
        "--data",
        str(data),
        "--quick",
        "--out",
        "out",
        "--rows",
        "independent",
        "--quiet",
    ]
    for options in ([], ["--in-order"]):
        assert main([*command, *options]) == 0
    steps, order = (written[name][0] for name in ("scale-0.2", "scale-0.2-in-order"))
    assert steps["errors"][1] != order["errors"][1]
    (split,) = Recorded.HORSES.read()
    in_order = horses.HorsesTable(str(data), num_train=2, num_test=2, scale=0.2, in_order=True)
    names = [[s.picture.name for b in in_order._scenes(part, 2).blocks for s in b.scenes] for part in ("train", "test")]
    everything = sorted((*split.train, *split.test))
    assert [sorted(part) for part in names] == [everything[:2], everything[-2:]]


def test_horses_with_other_thresholds(data, folder, monkeypatch, written):
    tiny = {"num_train": 2, "num_test": 2, "iterations": 3, "scale": 0.2, "sweeps": (1,)}
    monkeypatch.setitem(QUICK, "horses", tiny)
    rows = ["--rows", "pseudolikelihood", "--quiet"]
    command = ["horses", "--data", str(data), "--quick", "--out", "out", *rows]
    parameters = []
    for options, name in (([], "scale-0.2"), (["--step", "0.2"], "scale-0.2-step-0.2")):
        assert main([*command, *options]) == 0
        independent, found = written[name]
        assert independent["row"] == "independent"
        parameters.append((independent["parameters"], found["parameters"]))
    # Edges matter to the pseudolikelihood alone.
    assert parameters[0][0] == parameters[1][0]
    assert parameters[0][1] != parameters[1][1]
    colours, responses = (feature.thresholds for feature in horses._features(0.5, 0.2).edges[1:])
    assert colours == responses == (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    text = sections(folder / "out")["scale-0.2-step-0.2"]
    assert "| pseudolikelihood |" in text
    assert "| piecewise |" not in text  # lines of which there is nothing
    assert "| TRW |" not in text
    assert "multiples of 0.2" in text
    assert "--step 0.2" in text


def test_backgrounds_in_folds(data, folder, monkeypatch, written):
    tiny = {"folds": (0,), "num_train": 3, "num_test": 2, "scale": 0.2, "iterations": 4, "first": 2, "sweeps": (2,)}
    monkeypatch.setitem(QUICK, "backgrounds table", tiny)
    tiny = {"num_pictures": 2, "scale": 0.2, "iterations": 2, "sweeps": (2,), "tolerances": (1e-2,)}
    monkeypatch.setitem(QUICK, "backgrounds curves", tiny)
    command = ["backgrounds", "--data", str(data), "--quick", "--out", "out", "--quiet"]
    shown = []
    monkeypatch.setattr(backgrounds, "gallery", lambda heads, rows: shown.append(rows) or gallery(heads, rows))
    assert main([*command, "--iterations", "3"]) == 0
    assert [name for name, _ in shown[0]] == [
        *("input", "true labels", "surrogate EM", "univariate logistic", "clique logistic"),
        *("independent", "pseudolikelihood", "piecewise"),
    ]
    records = written["table"]
    assert [(record["sweeps"], record["row"]) for record in records] == [
        *((0, row) for row in ("independent", "pseudolikelihood", "piecewise")),
        *((2, row) for row in ("surrogate EM", "univariate logistic", "clique logistic", "surrogate EM unstopped")),
    ]
    assert "[1]" in sections(folder / "out")["table"]
    assert all("parameters" in record for record in records)  # of the fold and the sweeps that are shown
    curves = written["curves-3"]
    assert {record["method"] for record in curves} == {"truncated", "perturbation", "back-propagation"}
    objectives = [objective for _, objective in curves[0]["curve"]]
    assert objectives == sorted(objectives, reverse=True)
    assert max(record["iterations"] for record in curves) == 3
    assert "--iterations 3" in sections(folder / "out")["curves-3"]


@pytest.mark.parametrize("name", ["denoising", "horses", "backgrounds"])
def test_missing_data_are_named_before_any_work(folder, monkeypatch, capsys, name):
    monkeypatch.delenv("RISKFIELD_DATA", raising=False)
    assert main([name, "--quick"]) == 2
    assert "RISKFIELD_DATA" in capsys.readouterr().err
    assert main([name, "--quick", "--data", "nowhere"]) == 2
    assert "Download it from" in capsys.readouterr().err


def test_bad_options_are_refused(data, folder, capsys):
    given = ["--data", str(data), "--quick"]
    assert main(["denoising", *given, "--rows", "nonsense"]) == 2
    assert "`rows` must be some of 'surrogate likelihood'" in capsys.readouterr().err
    assert main(["backgrounds", "--data", str(data), "--folds", "0,5"]) == 2
    assert "--folds must be numbers from 0 to 4" in capsys.readouterr().err
    assert main(["horses", *given, "--step", "0"]) == 2
    assert "`step` must be a number of at least 1e-6. Got 0.0." in capsys.readouterr().err
    if not torch.cuda.is_available():
        for name in ("denoising", "horses", "backgrounds"):
            assert main([name, *given, "--device", "cuda"]) == 2
            assert "torch finds no CUDA device" in capsys.readouterr().err


# -- frames -----------------------------------------------------------------------------------------------------------


def three_sizes(num_states=3):
    pictures = [
        replace_labels(picture) for k in range(3) for picture in rf.datasets.mosaics(1, (20 + k, 27 - 2 * k), seed=k)
    ]
    return describe(pictures, rf.features.ImageFeatures(scale=0.5)), num_states


def replace_labels(picture):
    labels = picture.labels.copy()
    labels[:4, :4] = -1
    return rf.datasets.LabelledImage(picture.name, picture.image, labels)


CRITERIA = {criterion.name: criterion for criterion in (*horses.BY_MODE[Mode.TRW], *backgrounds.WITHOUT)}


@pytest.mark.parametrize("name", CRITERIA)
def test_frames_change_nothing(name):
    """Neither a loss nor its gradient sees how far a grid was widened."""
    described, num_states = three_sizes()
    generator = torch.Generator().manual_seed(0)
    found = []
    for frame in (1, 16):
        scenes = Scenes.of(described, num_states, frame=frame)
        model = Trainer(rf.features.ImageFeatures(), num_states, 1).model()
        generator.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        inference = Mode.TRW.after(4)
        at = rf.learning.Objective(model, scenes.examples, CRITERIA[name].loss, inference)()
        found.append((len(scenes.blocks), at.risk, at.gradient, evaluate(model, [scenes], inference, 2)))
    (many, risk, gradient, tested), (one, framed_risk, framed_gradient, framed_tested) = found
    assert (many, one) == (3, 1)
    assert risk == pytest.approx(framed_risk, rel=1e-10)
    torch.testing.assert_close(gradient, framed_gradient, rtol=1e-9, atol=1e-12)
    assert tested["errors"] == pytest.approx(framed_tested["errors"])


@pytest.mark.parametrize("adjoint", [rf.Unroll(), rf.FixedPoint()])
def test_row_by_row_is_the_order_of_reading(adjoint):
    generator = torch.Generator().manual_seed(0)
    stop = rf.Stop(2, tol=None) if adjoint == rf.Unroll() else rf.Stop(200, 1e-10)
    for shape in ((3, 4), (5, 2)):
        graph = rf.grid(*shape, num_states=2)
        theta = torch.randn(graph.theta_size, dtype=torch.float64, generator=generator)
        naive = NaiveMeanField(graph, theta)
        found, same = (
            rf.infer(graph, theta.requires_grad_(), algorithm, stop=stop, adjoint=adjoint)
            for algorithm in (RowByRow(), rf.MeanField(range(graph.num_variables)))
        )
        for _ in range(int(found.sweeps)):
            naive.sweep(range(graph.num_variables))
        torch.testing.assert_close(found.node_marginals[0].detach(), torch.tensor(np.stack(naive.q)))
        assert torch.equal(*(torch.autograd.grad(solution.mu[1], theta)[0] for solution in (found, same)))


@pytest.mark.parametrize("own", [None, Mode.TRW.after(7)])
def test_what_is_trained_without_inference_is_tested_by_its_own_or_to_convergence(own):
    described, num_states = three_sizes()
    scenes = Scenes.of(described, num_states)
    trainer = Trainer(rf.features.ImageFeatures(), num_states, 20)
    criterion = Criterion("x", rf.losses.Pseudolikelihood(), None, 1e-4, own)
    result = trainer(criterion, None, scenes, scenes, Mode.TRW.after(1))
    model = with_parameters(trainer.model(), result["parameters"])
    wanted, by_one = (evaluate(model, [scenes], how, 8)["errors"] for how in (own or CONVERGED, Mode.TRW.after(1)))
    assert result["errors"] == wanted * 2
    assert wanted != by_one


def test_errors_are_of_labelled_pixels_at_the_resolution_of_the_pictures():
    described, _ = three_sizes()
    scenes = Scenes.of(described, 3)
    model = Trainer(rf.features.ImageFeatures(), 3, 1).model()
    with torch.no_grad():  # every pixel gets label 1, by the cosine of 0
        model.nodes["nodes"].weight[1, 32] = 1.0
    tested = evaluate(model, [scenes], rf.Inference(rf.MessagePassing(), rf.Stop(3, None)), 2)
    labels = [picture.labels for picture, _ in described]
    wrong = sum(((own >= 0) & (own != 1)).sum() for own in labels)
    assert tested["errors"] == [pytest.approx(wrong / sum((own >= 0).sum() for own in labels))]
    assert tested["unsettled"] == 0


def test_standard_errors_are_those_of_the_mean_for_pictures_of_one_size():
    pictures = list(rf.datasets.mosaics(6, (20, 24)))
    scenes = Scenes.of(describe(pictures, rf.features.ImageFeatures(scale=0.5)), 3)
    model = Trainer(rf.features.ImageFeatures(), 3, 1).model()
    with torch.no_grad():
        model.nodes["nodes"].weight[1, 32] = 1.0
    tested = evaluate(model, [scenes], rf.Inference(rf.MessagePassing(), rf.Stop(3, None)), 4)
    own = [(picture.labels != 1).mean() for picture in pictures]
    assert tested["standard_errors"] == [pytest.approx(np.std(own, ddof=1) / 6**0.5)]


def test_unsettled_inference_is_counted():
    described, _ = three_sizes()
    model = Trainer(rf.features.ImageFeatures(), 3, 1).model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    scenes = Scenes.of(described, 3)
    assert evaluate(model, [scenes], rf.Inference(rf.MessagePassing(), rf.Stop(2, 1e-12)), 2)["unsettled"] == 3
    assert not any(
        found.settled for found in predict(model, scenes, rf.Inference(rf.MessagePassing(), rf.Stop(2, 1e-12)), 2)
    )


def test_all_losses_of_one_run_are_those_of_their_own_runs():
    scenes = denoising_2010._scenes(None, "Gaussian", (64, 64), "train", 2, "cpu")
    model = denoising_2010.one_table_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    risks = denoising_2010._risks(model, scenes, denoising.prediction(1e-6), 1)
    for criterion in denoising_2010.CRITERIA[:3]:
        own = rf.learning.Objective(model, scenes.examples, criterion.loss, denoising.prediction(1e-6)).risk()
        assert risks[criterion.name] == pytest.approx(own, rel=1e-9)


# -- criteria ---------------------------------------------------------------------------------------------------------


def test_criteria_are_trained_after_those_they_start_from():
    names = [criterion.name for criterion in closure(denoising.CRITERIA, ["smooth class. 5"])]
    assert names == ["independent", "surrogate likelihood", "smooth class. 5"]
    with pytest.raises(ValueError, match=r"`rows` must be some of .*'piecewise'.* Got 'likelihood'"):
        closure(denoising.CRITERIA, ["likelihood"])


def test_each_criterion_gets_the_parameters_it_starts_from(tmp_path):
    criteria = [
        Criterion("b", rf.losses.Independent(), start="a"),
        Criterion("a", rf.losses.Independent(), start="zero"),
    ]
    asked = []

    def fit(criterion, start):
        asked.append((criterion.name, start))
        return {"parameters": [float(len(asked))]}

    with Cells(tmp_path, total=2) as cells:
        known = {"zero": {"parameters": [0.0]}}
        assert fit_all(cells, "x", criteria, [], fit, known=known, n=1) == {}
        assert fit_all(cells, "x", criteria, ["a"], fit, known=known, n=1) == {"a": {"parameters": [1.0]}}
        both = fit_all(cells, "x", criteria, ["b"], fit, known=known, n=1)
        assert fit_all(cells, "x", criteria, [], fit, known=known, n=1) == both
    assert asked == [("a", [0.0]), ("b", [1.0])]
    assert both == {"a": {"parameters": [1.0]}, "b": {"parameters": [2.0]}}


def test_a_likelihood_of_too_few_sweeps_is_reported_as_diverged():
    scenes = Scenes.of(describe(list(rf.datasets.mosaics(2, (24, 32))), rf.features.ImageFeatures(scale=0.5)), 3)
    optimiser = rf.optim.LBFGS(iterations=30)
    results = {}
    for loss in (rf.losses.SurrogateEM(), ApproximateLikelihood(), rf.losses.UnivariateLogistic()):
        model = Trainer(rf.features.ImageFeatures(), 3, 30).model()
        criterion = Criterion("x", loss, ridge=1e-6)
        results[loss] = train(model, scenes, criterion, Mode.MEAN_FIELD.after(1), optimiser, None, chunk_size=8)
    assert results[rf.losses.SurrogateEM()]["diverged"]
    assert results[ApproximateLikelihood()]["diverged"] is None
    assert results[ApproximateLikelihood()]["objective"] < 0 < results[rf.losses.SurrogateEM()]["objective"]
    assert results[rf.losses.UnivariateLogistic()]["diverged"] is None


def test_a_criterion_that_cannot_begin_is_reported():
    scenes = Scenes.of(describe(list(rf.datasets.mosaics(2, (24, 32))), rf.features.ImageFeatures(scale=0.5)), 3)
    model = Trainer(rf.features.ImageFeatures(), 3, 30).model()
    start = [1e308] * sum(parameter.numel() for parameter in model.parameters())
    settings = Criterion("x", rf.losses.UnivariateLogistic()), Mode.TRW.after(1), rf.optim.LBFGS(iterations=2), start
    result = train(model, scenes, *settings, chunk_size=8)
    said = "at the first parameters of stage 1 of 1: `model` must start where the objective is finite"
    assert result["diverged"].startswith(said)
    assert result["objective"] is None


def test_stages_before_one_that_cannot_begin_are_reported(monkeypatch):
    done, fit_stages = [], rf.learning.fit_stages

    def fails_at_the_second(model, examples, stages, **settings):
        done.append(stages)
        if len(done) == 2:
            raise rf.errors.AdjointError("no gradient")
        return fit_stages(model, examples, stages, **settings)

    monkeypatch.setattr(rf.learning, "fit_stages", fails_at_the_second)
    scenes = Scenes.of(describe(list(rf.datasets.mosaics(4, (24, 32))), rf.features.ImageFeatures(scale=0.5)), 3)
    model, settings = (
        Trainer(rf.features.ImageFeatures(), 3, 30).model(),
        (Mode.TRW.after(1), rf.optim.LBFGS(iterations=2), None),
    )
    result = train(model, scenes, Criterion("x", rf.losses.UnivariateLogistic()), *settings, chunk_size=8, first=2)
    assert result["diverged"] == "at the first parameters of stage 2 of 2: no gradient"
    assert (result["iterations"], result["objective"]) == (2, None)


# -- numbers and pictures ---------------------------------------------------------------------------------------------


def test_differences_of_two_samples_are_told_from_others():
    assert could_be_pictures(0.10, 0.12, 0.01)
    assert not could_be_pictures(0.10, 0.13, 0.01)


def test_what_is_off_is_trained_again(data, tmp_path, monkeypatch):
    study = denoising.PowerNoiseTable(str(data), (5.0,), 2, 2, (12, 18), rows=("independent",))
    far = {"independent": ((0.5, 0.5),) * 3}
    monkeypatch.setattr(denoising, "PAPER", {**denoising.PAPER, **far})
    with Cells(tmp_path, study.num_cells) as cells:
        (record,) = study.measure(cells)
    assert set(record["again"]) == {"from zeros", "other pictures", "pictures cropped", "pixels sampled"}
    assert record["again"]["from zeros"]["errors"] == pytest.approx(record["errors"], abs=0.02)
    assert "| 5 | independent | other pictures | .500 / **" in study.tables([record])
    assert "†" not in study.tables([record]).partition("## What differs")[2]
    diverged = {how: fitted | {"diverged": "at once"} for how, fitted in record["again"].items()}
    assert study.tables([record | {"again": diverged}]).partition("## What differs")[2].count(" † |") == 2 * len(
        diverged
    )
    finished = replace(study, rows=())
    with Cells(tmp_path, finished.num_cells) as cells:
        assert finished.measure(cells) == [record]
    monkeypatch.setattr(denoising, "could_be_pictures", lambda *numbers: True)
    with Cells(tmp_path, finished.num_cells) as cells:
        assert set(finished.measure(cells)[0]["again"]) == {"other pictures"}
    monkeypatch.setattr(denoising, "is_far", lambda *numbers: False)
    with Cells(tmp_path, finished.num_cells) as cells:
        assert finished.measure(cells)[0]["again"] == {}


def test_marginals_and_labels_have_the_same_colours():
    labels = np.array([[0, 1], [2, -1]])
    certain = torch.nn.functional.one_hot(torch.tensor([[0, 1], [2, 0]]), 3).double()
    np.testing.assert_allclose(shade(certain)[labels >= 0], shade_labels(labels, 3)[labels >= 0])
    assert (shade_labels(labels, 3)[1, 1] == 0).all()
    assert shade(torch.tensor([[[0.3, 0.7]]])).tolist() == [[pytest.approx(0.7)]]
