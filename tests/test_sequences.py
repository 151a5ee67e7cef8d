"""`CRF` on sentences: features, transitions, spans, the k best sequences; beside CRFsuite."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import riskfield as rf
from riskfield import CRF
from riskfield.estimators.transitions import forbidden_transitions
from riskfield.inference.k_best import k_best
from riskfield.metrics import make_scorer, span_f_measure, spans
from riskfield.models import ChainModel

# `CRF` on sentences: named, sparse and dense features.


WORDS = {"the": "DET", "a": "DET", "cat": "NOUN", "dogs": "NOUN", "runs": "VERB", "sleep": "VERB", "slowly": "ADV"}


def sentences(number=30, seed=0):
    """Tokens as dictionaries of features, and their labels."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(number):
        words = rng.choice(list(WORDS), size=rng.integers(1, 7))
        X.append([token(words, k) for k in range(len(words))])
        y.append([WORDS[word] for word in words])
    return X, y


def token(words, k):
    word = str(words[k])
    features = {
        "bias": 1.0,
        "plural": word.endswith("s"),
        "length": len(word) / 10,
        "affix": [word[:2], "-" + word[-1]],
    }
    return {**features, "before": {"word": str(words[k - 1])}} if k else features


FEW = rf.optim.LBFGS(iterations=15)


def test_tokens_are_what_crfsuite_makes_of_them():
    pycrfsuite = pytest.importorskip("pycrfsuite")
    X, y = sentences()
    crf = CRF(optimiser=FEW).fit(X, y)
    theirs = {name for sentence in X for items in pycrfsuite.ItemSequence(sentence).items() for name in items}
    assert set(crf.vocabulary_) == theirs
    matrix = crf._prepared(X, fitting=False)[0][0].matrix.toarray()
    names = {name: column for column, name in enumerate(crf.vocabulary_)}
    rows = iter(matrix)
    for sentence in X:
        for items in pycrfsuite.ItemSequence(sentence).items():
            expected = np.zeros(len(names) + 1)
            expected[-1] = 1.0
            for name, value in items.items():
                expected[names[name]] += value
            np.testing.assert_allclose(next(rows), expected)


def forms(X):
    """The same features named, sparse and dense."""
    crf = CRF(optimiser=FEW, fit_intercept=False).fit(X, [[str(k % 2) for k in range(len(x))] for x in X])
    ranges = [own for (own,) in crf._prepared(X, fitting=False)]
    sparse = [own.matrix[own.start : own.stop] for own in ranges]
    return {"named": X, "sparse": sparse, "dense": [own.toarray() for own in sparse]}


def test_all_forms_of_features_are_one_model():
    X, y = sentences()
    found = {}
    for name, own in forms(X).items():
        crf = CRF(loss="surrogate-likelihood", optimiser=FEW).fit(own, y)
        found[name] = np.concatenate(crf.predict_marginals(own)), crf
    for name in ("sparse", "dense"):
        np.testing.assert_allclose(found[name][0], found["named"][0], atol=1e-10)
    crf = found["named"][1]
    assert crf.score(X, y) > 0.95
    assert crf.predict([[{"word": "unheard"}]])[0].shape == (1,)  # unknown features are ignored


@pytest.mark.parametrize("loss", ["surrogate-likelihood", "univariate-logistic", "pseudolikelihood"])
def test_sparse_features_are_never_made_dense(loss, monkeypatch):
    monkeypatch.setattr(sp.csr_array, "toarray", lambda *arguments: pytest.fail("made dense"))
    monkeypatch.setattr(sp.csr_array, "todense", lambda *arguments: pytest.fail("made dense"))
    wide = 200_000
    rng = np.random.default_rng(0)
    X = [sp.csr_array(sp.random(5, wide, 1e-4, random_state=rng)) for _ in range(8)]
    y = rng.integers(0, 3, (8, 5))
    crf = CRF(loss=loss, optimiser=rf.optim.LBFGS(iterations=3), initial=()).fit(X, y)
    assert crf.n_features_in_ == wide
    assert crf.predict_marginals(X[:2])[0].shape == (5, 3)


