"""Ends, forbidden transitions and tag schemes of sequences; the k best sequences; spans."""

import itertools

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield import CRF
from riskfield.estimators.transitions import forbidden_transitions
from riskfield.inference.k_best import k_best
from riskfield.metrics import make_scorer, span_f_measure, spans
from riskfield.models import ChainModel

FEW = rf.optim.LBFGS(iterations=30)


def tagged(number=25, seed=0):
    """Sentences with spans of two types, from noisy features."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(number):
        tags = []
        while len(tags) < 8:
            kind = rng.choice(["X", "Y"])
            tags += ["O"] if rng.random() < 0.5 else [f"B-{kind}"] + [f"I-{kind}"] * int(rng.integers(3))
        X.append([{"seen": tag if rng.random() < 0.6 else "O", "upper": bool(rng.random() < 0.3)} for tag in tags])
        y.append(tags)
    return X, y


def is_bio(tags):
    return all(
        after[0] != "I" or (before != "O" and before[2:] == after[2:])
        for before, after in itertools.pairwise(["O", *tags])
    )


def test_a_scheme_is_obeyed():
    X, y = tagged()
    assert all(map(is_bio, y))
    free = CRF(optimiser=FEW, ridge=0.3).fit(X[:12], y[:12])
    bound = CRF(optimiser=FEW, ridge=0.3, scheme="BIO").fit(X[:12], y[:12])
    assert not all(is_bio(list(tags)) for tags in free.predict(X))
    assert all(is_bio(list(tags)) for tags in bound.predict(X))
    inside = list(bound.classes_).index("I-X")
    assert all(marginals[0, inside] == 0 for marginals in bound.predict_marginals(X))  # no span begins inside


@pytest.mark.parametrize("loss", ["univariate-logistic", "surrogate-likelihood", "clique-logistic"])
def test_every_loss_takes_forbidden_transitions(loss):
    X, y = tagged(8)
    crf = CRF(loss=loss, optimiser=rf.optim.LBFGS(iterations=5), scheme="BIO").fit(X, y)
    assert all(is_bio(list(tags)) for tags in crf.predict(X))


def test_bioes():
    classes = np.array(["B-X", "B-Y", "E-X", "I-X", "O", "S-X"])
    number = {label: k for k, label in enumerate([*classes.tolist(), None])}
    forbidden = forbidden_transitions(classes, "BIOES", None)
    allowed = {("B-X", "I-X"), ("B-X", "E-X"), ("I-X", "E-X"), ("E-X", "B-X"), (None, "S-X"), ("O", None), ("S-X", "O")}
    refused = {("B-X", "O"), ("B-Y", "E-X"), ("O", "E-X"), (None, "I-X"), ("B-X", None), ("S-X", "I-X"), ("I-X", "S-X")}
    assert not any(forbidden[number[a], number[b]] for a, b in allowed)
    assert all(forbidden[number[a], number[b]] for a, b in refused)


def test_ends_have_potentials_of_their_own():
    model = ChainModel(2, 1, 1, boundaries=True)
    with torch.no_grad():
        model.ends["first"].copy_(torch.tensor([1.0, 2.0]))
        model.ends["last"].copy_(torch.tensor([10.0, 20.0]))
    lone = rf.Examples(rf.chain(1, 2, tied=True), torch.zeros(2, 1).long(), inputs(2, 1))
    pair = rf.Examples(rf.chain(3, 2, tied=True), torch.zeros(1, 3).long(), inputs(1, 3))
    whole = rf.learning.join([lone, pair])
    found = whole.graph.node_views(model(whole.graph, whole.inputs))[0][0].tolist()
    assert found == [[11, 22], [11, 22], [1, 2], [0, 0], [10, 20]]
    fitted = CRF(boundaries=True, optimiser=FEW).fit([np.ones((3, 1))] * 2, [["a", "b", "b"], ["a", "a", "b"]])
    first, last = (fitted.model_.ends[name].detach() for name in ("first", "last"))
    assert first[0] > first[1]
    assert last[0] < last[1]


def inputs(number, length):
    return {
        "nodes": torch.ones(number, length, 1).double(),
        "factors": torch.ones(number, min(length - 1, 1), 1).double(),
    }


def test_forbidden_pairs_and_ends():
    X, y = [np.ones((3, 1))] * 4, [["a", "b", "c"], ["a", "c", "c"], ["b", "c", "c"], ["b", "b", "c"]]
    crf = CRF(optimiser=FEW, forbidden=[("c", "a"), (None, "c"), ("a", None)]).fit(X, y)
    (best,) = crf.predict_k_best(X[:1], 27)
    found = ["".join(labels) for labels, _ in best]
    assert found[0] == "".join(crf.predict(X[:1])[0])
    expected = {"".join(own) for own in itertools.product("abc", repeat=3)}
    assert set(found) == {own for own in expected if "ca" not in own and own[0] != "c" and own[-1] != "a"}
    assert sum(probability for _, probability in best) == pytest.approx(1)


def test_saved_and_loaded(tmp_path):
    X, y = tagged(10)
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=3), scheme="BIO", boundaries=True, lasso=1e-3).fit(X, y)
    crf.save(tmp_path / "crf.safetensors")
    again = CRF.load(tmp_path / "crf.safetensors")
    for a, b in zip(again.predict_marginals(X), crf.predict_marginals(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lasso_makes_weights_zero():
    X, y = tagged(10)
    fitted = [CRF(optimiser=FEW, lasso=lasso, ridge=0.0, initial=()).fit(X, y) for lasso in (0.0, 0.02)]
    zeros = [int((crf.model_.nodes["nodes"].weight == 0).sum()) for crf in fitted]
    assert zeros[0] == 0
    assert zeros[1] > 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "IO"}, '`scheme` must be "BIO" ("IOB2"), "BIOES" ("IOBES") or None. Got \'IO\'.'),
        ({"forbidden": [("O", "Q")]}, "`forbidden` must hold pairs of labels in `y`"),
        ({"forbidden": [("O", "B-X")]}, "`y[0]` goes from 'O' to 'B-X' at position 1, which is forbidden."),
        ({"scheme": "BIOES"}, "which is forbidden"),
        ({"boundaries": True, "graph": [[0, 1]]}, '`boundaries` needs `graph="chain"`. Got a list of edges.'),
    ],
)
def test_refusals(settings, message):
    y = [["O", "B-X", "O"], ["B-X", "O", "O"]]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        CRF(**settings).fit([np.eye(3)] * 2, y)
    assert message in str(caught.value)


@pytest.mark.parametrize("label", ["", "BI-X", "L-X"])
def test_labels_that_are_no_tags_are_refused(label):
    with pytest.raises(ValueError, match=f"`y` must hold labels of the scheme BIO, .* Got '{label}'"):
        forbidden_transitions(np.array(["B-X", label, "O"]), "BIO", None)
    with pytest.raises(ValueError, match=f"`tags` must begin with B-, I-, E- or S-, or be 'O'. Got '{label}'"):
        list(spans(["O", label]))


@pytest.mark.parametrize(("alias", "scheme"), [("IOB2", "BIO"), ("IOBES", "BIOES")])
def test_schemes_have_two_names(alias, scheme):
    classes = np.array(["O", *(f"{prefix}-{kind}" for prefix in scheme.replace("O", "") for kind in "XY")])
    found, same = (forbidden_transitions(classes, name, None) for name in (alias, scheme))
    assert np.array_equal(found, same)


def test_unknown_labels_that_nothing_can_stand_for():
    X = [np.ones((3, 1))] * 2
    y = [np.array(own, dtype=object) for own in (["a", "b", "c"], ["a", -1, "a"])]
    forbidden = [("a", "a"), ("b", "a"), ("c", "a")]
    for loss in ("surrogate-em", "univariate-logistic"):
        with pytest.raises(ValueError, match=r"`y\[1\]` has unknown labels that nothing can stand for"):
            CRF(forbidden=forbidden, loss=loss, optimiser=FEW).fit(X, y)
    CRF(forbidden=forbidden[:2], optimiser=FEW).fit(X, y)  # by "c"
    crf = CRF(forbidden=[(None, "b"), (None, "c"), ("a", "c"), ("a", None), ("b", None)], optimiser=FEW).fit(
        X[:1], y[:1]
    )
    assert crf.predict(X[:1])[0].tolist() == ["a", "b", "c"]
    with pytest.raises(
        ValueError, match=r"`X\[1\]` has 2 variables, and every sequence of so many labels is forbidden"
    ):
        crf.predict([X[0], np.ones((2, 1))])


def test_k_best_is_brute_force():
    rng = np.random.default_rng(0)
    nodes, pairs = rng.normal(size=(4, 3)), rng.normal(size=(3, 3))
    every = np.array(list(itertools.product(range(3), repeat=4)))
    scores = nodes[np.arange(4), every].sum(1) + pairs[every[:, :-1], every[:, 1:]].sum(1)
    order = np.argsort(-scores)
    states, log_probabilities = k_best(nodes, pairs, 10)
    assert states.tolist() == every[order[:10]].tolist()
    np.testing.assert_allclose(log_probabilities, scores[order[:10]] - np.log(np.exp(scores).sum()))
    assert len(k_best(nodes, pairs, 100)[0]) == 81


def test_spans():
    """By the rules of conlleval."""
    assert list(spans(["I-X", "I-X", "I-Y", "O", "B-X", "E-X", "I-X", "S-Y", "S-Y"])) == [
        ("X", 0, 1), ("Y", 2, 2), ("X", 4, 5), ("X", 6, 6), ("Y", 7, 7), ("Y", 8, 8)
    ]  # fmt: skip
    truth = [["B-X", "I-X", "O", "B-Y"], ["O", "O"]]
    assert span_f_measure(truth, [["B-X", "I-X", "O", "B-X"], ["O", "B-X"]]) == pytest.approx(2 * 1 / (2 + 3))
    assert span_f_measure([["O"]], [["O"]]) == 0.0
    with pytest.raises(ValueError, match=r"`predicted\[0\]` must have 4 tags. Got 1."):
        span_f_measure(truth, [["O"], ["O", "O"]])


def test_spans_are_those_of_seqeval():
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = np.random.default_rng(0)
    tags = ["O", "B-X", "I-X", "B-Y", "I-Y", "E-X", "S-Y"]
    for _ in range(300):
        truth, predicted = ([rng.choice(tags, 6).tolist() for _ in range(3)] for _ in range(2))
        assert span_f_measure(truth, predicted) == pytest.approx(seqeval.f1_score(truth, predicted))


def test_scorers_on_sentences_of_all_lengths():
    from sklearn.metrics import f1_score
    from sklearn.model_selection import GridSearchCV

    X, y = tagged(12)
    few = rf.optim.LBFGS(iterations=3)
    for scorer in (make_scorer(span_f_measure), make_scorer(f1_score, flat=True, average="macro", zero_division=0)):
        search = GridSearchCV(CRF(optimiser=few), {"ridge": [1e-3, 1e-1]}, scoring=scorer, cv=2).fit(X, y)
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    with pytest.raises(ValueError, match="`metric` must return a number"):
        make_scorer(lambda truth, predicted: float("nan"))(CRF(optimiser=few).fit(X, y), X, y)


@pytest.mark.parametrize("tags", ["B-PER", [0, 1], ["O", -1]])
def test_spans_of_what_is_no_sequence_of_tags_are_refused(tags):
    with pytest.raises(ValueError, match="`tags` must be the tags of one sequence"):
        rf.metrics.span_f_measure([tags], [tags])


def test_k_best_refuses_examples_with_edges_of_their_own():
    X, y = [np.eye(3), np.eye(3)], [[0, 1, 0], [1, 1, 0]]
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    with pytest.raises(ValueError, match=r"`predict_k_best` needs chains. `X\[1\]` has edges"):
        crf.predict_k_best([X[0], (X[1], np.array([[0, 2], [2, 1]]))], 2)
