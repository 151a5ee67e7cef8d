"""`CRF`: sequences, and any graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.decoders import AbstractDecoder
from riskfield.estimators._arrays import as_features
from riskfield.estimators.base import AbstractCRF
from riskfield.estimators.defaults import LOSS, RIDGE
from riskfield.estimators.design import Design, listed, sequence
from riskfield.infer import InferenceChoice
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.losses.loss import LossLike


class CRF(AbstractCRF):
    """A linear conditional random field on sequences, or on any graphs.

    Variables have features, and labels that depend on them and on each other:

        theta_i = F (u_i, 1),        theta_c = G (v_c, 1)

    with features u_i of variable i and, where they are given, v_c of the factor c. Without v all factors share a table.

    X is a list with an array of shape (variables, features) for each example, or one array of shape (n, variables,
    features) if all have the same size; y has an array of shape (variables,) for each. An example with a structure of
    its own is a tuple (features, edges), or (features, edges, edge_features) with shapes (edge, 2) and (edge, feature).

    Arguments:
        graph: how the variables of an example are joined: "chain", one after the other, or an integer array of shape
            (edge, 2), the same for all examples. With three columns or more, every row is a factor of so many
            variables.
        loss, inference, decoder, ridge, optimiser, initial, chunk_size, random_state, verbose: as for `AbstractCRF`.

    >>> import numpy as np
    >>> from riskfield import CRF
    >>> X = [np.array([[0.1], [0.9], [0.8]]), np.array([[0.2], [0.1]]), np.array([[0.7], [0.9]])]
    >>> y = [["a", "b", "b"], ["a", "a"], ["b", "b"]]
    >>> crf = CRF(loss="surrogate-likelihood").fit(X, y)
    >>> [labels.tolist() for labels in crf.predict(X)]
    [['a', 'b', 'b'], ['a', 'a'], ['b', 'b']]
    >>> [marginals.shape for marginals in crf.predict_marginals(X)]
    [(3, 2), (2, 2), (2, 2)]
    """

    def __init__(
        self,
        graph: Any = "chain",
        *,
        loss: str | LossLike = LOSS,
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float = RIDGE,
        optimiser: AbstractOptimiser | None = None,
        initial: Sequence[LossLike] | None = None,
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
        self.initial = initial
        self.chunk_size = chunk_size
        self.random_state = random_state
        self.verbose = verbose

    def _edge_types(self) -> tuple[str, ...]:
        return ("factors",)

    def _design(self, example: Any, name: str) -> Design:
        if isinstance(example, tuple):
            if len(example) not in (2, 3):
                raise ValueError(
                    f"`{name}` must be an array, or a tuple (features, edges) or (features, edges, edge_features). "
                    f"Got a tuple of length {len(example)}."
                )
            features = as_features(example[0], 2, f"{name}[0]")
            edges = _edges(example[1], len(features), f"{name}[1]")
            own = as_features(example[2], 2, f"{name}[2]") if len(example) == 3 else None
            if own is not None and len(own) != len(edges):
                raise ValueError(f"`{name}[2]` must have one row for each of {len(edges)} edges. Got {len(own)}.")
            return listed(features, edges, own)
        features = as_features(example, 2, name)
        if isinstance(self.graph, str):
            if self.graph != "chain":
                raise ValueError(f'`graph` must be "chain" or an integer array of edges. Got {self.graph!r}.')
            return sequence(features)
        return listed(features, _edges(self.graph, len(features), "graph"), None)


def _edges(values: Any, num_variables: int, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.reshape(0, array.shape[1] if array.ndim == 2 else 2).astype(np.int64)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers of shape (edges, 2). Got {array.dtype} of shape {array.shape}.")
    if ((array < 0) | (array >= num_variables)).any():
        raise ValueError(f"`{name}` must name variables in 0..{num_variables - 1}. Got {array.min()}..{array.max()}.")
    return np.ascontiguousarray(array, np.int64)
