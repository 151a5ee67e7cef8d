"""`CRF`: sequences, and any graphs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import Tags
from torch import Tensor

from riskfield.decoders import MAP, AbstractDecoder
from riskfield.devices import as_dtype
from riskfield.estimators.base import AbstractCRF
from riskfield.estimators.defaults import LOSS, PATIENCE, RIDGE
from riskfield.estimators.design import (
    Design,
    Floats,
    RowRange,
    as_features,
    listed,
    sequence,
    with_constant,
    with_constant_column,
)
from riskfield.estimators.labels import Array
from riskfield.estimators.parameters import check_flags
from riskfield.estimators.tokens import (
    Vocabulary,
    are_mostly_zero,
    as_tokens,
    columns_of,
    is_empty,
    is_sparse,
    refuse_one_sequence,
    sparse_rows,
)
from riskfield.estimators.transitions import Bools, check_allowed, check_lengths, forbidden_transitions
from riskfield.examples import Examples
from riskfield.graph.builders import chain
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, InferenceChoice
from riskfield.inference.k_best import k_best
from riskfield.learning.optimiser import AbstractOptimiser, check_counts
from riskfield.losses.loss import LossLike
from riskfield.models.chain import ChainModel
from riskfield.models.conditional import LinearModel


class CRF(AbstractCRF):
    """A linear conditional random field on sequences, or on any graphs.

    Variables have features, and labels that depend on them and on each other:

        theta_i = F (u_i, 1),        theta_c = G (v_c, 1)

    with features u_i of variable i and, where they are given, v_c of the factor c. Without v all factors share a table.

    X has an entry for each example:

    - an array, a SciPy sparse matrix or a pandas table of numbers, of shape (variables, features);
    - a list with a dictionary of features for each token, as for CRFsuite (see `riskfield.estimators.tokens`), or a
      pandas table with strings. In `predict`, features that did not occur in `fit` are ignored;
    - a tuple (features, edges), or (features, edges, edge_features) with shapes (edge, 2) and (edge, feature), for an
      example with a structure of its own.

    X may also be one array of shape (n, variables, features). y has an array of shape (variables,) for each example.
    Sparse and named features stay sparse in the model and in its gradient. Dense features that are mostly 0 are stored
    as sparse ones, too.

    Arguments:
        graph: how the variables of an example are joined: "chain", one after the other, or an integer array of shape
            (edge, 2), the same for all examples. With three columns or more, every row is a factor of that
            many variables.
        fit_intercept: add a constant to the features of the variables.
        boundaries: learn how probable each label is at the start and at the end of a chain.
        scheme: "BIO" ("IOB2") or "BIOES" ("IOBES"), in upper or lower case, if labels are "O", "B-X", "I-X", ... for
            spans: transitions that the scheme does not allow have probability 0.
        forbidden: further transitions of probability 0, pairs (label, next label) with None for the start or the end.
            With a `scheme` or `forbidden`, the default decoder is `MAP()`, so that predictions obey them.
        loss, inference, decoder, ridge, lasso, optimiser, initial, class_weight: as for `AbstractCRF`.
        ignore, chunk_size, early_stopping, validation_fraction, n_iter_no_change: as for `AbstractCRF`.
        n_jobs, random_state, verbose, device, dtype: as for `AbstractCRF`.

    >>> import numpy as np
    >>> from riskfield import CRF
    >>> X = [np.array([[0.1], [0.9], [0.8]]), np.array([[0.2], [0.1]]), np.array([[0.7], [0.9]])]
    >>> y = [["a", "b", "b"], ["a", "a"], ["b", "b"]]
    >>> crf = CRF(loss="surrogate-likelihood").fit(X, y)
    >>> [labels.tolist() for labels in crf.predict(X)]
    [['a', 'b', 'b'], ['a', 'a'], ['b', 'b']]
    >>> [marginals.shape for marginals in crf.predict_marginals(X)]
    [(3, 2), (2, 2), (2, 2)]

    >>> X = [[{"word": "the"}, {"word": "cat", "plural": False}], [{"word": "the"}, {"word": "dogs", "plural": True}]]
    >>> CRF(loss="surrogate-likelihood").fit(X, [["DET", "NOUN"]] * 2).predict([[{"word": "the"}, {"word": "dogs"}]])
    [array(['DET', 'NOUN'], dtype='<U4')]
    """

    columns_: Array | None  # the columns of pandas tables of numbers
    vocabulary_: Array | None  # the names of the features, where tokens name them
    _fitted = (*AbstractCRF._fitted, "columns_", "vocabulary_")

    def __init__(
        self,
        graph: Any = "chain",
        *,
        fit_intercept: bool = True,
        boundaries: bool = False,
        scheme: str | None = None,
        forbidden: Collection[tuple[Any, Any]] | None = None,
        loss: str | LossLike = LOSS,
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float = RIDGE,
        lasso: float = 0.0,
        optimiser: AbstractOptimiser | None = None,
        initial: Sequence[LossLike] | None = None,
        class_weight: Any = None,
        ignore: Any = -1,
        chunk_size: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = PATIENCE,
        n_jobs: int | None = None,
        random_state: Any = 0,
        verbose: bool | int = False,
        device: str | None = None,
        dtype: str | None = None,
    ):
        self.graph = graph
        self.fit_intercept = fit_intercept
        self.boundaries = boundaries
        self.scheme = scheme
        self.forbidden = forbidden
        self.loss = loss
        self.inference = inference
        self.decoder = decoder
        self.ridge = ridge
        self.lasso = lasso
        self.optimiser = optimiser
        self.initial = initial
        self.class_weight = class_weight
        self.ignore = ignore
        self.chunk_size = chunk_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        self.device = device
        self.dtype = dtype

    def _edge_types(self) -> tuple[str, ...]:
        return ("factors",)

    def predict_k_best(self, X: Any, k: int) -> list[list[tuple[Array, float]]]:
        """Return the k most probable label sequences of each example, with their probabilities.

        Arguments:
            X: examples, as for `predict`. They must be chains.
            k: how many label sequences to return.

        Returns:
            For each example a list of pairs (labels, probability), best first. The labels are an array of shape
            (variables,). A short example may have fewer than k label sequences.

        Raises:
            ValueError: if `graph` is not "chain", or an example has edges of its own.
        """
        check_counts(k=k)
        self._require_chains("predict_k_best")
        X = list(X) if isinstance(X, Iterator) else X  # it is gone through twice
        for number, example in enumerate(X):
            if len(_unpacked(example, f"X[{number}]")[0]) > 1:
                raise ValueError(f"`predict_k_best` needs chains. `X[{number}]` has edges of its own.")

        def of_examples(examples: Examples, inference: Inference) -> Tensor:
            theta = self.model_(examples.graph, examples.inputs)
            return examples.graph.node_views(theta)[0]

        potentials = self._predict(X, of_examples, by_part=False)
        pairs = self.model_(chain(2, len(self.classes_), tied=True), self._pair_inputs())
        table = chain(2, len(self.classes_), tied=True).factor_views(pairs)[0][0].detach().cpu().numpy()
        found = [k_best(own, table, k) for own in potentials]
        return [
            [(self.classes_[own], float(np.exp(log))) for own, log in zip(states, logs, strict=True)]
            for states, logs in found
        ]

    def _pair_inputs(self) -> dict[str, Tensor]:
        """The inputs of two variables without features, for the table that all pairs share."""
        width = self.n_features_in_ + self._num_constants()
        like = next(self.model_.parameters())
        return {"nodes": like.new_zeros(2, width), "factors": like.new_ones(1, 1)}

    def _check_settings(self) -> None:
        super()._check_settings()
        check_flags(fit_intercept=self.fit_intercept, boundaries=self.boundaries)
        if self.forbidden is not None and not isinstance(self.forbidden, list | tuple | set | frozenset):
            raise ValueError(f"`forbidden` must be a list, a tuple or a set of pairs. Got {self.forbidden!r}.")

    def _plain_settings(self) -> dict[str, Any]:
        settings = super()._plain_settings()
        if self.forbidden is not None:
            settings["forbidden"] = [tuple(pair) for pair in self.forbidden]
        return settings

    def _require_chains(self, what: str) -> None:
        if not isinstance(self.graph, str):
            raise ValueError(f'`{what}` needs `graph="chain"`. Got a list of edges.')

    def _forbidden(self) -> Bools | None:
        return forbidden_transitions(self.classes_, self.scheme, self.forbidden)

    def _constrains(self) -> bool:
        return self.scheme is not None or bool(self.forbidden)

    def _decoder(self) -> AbstractDecoder | None:
        return MAP() if self.decoder is None and self._constrains() else self.decoder

    def _model(self) -> LinearModel:
        if not (self.boundaries or self._constrains()):
            return super()._model()
        for name in ("boundaries", "scheme", "forbidden"):
            if getattr(self, name):
                self._require_chains(name)
        return ChainModel(
            len(self.classes_),
            self.n_features_in_ + self._num_constants(),
            self.n_edge_features_in_,
            boundaries=self.boundaries,
            forbidden=self._forbidden(),
            dtype=as_dtype(self.dtype),
        )

    def _check_codes(self, codes: Sequence[npt.NDArray[np.int64]]) -> None:
        forbidden = self._forbidden()
        if forbidden is not None:
            check_allowed(codes, forbidden, self.classes_)

    def _num_constants(self) -> int:
        return int(bool(self.fit_intercept))

    def _prepared(self, X: Any, fitting: bool) -> list[Any]:
        """The examples, with their features as rows of one sparse matrix unless they are dense.

        In `fit`, the names of features make the vocabulary.
        """
        refuse_one_sequence(X)
        examples = [_unpacked(example, f"X[{k}]") for k, example in enumerate(X)]
        features = [own[0] for own, _ in examples]
        names = [name for _, name in examples]
        for own, name in zip(features, names, strict=True):
            if is_empty(own):
                raise ValueError(f"`{name}` must have at least one variable. Got an empty sequence: leave it out.")
        tokens = [as_tokens(own) for own in features]
        if fitting:
            self.vocabulary_ = self.columns_ = None
        matrix: Any = None
        dense: list[Floats] = []
        if any(own is not None for own in tokens):
            matrix = self._token_rows(tokens, names, fitting)
        elif self.vocabulary_ is not None:
            if features:
                raise ValueError(f"`{names[0]}` must name its features, as the examples in `fit` did.")
        else:
            sparse = [is_sparse(own) for own in features]
            if any(sparse):
                if not all(sparse):
                    name = names[sparse.index(False)]
                    raise ValueError(f"`{name}` must be a sparse matrix, as other examples are. Got a dense array.")
                matrix = sparse_rows(features, names)
            else:
                self._check_columns(features, names, fitting)
                dense = [as_features(own, 2, name) for own, name in zip(features, names, strict=True)]
                if are_mostly_zero(dense):
                    matrix = sparse_rows(dense, names)
        if matrix is None:
            rows: list[Any] = [with_constant(own) for own in dense] if self._num_constants() else list(dense)
        else:
            counts = [len(own) if own is not None else np.shape(features[k])[0] for k, own in enumerate(tokens)]
            ends = np.cumsum([0, *counts]).tolist()
            full = with_constant_column(matrix) if self._num_constants() else matrix
            rows = [RowRange(full, start, stop) for start, stop in itertools.pairwise(ends)]
        forbidden = None if fitting else self._forbidden()
        if forbidden is not None:
            check_lengths([len(own) for own in rows], forbidden)
        return [(own, *example[1:]) for own, (example, _) in zip(rows, examples, strict=True)]

    def _check_columns(self, features: Sequence[Any], names: Sequence[str], fitting: bool) -> None:
        """Raise if pandas tables have other columns than those in `fit`, or the same ones in another order."""
        tables = [(own, name) for own, name in zip(map(columns_of, features), names, strict=True) if own is not None]
        if fitting and tables:
            self.columns_ = np.array(tables[0][0], dtype=object)
        expected = None if self.columns_ is None else self.columns_.tolist()
        for own, name in tables:
            if expected is not None and own != expected:
                raise ValueError(f"`{name}` must have the columns {expected}, in this order, as in `fit`. Got {own}.")

    def _token_rows(self, tokens: Sequence[Sequence[Any] | None], names: Sequence[str], fitting: bool) -> Any:
        for own, name in zip(tokens, names, strict=True):
            if own is None or not len(own):
                raise ValueError(f"`{name}` must name the features of at least one token, as other examples do.")
        given = [own for own in tokens if own is not None]
        if fitting:
            vocabulary = Vocabulary()
            matrix = vocabulary.rows(given, names)
            self.vocabulary_ = np.array(list(vocabulary.index), dtype=object)  # others drop NULs at the end of a name
            return matrix
        if self.vocabulary_ is None:
            raise ValueError(f"`{names[0]}` must hold numbers, as the examples in `fit` did. Got named features.")
        return Vocabulary(self.vocabulary_.tolist(), fixed=True).rows(given, names)

    def _design(self, example: Any, name: str) -> Design:
        features, *structure = example
        constants = self._num_constants()
        if structure and (self.boundaries or self._constrains()):
            raise ValueError(f"`{name}` must be a chain with `boundaries`, `scheme` or `forbidden`. Got edges.")
        if structure:
            edges = _edges(structure[0], len(features), f"{name}[1]")
            own = as_features(structure[1], 2, f"{name}[2]") if len(structure) == 2 else None
            if own is not None and len(own) != len(edges):
                raise ValueError(f"`{name}[2]` must have one row for each of {len(edges)} edges. Got {len(own)}.")
            return listed(features, constants, edges, own)
        if isinstance(self.graph, str):
            if self.graph != "chain":
                raise ValueError(f'`graph` must be "chain" or an integer array of edges. Got {self.graph!r}.')
            return sequence(features, constants)
        return listed(features, constants, _edges(self.graph, len(features), "graph"), None)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.dict = tags.input_tags.string = True
        return tags


def _unpacked(example: Any, name: str) -> tuple[tuple[Any, ...], str]:
    """An example as a tuple of features and structure, and the name of its features in errors.

    A tuple of tokens is a sentence, not (features, edges).
    """
    if not isinstance(example, tuple) or not example or isinstance(example[0], Mapping):
        return (example,), name
    if len(example) not in (2, 3):
        raise ValueError(
            f"`{name}` must be an array, or a tuple (features, edges) or (features, edges, edge_features). "
            f"Got a tuple of length {len(example)}."
        )
    return example, f"{name}[0]"


def _edges(values: Any, num_variables: int, name: str) -> npt.NDArray[np.int64]:
    if isinstance(values, FactorGraph) or callable(getattr(values, "number_of_nodes", None)):  # the latter: networkx
        raise TypeError(
            f"`{name}` must be integers of shape (edges, 2). Got a {type(values).__name__}: pass an array of its "
            "edges, with the nodes numbered from 0."
        )
    array = np.asarray(values)
    if array.size == 0:
        array = array.reshape(0, array.shape[1] if array.ndim == 2 else 2).astype(np.int64)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers of shape (edges, 2). Got {array.dtype} of shape {array.shape}.")
    if ((array < 0) | (array >= num_variables)).any():
        raise ValueError(f"`{name}` must name variables in 0..{num_variables - 1}. Got {array.min()}..{array.max()}.")
    return np.ascontiguousarray(array, np.int64)
