"""`CRF` on sentences: named, sparse and dense features."""

import numpy as np
import pytest
import scipy.sparse as sp

import riskfield as rf
from riskfield import CRF

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
