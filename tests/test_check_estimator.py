"""`check_estimator` of scikit-learn on estimators whose examples have one variable.

Its checks bring tables with a label for each row. A row is a sequence of one variable, or a picture of one pixel, so
that `CRF` and `GridCRF` are logistic regression there. What remains is listed, with the reason.
"""

import numpy as np
import pytest
from scipy.sparse import issparse
from sklearn.base import ClassifierMixin
from sklearn.utils.estimator_checks import parametrize_with_checks

import riskfield as rf


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
