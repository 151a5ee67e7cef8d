"""`ImageCRF`: images of all kinds, its choice of the ridge, and large images in tiles."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import riskfield as rf
from riskfield import ImageCRF
from riskfield.estimators import image_tiles
from riskfield.estimators.ridge_path import RIDGES, Parameters, Trial, best_ridge
from riskfield.examples import take
from riskfield.features import HOG, Colour, ColourDifference, Constant, Fourier, ImageFeatures, Position, SobelResponse
from riskfield.features.image import physical_memory
from riskfield.features.kinds import AbstractPixelFeature
from riskfield.features.window import Window, tiles
from riskfield.learning.objective import Objective

# `ImageCRF`: images of all kinds in, marginals at their resolution out.


RECIPE = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Colour()),
    edges=(rf.features.Constant(), rf.features.ColourDifference((0.3,))),
)
FEW = rf.optim.LBFGS(iterations=6)


def drawn_images(shapes=((12, 16, 3), (10, 18), (12, 16, 3), (15, 9, 1)), seed=0):
    """Bright rectangles on dark ground seen through noise, in bytes; their masks are 0 and 255."""
    rng = np.random.default_rng(seed)
    images, masks = [], []
    for shape in shapes:
        mask = np.zeros(shape[:2], np.uint8)
        mask[shape[0] // 4 : -2, 2 : shape[1] // 2 + 2] = 255
        level = mask[..., None] / 4 + 90 + 50 * rng.normal(size=(*shape[:2], shape[2] if len(shape) == 3 else 1))
        images.append(np.clip(level, 0, 255).astype(np.uint8).reshape(shape))
        masks.append(mask)
    return images, masks


def test_images_of_unequal_sizes_grey_and_coloured():
    images, masks = drawn_images()
    crf = ImageCRF(RECIPE, optimiser=rf.optim.LBFGS(iterations=15)).fit(images, masks)
    assert crf.classes_.tolist() == [0, 255]
    others, truth = drawn_images(seed=1)
    marginals = crf.predict_marginals(others)
    assert [m.shape for m in marginals] == [(*mask.shape, 2) for mask in truth]
    assert all(np.allclose(m.sum(-1), 1) for m in marginals)
    labels = crf.predict(others)
    assert all(np.array_equal(p, np.where(m[..., 1] > 0.5, 255, 0)) for p, m in zip(labels, marginals, strict=True))
    alone = ImageCRF(RECIPE, loss="independent", optimiser=FEW).fit(images, masks).score(others, truth)
    assert crf.score(others, truth) > alone + 0.05
    right = [(a == b).ravel() for a, b in zip(labels, truth, strict=True)]
    assert crf.score(others, truth) == np.concatenate(right).mean()


def test_marginals_are_those_of_the_grid_brought_to_the_pixels():
    images, masks = drawn_images()
    recipe = rf.features.ImageFeatures(RECIPE.pixels, RECIPE.edges, scale=0.5)
    inference = rf.Inference(rf.MeanField(), rf.Stop(3, None), rf.Unroll())
    crf = ImageCRF(recipe, inference=inference, optimiser=FEW).fit(images, masks)
    features = recipe(images[1])
    assert features.shape == (5, 9)
    graph = rf.grid(5, 9, 2)
    solution = rf.infer(graph, crf.model_(graph, features.inputs()).detach(), rf.MeanField(), stop=rf.Stop(3, None))
    expected = rf.features.resize(solution.node_marginals[0].reshape(5, 9, 2), (10, 18)).numpy()
    np.testing.assert_allclose(crf.predict_marginals(images)[1], expected, rtol=0, atol=1e-12)


def test_weights_and_decoders():
    images, masks = drawn_images()
    weighted = ImageCRF(RECIPE, optimiser=FEW).fit(images, masks, sample_weight=[0, 1, 0, 1])
    fewer = ImageCRF(RECIPE, optimiser=FEW).fit(images[1::2], masks[1::2])
    for a, b in zip(weighted.predict_marginals(images), fewer.predict_marginals(images), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    recipe = rf.features.ImageFeatures(RECIPE.pixels, RECIPE.edges, scale=0.5)
    joint = ImageCRF(recipe, decoder=rf.decoders.MAP(), optimiser=FEW).fit(images, masks)
    found = joint.predict(images)[0]
    assert found.shape == masks[0].shape
    assert np.array_equal(found, np.kron(found[::2, ::2], np.ones((2, 2), np.uint8)))


def test_training_is_fit_stages_from_the_independent_model():
    images, masks = drawn_images()
    crf = ImageCRF(RECIPE, loss="clique-logistic", optimiser=FEW, ridge=1e-2).fit(images, masks)
    assert len(crf.results_) == 2
    labels = [np.where(mask == 255, 1, 0) for mask in masks]
    named = [rf.datasets.LabelledImage(str(k), *pair) for k, pair in enumerate(zip(images, labels, strict=True))]
    data = rf.datasets.image_examples(named, RECIPE, 2)
    model = rf.LinearModel(2, 4, {"horizontal": 2, "vertical": 2})
    trw = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(10, None), rf.Unroll())
    rf.fit(model, data, rf.losses.Independent(), optimiser=FEW, ridge=1e-2, progress=False)
    result = rf.fit(model, data, rf.losses.CliqueLogistic(), trw, optimiser=FEW, ridge=1e-2, progress=False)
    assert crf.results_[1].best.objective == pytest.approx(result.best.objective, rel=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(crf.model_.state_dict()[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"loss": "independent"}, 1),
        ({"loss": "smoothed-classification"}, 3),
        ({"loss": rf.losses.UnivariateLogistic(), "initial": ()}, 1),
        ({"loss": "univariate-logistic", "initial": (rf.losses.Independent(), rf.losses.Pseudolikelihood())}, 3),
    ],
)
def test_what_is_fitted_first(settings, stages):
    crf = ImageCRF(RECIPE, optimiser=rf.optim.LBFGS(iterations=2), **settings).fit(*drawn_images())
    assert len(crf.results_) == stages


def test_pixels_without_a_label_do_not_count():
    images, masks = drawn_images()
    names = [np.where(mask == 255, "figure", "ground") for mask in masks]
    crf = ImageCRF(RECIPE, optimiser=FEW).fit(images, names)
    assert crf.classes_.tolist() == ["figure", "ground"]
    assert set(np.unique(crf.predict(images)[0])) == {"figure", "ground"}
    hidden = [mask.astype(int) for mask in masks]
    for mask in hidden:
        mask[::2] = -1
    crf = ImageCRF(RECIPE, optimiser=FEW).fit(images, hidden)
    right = np.concatenate([(p == m)[m >= 0] for p, m in zip(crf.predict(images), hidden, strict=True)])
    assert crf.score(images, hidden) == right.mean() > 0.8
    lies = [np.where(mask == -1, 7, mask) for mask in hidden]
    assert ImageCRF(RECIPE, optimiser=FEW).fit(images, lies).classes_.tolist() == [0, 7, 255]


def test_images_of_one_row_column_or_pixel():
    images, masks = drawn_images()
    with pytest.raises(ValueError, match=r"`y` must hold at least two classes\. Got one class only, 0\."):
        ImageCRF(RECIPE, optimiser=FEW).fit([image[:1] for image in images], [mask[:1] for mask in masks])
    crf = ImageCRF(RECIPE, optimiser=FEW).fit([*images, images[0][:, :1]], [*masks, masks[0][:, :1]])
    for cut in (np.s_[:1], np.s_[:, :1], np.s_[:1, :1]):
        assert crf.predict([images[0][cut]])[0].shape == masks[0][cut].shape


def test_arrays_of_images_and_searches():
    images, masks = (np.stack(part) for part in drawn_images(((8, 9, 3),) * 2))
    crf = ImageCRF(RECIPE, optimiser=FEW)
    search = GridSearchCV(crf, {"ridge": [1e-3, 10.0], "loss": ["clique-logistic", "piecewise"]}, cv=2)
    assert search.fit(images, masks).best_params_["ridge"] == 1e-3
    assert search.predict(images).shape == (2, 8, 9)
    assert search.predict_proba(images).shape == (2, 8, 9, 2)
    before = clone(crf).get_params()
    assert crf.fit(images, masks).get_params() == before


def test_files(tmp_path):
    images, masks = drawn_images()
    recipe = rf.features.ImageFeatures(
        (rf.features.Fourier((rf.features.Intensity(),)), rf.features.HOG(4)), RECIPE.edges, scale=0.6
    )
    crf = ImageCRF(recipe, optimiser=FEW, initial=(rf.losses.Independent(),), ridge=1e-2).fit(images, masks)
    crf.save(tmp_path / "crf.safetensors")
    again = ImageCRF.load(tmp_path / "crf.safetensors")
    assert again.get_params() == crf.get_params()
    for a, b in zip(crf.predict_marginals(images), again.predict_marginals(images), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(rf.errors.FileFormatError, match=r"must hold a CRF. It holds ImageCRF"):
        rf.CRF.load(tmp_path / "crf.safetensors")


def test_a_run_that_was_cut_short_goes_on(tmp_path):
    images, masks = drawn_images()
    whole = ImageCRF(RECIPE, optimiser=rf.optim.LBFGS(iterations=6), initial=()).fit(images, masks)
    part = ImageCRF(RECIPE, optimiser=rf.optim.LBFGS(iterations=2), initial=()).fit(images, masks, checkpoint=tmp_path)
    rest = clone(part).set_params(optimiser=rf.optim.LBFGS(iterations=6))
    with pytest.raises(FileExistsError, match="already holds a run"):
        rest.fit(images, masks, checkpoint=tmp_path)
    rest.fit(images, masks, checkpoint=tmp_path, resume=True)
    assert [record.iteration for record in rest.results_[0].history] == [1, 2, 3, 4, 5, 6]
    for name, value in whole.model_.state_dict().items():
        assert torch.equal(rest.model_.state_dict()[name], value)


IMAGE, MASK = np.zeros((3, 4), np.uint8), np.eye(3, 4, dtype=int)


@pytest.mark.parametrize(
    ("settings", "X", "y", "error", "message"),
    [
        ({}, [], [], ValueError, "`X` must hold at least one example. Got none."),
        ({}, [IMAGE], [MASK, MASK], ValueError, "inconsistent numbers of samples"),
        ({}, [IMAGE], [MASK[:2]], ValueError, "`y[0]` must have shape (3, 4), a label for each variable. Got (2, 4)."),
        ({}, [np.ones((3, 4, 4))], [MASK], ValueError, "is transparency, pass image[..., :3]."),
        ({}, [np.ones((3, 5, 7))], [MASK], ValueError, "If the channels come first, pass np.moveaxis(image, 0, -1)."),
        ({}, [IMAGE, IMAGE[0]], [MASK, MASK], ValueError, "`X[1]` must have shape (row, column), (row, column, 1) or"),
        ({}, [IMAGE.astype(int)], [MASK], ValueError, "`X[0]` must be of type uint8, uint16, bool or floating. Got"),
        ({}, [IMAGE * np.nan], [MASK], ValueError, "`X[0]` must hold finite numbers. Got NaN or infinity."),
        ({}, np.zeros((3, 4, 3)), MASK, ValueError, "`X` must be a list of images. Got what looks like one image"),
        ({}, [IMAGE], [-np.ones((3, 4), int)], ValueError, "`y` must hold a label other than -1."),
        ({"loss": "hinge"}, [IMAGE], [MASK], ValueError, "`loss` must be a loss object, or one of"),
        ({"features": "hog"}, [IMAGE], [MASK], TypeError, "`features` must be an object such as `ImageFeatures()`."),
        ({"initial": "independent"}, [IMAGE], [MASK], TypeError, "`initial` must be a tuple of losses."),
        ({"ridge": -1}, [IMAGE], [MASK], ValueError, "`ridge` must be a non-negative number. Got -1."),
    ],
)
def test_refusals(settings, X, y, error, message):
    with pytest.raises(error) as caught:
        ImageCRF(**settings).fit(X, y)
    assert message in str(caught.value)


# `ImageCRF` chooses its ridge on held-out images, and keeps a baseline without edges.


FEATURES = ImageFeatures(pixels=(Constant(), Colour()), edges=(Constant(),))


def discs(count, seed=0):
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:8, :9]
    masks = [((row - rng.uniform(2, 6)) ** 2 + (column - rng.uniform(2, 6)) ** 2 < 8).astype(int) for _ in range(count)]
    return [mask[..., None] + 0.7 * rng.normal(size=(8, 9, 3)) for mask in masks], masks


@contextmanager
def interrupted_at(number):
    """Interrupt training at an evaluation of its objective, and list those that were begun."""
    evaluate, begun = Objective.__call__, []

    def counted(self, *arguments, **settings):
        begun.append(self)
        if len(begun) == number:
            raise KeyboardInterrupt
        return evaluate(self, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "__call__", counted)
        yield begun


def path_of(model, trials):
    """What `ridge_path` returns if all ridges leave the model as it is."""
    parameters = Parameters(copy.deepcopy(model.state_dict()), copy.deepcopy(model.state_dict()))
    return trials, {trial.ridge: parameters for trial in trials}


@pytest.fixture(scope="module")
def fitted_on_discs():
    return rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=10)).fit(*discs(6))


def test_the_ridge_is_chosen_on_held_out_images(fitted_on_discs):
    tried = [trial.ridge for trial in fitted_on_discs.path_]
    assert tried == list(RIDGES[: len(tried)])
    assert len(tried) >= 2
    assert fitted_on_discs.ridge_ == min(fitted_on_discs.path_, key=lambda trial: trial.model).ridge
    given = rf.ImageCRF(FEATURES, ridge=fitted_on_discs.ridge_, optimiser=rf.optim.LBFGS(iterations=200))
    given.fit(*discs(6))
    assert given.path_ == ()
    assert given.results_[-1].reason.value == "converged"
    # The model is that of the chosen ridge on all images.
    assert fitted_on_discs.results_[-1].best.objective == pytest.approx(given.results_[-1].best.objective, rel=1e-4)


def test_training_on_all_images_starts_from_the_parameters_of_the_chosen_ridge(fitted_on_discs):
    few = rf.optim.LBFGS(iterations=10)
    cold = rf.ImageCRF(FEATURES, ridge=fitted_on_discs.ridge_, optimiser=few).fit(*discs(6))
    for warm, other in zip(fitted_on_discs.results_, cold.results_, strict=True):
        assert warm.history[0].objective < other.history[0].objective
    assert fitted_on_discs.results_[-1].best.objective < cold.results_[-1].best.objective


def test_losses_between_the_first_and_the_last_are_not_fitted_again():
    initial = (rf.losses.Independent(), rf.losses.SurrogateEM())
    crf = rf.ImageCRF(FEATURES, initial=initial, optimiser=rf.optim.LBFGS(iterations=2))
    assert [type(stage.loss) for stage in crf.stages()] == [*map(type, initial), rf.losses.UnivariateLogistic]
    crf.fit(*discs(5))
    assert [type(stage.loss) for stage in crf.stages()] == [rf.losses.Independent, rf.losses.UnivariateLogistic]
    assert [stage.ridge for stage in crf.stages()] == [crf.independent().ridge_, crf.ridge_]
    assert len(crf.results_) == 2
    path = crf.path_
    assert crf.fit(*discs(5)).path_ == path  # the second fit has all stages again


def test_the_path_is_the_same_whatever_stops_training_early():
    images, masks = discs(8)
    early = rf.ImageCRF(FEATURES, early_stopping=True, n_iter_no_change=2, optimiser=rf.optim.LBFGS(iterations=30))
    plain = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=30))
    assert early.fit(images, masks).path_ == plain.fit(images, masks).path_  # the same images are held out
    best = early.results_[-1].best.validation
    assert best <= min(trial.model for trial in early.path_) + 1e-3
    assert all(record.validation is None for record in plain.results_[-1].history)


def test_a_class_that_is_missing_in_the_held_out_images():
    images, masks = discs(6)
    chosen = np.random.default_rng(int(np.random.RandomState(0).randint(2**31))).permutation(6)[0]
    masks = [np.zeros_like(mask) if k == chosen else mask for k, mask in enumerate(masks)]
    for weights in (None, "balanced", {0: 1.0, 1: 3.0}):
        crf = rf.ImageCRF(FEATURES, class_weight=weights, optimiser=rf.optim.LBFGS(iterations=5)).fit(images, masks)
        assert all(0 < trial.model < np.inf for trial in crf.path_)
        assert crf.predict_marginals(images)[chosen].shape == (8, 9, 2)


def test_the_log_loss_of_a_trial_is_that_of_images_the_model_has_not_seen(fitted_on_discs):
    images, masks = discs(6)
    order = np.random.default_rng(int(np.random.RandomState(0).randint(2**31))).permutation(6)
    (held_out,), train = order[:1], sorted(order[1:].tolist())
    trial = fitted_on_discs.path_[0]
    crf = rf.ImageCRF(FEATURES, ridge=trial.ridge, optimiser=rf.optim.LBFGS(iterations=10))
    crf.fit([images[k] for k in train], [masks[k] for k in train])
    for model, loss in ((crf, trial.model), (crf.independent(), trial.independent)):
        (marginals,) = model.predict_marginals([images[held_out]])
        true = np.take_along_axis(marginals, masks[held_out][..., None], -1)
        assert loss == pytest.approx(-np.log(true).mean(), rel=1e-6)


def test_the_baseline_has_no_edges(fitted_on_discs, tmp_path):
    images, _ = discs(2, seed=9)
    fitted_on_discs.save(tmp_path / "crf.safetensors")
    for crf in (fitted_on_discs, rf.ImageCRF.load(tmp_path / "crf.safetensors")):
        assert crf.path_ == fitted_on_discs.path_
        alone = crf.independent()
        for edges in alone.model_.factors.values():
            assert not edges.weight.any()
        theta = (
            np.concatenate([np.ones((8, 9, 1)), images[0]], -1) @ alone.model_.nodes["nodes"].weight.detach().numpy().T
        )
        expected = np.exp(theta) / np.exp(theta).sum(-1, keepdims=True)
        np.testing.assert_allclose(alone.predict_marginals(images)[0], expected, atol=1e-6)
        assert alone.ridge_ == best_ridge(crf.path_, "independent")


def test_few_images_are_all_used_for_training():
    crf = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=2)).fit(*discs(4))
    assert crf.path_ == ()
    assert crf.ridge_ == 1e-3
    assert crf.independent().ridge_ == 1e-3


def test_images_without_labels_or_weight_do_not_count():
    images, masks = discs(5)
    hidden = [masks[0], *(np.full_like(mask, -1) for mask in masks[1:])]
    few = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=1))
    for crf in (few.fit(images, hidden), few.fit(images, masks, sample_weight=[1, 0, 0, 0, 0])):
        assert crf.path_ == ()
        assert crf.ridge_ == 1e-3


@pytest.mark.parametrize(("at", "reasons"), [(3, ["interrupted"]), (5, ["iterations", "interrupted"])])
def test_an_interrupted_search_ends_the_fit_and_can_be_resumed(at, reasons, tmp_path, monkeypatch):
    monkeypatch.setattr("riskfield.estimators.ridge_path.RIDGES", (1e-1, 1e-2))
    crf = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=2))
    whole = clone(crf).fit(*discs(5))
    with interrupted_at(at) as evaluations:
        cut = clone(crf).fit(*discs(5), checkpoint=tmp_path)
    assert len(evaluations) == at  # nothing runs after the interrupt
    assert [result.reason.value for result in cut.results_] == reasons
    assert (cut.path_, cut.ridge_, cut.baseline_) == ((), 1e-1, None)
    assert cut.model_.nodes["nodes"].weight.any()  # it has the parameters so far
    resumed = clone(crf).fit(*discs(5), checkpoint=tmp_path, resume=True)
    assert resumed.path_ == whole.path_
    for name, value in whole.model_.state_dict().items():
        assert torch.equal(resumed.model_.state_dict()[name], value)


def test_the_baseline_is_kept_after_an_interrupt(monkeypatch):
    trials = [Trial(0.1, 1.0, 2.0), Trial(0.01, 2.0, 1.0)]
    monkeypatch.setattr("riskfield.estimators.image_crf.ridge_path", lambda model, *_, **__: path_of(model, trials))
    crf = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=2))
    with interrupted_at(5) as evaluations:
        cut = clone(crf).fit(*discs(5))
    assert len(evaluations) == 5
    assert [result.reason.value for result in cut.results_] == ["iterations", "interrupted"]
    alone, whole = cut.independent(), clone(crf).fit(*discs(5)).independent()
    assert (cut.ridge_, alone.ridge_) == (0.1, 0.01)
    for name, value in whole.model_.state_dict().items():
        assert torch.equal(alone.model_.state_dict()[name], value)


def test_the_same_images_are_held_out_with_a_cache(tmp_path, monkeypatch):
    seen = []

    def search(model, train, held_out, stages, **settings):
        seen.append(sorted(block.graph.num_variables for block in held_out for _ in range(len(block))))
        return path_of(model, [Trial(0.1, 1.0, 1.0)])

    monkeypatch.setattr("riskfield.estimators.image_crf.ridge_path", search)
    rng = np.random.default_rng(0)
    masks = [np.arange(rows * 3).reshape(rows, 3) % 2 for rows in (2, 3, 2, 4, 3, 5)]
    images = [rng.normal(size=(*mask.shape, 3)) for mask in masks]
    for seed in range(3):
        crf = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=1), random_state=seed)
        crf.fit(images, masks)
        crf.fit(images, masks, cache=tmp_path)
    assert seen[::2] == seen[1::2]


def test_a_trial_that_is_not_finite_is_not_chosen():
    assert best_ridge([Trial(0.1, float("nan"), 1.0), Trial(0.01, 2.0, float("inf"))], "model") == 0.01


@pytest.mark.parametrize("fraction", [0, 1, -0.5, "half", True])
def test_refused_fractions(fraction):
    with pytest.raises(ValueError, match="`validation_fraction` must be between 0 and 1"):
        rf.ImageCRF(FEATURES, validation_fraction=fraction).fit(*discs(2))


def test_without_an_independent_stage_there_is_no_baseline():
    crf = rf.ImageCRF(FEATURES, initial=(), optimiser=rf.optim.LBFGS(iterations=1)).fit(*discs(2))
    with pytest.raises(ValueError, match="There is no baseline"):
        crf.independent()


# Large images in tiles, images in files, and features that training reads from the disk.


TILED = ImageFeatures((Constant(), Fourier((Colour(), Position())), HOG(4)), (Constant(), SobelResponse()))
# Couplings are weak enough here for the influence of a border to vanish within some ten pixels.
CHEAP = ImageFeatures((Constant(), Colour(), Position()), (Constant(), ColourDifference((0.1,))))


def blobs(number, shape, seed=0):
    """Noisy images and their labels."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 2, (number, *(-(-n // 6) for n in shape)))
    labels = np.kron(coarse, np.ones((6, 6), int))[:, : shape[0], : shape[1]]
    images = 0.5 * labels[..., None] + 0.25 * rng.normal(size=(*labels.shape, 1))
    return [*images], [*labels]


