"""`PerVariable`: transformers of scikit-learn for the features of variables."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted


class PerVariable(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer of scikit-learn for the features of variables or pixels, in front of `CRF` or `GridCRF`.

    It is fitted to the variables of all examples, one row each. If examples are tuples, their first entry is used.

    Arguments:
        transformer: such as `StandardScaler()`.

    >>> import numpy as np
    >>> from riskfield import CRF, PerVariable
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> pipeline = make_pipeline(PerVariable(StandardScaler()), CRF())
    >>> pipeline = pipeline.fit(np.array([[[10.0], [90.0]], [[80.0], [20.0]]]), [[0, 1], [1, 0]])
    >>> pipeline.predict(np.array([[[85.0], [15.0]]]))
    array([[1, 0]])
    """

    def __init__(self, transformer: Any):
        self.transformer = transformer

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the transformer to the rows of all examples, and to their labels where `y` is given."""
        parts = [_features(example, f"X[{k}]") for k, example in enumerate(X)]
        if not parts:
            raise ValueError("`X` must hold at least one example. Got none.")
        rows = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
        labels = None if y is None else np.concatenate([np.asarray(own).reshape(-1) for own in y])
        if labels is not None and len(labels) != len(rows):
            raise ValueError(f"`y` must hold a label for each of {len(rows)} variables. Got {len(labels)}.")
        self.transformer_ = clone(self.transformer).fit(rows, labels)
        return self

    def transform(self, X: Any) -> Any:
        """X with transformed features, in the same form."""
        check_is_fitted(self)
        out = []
        for k, example in enumerate(X):
            features = _features(example, f"X[{k}]")
            rows = np.asarray(self.transformer_.transform(features.reshape(-1, features.shape[-1])))
            changed = rows.reshape(*features.shape[:-1], rows.shape[-1])
            out.append((changed, *example[1:]) if isinstance(example, tuple) else changed)
        return np.stack(out) if isinstance(X, np.ndarray) and X.dtype != object and out else out


def _features(example: Any, name: str) -> npt.NDArray[Any]:
    features = np.asarray(example[0] if isinstance(example, tuple) else example)
    if features.ndim < 2:
        raise ValueError(f"`{name}` must be an array with the features of a variable in each row. Got {example!r:.80}.")
    return features
