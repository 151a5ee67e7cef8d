"""`ImageCRF` chooses its ridge on held-out images, and keeps a baseline without edges."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sklearn.base import clone

import riskfield as rf
from riskfield.estimators.ridge_path import RIDGES, Trial, best_ridge
from riskfield.features import Colour, Constant, ImageFeatures
from riskfield.learning.objective import Objective

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


def test_no_baseline_is_fitted_after_an_interrupt(monkeypatch):
    trials = [Trial(0.1, 1.0, 2.0), Trial(0.01, 2.0, 1.0)]
    monkeypatch.setattr("riskfield.estimators.image_crf.ridge_path", lambda *_, **__: trials)
    with interrupted_at(5) as evaluations:
        cut = rf.ImageCRF(FEATURES, optimiser=rf.optim.LBFGS(iterations=2)).fit(*discs(5))
    assert len(evaluations) == 5
    assert [result.reason.value for result in cut.results_] == ["iterations", "interrupted"]
    with pytest.raises(ValueError, match="There is no baseline: training was interrupted"):
        cut.independent()


def test_the_same_images_are_held_out_with_a_cache(tmp_path, monkeypatch):
    seen = []

    def search(model, train, held_out, stages, **settings):
        seen.append(sorted(block.graph.num_variables for block in held_out for _ in range(len(block))))
        return [Trial(0.1, 1.0, 1.0)]

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
def test_refusals(fraction):
    with pytest.raises(ValueError, match="`validation_fraction` must be between 0 and 1"):
        rf.ImageCRF(FEATURES, validation_fraction=fraction).fit(*discs(2))


def test_without_an_independent_stage_there_is_no_baseline():
    crf = rf.ImageCRF(FEATURES, initial=(), optimiser=rf.optim.LBFGS(iterations=1)).fit(*discs(2))
    with pytest.raises(ValueError, match="There is no baseline"):
        crf.independent()
