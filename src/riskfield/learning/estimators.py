"""The scikit-learn face: `CRF` for sequences and any graphs, `GridCRF` for pictures.

`riskfield.CRF`, `riskfield.GridCRF` and `riskfield.PerVariable` load this module, and scikit-learn with it, when they
are first asked for.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted

from riskfield.decoders import AbstractDecoder
from riskfield.infer import InferenceChoice
from riskfield.learning._designs import Design, Floats, listed, picture, sequence
from riskfield.learning._estimator import AbstractCRF
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.losses.loss import LossLike


class CRF(AbstractCRF):
    """A linear conditional random field on sequences, or on any graphs.

    Variables have features, and labels that depend on them and on each other:

        theta_i = F (u_i, 1),        theta_c = G (v_c, 1)

    with features u_i of variable i and, where they are given, v_c of the factor c. Without v all factors share a table.

    X is a list with an array of shape (variables, features) for each example, or one array of shape (n, variables,
    features) if all are of a size; y has an array of shape (variables,) for each. An example with a structure of its
    own is a tuple (features, edges), or (features, edges, edge_features) with shapes (edge, 2) and (edge, feature).

    Arguments:
        graph: how the variables of an example are joined: "chain", one after the other, or an integer array of shape
            (edge, 2), the same for all examples. Three columns and more make factors of so many variables.
        loss: "univariate-logistic", "clique-logistic", "univariate-quadratic", "clique-quadratic",
            "smoothed-classification", "likelihood" (which sums over unknown labels), "pseudolikelihood", "piecewise" or
            "independent"; or a loss object; or a function of (solution, labels, mask).
        inference: how marginals are computed, in training as in prediction. By default the graph of each example
            decides: exact inference on a graph without cycles, such as a chain, however it was described; ten sweeps of
            tree-reweighted message passing with rho = 1/2 on any other.
        decoder: how marginals become labels. By default the most probable one of each variable.
        ridge: the weight of the squares of all parameters, relative to the loss per variable.
        optimiser: such as `LBFGS(iterations=200)`, the default without a number, or `Torch(torch.optim.Adam)`.
        chunk_size: how many examples are looked at at once, to bound memory. By default all that share a graph.
        random_state: seeds what is random; L-BFGS on a loss that draws nothing is not.
        verbose: show a progress bar.

    After `fit` there are `classes_`, the labels in order; `model_`, the `LinearModel`; `inference_`, what `inference`
    came to be; and `result_`, how the fit went.

    >>> import numpy as np
    >>> from riskfield import CRF
    >>> X = [np.array([[0.1], [0.9], [0.8]]), np.array([[0.2], [0.1]]), np.array([[0.7], [0.9]])]
    >>> y = [["a", "b", "b"], ["a", "a"], ["b", "b"]]
    >>> crf = CRF(loss="likelihood").fit(X, y)
    >>> [labels.tolist() for labels in crf.predict(X)]
    [['a', 'b', 'b'], ['a', 'a'], ['b', 'b']]
    >>> [marginals.shape for marginals in crf.predict_marginals(X)]
    [(3, 2), (2, 2), (2, 2)]
    """

    def __init__(
        self,
        graph: Any = "chain",
        *,
        loss: str | LossLike = "univariate-logistic",
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float = 1e-4,
        optimiser: AbstractOptimiser | None = None,
        chunk_size: int | None = None,
        random_state: Any = 0,
        verbose: bool = False,
    ):
        self.graph = graph
        self.loss = loss
        self.inference = inference
        self.decoder = decoder
        self.ridge = ridge
        self.optimiser = optimiser
        self.chunk_size = chunk_size
        self.random_state = random_state
        self.verbose = verbose

    def _design(self, example: Any, name: str) -> Design:
        if isinstance(example, tuple):
            if len(example) not in (2, 3):
                raise ValueError(
                    f"`{name}` must be an array, or a tuple (features, edges) or (features, edges, edge_features). "
                    f"Got a tuple of length {len(example)}."
                )
            features = _features(example[0], 2, f"{name}[0]")
            edges = _edges(example[1], len(features), f"{name}[1]")
            own = _features(example[2], 2, f"{name}[2]") if len(example) == 3 else None
            if own is not None and len(own) != len(edges):
                raise ValueError(f"`{name}[2]` must have one row for each of {len(edges)} edges. Got {len(own)}.")
            return listed(features, edges, own)
        features = _features(example, 2, name)
        if isinstance(self.graph, str):
            if self.graph != "chain":
                raise ValueError(f'`graph` must be "chain" or an integer array of edges. Got {self.graph!r}.')
            return sequence(features)
        return listed(features, _edges(self.graph, len(features), "graph"), None)


class GridCRF(AbstractCRF):
    """A linear conditional random field on pictures.

    Every pixel is a variable with features u_i, joined to its neighbours:

        theta_i = F (u_i, 1),        theta_ij = G_d (v_ij, 1)

    with a matrix G_d for each direction of edges, and v_ij nothing or |u_i - u_j|.

    X is an array of shape (n, rows, columns, features), or a list of arrays of shape (rows, columns, features) of
    different sizes; y has label maps of shape (rows, columns), with -1 where a label is not known.

    Arguments:
        connectivity: 4 or 8 neighbours.
        edge_features: "constant", so that all edges of a direction share a table, or "difference", so that tables
            depend on how the pixels differ.
        loss, inference, decoder, ridge, optimiser, chunk_size, random_state, verbose: as for `CRF`.

    >>> import numpy as np
    >>> from riskfield import GridCRF
    >>> truth = np.zeros((4, 10, 12), int)
    >>> truth[:, 2:8, 3:9] = 1
    >>> noisy = truth[..., None] + np.random.default_rng(0).normal(size=(4, 10, 12, 1))
    >>> crf = GridCRF().fit(noisy[:2], truth[:2])
    >>> crf.predict_marginals(noisy[2:]).shape
    (2, 10, 12, 2)
    >>> crf.score(noisy[2:], truth[2:]) > 0.85  # pixel by pixel it would be 0.74
    True
    """

    def __init__(
        self,
        connectivity: int = 4,
        edge_features: str = "constant",
        *,
        loss: str | LossLike = "univariate-logistic",
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float = 1e-4,
        optimiser: AbstractOptimiser | None = None,
        chunk_size: int | None = None,
        random_state: Any = 0,
        verbose: bool = False,
    ):
        self.connectivity = connectivity
        self.edge_features = edge_features
        self.loss = loss
        self.inference = inference
        self.decoder = decoder
        self.ridge = ridge
        self.optimiser = optimiser
        self.chunk_size = chunk_size
        self.random_state = random_state
        self.verbose = verbose

    def _design(self, example: Any, name: str) -> Design:
        if self.edge_features not in ("constant", "difference"):
            raise ValueError(f'`edge_features` must be "constant" or "difference". Got {self.edge_features!r}.')
        return picture(_features(example, 3, name), self.connectivity, self.edge_features == "difference")


class PerVariable(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer of scikit-learn for the features of variables or pixels, in front of `CRF` or `GridCRF`.

    The rows it is fitted to are the variables of all examples; where examples are tuples, it is for their first entry.

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
        """Fit the transformer to the rows of all examples."""
        rows = [np.asarray(_first(example)) for example in X]
        self.transformer_ = clone(self.transformer).fit(np.concatenate([r.reshape(-1, r.shape[-1]) for r in rows]))
        return self

    def transform(self, X: Any) -> Any:
        """X with transformed features, in the form it has."""
        check_is_fitted(self)
        out = []
        for example in X:
            features = np.asarray(_first(example))
            rows = np.asarray(self.transformer_.transform(features.reshape(-1, features.shape[-1])))
            changed = rows.reshape(*features.shape[:-1], rows.shape[-1])
            out.append((changed, *example[1:]) if isinstance(example, tuple) else changed)
        return np.stack(out) if isinstance(X, np.ndarray) and X.dtype != object and out else out


def _first(example: Any) -> Any:
    return example[0] if isinstance(example, tuple) else example


def _features(values: Any, dims: int, name: str) -> Floats:
    """`values` as finite numbers with `dims` axes, the last one of features."""
    array = np.asarray(values)
    axes = "(variables, features)" if dims == 2 else "(rows, columns, features)"
    if array.ndim != dims or 0 in array.shape[: dims - 1]:
        raise ValueError(f"`{name}` must have shape {axes}. Got {array.shape}.")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` must hold numbers. Got {array.dtype}.")
    features = array.astype(np.float64)
    if not np.isfinite(features).all():
        raise ValueError(f"`{name}` must hold finite numbers. Got NaN or infinity.")
    return features


def _edges(values: Any, num_variables: int, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.reshape(0, array.shape[1] if array.ndim == 2 else 2).astype(np.int64)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers of shape (edges, 2). Got {array.dtype} of shape {array.shape}.")
    if ((array < 0) | (array >= num_variables)).any():
        raise ValueError(f"`{name}` must name variables in 0..{num_variables - 1}. Got {array.min()}..{array.max()}.")
    return np.ascontiguousarray(array, np.int64)
