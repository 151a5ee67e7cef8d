"""The scikit-learn face: what scikit-learn asks of an estimator, and the same answers as `fit` and `infer`."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils import estimator_checks

import riskfield as rf
from riskfield import CRF, GridCRF, ImageCRF, PerVariable
from riskfield.estimators import registry

EXACT = rf.Inference(rf.Exact())


def sentences(number=20, seed=0, lengths=(1, 4)):
    """Labels that tend to repeat, each seen through a noisy feature; a second feature says nothing."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(number):
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        labels = np.cumsum(rng.random(length) < 0.3) % 3
        X.append(np.stack([labels + 0.5 * rng.normal(size=length), rng.normal(size=length)], 1))
        y.append(labels)
    return X, y


def drawn_images(number=6, rows=8, columns=9, seed=0):
    """Rectangles seen through noise."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((number, rows, columns), int)
    for image in truth:
        top, left = rng.integers(0, rows // 2), rng.integers(0, columns // 2)
        image[top : top + rows // 2, left : left + columns // 2] = 1
    return truth[..., None] + 0.7 * rng.normal(size=(number, rows, columns, 1)), truth


# -- what scikit-learn asks -------------------------------------------------------------------------------------------

ESTIMATORS = [CRF(), GridCRF(), ImageCRF()]
NAMES = ["CRF", "GridCRF", "ImageCRF"]


def test_all_estimators_have_the_same_parameters_and_defaults():
    assert [estimator.ridge for estimator in ESTIMATORS] == [1e-3, 1e-3, None]  # images choose it on held-out ones
    own = {"ridge", "validation_fraction"}
    own |= {"graph", "fit_intercept", "boundaries", "scheme", "forbidden", "connectivity", "edge_features", "features"}
    common = [
        {name: value for name, value in estimator.get_params().items() if name not in own} for estimator in ESTIMATORS
    ]
    assert common[0] == common[1] == common[2]
    shared = {"loss", "inference", "decoder", "lasso", "optimiser", "initial", "chunk_size", "random_state"}
    shared |= {"ignore", "verbose", "device", "dtype", "class_weight", "early_stopping", "n_iter_no_change", "n_jobs"}
    assert set(common[0]) == shared


def test_all_estimators_have_the_same_fitted_attributes():
    X, y = drawn_images(2)
    few = rf.optim.LBFGS(iterations=2)
    features = rf.features.ImageFeatures((rf.features.Constant(), rf.features.Intensity()), (rf.features.Constant(),))
    fitted = [
        CRF(optimiser=few).fit(*sentences(3, lengths=(4, 4))),
        GridCRF(optimiser=few).fit(X, y),
        ImageCRF(features, optimiser=few).fit(list(X), y),
    ]
    found = [{name for name in vars(estimator) if name.endswith("_")} for estimator in fitted]
    of_images = {"features_", "ridge_", "path_", "held_out_", "ridge_seconds_", "baseline_", "baseline_results_"}
    assert found[0] - {"columns_", "vocabulary_"} == found[1] == found[2] - of_images
    assert {len(estimator.results_) for estimator in fitted} == {2}


# Those of its checks that bring no data of their own: theirs are tables, with a label for each row.
CHECKS = [
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learn_is_content(estimator, check):
    getattr(estimator_checks, check)(type(estimator).__name__, estimator)


@pytest.mark.parametrize(
    ("estimator", "data"), [(CRF(), sentences()), (GridCRF(), drawn_images())], ids=["CRF", "GridCRF"]
)
def test_fitting_is_repeatable_and_leaves_its_arguments_alone(estimator, data):
    X, y = data
    copies = [np.array(x) for x in X], [np.array(labels) for labels in y]
    before = estimator.get_params()
    assert estimator.fit(X, y) is estimator
    assert estimator.get_params() == before
    assert all(np.array_equal(a, b) for a, b in zip([*X, *y], [*copies[0], *copies[1]], strict=True))
    first = estimator.predict_marginals(X)
    again = clone(estimator).fit(X, y).predict_marginals(X)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    twin = pickle.loads(pickle.dumps(estimator))
    assert all(np.array_equal(a, b) for a, b in zip(first, twin.predict_marginals(X), strict=True))
    assert not hasattr(clone(estimator), "model_")


@pytest.mark.parametrize(
    ("estimator", "data"), [(CRF(), sentences()), (GridCRF(), drawn_images())], ids=["CRF", "GridCRF"]
)
def test_a_prediction_does_not_depend_on_the_others(estimator, data):
    X, y = data
    estimator.fit(X, y)
    together = estimator.predict_marginals(X), estimator.predict(X)
    for k in range(len(X)):
        np.testing.assert_allclose(estimator.predict_marginals([X[k]])[0], together[0][k], rtol=0, atol=1e-14)
        assert np.array_equal(estimator.predict([X[k]])[0], together[1][k])
    chunks = clone(estimator).set_params(chunk_size=2).fit(X, y)
    np.testing.assert_allclose(chunks.predict_marginals(X)[0], together[0][0], rtol=0, atol=1e-4)
    once = chunks.set_params(chunk_size=10**400).predict_marginals(X)[0]
    np.testing.assert_allclose(once, chunks.set_params(chunk_size=2).predict_marginals(X)[0], rtol=0, atol=1e-10)
    assert estimator.predict_proba(X)[0].tolist() == together[0][0].tolist()


def test_grid_search():
    X, y = sentences(24)
    grid = [{"ridge": [10.0, 1e-3], "inference": [None, EXACT]}, {"loss": ["independent", rf.losses.CliqueLogistic()]}]
    search = GridSearchCV(CRF("chain", loss="surrogate-likelihood"), grid, cv=2).fit(X, y)
    assert len(search.cv_results_["params"]) == 6
    assert isinstance(search.best_estimator_, CRF)
    assert search.score(X, y) == search.best_estimator_.score(X, y) > 0.6
    scores = search.cv_results_["mean_test_score"]  # None and EXACT at a ridge of 10, at one of 1e-3, the losses
    assert scores[0] < scores[1] == search.best_score_
    # Belief propagation is exact on chains, so that both inferences give the same scores.
    np.testing.assert_allclose(scores[:2], scores[2:4], rtol=0, atol=1e-9)


def test_grid_search_over_images_of_different_sizes():
    small, large = drawn_images(3, rows=6), drawn_images(3, rows=9, seed=1)
    X, y = [*small[0], *large[0]], [*small[1], *large[1]]
    search = GridSearchCV(GridCRF(), {"edge_features": ["constant", "difference"]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.75
    assert len(cross_val_score(GridCRF(loss="independent"), X, y, cv=3)) == 3


def test_pipelines():
    X, y = sentences(30)
    distorted = [1000 * x + 500 for x in X]  # a ridge makes scales matter
    pipeline = Pipeline([("scale", PerVariable(StandardScaler())), ("crf", CRF(ridge=1e-2))]).fit(distorted, y)
    rows = np.concatenate(pipeline["scale"].transform(distorted))
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(rows.std(0), 1, atol=1e-9)
    by_hand = CRF(ridge=1e-2).fit(pipeline["scale"].transform(distorted), y)
    assert pipeline.score(distorted, y) == by_hand.score(pipeline["scale"].transform(distorted), y)
    marginals = pipeline.predict_proba(distorted)
    assert [m.shape for m in marginals] == [(len(x), 3) for x in X]
    search = GridSearchCV(pipeline, {"crf__ridge": [1e-1, 1e-3], "scale__transformer__with_mean": [True, False]}, cv=2)
    assert search.fit(distorted, y).best_score_ > 0.55


def test_pipelines_of_functions_and_arrays():
    X, y = drawn_images()
    neighbours = FunctionTransformer(lambda X: np.concatenate([X, np.roll(X, 1, axis=2)], axis=-1))
    pipeline = make_pipeline(neighbours, PerVariable(StandardScaler()), GridCRF()).fit(X, y)
    assert pipeline[-1].n_features_in_ == 2
    predicted = pipeline.predict(X)
    assert predicted.shape == y.shape
    assert pipeline.score(X, y) == np.mean(predicted == y) > 0.8


def test_a_transformer_leaves_graphs_alone():
    edges = np.array([[0, 1]])
    X = [(np.array([[1.0], [3.0]]), edges, np.array([[7.0]])), (np.array([[5.0], [7.0]]), edges, np.array([[8.0]]))]
    changed = PerVariable(StandardScaler()).fit_transform(X)
    assert [x[0].ravel().round(3).tolist() for x in changed] == [[-1.342, -0.447], [0.447, 1.342]]
    assert changed[1][1] is edges
    assert changed[1][2] is X[1][2]
    with pytest.raises(NotFittedError):
        PerVariable(StandardScaler()).transform(X)


# -- the same answers as fit and infer --------------------------------------------------------------------------------


def chain_by_hand(X, y, loss, ridge, num_states=3):
    """A model fitted with `rf.fit` to sequences, exactly; its marginals of each."""
    model = rf.LinearModel(num_states, X[0].shape[1] + 1, 1)
    blocks = []
    for x, labels in zip(X, y, strict=True):
        graph = rf.chain(len(x), num_states, tied=True)
        nodes = torch.from_numpy(np.concatenate([x, np.ones((len(x), 1))], 1))[None]
        factors = torch.ones(1, min(len(x) - 1, 1), 1, dtype=torch.float64)
        blocks.append(rf.Examples(graph, torch.tensor(np.array(labels))[None], {"nodes": nodes, "factors": factors}))
    rf.fit(model, blocks, loss, EXACT, ridge=ridge, progress=False)
    with torch.no_grad():
        solutions = [EXACT(block.graph, model(block.graph, block.inputs)) for block in blocks]
    return [solution.node_marginals[0][0].numpy() for solution in solutions]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("surrogate-likelihood", rf.losses.SurrogateLikelihood()),
        ("univariate-logistic", rf.losses.UnivariateLogistic()),
    ],
)
def test_sequences(name, loss):
    X, y = sentences()
    crf = CRF(loss=name, ridge=1e-3).fit(X, y)
    expected = chain_by_hand(X, y, loss, 1e-3)
    for marginals, truth in zip(crf.predict_marginals(X), expected, strict=True):
        np.testing.assert_allclose(marginals, truth, rtol=0, atol=2e-4)
    predicted = crf.predict(X)
    assert all(np.array_equal(p, m.argmax(-1)) for p, m in zip(predicted, crf.predict_marginals(X), strict=True))
    right = sum(np.count_nonzero(p == labels) for p, labels in zip(predicted, y, strict=True))
    assert crf.score(X, y) == right / sum(map(len, y))
    assert crf.results_[-1].reason is rf.learning.Reason.CONVERGED
    assert crf.n_features_in_ == 2


def test_arrays_in_arrays_out():
    X, y = sentences(10, lengths=(4, 4))
    lists, arrays = CRF().fit(X, y), CRF().fit(np.stack(X), np.stack(y))
    assert arrays.predict(np.stack(X)).shape == (10, 4)
    assert arrays.predict_marginals(np.stack(X)).shape == (10, 4, 3)
    assert np.array_equal(arrays.predict_marginals(np.stack(X)), np.stack(lists.predict_marginals(X)))
    ragged = np.empty(2, dtype=object)
    ragged[:] = [X[0], X[1][:2]]
    assert [len(labels) for labels in arrays.predict(ragged)] == [4, 2]


@pytest.mark.parametrize("labels", [["noun", "verb", "other"], [7, -3, 100], [True, False]])
def test_any_labels(labels):
    X, y = sentences()
    y = [entry % len(labels) for entry in y]
    plain, named = CRF().fit(X, y), CRF().fit(X, [[labels[k] for k in entry] for entry in y])
    order = np.argsort(labels)
    assert named.classes_.tolist() == [labels[k] for k in order]
    np.testing.assert_allclose(
        named.predict_marginals(X)[0], plain.predict_marginals(X)[0][:, order], rtol=0, atol=1e-3
    )
    assert named.predict(X)[0].tolist() == [labels[k] for k in plain.predict(X)[0]]


def test_unknown_labels_do_not_count():
    X, y = sentences(30)
    hidden = [np.where(np.arange(len(labels)) % 3 == 1, -1, labels) for labels in y]
    for loss in ("univariate-logistic", "surrogate-em", "pseudolikelihood"):
        crf = CRF(loss=loss, ridge=1e-3).fit(X, hidden)
        assert crf.classes_.tolist() == [0, 1, 2]
        assert crf.score(X, y) > 0.55
    known = np.concatenate(hidden) >= 0
    right = np.concatenate(crf.predict(X)) == np.concatenate(hidden)
    assert crf.score(X, hidden) == right[known].mean()
    # A sequence without labels changes nothing, and neither does what is said about it.
    more = [*X, np.full((3, 2), 50.0)], [*hidden, np.full(3, -1)]
    other = CRF(ridge=1e-3).fit(*more)
    np.testing.assert_allclose(
        other.predict_marginals(X)[0], CRF(ridge=1e-3).fit(X, hidden).predict_marginals(X)[0], atol=1e-6
    )
    mixed = [np.array(["a", -1], dtype=object), np.array(["b", "a"], dtype=object)]
    assert CRF().fit([np.eye(2), np.eye(2)], mixed).classes_.tolist() == ["a", "b"]


def test_weights_are_repetitions():
    X, y = sentences(12)
    weights = np.array([2, 0, 1] * 4)
    repeated = [k for k, weight in enumerate(weights) for _ in range(weight)]
    weighted = CRF().fit(X, y, sample_weight=weights)
    plain = CRF().fit([X[k] for k in repeated], [y[k] for k in repeated])
    np.testing.assert_allclose(weighted.predict_marginals(X)[1], plain.predict_marginals(X)[1], rtol=0, atol=1e-4)
    several = plain.score([X[k] for k in repeated], [y[k] for k in repeated])
    assert weighted.score(X, y, weights) == pytest.approx(several, abs=1e-12)


# -- structures -------------------------------------------------------------------------------------------------------


def chain_edges(length):
    return np.stack([np.arange(length - 1), np.arange(1, length)], 1)


def test_chains_by_any_other_name():
    """As a graph of all examples, and as a graph of each."""
    X, y = sentences(10, lengths=(4, 4))
    settings = {"inference": EXACT, "ridge": 1e-3}
    expected = CRF(**settings).fit(X, y).predict_marginals(X)
    shared = CRF(chain_edges(4), **settings).fit(X, y).predict_marginals(X)
    own = [(x, chain_edges(4)) for x in X]
    each = CRF("chain", **settings).fit(own, y).predict_marginals(own)
    for a, b, c in zip(expected, shared, each, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-9)


def test_the_graph_decides_how_marginals_are_computed():
    """Not the form in which it was given, and not what the estimator was fitted to."""
    X, y = sentences(10, lengths=(4, 4))
    shuffled = np.array([[2, 3], [0, 1], [2, 1]])  # a chain; its variables in another order than the numbering
    star, square = np.array([[0, 3], [3, 1], [3, 2]]), np.array([[0, 1], [1, 2], [2, 3], [3, 0]])
    as_graphs = [(x, chain_edges(4)) for x in X]
    plain, listed = CRF(ridge=1e-3).fit(X, y), CRF(ridge=1e-3).fit(as_graphs, y)
    for a, b in zip(plain.predict_marginals(X), listed.predict_marginals(as_graphs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    joint = clone(plain).set_params(decoder=rf.decoders.MAP()).fit(X, y)
    for fitted, edges in [(plain, shuffled), (plain, star), (plain, square), (listed, star), (joint, shuffled)]:
        graph = rf.FactorGraph([3] * 4, edges, tables=np.zeros(len(edges), int))
        nodes = torch.from_numpy(np.concatenate([X[0], np.ones((4, 1))], 1))
        theta = fitted.model_(graph, {"nodes": nodes, "factors": torch.ones(1, 1, dtype=torch.float64)}).detach()
        if graph.is_forest:
            expected = rf.infer(graph, theta, rf.Exact())
        else:
            expected = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=rf.Stop(10, tol=None))
        own = [(X[0], edges)]
        np.testing.assert_allclose(fitted.predict_marginals(own)[0], expected.node_marginals[0], rtol=0, atol=1e-12)
        if fitted is joint:
            assert fitted.predict(own)[0].tolist() == rf.infer(graph, theta, rf.MaxProduct()).mode().tolist()
    row, truth = drawn_images(4, rows=2)
    one_row = GridCRF().fit(row, truth).predict_marginals(row[:1, :1])
    exact = GridCRF(inference=EXACT, optimiser=rf.optim.LBFGS(iterations=1)).fit(row, truth)
    exact.model_ = GridCRF().fit(row, truth).model_
    np.testing.assert_allclose(one_row, exact.predict_marginals(row[:1, :1]), rtol=0, atol=1e-12)


def test_graphs_that_differ_and_edges_that_speak():
    """Neighbours agree or disagree, as the feature of their edge says; their own features say nothing."""
    rng = np.random.default_rng(0)
    X, y = [], []
    for _ in range(30):
        size = int(rng.integers(3, 7))
        edges = np.stack([np.arange(1, size), rng.integers(0, np.arange(1, size))], 1)  # a random tree
        edges = np.concatenate([edges, [[0, size - 1]]]) if size > 3 else edges
        labels = rng.integers(0, 2, size)
        sign = np.where(labels[edges[:, 0]] == labels[edges[:, 1]], 1.0, -1.0)
        features = np.zeros((size, 1))
        features[0] = 2 * labels[0] - 1  # where to begin
        X.append((features, edges, sign[:, None]))
        y.append(labels)
    assert CRF().fit(X, y).score(X, y) > 0.95
    without = [x[:2] for x in X]
    assert CRF().fit(without, y).score(without, y) < 0.8
    assert CRF().fit(X, y).inference_.loopy.algorithm.entropy.rho == 0.5
    with pytest.raises(ValueError, match=r"`X\[1\]` must have 2 features per edge .* Got 1."):
        CRF().fit([X[0], without[1]], y[:2])


def test_factors_of_three():
    """The third variable is the exclusive or of the first two: no pairs can say that."""
    labels = np.array([[a, b, a ^ b] for a in (0, 1) for b in (0, 1)] * 3)
    features = (2.0 * labels - 1)[..., None].copy()
    features[:, 2] = 0
    triples = CRF([[0, 1, 2]], loss="surrogate-likelihood", inference=EXACT).fit(features, labels)
    assert triples.score(features, labels) == 1
    assert triples.arity_ == 3
    pairs = CRF([[0, 1], [1, 2], [0, 2]], loss="surrogate-likelihood", inference=EXACT).fit(features, labels)
    assert pairs.score(features, labels) < 0.9


def test_variables_without_edges_are_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 5, 2))
    y = (X @ [[2.0], [-1.0]] + rng.normal(size=(20, 5, 1)) > 0).astype(int)[..., 0]
    crf = CRF(np.empty((0, 2), int), ridge=1e-2).fit(X, y)
    # The intercept has a ridge here as everything has, so that it is a feature there.
    rows = np.concatenate([X, np.ones((20, 5, 1))], -1).reshape(100, 3)
    # Two opposite rows of parameters w: 2 * ridge |w|^2 against |2 w|^2 / (2 C n).
    other = LogisticRegression(C=1 / (1e-2 * 100), fit_intercept=False, tol=1e-8).fit(rows, y.ravel())
    np.testing.assert_allclose(crf.predict_proba(X).reshape(100, 2), other.predict_proba(rows), rtol=0, atol=1e-4)


# -- images -----------------------------------------------------------------------------------------------------------


def test_images_are_better_together():
    X, y = drawn_images(12)
    train, test = slice(0, 6), slice(6, 12)
    alone = GridCRF(loss="independent").fit(X[train], y[train]).score(X[test], y[test])
    together = GridCRF().fit(X[train], y[train])
    assert together.score(X[test], y[test]) > alone + 0.05
    marginals = together.predict_marginals(X[test])
    assert marginals.shape == (6, 8, 9, 2)
    np.testing.assert_allclose(marginals.sum(-1), 1, atol=1e-12)


@pytest.mark.parametrize("connectivity", [4, 8])
@pytest.mark.parametrize("edge_features", ["constant", "difference"])
def test_images_of_all_shapes(connectivity, edge_features):
    X, y = drawn_images()
    shapes = [(8, 9), (1, 9), (8, 1), (1, 1), (5, 7), (8, 9)]
    X = [x[:rows, :columns] for x, (rows, columns) in zip(X, shapes, strict=True)]
    y = [labels[:rows, :columns] for labels, (rows, columns) in zip(y, shapes, strict=True)]
    crf = GridCRF(connectivity, edge_features).fit(X, y)
    assert [p.shape for p in crf.predict(X)] == shapes
    directions = connectivity // 2
    assert [*crf.model_.factors] == ["horizontal", "vertical", "diagonal", "antidiagonal"][:directions]
    assert {tuple(network.weight.shape) for network in crf.model_.factors.values()} == {
        (4, 1 if edge_features == "constant" else 2)
    }


@pytest.mark.parametrize("connectivity", [4, 8])
def test_images_have_the_marginals_of_their_grid(connectivity):
    """Against a theta that is written down pixel by pixel and edge by edge."""
    X, y = drawn_images(2, rows=3, columns=4)
    X = np.concatenate([X, np.random.default_rng(1).normal(size=X.shape)], -1)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.3)), rf.Stop(4, None))
    crf = GridCRF(connectivity, "difference", inference=inference, optimiser=rf.optim.LBFGS(iterations=3)).fit(X, y)
    F = crf.model_.nodes["nodes"].weight.detach().numpy()
    G = {name: network.weight.detach().numpy() for name, network in crf.model_.factors.items()}
    graph = rf.grid(3, 4, 2, connectivity=connectivity)
    theta = graph.zeros()
    steps = {(0, 1): "horizontal", (1, 0): "vertical", (1, 1): "diagonal", (1, -1): "antidiagonal"}
    pixels = [(row, column) for row in range(3) for column in range(4)]
    for variable, (row, column) in enumerate(pixels):
        graph.node(theta, variable)[:] = torch.from_numpy(F @ [*X[0, row, column], 1])
    for factor in range(graph.num_factors):
        first, second = (np.array(pixels[variable]) for variable in graph.scope(factor))
        direction = steps[tuple((second - first).tolist())]
        v = [*np.abs(X[0][tuple(first)] - X[0][tuple(second)]), 1]
        table = G[direction] @ v
        graph.factor(theta, factor)[:] = torch.from_numpy(table.reshape(2, 2))
    expected = inference(graph, theta).node_marginals[0].reshape(3, 4, 2)
    np.testing.assert_allclose(crf.predict_marginals(X)[0], expected, rtol=0, atol=1e-12)


def test_tied_and_untied_edges_are_the_same_model():
    """A constant difference is a constant."""
    X, y = drawn_images(2)
    ones = np.concatenate([X, np.ones_like(X)], -1)
    constant = GridCRF(ridge=1e-3).fit(ones, y)
    untied = GridCRF(edge_features="difference", ridge=1e-3, optimiser=rf.optim.LBFGS(iterations=1)).fit(ones, y)
    with torch.no_grad():
        untied.model_.nodes["nodes"].weight.copy_(constant.model_.nodes["nodes"].weight)
        for name, network in constant.model_.factors.items():
            untied.model_.factors[name].weight.zero_()[:, 2:] = network.weight
    np.testing.assert_allclose(untied.predict_marginals(ones), constant.predict_marginals(ones), rtol=0, atol=1e-12)


def test_pixels_without_a_label():
    X, y = drawn_images()
    hidden = y.copy()
    hidden[:, ::2] = -1
    crf = GridCRF().fit(X, hidden)
    assert crf.score(X, y) > 0.85
    assert crf.score(X, hidden) == (crf.predict(X) == y)[:, 1::2].mean()


# -- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        *("univariate-logistic", "univariate-quadratic", "clique-logistic", "clique-quadratic"),
        *("smoothed-classification", "surrogate-likelihood", "surrogate-em", "pseudolikelihood", "piecewise"),
        "independent",
        rf.losses.Hybrid(rf.losses.MSE(), rf.losses.UnivariateLogistic(), 0.5),
        lambda solution, labels, mask: -solution.log_partition * 0 + solution.node_marginals[0][..., 0].sum(-1),
    ],
)
def test_losses(loss):
    X, y = sentences(15)
    crf = CRF(loss=loss, optimiser=rf.optim.LBFGS(iterations=15)).fit(X, y)
    assert crf.results_[-1].history[-1].objective < crf.results_[-1].history[0].objective
    if isinstance(loss, str):
        assert crf.score(X, y) > 0.5


def test_optimisers_decoders_and_seeds():
    X, y = sentences(15)
    adam = rf.optim.Torch(torch.optim.Adam, {"lr": 0.1}, batch_size=4, epochs=3)
    first, again, other = (CRF(optimiser=adam, random_state=seed).fit(X, y) for seed in (1, 1, 2))
    assert np.array_equal(first.predict_marginals(X)[0], again.predict_marginals(X)[0])
    assert not np.array_equal(first.predict_marginals(X)[0], other.predict_marginals(X)[0])
    joint = CRF(decoder=rf.decoders.MAP()).fit(X, y)
    graph = rf.chain(len(X[0]), 3, tied=True)
    nodes = torch.from_numpy(np.concatenate([X[0], np.ones((len(X[0]), 1))], 1))
    inputs = {"nodes": nodes, "factors": torch.ones(min(len(X[0]) - 1, 1), 1, dtype=torch.float64)}
    theta = joint.model_(graph, inputs).detach()
    assert joint.predict(X)[0].tolist() == rf.infer(graph, theta, rf.MaxProduct()).mode().tolist()


# -- refusals ---------------------------------------------------------------------------------------------------------

GOOD = [np.zeros((3, 2)), np.zeros((2, 2))], [[0, 1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (GOOD[0], [[0, 1], [1, 0]], r"`y[0]` must have shape (3,), a label for each variable. Got (2,)."),
        (GOOD[0], [[-1] * 3, [-1] * 2], "`y` must hold a label other than -1."),
        (
            GOOD[0],
            [[0, 1, 0.5], [1, 0]],
            "`y[0]` must hold integers or strings, no continuous values. Got fractions or NaN.",
        ),
        (GOOD[0], [[0, 1, 1]], "inconsistent numbers of samples"),
        ([], [], "`X` must hold at least one example. Got none."),
        ([np.zeros(3)], [[0, 1, 1]], "`X[0]` must have shape (variables, features). Got (3,)."),
        ([np.zeros((0, 2))], [[]], "`X[0]` must have at least one variable. Got an empty sequence: leave it out."),
        ([np.array([[np.nan]])], [[0]], "`X[0]` must hold finite numbers. Got NaN or infinity."),
        ([np.array([["a"]])], [[0]], "`X[0]` must hold numbers. Got <U1."),
        ([np.zeros((1, 2)), np.zeros((1, 3))], [[0], [1]], "`X[1]` must have 2 features per variable, as"),
        ([(np.zeros((2, 1)),)], [[0, 1]], "Got a tuple of length 1."),
        (
            [(np.zeros((2, 1)), [0, 1])],
            [[0, 1]],
            "`X[0][1]` must be integers of shape (edges, 2). Got int64 of shape (2,).",
        ),
        (
            [(np.zeros((2, 1)), [[0, 1]], np.zeros((2, 1)))],
            [[0, 1]],
            "`X[0][2]` must have one row for each of 1 edges.",
        ),
        ([(np.zeros((2, 1)), [[0, 2]])], [[0, 1]], "`X[0][1]` must name variables in 0..1. Got 0..2."),
    ],
)
def test_bad_data_is_refused(X, y, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        CRF().fit(X, y)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("estimator", "error", "message"),
    [
        (CRF(loss="hinge"), ValueError, "`loss` must be a loss object, or one of univariate-logistic, "),
        (CRF(loss=rf.losses.UnivariateLogistic), TypeError, "`loss` must be a loss such as `UnivariateLogistic()`"),
        (CRF(rf.chain(3, 2)), TypeError, "`graph` must be integers of shape (edges, 2). Got a FactorGraph: pass an"),
        (CRF("grid"), ValueError, "`graph` must be \"chain\" or an integer array of edges. Got 'grid'."),
        (CRF(ridge=-1), ValueError, "`ridge` must be a non-negative number. Got -1."),
        (CRF(optimiser="adam"), TypeError, "`optimiser` must be an object such as `LBFGS()`"),
        (CRF(decoder="map"), TypeError, "`decoder` must be a hard decoder such as `MaxMarginal()`. Got 'map'."),
        (
            CRF(decoder=rf.decoders.MAP),
            TypeError,
            "`decoder` must be a hard decoder such as `MaxMarginal()`. Got <class",
        ),
        (CRF(decoder=rf.decoders.SoftArgmax()), TypeError, "`decoder` must be a hard decoder such as `MaxMarginal()`."),
        (CRF(inference="trw"), TypeError, "`inference` must be an object such as `Inference(MessagePassing())`"),
    ],
)
def test_bad_settings_are_refused_in_fit(estimator, error, message):
    with pytest.raises(error) as caught:
        estimator.fit(*GOOD)
    assert message in str(caught.value)


def test_bad_images_are_refused():
    with pytest.raises(ValueError, match=r"`X\[0\]` must have shape \(rows, columns, features\). Got \(3, 4\)."):
        GridCRF().fit(np.zeros((2, 3, 4)), np.zeros((2, 3, 4), int))
    with pytest.raises(ValueError, match=r"`edge_features` must be \"constant\" or \"difference\"\. Got 'both'\."):
        GridCRF(edge_features="both").fit(*drawn_images(1))
    with pytest.raises(ValueError, match=r"`connectivity` must be 4 or 8\. Got 6\."):
        GridCRF(connectivity=6).fit(*drawn_images(1))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[-1, 1, 1], [1, -1]], "it seems to be a class here: -1 and 1 are two classes. Number the classes from 0"),
        ([[-1, 0, -2], [1, 2]], "it seems to be a class here: -2 is negative, too."),
        ([["a", -1, "b"], ["a", "b"]], "`y[0]` must hold labels of one type. Got strings and -1. To mark unknown"),
        ([np.array(["a", -1, "b"]), ["a", "b"]], "`y` holds the string '-1' and 'a'."),
        (
            [np.array(["a", 2, "b"], object), ["a", "b"]],
            "`y[0]` must hold labels of one type, or -1. Got strings and 2",
        ),
        ([[0, 1, 1], ["a", "b"]], "`y` must hold labels of one type. Got integers in y[0] and strings in y[1]."),
        ([[True, False, True], [1, 0]], "Got booleans in y[0] and integers in y[1]."),
        (
            [np.array([0, None, 1], object), [0, 1]],
            "`y[0]` must hold integers of at most 64 bits, booleans or strings. Got None.",
        ),
        ([np.array([0, 1, 1j]), [0, 1]], "`y[0]` must hold integers, booleans or strings. Got complex128."),
        ([[7, 7, 7], [7, 7]], "`y` must hold at least two classes. Got one class only, 7."),
        ([[0, -1, 0], [0, 0]], "`y` must hold at least two classes. Got one class only, 0."),
        ([["a", "a", "a"], [-1, -1]], "`y` must hold at least two classes. Got one class only, 'a'."),
    ],
)
def test_doubtful_labels_are_refused(labels, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        CRF().fit(GOOD[0], labels)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([[-1, 0, 1], [0, 1]], [0, 1]),
        ([[-1.0, 0, 1], [0, 1]], [0, 1]),
        ([np.array([-1, 0, 1], object), [0, 1]], [0, 1]),
        ([["a", "b", "a"], [-1, -1]], ["a", "b"]),
        ([["-1", "1", "1"], ["1", "-1"]], ["-1", "1"]),
        ([[-2, 3, 3], [-2, 3]], [-2, 3]),
    ],
)
def test_clear_labels_are_taken(labels, classes):
    assert CRF().fit(GOOD[0], labels).classes_.tolist() == classes


def test_predictions_need_a_fit_and_the_same_features():
    for method in ("predict", "predict_marginals", "predict_proba"):
        with pytest.raises(NotFittedError):
            getattr(CRF(), method)(GOOD[0])
    crf = CRF().fit(*GOOD)
    with pytest.raises(ValueError, match=r"`X\[0\]` must have 2 features per variable, as the others in `fit`. Got 5."):
        crf.predict([np.zeros((3, 5))])
    with pytest.raises(ValueError, match=r"`X\[0\]` must have 2 variables per edge, as the others in `fit`. Got 3."):
        crf.predict([(np.zeros((3, 2)), [[0, 1, 2]])])
    with pytest.raises(ValueError, match=r"`y\[0\]` must have shape \(3,\), a label for each variable. Got \(2,\)."):
        crf.score(GOOD[0], [[0, 1], [0, 1]])
    with pytest.raises(ValueError, match=r"`y` must hold a label other than -1\."):
        crf.score(GOOD[0], [[-1] * 3, [-1] * 2])
    with pytest.raises(ValueError, match=r"`y\[0\]` must hold integers, as in `fit`. Got strings."):
        crf.score(GOOD[0], [["a", "b", "b"], ["b", "a"]])
    assert crf.predict([]) == []


# -- messages for newcomers -------------------------------------------------------------------------------------------

WORDS = [[{"word": "the"}, {"word": "cat"}], [{"word": "a"}, {"word": "dog"}]]
TAGS = [["DET", "NOUN"], ["DET", "NOUN"]]
FEW = rf.optim.LBFGS(iterations=2)


def test_one_sequence_is_not_a_list_of_them():
    named, dense = CRF(optimiser=FEW).fit(WORDS, TAGS), CRF(optimiser=FEW).fit([np.eye(2)] * 2, [[0, 1]] * 2)
    sparse = pytest.importorskip("scipy.sparse")
    one = "Got what looks like one sequence: pass [X]."
    strings = (
        'if they are sentences, make each word a dictionary, such as {"word": "the"}; if they are the tokens of one'
    )
    for crf, X, message in [
        (named, WORDS[0], one),
        (named, [["word:the", "upper"], ["word:cat"]], strings),
        (dense, np.eye(2), one),
        (dense, sparse.csr_array(np.eye(2)), one),
    ]:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            crf.predict(X)
        assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"`X\[0\]` must have shape .* If `X` is one example, pass \[X\]"):
        dense.predict([[0.0, 1.0], [1.0, 0.0]])
    picture = np.zeros((3, 4, 1))
    with pytest.raises(ValueError, match=r"`X\[0\]` must have shape .* If `X` is one example, pass \[X\]"):
        GridCRF().fit(picture, np.zeros((3, 4), int))


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2))])
def test_empty_sequences_are_named(empty):
    for X, y in [([*WORDS, empty], [*TAGS, []]), ([np.eye(2), np.eye(2), empty], [[0, 1], [1, 0], []])]:
        with pytest.raises(ValueError, match=r"`X\[2\]` must have at least one variable. Got an empty sequence"):
            CRF(optimiser=FEW).fit(X, y)
        with pytest.raises(ValueError, match=r"`X\[0\]` must have at least one variable. Got an empty sequence"):
            CRF(optimiser=FEW).fit(X[:2], y[:2]).predict([empty])


def test_lists_of_numbers_that_are_mostly_zero():
    rows = np.zeros((2, 40))
    rows[0, 3] = 1
    listed, array = (CRF(optimiser=FEW).fit([own] * 2, [[0, 1]] * 2) for own in (rows.tolist(), rows))
    assert np.array_equal(listed.predict_marginals([rows.tolist()])[0], array.predict_marginals([rows])[0])


def test_names_of_features_may_end_in_nul():
    X = [[{"word": "a\0"}, {"word": "a"}]] * 2
    crf = CRF(optimiser=FEW).fit(X, [["x", "y"]] * 2)
    assert len(set(crf.vocabulary_)) == 2
    assert crf.predict(X)[0].tolist() == ["x", "y"]


def own_loss(solution, labels, mask):
    return rf.losses.UnivariateLogistic().of_solution(solution, labels, mask)


def test_an_own_loss_is_no_part_of_a_file(tmp_path):
    crf = CRF(loss=own_loss, initial=(own_loss,), optimiser=FEW).fit(WORDS, TAGS)
    with pytest.raises(TypeError, match=r"`loss` holds a loss of your own, <function own_loss.*set_params\(loss="):
        crf.save(tmp_path / "crf")
    crf.set_params(loss="univariate-logistic")
    with pytest.raises(TypeError, match=r"`initial` holds a loss of your own, .*set_params\(initial=\(\)\)"):
        crf.save(tmp_path / "crf")
    crf.set_params(initial=()).save(tmp_path / "crf")
    assert np.array_equal(CRF.load(tmp_path / "crf").predict_marginals(WORDS)[0], crf.predict_marginals(WORDS)[0])
    mixed = rf.losses.Hybrid(own_loss, rf.losses.UnivariateLogistic(), 0.5)
    with pytest.raises(TypeError, match="`loss` holds a loss of your own"):
        CRF(loss=mixed, optimiser=FEW).fit(WORDS, TAGS).save(tmp_path / "crf")


def test_an_own_loss_that_is_registered_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_SAVED", dict(registry.SAVED))
    monkeypatch.setattr("riskfield.estimators.files.SAVED", registry._SAVED)

    @dataclass(frozen=True)
    class Squared(rf.losses.AbstractMarginalLoss):
        weight: float

        def of_solution(self, solution, labels, mask):
            return self.weight * rf.losses.UnivariateQuadratic().of_solution(solution, labels, mask)

    crf = CRF(loss=rf.losses.Hybrid(Squared(2.0), rf.losses.MSE(), 0.5), initial=(Squared(1.0),), optimiser=FEW)
    crf.fit(WORDS, TAGS)
    with pytest.raises(TypeError, match=r"`loss` holds a loss of your own, .*registry\.register"):
        crf.save(tmp_path / "crf")
    assert registry.register(Squared) is Squared
    crf.save(tmp_path / "crf")
    again = CRF.load(tmp_path / "crf")
    assert (again.loss, again.initial) == (crf.loss, crf.initial)
    assert np.array_equal(again.predict_marginals(WORDS)[0], crf.predict_marginals(WORDS)[0])
    monkeypatch.setattr("riskfield.estimators.files.SAVED", registry.SAVED)  # where the class is not registered
    with pytest.raises(
        rf.errors.FileFormatError, match=r"crf names the class '.*Squared', which is not.*import the module"
    ):
        CRF.load(tmp_path / "crf")
    with pytest.raises(TypeError, match="`own` must be a dataclass"):
        registry.register(own_loss)


def test_an_own_algorithm_that_is_registered_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_SAVED", dict(registry.SAVED))
    monkeypatch.setattr("riskfield.estimators.files.SAVED", registry._SAVED)

    @dataclass(frozen=True)
    class Careful(rf.MessagePassing):
        weight: float = 0.5

    crf = CRF(inference=rf.Inference(Careful(weight=0.25), rf.Stop(1, None)), optimiser=FEW).fit(WORDS, TAGS)
    with pytest.raises(TypeError, match=r"`inference.*/algorithm` must be .*registry\.register"):
        crf.save(tmp_path / "crf")
    registry.register(Careful)
    crf.save(tmp_path / "crf")
    assert CRF.load(tmp_path / "crf").inference == crf.inference


def test_the_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        CRF(optimiser=FEW).fit(WORDS, TAGS).save(tmp_path / "missing" / "crf.safetensors")
    assert caught.value.filename == str(tmp_path / "missing" / "crf.safetensors")


def test_errors_name_a_loss_as_its_user_does():
    def wrong_shape(solution, labels, mask):
        return solution.mu.sum()

    def detached(solution, labels, mask):
        return own_loss(solution, labels, mask).detach()

    with pytest.raises(ValueError, match="The loss `wrong_shape` must return one number per example"):
        CRF(loss=wrong_shape, initial=(), optimiser=FEW).fit(WORDS, TAGS)
    with pytest.raises(ValueError, match="`detached` has none: compute it from the marginals"):
        CRF(loss=detached, initial=(), optimiser=FEW).fit(WORDS, TAGS)
    with pytest.raises(TypeError, match=r"Pass the object `riskfield.losses.CliqueLogistic\(\)`"):
        rf.nn.LinearChainCRF(3, loss="clique-logistic")
    with pytest.raises(TypeError, match=r"Pass an object of it, `CliqueLogistic\(\)`"):
        rf.nn.LinearChainCRF(3, loss=rf.losses.CliqueLogistic)
