"""What users of scikit-learn expect: unknown labels, nested parameters, supervised transformers."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

import riskfield as rf
from riskfield import CRF, PerVariable

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