@pytest.fixture(scope="module")
def fitted_on_blobs():
    return ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(20)).fit(*blobs(3, (24, 30)))


@pytest.fixture
def tiled(monkeypatch):
    """Predicts every image in tiles of a given side and margin."""

    def switch(side, margin):
        monkeypatch.setattr(image_tiles, "TILE_SIDE", side)
        monkeypatch.setattr(image_tiles, "TILE_MARGIN", margin)
        monkeypatch.setattr(image_tiles, "_SHARE", 0.0)

    return switch


@pytest.mark.parametrize("shape", [(1, 1), (10, 18), (37, 10), (11, 64), (100, 41)])
@pytest.mark.parametrize(("side", "margin"), [(10, 0), (10, 2), (11, 5)])
def test_tiles_cover_a_map_once_with_their_margins(shape, side, margin):
    count = np.zeros(shape, int)
    for tile in tiles(shape, side, margin):
        count[tile.kept.slices] += 1
        assert tile.window.shape == (min(side, shape[0]), min(side, shape[1]))
        inside = tile.kept.inside(tile.window)
        distances = zip(inside, (0, tile.window.shape[0], 0, tile.window.shape[1]), strict=True)
        borders = zip(tile.kept, (0, shape[0], 0, shape[1]), strict=True)
        for (own, outer), (kept, end) in zip(distances, borders, strict=True):
            assert abs(own - outer) >= margin or kept == end
    assert (count == 1).all()
    with pytest.raises(ValueError, match=r"`margin` must be less than half of `side`, 4\. Got 2"):
        tiles((9, 9), 4, 2)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37])