def test_mostly_zero_features_are_stored_sparse():
    rng = np.random.default_rng(0)
    X = [(rng.random((4, 60)) < 0.05).astype(float) for _ in range(5)]
    assert isinstance(CRF()._prepared(X, fitting=True)[0][0], rf.estimators.design.RowRange)
    assert isinstance(CRF()._prepared([x + 1 for x in X], fitting=True)[0][0], np.ndarray)
    assert isinstance(CRF()._prepared([x[:, :9] for x in X], fitting=True)[0][0], np.ndarray)


def test_saved_and_loaded(tmp_path):
    X, y = sentences()
    crf = CRF(optimiser=FEW).fit(X, y)
    crf.save(tmp_path / "crf.safetensors")
    again = CRF.load(tmp_path / "crf.safetensors")
    assert again.vocabulary_.tolist() == crf.vocabulary_.tolist()
    for a, b in zip(again.predict_marginals(X), crf.predict_marginals(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_named_features_on_graphs_of_their_own():
    X, y = sentences(12)
    edges = [[(k, k + 1) for k in range(len(x) - 1)] for x in X]
    trees = [(x, np.array(e).reshape(-1, 2)) for x, e in zip(X, edges, strict=True)]
    ours = CRF(optimiser=FEW).fit(trees, y).predict_marginals(trees)
    chains = CRF(optimiser=FEW).fit(X, y).predict_marginals(X)
    for a, b in zip(ours, chains, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)


def test_tables_of_pandas():
    pandas = pytest.importorskip("pandas")
    X = [
        pandas.DataFrame({"word": ["the", "cat"], "upper": [True, False]}),
        pandas.DataFrame({"word": ["a"], "upper": [1]}),
    ]
    crf = CRF(optimiser=FEW).fit(X, [["D", "N"], ["D"]])
    assert sorted(crf.vocabulary_) == ["upper", "word:a", "word:cat", "word:the"]
    numbers = [table[["upper"]].astype(float) for table in X]
    assert CRF(optimiser=FEW).fit(numbers, [["D", "N"], ["D"]]).n_features_in_ == 1


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([[{"a": 1.0}], [{"a": None}]], "`X[1][0]` must map features to numbers, booleans, strings, or lists"),
        ([[{"a": 1.0}], [3.0]], "`X[1]` must name the features of at least one token, as other examples do."),
        ([[{"a": 1.0}], [{"a": 1.0}, 3.0]], "`X[1][1]` must be a dictionary of features, or a list of strings."),
        ([[{"a": np.inf}], [{"a": 1.0}]], "`X` must hold finite numbers. Got NaN or infinity"),
        ([sp.eye_array(2), np.eye(2)], "`X[1]` must be a sparse matrix, as other examples are. Got a dense array."),
        ([sp.eye_array(2), sp.eye_array(3)], "`X[1]` must have 2 features per variable, as the others. Got 3."),
        ([sp.csr_array([[np.nan]]), sp.csr_array([[1.0]])], "`X[0]` must hold finite numbers. Got NaN or infinity."),
    ],
)  # fmt: skip
def test_bad_features_are_refused(X, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        CRF().fit(X, [["a"] * len(x) if not sp.issparse(x) else ["a"] * x.shape[0] for x in X])
    assert message in str(caught.value)


def test_predictions_need_the_features_of_fit():
    X, y = sentences(5)
    crf = CRF(optimiser=FEW).fit(X, y)
    with pytest.raises(ValueError, match=r"`X\[0\]` must name its features, as the examples in `fit` did"):
        crf.predict([np.ones((2, 3))])
    crf = CRF(optimiser=FEW).fit([np.eye(2)], [[0, 1]])
    with pytest.raises(ValueError, match=r"`X\[0\]` must hold numbers, as the examples in `fit` did. Got named"):
        crf.predict(X)


def test_many_lengths_are_few_graphs(monkeypatch):
    """No graph is compiled per example: neither in fit nor in predict."""
    X, y = sentences(60)
    solved = []
    plain = rf.infer.__globals__["Request"].run

    def counted(request, *arguments):
        solved.append(request.graph.num_variables)
        return plain(request, *arguments)

    monkeypatch.setattr(rf.infer.__globals__["Request"], "run", counted)
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=2), initial=()).fit(X, y)
    assert set(solved) == {sum(map(len, X))}
    solved.clear()
    crf.predict(X)
    assert solved == [sum(map(len, X))]


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_model_of_tokens_without_features_is_saved_and_loaded(tmp_path, fit_intercept):
    X, y = [[{}, {}], [{}]], [[0, 1], [0]]
    crf = rf.CRF(fit_intercept=fit_intercept, optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    crf.save(tmp_path / "crf.safetensors")
    loaded = rf.CRF.load(tmp_path / "crf.safetensors")
    np.testing.assert_array_equal(loaded.predict_marginals(X)[0], crf.predict_marginals(X)[0])


# Ends, forbidden transitions and tag schemes of sequences; the k best sequences; spans.


MORE = rf.optim.LBFGS(iterations=30)


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
    free = CRF(optimiser=MORE, ridge=0.3).fit(X[:12], y[:12])
    bound = CRF(optimiser=MORE, ridge=0.3, scheme="BIO").fit(X[:12], y[:12])
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
    fitted = CRF(boundaries=True, optimiser=MORE).fit([np.ones((3, 1))] * 2, [["a", "b", "b"], ["a", "a", "b"]])
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
    crf = CRF(optimiser=MORE, forbidden=[("c", "a"), (None, "c"), ("a", None)]).fit(X, y)
    (best,) = crf.predict_k_best(X[:1], 27)
    found = ["".join(labels) for labels, _ in best]
    assert found[0] == "".join(crf.predict(X[:1])[0])
    assert len(crf.predict_k_best(iter(X), 2)) == 4
    expected = {"".join(own) for own in itertools.product("abc", repeat=3)}
    assert set(found) == {own for own in expected if "ca" not in own and own[0] != "c" and own[-1] != "a"}
    assert sum(probability for _, probability in best) == pytest.approx(1)


def test_transitions_are_saved_and_loaded(tmp_path):
    X, y = tagged(10)
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=3), scheme="BIO", boundaries=True, lasso=1e-3).fit(X, y)
    crf.save(tmp_path / "crf.safetensors")
    again = CRF.load(tmp_path / "crf.safetensors")
    for a, b in zip(again.predict_marginals(X), crf.predict_marginals(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lasso_makes_weights_zero():
    X, y = tagged(10)
    fitted = [CRF(optimiser=MORE, lasso=lasso, ridge=0.0, initial=()).fit(X, y) for lasso in (0.0, 0.02)]
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


@pytest.mark.parametrize(("alias", "scheme"), [("IOB2", "BIO"), ("IOBES", "BIOES"), ("bio", "BIO")])
def test_schemes_have_two_names(alias, scheme):
    classes = np.array(["O", *(f"{prefix}-{kind}" for prefix in scheme.replace("O", "") for kind in "XY")])
    found, same = (forbidden_transitions(classes, name, None) for name in (alias, scheme))
    assert np.array_equal(found, same)


def test_unknown_labels_that_nothing_can_stand_for():
    X = [np.ones((3, 1))] * 2
    y = [np.array(own, dtype=object) for own in (["a", "b", "c"], ["a", -1, "a"])]
    forbidden = [("a", "a"), ("b", "a"), ("c", "a")]
    for loss in ("surrogate-em", "univariate-logistic"):
        with pytest.raises(ValueError, match=r"`y\[1\]` has unknown labels that cannot be filled in"):
            CRF(forbidden=forbidden, loss=loss, optimiser=MORE).fit(X, y)
    CRF(forbidden=forbidden[:2], optimiser=MORE).fit(X, y)  # by "c"
    crf = CRF(forbidden=[(None, "b"), (None, "c"), ("a", "c"), ("a", None), ("b", None)], optimiser=MORE).fit(
        X[:1], y[:1]
    )
    assert crf.predict(X[:1])[0].tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"`X\[1\]` has 2 variables, and every sequence of that length is forbidden"):
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
    for scorer in (make_scorer(span_f_measure), make_scorer(f1_score, average="macro", zero_division=0)):
        search = GridSearchCV(CRF(optimiser=few), {"ridge": [1e-3, 1e-1]}, scoring=scorer, cv=2).fit(X, y)
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    with pytest.raises(ValueError, match="`metric` must return a number"):
        make_scorer(lambda truth, predicted: float("nan"))(CRF(optimiser=few).fit(X, y), X, y)


def test_scorers_of_scikit_learn_leave_out_unknown_labels_also_of_images():
    from sklearn.metrics import accuracy_score

    images = np.random.default_rng(0).normal(size=(3, 4, 5, 2))
    labels = (images[..., 0] > 0).astype(int)
    labels[0, :2] = -1
    crf = rf.GridCRF(optimiser=rf.optim.LBFGS(iterations=3)).fit(images, labels)
    assert make_scorer(accuracy_score)(crf, images, labels) == pytest.approx(crf.score(images, labels))
    assert make_scorer(accuracy_score, ignore=None)(crf, images, labels) < crf.score(images, labels)


@pytest.mark.parametrize("kind", ["lil", "dok", "dia"])
def test_sparse_matrices_of_any_kind(kind):
    X, y = [sp.csr_matrix(np.eye(4, 6)) for _ in range(3)], [[0, 1, 0, 1]] * 3
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=3)).fit([own.asformat(kind) for own in X], y)
    assert crf.score(X, y) == 1
    X[1][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"`X\[1\]` must hold finite numbers"):
        crf.predict([own.asformat(kind) for own in X])


