"""`ImageCRF` chooses its ridge on held-out images, and keeps a baseline without edges."""

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.estimators.ridge_path import RIDGES, Trial, best_ridge
from riskfield.features import Colour, Constant, ImageFeatures

FEATURES = ImageFeatures(pixels=(Constant(), Colour()), edges=(Constant(),))


def discs(count, seed=0):
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:8, :9]
    masks = [((row - rng.uniform(2, 6)) ** 2 + (column - rng.uniform(2, 6)) ** 2 < 8).astype(int) for _ in range(count)]
    return [mask[..., None] + 0.7 * rng.normal(size=(8, 9, 3)) for mask in masks], masks


@pytest.fixture(scope="module")
def fitted():
    return rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=10)).fit(*discs(6))


def test_the_ridge_is_chosen_on_held_out_images(fitted):
    tried = [trial.ridge for trial in fitted.path_]
    assert tried == list(RIDGES[: len(tried)])
    assert len(tried) >= 2
    assert fitted.ridge_ == min(fitted.path_, key=lambda trial: trial.model).ridge
    given = rf.ImageCRF(FEATURES, ridge=fitted.ridge_, optimiser=rf.optim.LBFGS(iterations=10)).fit(*discs(6))
    assert given.path_ == ()
    for name, value in fitted.model_.state_dict().items():  # the model is that of the chosen ridge on all images
        assert torch.equal(given.model_.state_dict()[name], value)


def test_the_log_loss_of_a_trial_is_that_of_images_the_model_has_not_seen(fitted):
    images, masks = discs(6)
    order = np.random.default_rng(int(np.random.RandomState(0).randint(2**31))).permutation(6)
    (held_out,), train = order[:1], sorted(order[1:].tolist())
    trial = fitted.path_[0]
    crf = rf.ImageCRF(FEATURES, ridge=trial.ridge, optimiser=rf.optim.LBFGS(iterations=10))
    crf.fit([images[k] for k in train], [masks[k] for k in train])
    for model, loss in ((crf, trial.model), (crf.independent(), trial.independent)):
        (marginals,) = model.predict_marginals([images[held_out]])
        true = np.take_along_axis(marginals, masks[held_out][..., None], -1)
        assert loss == pytest.approx(-np.log(true).mean(), rel=1e-6)


def test_the_baseline_has_no_edges(fitted, tmp_path):
    images, _ = discs(2, seed=9)
    fitted.save(tmp_path / "crf.safetensors")
    for crf in (fitted, rf.ImageCRF.load(tmp_path / "crf.safetensors")):
        assert crf.path_ == fitted.path_
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


def test_a_trial_that_is_not_finite_is_not_chosen():
    assert best_ridge([Trial(0.1, float("nan"), 1.0), Trial(0.01, 2.0, float("inf"))], "model") == 0.01


@pytest.mark.parametrize("fraction", [0, 1, -0.5, "half", True])
def test_refusals(fraction):
    with pytest.raises(ValueError, match="`validation_fraction` must be between 0 and 1"):
        rf.ImageCRF(FEATURES, validation_fraction=fraction).fit(*discs(2))


def test_without_an_independent_stage_there_is_no_baseline():
    crf = rf.ImageCRF(FEATURES, initial=(), optimiser=rf.optim.LBFGS(iterations=1)).fit(*discs(2))
    with pytest.raises(ValueError, match="There is no baseline"):
        crf.independent()