def test_features_of_a_window_are_those_of_the_image(scale):
    recipe = ImageFeatures(TILED.pixels, TILED.edges, scale)
    image = np.random.default_rng(0).integers(0, 256, (61, 74, 3), np.uint8)
    whole = recipe(image)
    rows, columns = whole.shape
    for window in (Window(0, 7, 0, 9), Window(5, rows, 6, 20), Window(9, 17, columns - 8, columns)):
        part, (row, column) = recipe(image, window), window.slices
        torch.testing.assert_close(part.pixels, whole.pixels[row, column], rtol=0, atol=1e-6)
        assert torch.equal(part.horizontal, whole.horizontal[row, window.left : window.right - 1])
        assert torch.equal(part.vertical, whole.vertical[window.top : window.bottom - 1, column])


@pytest.mark.parametrize("window", [None, Window(3, 27, 0, 7)])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_features_of_a_large_image_or_window_are_computed_in_bands(scale, window, monkeypatch):
    recipe = ImageFeatures(TILED.pixels, TILED.edges, scale)
    image = np.random.default_rng(0).integers(0, 256, (97, 23), np.uint8)
    whole = recipe(image, window)
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 7 * 23)
    sizes, compute = [], HOG.map
    monkeypatch.setattr(HOG, "map", lambda self, part: sizes.append(part.size) or compute(self, part))
    banded = recipe(image, window)
    assert len(sizes) > 1
    assert max(sizes) < (7 + 2 / scale + 2 * recipe.reach) * 23
    for name in ("pixels", "horizontal", "vertical"):
        torch.testing.assert_close(getattr(banded, name), getattr(whole, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("window", "what"), [(None, "an image"), (Window(2, 9, 5, 30), "25 x 7 cells of an image")])
def test_the_memory_of_features_counts_the_pixels_a_band_depends_on(window, what, monkeypatch):
    recipe, sizes = ImageFeatures((HOG(4),), (Constant(),), scale=0.25), []
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 500)
    monkeypatch.setattr(HOG, "map", lambda self, image: sizes.append(image.size) or np.zeros((*image.shape[:2], 36)))
    recipe(np.zeros((48, 160)), window)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 24 * 36 * max(sizes))
    with pytest.raises(MemoryError, match=f"Features of {what} of 160 x 48 pixels would take about"):
        recipe(np.zeros((48, 160)), window)


