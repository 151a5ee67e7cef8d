"""What scikit-learn and its users expect of an estimator."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, issparse
from sklearn.base import ClassifierMixin, clone
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import riskfield as rf
from riskfield import CRF, PerVariable

# `check_estimator` of scikit-learn on estimators whose examples have one variable. Its checks bring tables with a
# label for each row. A row is a sequence of one variable, or a picture of one pixel, so that `CRF` and `GridCRF` are
# logistic regression there. What remains is listed, with the reason.


class Rows(ClassifierMixin):
    """A table in place of a list of examples."""

    def fit(self, X, y, sample_weight=None):
        return super().fit(self._examples(X), None if y is None else self._labels(y), sample_weight)

    def predict(self, X):
        return np.concatenate([own.reshape(1) for own in super().predict(self._examples(X))])

    def predict_proba(self, X):
        marginals = self.predict_marginals(self._examples(X))
        return np.concatenate([own.reshape(1, -1) for own in marginals])

    def score(self, X, y, sample_weight=None):
        # The score of riskfield, by its own `predict`.
        right = np.asarray(self.predict(X)) == np.asarray(y)
        return float(np.average(right, weights=sample_weight))

    def _labels(self, y):
        return [np.asarray(own).reshape(self.axes + np.shape(own)) for own in np.asarray(y)]

    def _examples(self, X):
        if issparse(X):
            return [X.tocsr()[k : k + 1] for k in range(X.shape[0])]
        return [own.reshape(self.axes + own.shape) for own in np.asarray(X)]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, False
        tags.target_tags.multi_output, tags.target_tags.single_output = False, True
        return tags


class Sequences(Rows, rf.CRF):
    """Each row is a sequence of one variable."""

    axes = (1,)


class Pictures(Rows, rf.GridCRF):
    """Each row is a picture of one pixel."""

    axes = (1, 1)


FAST = {"ignore": None, "initial": (), "optimiser": rf.optim.LBFGS(iterations=12)}

# Why an estimator does not do what a check asks.
REASONS = {
    "check_n_features_in_after_fitting": "the error names the example and what it must have, in other words",
    "check_estimators_empty_data_messages": "examples without features are allowed: the constant remains",
    "check_supervised_y_2d": "a label has the shape of its example, so a column of labels is an error, not a warning",
    "check_fit2d_predict1d": "the error says to pass [X], since there is nothing to reshape",
    "check_dtype_object": "the error about an entry that is no number is a ValueError which names the example",
}


def expected_failures(estimator):
    reasons = dict(REASONS)
    if isinstance(estimator, rf.CRF):
        del reasons["check_dtype_object"]  # not asked of an estimator that takes strings
    else:
        reasons |= {
            name: "a picture is a dense array, and the error says so in other words"
            for name in ("check_estimator_sparse_tag", "check_estimator_sparse_array", "check_estimator_sparse_matrix")
        }
    return reasons


@parametrize_with_checks([Sequences(**FAST)], expected_failed_checks=expected_failures, xfail_strict=True)
def test_sequences_of_one_variable(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([Pictures(**FAST)], expected_failed_checks=expected_failures, xfail_strict=True)
def test_pictures_of_one_pixel(estimator, check):
    check(estimator)


# What users of scikit-learn expect: unknown labels, nested parameters, class weights, early stopping, n_jobs.


FEW = rf.optim.LBFGS(iterations=4)
RNG = np.random.default_rng(0)
X = [RNG.normal(size=(length, 3)) for length in (3, 5, 4, 2, 6)]
SIGNS = [np.where(x[:, 0] > 0, 1, -1) for x in X]


def test_minus_one_is_a_class_if_no_label_is_unknown():
    with pytest.raises(ValueError, match="pass `ignore=None` to the estimator if no label is unknown"):
        CRF(optimiser=FEW).fit(X, SIGNS)
    crf = CRF(optimiser=FEW, ignore=None).fit(X, SIGNS)
    assert crf.classes_.tolist() == [-1, 1]
    wrong = [-own for own in SIGNS]
    assert crf.score(X, SIGNS) + crf.score(X, wrong) == pytest.approx(1)


class Series(list):
    """As a `Series` of pandas whose index is not 0, 1, ...: iteration gives values, [] looks up a label."""

    def __getitem__(self, label):
        raise KeyError(label)


def test_score_takes_series_by_position():
    y = [(own > 0).astype(int) for own in SIGNS]
    crf = CRF(optimiser=FEW).fit(X, y)
    y[0], weights = 1 - y[0], [9.0, 1.0, 2.0, 3.0, 4.0]
    assert crf.score(X, Series(y), sample_weight=Series(weights)) == crf.score(X, y, sample_weight=weights)


def test_a_list_of_initial_losses_is_saved(tmp_path):
    y = [(own > 0).astype(int) for own in SIGNS]
    for initial in ([], [rf.losses.Independent()]):
        CRF(initial=initial, optimiser=FEW).fit(X, y).save(tmp_path / "crf")
        assert CRF.load(tmp_path / "crf").initial == tuple(initial)


@pytest.mark.parametrize(("unknown", "labels"), [("?", ["a", "b"]), (0, [1, 2]), (-100, [-1, 1])])
def test_any_label_can_mark_unknown_ones(unknown, labels):
    y = [np.array(labels)[(own > 0).astype(int)] for own in SIGNS]
    y[1][2:] = unknown
    hidden = [own.astype(object) for own in y]
    crf = CRF(optimiser=FEW, ignore=unknown).fit(X, y)
    assert crf.classes_.tolist() == labels
    same = CRF(optimiser=FEW, ignore=unknown).fit(X, hidden)
    np.testing.assert_array_equal(crf.predict_marginals(X)[0], same.predict_marginals(X)[0])
    others = [np.where(own == unknown, labels[0], own) for own in y]
    assert crf.score(X, y) != crf.score(X, others)  # unknown labels do not count


def test_nested_parameters():
    y = [(own > 0).astype(int) for own in SIGNS]
    crf = CRF().set_params(optimiser__iterations=3, ridge=0.1)
    assert crf.optimiser == rf.optim.LBFGS(iterations=3)
    assert clone(crf).get_params()["optimiser__iterations"] == 3
    search = GridSearchCV(CRF(), {"optimiser__iterations": [1, 5]}, cv=2).fit(X, y)
    assert search.best_params_["optimiser__iterations"] in (1, 5)
    with pytest.raises(ValueError, match="`optimiser__steps` is not a setting of this estimator"):
        CRF().set_params(optimiser__steps=3)
    with pytest.raises(ValueError, match="`ridge__weight` is not a setting"):
        CRF().set_params(ridge__weight=3)


def test_a_transformer_sees_the_labels():
    y = [(own > 0).astype(int) for own in SIGNS]
    pipeline = make_pipeline(PerVariable(SelectKBest(k=1)), CRF(optimiser=FEW)).fit(X, y)
    assert pipeline[0].transformer_.get_support().tolist() == [True, False, False]
    with pytest.raises(ValueError, match="`y` must hold a label for each of 20 variables"):
        PerVariable(SelectKBest(k=1)).fit(X, [[0, 1, 0]])


def test_a_transformer_needs_rows():
    with pytest.raises(ValueError, match=r"`X\[1\]` must be an array with the features of a variable in each row"):
        PerVariable(SelectKBest(k=1)).fit([X[0], csr_array(X[1])])
    with pytest.raises(ValueError, match="`X` must hold at least one example"):
        PerVariable(SelectKBest(k=1)).fit([])


def test_examples_with_and_without_cycles_do_not_mix():
    """A forest is exact whatever it is predicted with, and a graph with a cycle gets the sweeps it needs."""
    rng = np.random.default_rng(1)
    chains = [(rng.normal(size=(3, 2)), [[0, 1], [1, 2]]) for _ in range(6)]
    cycles = [(rng.normal(size=(3, 2)), [[0, 1], [1, 2], [2, 0]]) for _ in range(6)]
    y = [rng.integers(0, 2, 3) for _ in range(6)]
    crf = CRF(optimiser=FEW).fit(chains, y)
    both = crf.predict_marginals([own for pair in zip(chains, cycles, strict=True) for own in pair])
    for k, alone in enumerate(
        crf.predict_marginals([own]) for pair in zip(chains, cycles, strict=True) for own in pair
    ):
        np.testing.assert_allclose(both[k], alone[0], atol=1e-12)
    factors = crf.model_.factors["factors"].weight.detach().reshape(1, 2, 2)
    for features, edges in (chains[0], cycles[0]):
        graph = rf.from_edges(2, edges, num_variables=3)
        nodes = crf.model_.nodes["nodes"](torch.tensor(np.column_stack([features, np.ones(3)]))).detach()
        theta = graph.assemble([nodes], [factors.expand(len(edges), 2, 2)])
        inference = rf.Exact() if len(edges) == 2 else rf.MessagePassing(rf.TRW(0.5))
        truth = rf.infer(graph, theta, inference, stop=rf.Stop(10, tol=None)).node_marginals[0]
        np.testing.assert_allclose(crf.predict_marginals([(features, edges)])[0], truth, atol=1e-10)


def test_the_ignored_label_of_masks_of_bytes():
    X = [np.array([[0.1], [0.9], [0.8]]), np.array([[0.2], [0.1]])]
    y = [np.array([255, 1, 1], np.uint8), np.array([0, 0], np.uint8)]
    crf = rf.CRF(ignore=255, optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    assert crf.classes_.tolist() == [0, 1]


# -- class weights ----------------------------------------------------------------------------------------------------


def rows_and_labels():
    """Variables without edges: logistic regression."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(30, 4, 2))
    return X, (X @ [2.0, -1.0] + rng.normal(size=(30, 4)) > 1.2).astype(int)


