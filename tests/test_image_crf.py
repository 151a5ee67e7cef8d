"""`ImageCRF`: images of all kinds in, marginals at their resolution out."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import riskfield as rf
from riskfield import ImageCRF

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
        ({}, [IMAGE, IMAGE[0]], [MASK, MASK], ValueError, "`X[1]` must have shape (row, column), (row, column, 1) or"),
        ({}, [IMAGE.astype(int)], [MASK], ValueError, "`X[0]` must be of type uint8, uint16, bool or floating. Got"),
        ({}, [IMAGE * np.nan], [MASK], ValueError, "`X[0]` must be finite."),
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