@dataclass(frozen=True)
class Centred(AbstractPixelFeature):
    """A user's own feature, which depends on the whole image."""

    num_features = 1

    def map(self, image):
        return image[..., :1] - image.mean()


def test_features_without_a_reach_depend_on_the_whole_image(monkeypatch):
    recipe = ImageFeatures((Colour(), Fourier((Centred(),))), (Constant(),), scale=0.5)
    image = np.random.default_rng(0).uniform(size=(80, 90))
    assert recipe.reach is None
    whole, small = recipe(image), recipe.memory_share(image.shape, 2)
    monkeypatch.setattr("riskfield.features.image._PIXELS_AT_ONCE", 100)
    assert recipe.memory_share(image.shape, 2) == small
    assert torch.equal(recipe(image).pixels, whole.pixels)
    assert torch.equal(recipe(image, Window(1, 4, 2, 6)).pixels, whole.pixels[1:4, 2:6])
    shape, share = (3000, 3000), recipe.memory_share((3000, 3000), 2)
    available = physical_memory()
    for part, fits in ((0.9, True), (1.1, False)):
        monkeypatch.setattr("riskfield.features.image.physical_memory", lambda part=part: available * share / part)
        if fits:
            assert image_tiles.tiling_of(recipe, shape, 2) is None
        else:
            with pytest.raises(
                MemoryError, match=r"of 3000 x 3000 pixels .* 110% .* because `reach` of a feature is None"
            ):
                image_tiles.tiling_of(recipe, shape, 2)