@pytest.mark.parametrize("weights", ["balanced", {1: 7.0}])
@pytest.mark.parametrize("loss", ["univariate-logistic", "independent", "pseudolikelihood"])
def test_class_weights_are_those_of_logistic_regression(loss, weights):
    from sklearn.linear_model import LogisticRegression

    X, y = rows_and_labels()
    crf = CRF(np.empty((0, 2), int), loss=loss, ridge=1e-2, class_weight=weights).fit(X, y)
    rows = np.concatenate([X, np.ones((30, 4, 1))], -1).reshape(120, 3)
    other = LogisticRegression(C=1 / (1e-2 * 120), fit_intercept=False, tol=1e-8, class_weight=weights)
    expected = other.fit(rows, y.ravel()).predict_proba(rows)
    np.testing.assert_allclose(crf.predict_proba(X).reshape(120, 2), expected, rtol=0, atol=1e-4)
    plain = CRF(np.empty((0, 2), int), loss=loss, ridge=1e-2).fit(X, y)
    assert np.abs(plain.predict_proba(X).reshape(120, 2) - expected).max() > 0.1


@pytest.mark.parametrize(
    "loss", [rf.losses.UnivariateLogistic, rf.losses.UnivariateQuadratic, rf.losses.SmoothedClassification]
)
def test_a_weighted_loss_is_a_weighted_sum(loss):
    """Over variables, with the marginals of all of them; unknown labels have no weight."""
    graph, rng = rf.chain(5, 3), torch.Generator().manual_seed(0)
    theta = torch.randn(graph.theta_size, generator=rng, dtype=torch.float64)
    labels, exact = torch.tensor([0, 2, -1, 1, 2]), rf.Inference(rf.Exact())
    weights = (0.5, 2.0, 3.0)
    parts = [loss()(graph, theta, labels, exact, mask=torch.arange(5) == k) for k in (0, 1, 3, 4)]
    expected = sum(weights[labels[k]] * part for k, part in zip((0, 1, 3, 4), parts, strict=True))
    torch.testing.assert_close(loss(class_weight=weights)(graph, theta, labels, exact), expected)
    with pytest.raises(ValueError, match=r"a weight for each of 3 states\. Got 2 weights"):
        loss(class_weight=[1, 2])(graph, theta, labels, exact)


