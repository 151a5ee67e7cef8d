"""Features of tokens as people write them (dictionaries, sparse matrices, tables) as rows of one sparse matrix.

A token may be a dictionary, as for CRFsuite. Its entries are features::

    {"bias": 1.0, "upper": True}            numbers and booleans: a feature with this value
    {"word": "cat"}                         a string: a feature "word:cat" of value 1
    {"affix": ["pre", "fix"]}               strings: "affix:pre" and "affix:fix"
    {"previous": {"word": "the"}}           a dictionary: "previous:word:the", and so on

A token may also be a list of strings, each a feature of value 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from riskfield.estimators.design import Floats

_SPARSE_SHARE = 0.1  # dense features are stored as sparse ones if a smaller share of them is not 0
_FEW_FEATURES = 32  # that are as fast dense


class Vocabulary:
    """The features that tokens name, numbered in the order in which they first appeared.

    Arguments:
        names: the names of the features.
        fixed: leave out features that are not among them, rather than add them.
    """

    def __init__(self, names: Iterable[str] = (), *, fixed: bool = False):
        self.index: dict[str, int] = {name: number for number, name in enumerate(names)}
        self.fixed = fixed

    def rows(self, sentences: Sequence[Sequence[Any]], names: Sequence[str]) -> Any:
        """A sparse matrix with a row for each token of all sentences; `names` are the sentences' names in errors."""
        from scipy.sparse import csr_array

        columns: list[int] = []
        values: list[float] = []
        ends = [0]
        index = self.index
        for sentence, where in zip(sentences, names, strict=True):
            for number, token in enumerate(sentence):
                features, numbers = _features(token, where, number)
                if self.fixed:
                    known = [
                        (index[name], value) for name, value in zip(features, numbers, strict=True) if name in index
                    ]
                    columns += [column for column, _ in known]
                    values += [value for _, value in known]
                else:
                    columns += [index.setdefault(name, len(index)) for name in features]
                    values += numbers
                ends.append(len(columns))
        data = np.array(values, np.float64)
        if not np.isfinite(data).all():
            raise ValueError("`X` must hold finite numbers. Got NaN or infinity among the features of tokens.")
        matrix = csr_array((data, np.array(columns, np.int64), np.array(ends)), (len(ends) - 1, len(index)))
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return matrix


def _features(token: Any, where: str, number: int) -> tuple[list[str], list[float]]:
    """The names and the values of the features of a token."""
    if isinstance(token, Mapping):
        names: list[str] = []
        values: list[float] = []
        _add_entries(token, "", names, values, f"{where}[{number}]")
        return names, values
    if isinstance(token, list | tuple | set | frozenset) and set(map(type, token)) <= {str, np.str_}:
        return list(token), [1.0] * len(token)
    raise ValueError(
        f"`{where}[{number}]` must be a dictionary of features, or a list of strings. Got {type(token).__name__}."
    )


def _add_entries(token: Mapping[str, Any], prefix: str, names: list[str], values: list[float], where: str) -> None:
    for key, value in token.items():
        if isinstance(value, str):
            names.append(f"{prefix}{key}:{value}")
            values.append(1.0)
        elif isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
            names.append(f"{prefix}{key}")
            values.append(float(value))
        elif isinstance(value, Mapping):
            _add_entries(value, f"{prefix}{key}:", names, values, where)
        elif isinstance(value, list | tuple | set | frozenset) and set(map(type, value)) <= {str, np.str_}:
            names += [f"{prefix}{key}:{name}" for name in value]
            values += [1.0] * len(value)
        else:
            raise ValueError(
                f"`{where}` must map features to numbers, booleans, strings, or lists or dictionaries of them. "
                f"Got {type(value).__name__} for {key!r}."
            )


def refuse_one_sequence(X: Any) -> None:
    """Raise if X is one sequence instead of several."""
    if isinstance(X, list | tuple) and len(X) > 0 and _is_strings(X[0]):
        raise ValueError(
            "`X` must be a list of sequences, whose tokens are lists of strings or dictionaries of features. Got lists "
            'of strings: if they are sentences, make each word a dictionary, such as {"word": "the"}; if they are the '
            "tokens of one sequence, pass [X]."
        )
    table = is_sparse(X) or is_table(X) or (isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "biuf")
    if table or (isinstance(X, list | tuple) and len(X) > 0 and _is_token(X[0])):
        raise ValueError("`X` must be a list of sequences. Got what looks like one sequence: pass [X].")


def is_empty(features: Any) -> bool:
    """Whether an example has no variables."""
    return (len(features) if isinstance(features, list | tuple) else np.shape(features)[:1]) in (0, (0,))


def _is_token(value: Any) -> bool:
    """Whether a value is a token with named features, and so no sequence."""
    return _is_strings(value) or (
        isinstance(value, Mapping | set | frozenset) and not is_sparse(value)  # SciPy's `dok` is a dict
    )


def _is_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(own, str) for own in value)


def is_table(features: Any) -> bool:
    """Whether features are a pandas table."""
    return type(features).__module__.partition(".")[0] == "pandas" and features.ndim == 2


def columns_of(features: Any) -> list[str] | None:
    """The names of the columns of a pandas table; None if features are no table."""
    return list(map(str, features.columns)) if is_table(features) else None


def as_tokens(features: Any) -> Sequence[Any] | None:
    """The tokens of an example that names its features; None if its features are numbers already.

    A pandas table whose columns are not all numbers has a token for each row.
    """
    if is_table(features):
        numeric = all(kind.kind in "biuf" for kind in features.dtypes)
        return None if numeric else list(features.to_dict("records"))
    if isinstance(features, list | tuple | np.ndarray) and len(features) > 0:
        first = features[0]
        if isinstance(first, Mapping | set | frozenset):
            return list(features)
        if isinstance(first, list | tuple) and (not first or isinstance(first[0], str)):
            return list(features)
    return None


def is_sparse(features: Any) -> bool:
    """Whether features are a SciPy sparse matrix or array."""
    if type(features).__module__.partition(".")[0] != "scipy":
        return False
    from scipy.sparse import issparse

    return bool(issparse(features))


def sparse_rows(blocks: Sequence[Any], names: Sequence[str]) -> Any:
    """SciPy matrices or arrays, one below the other, checked; `names` are their names in errors."""
    from scipy.sparse import csr_array, vstack

    for block, name in zip(blocks, names, strict=True):
        if block.ndim != 2 or block.shape[0] == 0:
            raise ValueError(f"`{name}` must have shape (variables, features). Got {block.shape}.")
        if block.shape[1] != blocks[0].shape[1]:
            raise ValueError(
                f"`{name}` must have {blocks[0].shape[1]} features per variable, as the others. Got {block.shape[1]}."
            )
        if block.dtype.kind not in "biuf":
            raise ValueError(f"`{name}` must hold numbers. Got {block.dtype}.")
    rows = [csr_array(block) for block in blocks]
    for block, name in zip(rows, names, strict=True):
        if not np.isfinite(block.data).all():
            raise ValueError(f"`{name}` must hold finite numbers. Got NaN or infinity.")
    matrix = csr_array(vstack(rows, format="csr"), dtype=np.float64)
    matrix.sum_duplicates()
    return matrix


def are_mostly_zero(blocks: Sequence[Floats]) -> bool:
    """Whether dense features are better stored as sparse ones."""
    if not blocks or blocks[0].shape[1] < _FEW_FEATURES:
        return False
    size = sum(block.size for block in blocks)
    return sum(int(np.count_nonzero(block)) for block in blocks) < _SPARSE_SHARE * size