def test_marginals_of_tiles_agree_with_those_of_the_whole_image(fitted_on_blobs, tiled):
    """The error of a margin decreases exponentially with its width: below 1e-1, 1e-2 and 1e-4 here."""
    (image,), _ = blobs(1, (70, 95), seed=1)
    assert fitted_on_blobs.tiling(image.shape) is None
    whole, states = fitted_on_blobs.predict_marginals([image])[0], fitted_on_blobs.predict([image])[0]
    for margin, bound in ((4, 1e-1), (8, 1e-2), (14, 1e-4)):
        tiled(60, margin)
        assert len(fitted_on_blobs.tiling(image.shape)) >= 4
        np.testing.assert_allclose(fitted_on_blobs.predict_marginals([image])[0], whole, rtol=0, atol=bound)
    np.testing.assert_array_equal(fitted_on_blobs.predict([image])[0], states)
    others = fitted_on_blobs.predict_marginals([image, image[:20, :20], image[:, :60]])  # large and small ones together
    np.testing.assert_array_equal(others[0], fitted_on_blobs.predict_marginals([image])[0])
    assert [own.shape for own in others] == [(70, 95, 2), (20, 20, 2), (70, 60, 2)]


def test_an_image_is_tiled_when_it_would_take_half_of_the_memory(fitted_on_blobs, monkeypatch):
    shape = (1000, 1500, 3)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: 10**9)
    share = fitted_on_blobs.features_.memory_share(shape, 2)
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: int(2.1e9 * share))
    assert fitted_on_blobs.tiling(shape) is None
    monkeypatch.setattr("riskfield.features.image.physical_memory", lambda: int(1.9e9 * share))
    assert len(fitted_on_blobs.tiling(shape)) == 6
    assert fitted_on_blobs.tiling((500, 600)) is None


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("loss", ["independent", "surrogate-likelihood"])
def test_training_on_parts_is_training_on_the_whole_without_the_edges_between_them(scale, loss, monkeypatch):
    images, masks = drawn_images([(24, 40, 3), (12, 16)])
    labels = [np.where(mask > 0, "figure", "ground") for mask in masks]
    features = rf.features.ImageFeatures((Constant(), Position(), HOG(4)), RECIPE.edges, scale)
    crf = ImageCRF(features, loss=loss, ridge=1e-2, optimiser=rf.optim.LBFGS(iterations=30))
    whole = clone(crf).fit(images, labels, sample_weight=[1.0, 2.0])
    monkeypatch.setattr("riskfield.features.image.PART_SIDE", 20)
    monkeypatch.setattr("riskfield.features.image.LARGEST_SHARE", features.memory_share((12, 16), 2))
    cut = features.training_parts((24, 40), 2)
    assert [window.shape for window in cut] == [(round(12 * scale), round(20 * scale))] * 4
    assert features.training_parts((12, 16), 2) is None
    parts = clone(crf).fit(images, labels, sample_weight=[1.0, 2.0])
    if loss == "independent":
        for name, values in whole.model_.state_dict().items():
            torch.testing.assert_close(parts.model_.state_dict()[name], values, rtol=1e-3, atol=1e-4)
    assert parts.score(images, labels) == pytest.approx(whole.score(images, labels), abs=0.03)