def test_balanced_weights_count_repeated_examples():
    y = [(own > 0).astype(int) for own in SIGNS]
    weights = np.array([2, 1, 0, 1, 3])
    repeated = [k for k, weight in enumerate(weights) for _ in range(weight)]
    weighted = CRF(class_weight="balanced").fit(X, y, sample_weight=weights)
    plain = CRF(class_weight="balanced").fit([X[k] for k in repeated], [y[k] for k in repeated])
    np.testing.assert_allclose(weighted.predict_marginals(X)[0], plain.predict_marginals(X)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_weight": {2: 1.0}}, r"`class_weight` must name labels in `y`, \[0, 1\]. Got 2"),
        ({"class_weight": {1: 0.0}}, "`class_weight` must be a positive number for each state"),
        ({"class_weight": "even"}, '`class_weight` must be None, "balanced" or a dictionary'),
        (
            {"class_weight": "balanced", "loss": "surrogate-likelihood"},
            "`class_weight` needs one of the losses univariate-logistic, .*independent. Got 'surrogate-likelihood'",
        ),
        (
            {"class_weight": {1: 2.0}, "loss": rf.losses.UnivariateLogistic(class_weight=(1, 2))},
            "`class_weight` must be given once",
        ),
        ({"early_stopping": 1}, "`early_stopping` must be True or False. Got 1"),
        ({"validation_fraction": 1.0}, "`validation_fraction` must be between 0 and 1"),
        ({"n_iter_no_change": 0}, "`n_iter_no_change` must be a positive integer"),
        ({"n_jobs": 0}, "`n_jobs` must be a positive integer, -1 for all processors, or None. Got 0"),
        ({"ignore": 255.0}, "`ignore` must be an integer, a string or None. Got 255.0"),
        ({"fit_intercept": 0}, "`fit_intercept` must be True or False. Got 0"),
        ({"boundaries": 1}, "`boundaries` must be True or False. Got 1"),
        ({"forbidden": iter([(0, 1)])}, "`forbidden` must be a list, a tuple or a set of pairs"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    y = [(own > 0).astype(int) for own in SIGNS]
    with pytest.raises(ValueError, match=message):
        CRF(optimiser=FEW, **settings).fit(X, y)


def test_weights_in_all_estimators():
    """More weight, more of the class; and weights stay with a saved model."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (5, 4, 6))
    X = y[..., None] + rng.normal(size=(5, 4, 6, 1))
    features = rf.features.ImageFeatures((rf.features.Constant(), rf.features.Intensity()), (rf.features.Constant(),))
    for make, data in ((rf.GridCRF, X), (lambda **own: rf.ImageCRF(features, **own), list(X[..., 0]))):
        plain, weighted = (
            make(optimiser=FEW, class_weight=own).fit(data, y).predict_marginals(data) for own in (None, {1: 9})
        )
        assert np.mean([own[..., 1] for own in weighted]) > np.mean([own[..., 1] for own in plain]) + 0.1


# -- early stopping ---------------------------------------------------------------------------------------------------


def noise(number=20):
    """Features that say nothing, so that the best model knows nothing."""
    rng = np.random.default_rng(5)
    return [rng.normal(size=(3, 8)) for _ in range(number)], [rng.integers(0, 2, 3) for _ in range(number)]


def test_early_stopping_keeps_what_was_best_on_held_out_examples():
    X, y = noise()
    settings = {"initial": (), "ridge": 0.0, "optimiser": rf.optim.LBFGS(iterations=40)}
    crf = CRF(early_stopping=True, validation_fraction=0.3, n_iter_no_change=3, **settings).fit(X, y)
    (result,) = crf.results_
    curve = [record.validation for record in result.history]
    assert result.reason is rf.learning.Reason.VALIDATION
    assert result.best.validation == min(curve)
    assert len(curve) == result.best.iteration + 3
    # The examples that are held out, and the loss on them, by hand.
    everything = CRF(**settings, early_stopping=False).fit(X, y)
    held_out = np.random.default_rng(np.random.RandomState(0).randint(2**31)).permutation(20)[:6]
    marginals = crf.predict_marginals(X)
    by_hand = -np.mean([np.log(marginals[k][np.arange(3), y[k]]) for k in held_out])
    assert min(curve) == pytest.approx(by_hand, abs=1e-9)
    assert all(record.validation is None for record in everything.results_[0].history)


def test_the_seed_chooses_the_held_out_examples():
    X, y = noise()
    curves = [
        [record.validation for record in CRF(early_stopping=True, random_state=seed).fit(X, y).results_[0].history]
        for seed in (0, 0, 1)
    ]
    assert curves[0] == curves[1] != curves[2]


def test_examples_without_labels_are_not_held_out():
    X, y = noise(4)
    y = [y[0], y[1], np.full(3, -1), np.full(3, -1)]
    for seed in range(6):
        crf = CRF(early_stopping=True, optimiser=FEW, random_state=seed).fit(X, y)
        assert crf.results_[-1].history[0].validation > 0
    with pytest.raises(ValueError, match="`X` must hold at least two examples with labels, since one is held out"):
        CRF(early_stopping=True).fit([np.eye(2)], [[0, 1]])


def test_early_stopping_of_images():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (6, 3, 4))
    images = list(rng.normal(size=(6, 3, 4)))
    features = rf.features.ImageFeatures((rf.features.Constant(), rf.features.Intensity()), (rf.features.Constant(),))
    crf = rf.ImageCRF(features, early_stopping=True, optimiser=FEW).fit(images, y)
    assert crf.path_
    assert all(record.validation is not None for result in crf.results_ for record in result.history)
    grid = rf.GridCRF(early_stopping=True, optimiser=FEW).fit(np.stack(images)[..., None], y)
    assert grid.results_[-1].history[0].validation is not None


# -- threads ----------------------------------------------------------------------------------------------------------


def test_n_jobs_is_the_number_of_threads(monkeypatch):
    y = [(own > 0).astype(int) for own in SIGNS]
    seen = []

    def loss(solution, labels, mask):
        seen.append((rf.get_num_threads(), torch.get_num_threads()))
        return rf.losses.UnivariateLogistic().of_solution(solution, labels, mask)

    before = rf.get_num_threads(), torch.get_num_threads()
    CRF(loss=loss, initial=(), optimiser=FEW, n_jobs=3).fit(X, y)
    assert set(seen) == {(3, 3)}
    assert (rf.get_num_threads(), torch.get_num_threads()) == before
    seen.clear()
    monkeypatch.setattr("riskfield.estimators.parameters.num_processors", lambda: 4)
    CRF(loss=loss, initial=(), optimiser=FEW, n_jobs=-2).fit(X, y)
    assert set(seen) == {(3, 3)}


# -- files ------------------------------------------------------------------------------------------------------------


def test_settings_come_back_from_a_file(tmp_path):
    y = [(own > 0).astype(int) for own in SIGNS]
    forbidden = {(1, None)}
    y = [np.append(own[:-1], 0) for own in y]
    settings = {"class_weight": {1: 2.0}, "early_stopping": True, "n_jobs": 1, "verbose": 0, "ignore": np.int64(7)}
    crf = CRF(forbidden=forbidden, optimiser=FEW, **settings).fit(X, y)
    crf.set_params(dtype="float32")  # set since
    expected = crf.predict_marginals(X)
    crf.save(tmp_path / "crf")
    again = CRF.load(tmp_path / "crf")
    assert again.get_params()["class_weight"] == {1: 2.0}
    assert [tuple(pair) for pair in again.forbidden] == [(1, None)]
    assert next(again.model_.parameters()).dtype == torch.float32
    assert all(np.array_equal(a, b) for a, b in zip(expected, again.predict_marginals(X), strict=True))
    assert again.results_ == crf.results_
    again.set_params(fit_intercept=1)
    with pytest.raises(ValueError, match="`fit_intercept` must be True or False"):
        again.save(tmp_path / "other")


def test_numpy_scalars_are_numbers(tmp_path):
    """As `GridSearchCV` passes them, from arrays of settings."""
    y = [(own > 0).astype(int) for own in SIGNS]
    settings = {
        "ridge": np.float32(1e-2),
        "chunk_size": np.int64(3),
        "class_weight": {np.int64(1): np.float32(2)},
        "early_stopping": np.bool_(True),
        "validation_fraction": np.float32(0.3),
        "n_iter_no_change": np.int32(3),
        "n_jobs": np.int64(1),
        "random_state": np.int64(3),
        "optimiser": rf.optim.LBFGS(np.int64(4), memory=np.int64(3)),
        "inference": rf.Inference(
            rf.MessagePassing(rf.TRW(np.float32(0.5))),
            rf.Stop(np.int64(50), np.float32(0.01)),
            rf.Unroll(np.int64(2)),
        ),
    }
    crf = CRF(**settings).fit(X, y, checkpoint=tmp_path / "checkpoint")
    crf.save(tmp_path / "crf")
    again = CRF.load(tmp_path / "crf")
    assert np.array_equal(crf.predict_marginals(X)[0], again.predict_marginals(X)[0])
    found = again.get_params()
    assert all(found[name] == value for name, value in settings.items() if name not in ("optimiser", "inference"))
    assert (type(found["chunk_size"]), type(found["early_stopping"])) == (int, bool)
    assert found["optimiser__iterations"] == 4
    with pytest.raises(ValueError, match=r"ridge"):  # a checkpoint tells one number from another
        crf.set_params(ridge=np.float32(1e-3)).fit(X, y, checkpoint=tmp_path / "checkpoint", resume=True)
    grid = {"chunk_size": np.arange(1, 3), "validation_fraction": np.array([0.2, 0.3], np.float32)}
    search = GridSearchCV(CRF(early_stopping=True, optimiser=FEW), grid, cv=2, error_score="raise").fit(X, y)
    search.best_estimator_.save(tmp_path / "best")


def test_the_baseline_of_images_has_its_own_training(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (5, 3, 4))
    features = rf.features.ImageFeatures((rf.features.Constant(), rf.features.Intensity()), (rf.features.Constant(),))
    crf = rf.ImageCRF(features, optimiser=FEW).fit(list(y + rng.normal(size=y.shape)), y)
    assert len(crf.results_) == 2
    assert len(crf.independent().results_) == 1
    assert crf.independent().results_[0] != crf.results_[-1]
    crf.save(tmp_path / "crf")
    assert rf.ImageCRF.load(tmp_path / "crf").independent().results_ == crf.independent().results_