def test_columns_of_tables_must_be_those_of_fit(tmp_path):
    pandas = pytest.importorskip("pandas")
    tables = [pandas.DataFrame({"a": [0.0, 1, 2], "b": [1.0, 0, 5]}) for _ in range(3)]
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=3)).fit(tables, [[0, 1, 1]] * 3)
    crf.save(tmp_path / "crf")
    for own in (crf, CRF.load(tmp_path / "crf")):
        assert own.predict(tables[:1])[0].tolist() == own.predict([tables[0].to_numpy()])[0].tolist()
        with pytest.raises(ValueError, match=r"`X\[1\]` must have the columns \['a', 'b'\], .* Got \['b', 'a'\]"):
            own.predict([tables[0], tables[1][["b", "a"]]])


@pytest.mark.parametrize("tags", ["B-PER", [0, 1], ["O", -1]])
def test_spans_of_what_is_no_sequence_of_tags_are_refused(tags):
    with pytest.raises(ValueError, match="`tags` must be the tags of one sequence"):
        rf.metrics.span_f_measure([tags], [tags])


def test_k_best_refuses_examples_with_edges_of_their_own():
    X, y = [np.eye(3), np.eye(3)], [[0, 1, 0], [1, 1, 0]]
    crf = CRF(optimiser=rf.optim.LBFGS(iterations=2)).fit(X, y)
    with pytest.raises(ValueError, match=r"`predict_k_best` needs chains. `X\[1\]` has edges"):
        crf.predict_k_best([X[0], (X[1], np.array([[0, 2], [2, 1]]))], 2)