@pytest.mark.parametrize("cached", [False, True])
def test_parts_of_one_photograph_are_held_out_together(cached, monkeypatch, tmp_path):
    images, masks = drawn_images([(24, 40), *[(12, 16)] * 3, (24, 41), (23, 40)])
    marked = [np.where(mask == 0, 0, k + 1) for k, mask in enumerate(masks)]  # a class of its own in each photograph
    features = rf.features.ImageFeatures((Constant(), Position()), RECIPE.edges)
    monkeypatch.setattr("riskfield.features.image.PART_SIDE", 20)
    monkeypatch.setattr("riskfield.features.image.LARGEST_SHARE", features.memory_share((12, 16), 7))
    seen = []

    def search(model, train, held_out, stages, **settings):
        seen.append([{k for block in part for k in block.labels.unique().tolist()} - {0} for part in (train, held_out)])
        return path_of(model, [Trial(0.1, 1.0, 1.0)])

    monkeypatch.setattr("riskfield.estimators.image_crf.ridge_path", search)
    for seed, early_stopping in product(range(4), (False, True)):
        crf = ImageCRF(features, early_stopping=early_stopping, random_state=seed, validation_fraction=0.4)
        crf.set_params(optimiser=rf.optim.LBFGS(iterations=1))
        if early_stopping:  # five of six are left to train on
            crf.set_params(validation_fraction=0.1)
        crf.fit(images, marked, cache=tmp_path if cached else None)
        train, held_out = seen[-1]
        assert not train & held_out
        assert train | held_out == {1, 2, 3, 4, 5, 6}
        assert len(held_out) == (1 if early_stopping else 2)
    assert len(seen) == 8
    few = ImageCRF(features, optimiser=rf.optim.LBFGS(iterations=1)).fit(images[:4], masks[:4])
    assert few.path_ == ()  # four photographs are few, whatever the number of parts


def test_features_of_the_whole_image_are_never_cut(monkeypatch):
    monkeypatch.setattr("riskfield.features.image.LARGEST_SHARE", 0.0)
    assert rf.features.ImageFeatures().training_parts((2000, 2000), 2) is not None
    assert rf.features.ImageFeatures(pixels=(Centred(),)).training_parts((2000, 2000), 2) is None


def test_decoders_that_weigh_all_pixels_see_the_whole_image(fitted_on_blobs, tiled):
    (image,), _ = blobs(1, (30, 40), seed=1)
    crf = copy.copy(fitted_on_blobs).set_params(decoder=rf.decoders.EqualCount())
    whole = crf.predict([image])[0]
    tiled(20, 5)
    assert crf.tiling(image.shape)
    np.testing.assert_array_equal(crf.predict([image])[0], whole)


def test_images_may_be_given_as_files(fitted_on_blobs, tmp_path):
    rng = np.random.default_rng(0)
    paths, arrays = [tmp_path / f"{k}.png" for k in range(3)], rng.integers(0, 256, (3, 12, 14, 3), np.uint8)
    for path, array in zip(paths, arrays, strict=True):
        Image.fromarray(array).save(path)
    masks = [*rng.integers(0, 2, (3, 12, 14))]
    by_files, by_arrays = (
        ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(3)).fit(X, masks) for X in (paths, [*arrays])
    )
    np.testing.assert_array_equal(
        by_files.predict_marginals([str(paths[0])])[0], by_arrays.predict_marginals(arrays)[0]
    )
    Image.fromarray(arrays[1, :5]).save(paths[1])  # of another size
    assert [own.shape for own in by_files.predict(np.array([str(path) for path in paths]))] == [
        (12, 14),
        (5, 14),
        (12, 14),
    ]
    with pytest.raises(FileNotFoundError):
        by_files.predict([tmp_path / "none.png"])