# Linear chains by exact maximum likelihood, beside CRFsuite.


STATES, FEATURES, RIDGE = 4, 6, 0.5


def sequences(number, seed):
    """Inputs and labels of chains of 3 to 9 variables, drawn from left to right with weights that are fixed."""
    weights = torch.Generator().manual_seed(0)
    node = 4 * torch.randn(FEATURES, STATES, generator=weights, dtype=torch.float64)
    pair = torch.randn(STATES, STATES, generator=weights, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(number):
        graph = rf.chain(3 + k % 7, STATES, tied=True)
        # Not negative: CRFsuite drops features whose values sum to less than 0.
        inputs = torch.rand(graph.num_variables, FEATURES, generator=generator, dtype=torch.float64)
        labels: list[int] = []
        for scores in inputs @ node:
            logits = scores + pair[labels[-1]] if labels else scores
            labels.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        found.append((graph, inputs, torch.tensor(labels)))
    return found


def as_examples(found):
    """One block per length."""
    by_length = {}
    for graph, inputs, labels in found:
        by_length.setdefault(graph.num_variables, (graph, [], []))[1].append(inputs)
        by_length[graph.num_variables][2].append(labels)
    return [rf.Examples(graph, torch.stack(y), {"nodes": torch.stack(x)}) for graph, x, y in by_length.values()]


def as_tokens(found):
    """What CRFsuite reads: one dict of features per token, one string per label."""
    x = [[{f"f{k}": float(v) for k, v in enumerate(token)} for token in inputs] for _, inputs, _ in found]
    return x, [[str(label) for label in labels.tolist()] for _, _, labels in found]


def predictions(model, blocks):
    """Accuracy of the most probable joint states, and the log-likelihood."""
    right = total = 0
    log_likelihood = 0.0
    for block in blocks:
        theta = model(block.graph, block.inputs).detach()
        best = rf.infer(block.graph, theta, rf.MaxProduct()).mode()
        right, total = right + int((best == block.labels).sum()), total + best.numel()
        log_likelihood -= float(
            rf.losses.SurrogateLikelihood()(block.graph, theta, block.labels, rf.Inference(rf.Exact())).sum()
        )
    return right / total, log_likelihood


def test_exact_likelihood_is_that_of_crfsuite():
    sklearn_crfsuite = pytest.importorskip("sklearn_crfsuite")
    train, test = sequences(70, seed=1), sequences(210, seed=1000)
    theirs = sklearn_crfsuite.CRF(
        algorithm="lbfgs",
        c1=0.0,
        c2=RIDGE,
        max_iterations=500,
        epsilon=1e-9,
        delta=1e-12,
        all_possible_states=True,
        all_possible_transitions=True,
    )
    theirs.fit(*as_tokens(train))
    x, y = as_tokens(test)
    their_accuracy = np.mean(np.concatenate(theirs.predict(x)) == np.concatenate(y))
    their_likelihood = {}
    for name, part in (("train", train), ("test", test)):
        total = 0.0
        for tokens, labels in zip(*as_tokens(part), strict=True):
            theirs.tagger_.set(tokens)
            total += float(np.log(theirs.tagger_.probability(labels)))
        their_likelihood[name] = total

    node = torch.nn.Linear(FEATURES, STATES, bias=False, dtype=torch.float64)
    model = rf.Conditional(node, rf.models.Tables(1, STATES, STATES))
    torch.nn.init.zeros_(node.weight)
    result = rf.fit(
        model,
        as_examples(train),
        rf.losses.SurrogateLikelihood(),
        rf.Inference(rf.Exact()),
        ridge=RIDGE,
        per_variable=False,
        optimiser=rf.optim.LBFGS(gradient_tol=1e-5, change_tol=1e-12),
        progress=False,
    )
    accuracy, likelihood = predictions(model, as_examples(test))
    _, train_likelihood = predictions(model, as_examples(train))
    assert result.reason is rf.learning.Reason.CONVERGED
    assert accuracy > 0.6  # of four states
    assert accuracy == pytest.approx(their_accuracy, abs=0.005)
    assert train_likelihood == pytest.approx(their_likelihood["train"], rel=1e-3)
    assert likelihood == pytest.approx(their_likelihood["test"], rel=1e-3)
    # The weights, too: both minimise the same strictly convex function.
    for (name, label), weight in theirs.state_features_.items():
        assert float(node.weight[int(label), int(name[1:])].detach()) == pytest.approx(weight, abs=1e-3)
    for (first, second), weight in theirs.transition_features_.items():
        assert float(model.factors["factors"].values[0, int(first), int(second)].detach()) == pytest.approx(
            weight, abs=1e-2
        )