def test_training_reads_features_from_the_disk(tmp_path, monkeypatch):
    images, masks = blobs(6, (12, 14))
    images[5], masks[5] = images[5][:1], masks[5][:1]  # one row has no vertical edges
    seen = []
    monkeypatch.setattr(ImageCRF, "_train", _spy(ImageCRF._train, seen))
    crf, other = (ImageCRF(CHEAP, optimiser=rf.optim.LBFGS(5)) for _ in range(2))
    crf.fit(images, masks)
    other.fit(images, masks, cache=tmp_path / "cache")
    plain, streamed = seen
    assert [len(block) for block in plain] == [5, 1]
    assert [len(block) for block in streamed] == [1] * 6  # a block per image, mapped to its file
    assert len({id(block.graph) for block in streamed}) == 2
    for block in streamed:
        assert {rows.dtype for rows in block.inputs.values()} == {torch.float32}
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert other.ridge_ == crf.ridge_
    for name, weights in crf.model_.state_dict().items():
        torch.testing.assert_close(other.model_.state_dict()[name], weights, rtol=1e-5, atol=1e-8)
    calls = []
    monkeypatch.setattr(ImageFeatures, "__call__", lambda *arguments: calls.append(arguments))
    ImageCRF(CHEAP, ridge=1e-2, optimiser=rf.optim.LBFGS(1)).fit(images, masks, cache=tmp_path / "cache")
    assert not calls


def _spy(train, seen):
    def recorded(self, examples, *others, **settings):
        seen.append(examples)
        return train(self, examples, *others, **settings)

    return recorded


def test_mapped_features_are_those_of_the_file(tmp_path):
    cache, image = rf.datasets.FeatureCache(tmp_path), blobs(1, (9, 11))[0][0]
    maps, mapped = cache(CHEAP, image), cache.mapped(CHEAP, image)
    for name in ("pixels", "horizontal", "vertical"):
        assert torch.equal(getattr(maps, name), getattr(mapped, name))
    (path,) = tmp_path.iterdir()
    maps_of_process = Path("/proc/self/maps")
    assert not maps_of_process.exists() or str(path) in maps_of_process.read_text()


def test_whole_blocks_are_not_copied():
    data = [rf.Examples(rf.chain(k, 2), torch.zeros(2, k, dtype=torch.int64)) for k in (3, 4)]
    first, second = take(data, [0, 1, 3])
    assert first is data[0]
    assert len(second) == 1


def test_a_likelihood_of_complete_labels_is_refused_before_training(tmp_path):
    images, labels = discs(2)
    labels[1] = np.where(np.arange(labels[1].shape[1]) == 0, -1, labels[1])
    with pytest.raises(ValueError, match=r'`loss` is the surrogate likelihood, .* use "surrogate-em"'):
        rf.ImageCRF(loss="surrogate-likelihood").fit(images, labels, checkpoint=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_images_that_are_held_out_are_known():
    crf = rf.ImageCRF(optimiser=rf.optim.LBFGS(iterations=2), validation_fraction=0.4)
    found = [clone(crf).set_params(early_stopping=early).fit(*discs(8)).held_out_ for early in (False, True)]
    assert [len(own) for own in found] == [3, 3]
    assert found[0] == found[1]  # whether they also decide when training ends
    assert clone(crf).set_params(ridge=0.1).fit(*discs(8)).held_out_ == ()
