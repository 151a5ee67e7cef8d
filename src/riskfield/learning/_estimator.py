"""What `CRF` and `GridCRF` share: examples as structures and features, fitted by `fit`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from riskfield.data.examples import Examples
from riskfield.decoders import AbstractDecoder, as_decoder, decode
from riskfield.learning._base import DEFAULT_INFERENCE, AbstractEstimator
from riskfield.learning._designs import Design
from riskfield.learning.fit import fit
from riskfield.learning.labels import Array, as_labels, classes_of
from riskfield.models.conditional import LinearModel

_SIZES = ("features per variable", "features per edge (a constant among them)", "variables per edge")


class AbstractCRF(AbstractEstimator):
    """What both estimators share. Subclasses say what an example looks like."""

    decoder: AbstractDecoder | None
    _fitted = ("classes_", "inference_", "n_features_in_", "n_edge_features_in_", "arity_")

    @abstractmethod
    def _design(self, example: Any, name: str) -> Design:
        """One example of X, checked; `name` is its name in errors."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model.

        Arguments:
            X: the examples.
            y: their labels, an array for each, of integers or strings; -1 where a label is not known.
            sample_weight: of shape (n,), how much each example counts.

        Returns:
            The estimator itself.
        """
        check_consistent_length(X, y, sample_weight)
        loss = self._loss()
        as_decoder(self.decoder)  # `predict` needs it; better to refuse it before the work than after
        designs = self._designs(X)
        labels = [
            as_labels(entry, design.shape, f"y[{k}]") for k, (entry, design) in enumerate(zip(y, designs, strict=True))
        ]
        self.classes_ = classes_of(labels)
        self.n_features_in_, self.n_edge_features_in_, self.arity_ = designs[0].sizes
        self.inference_ = DEFAULT_INFERENCE if self.inference is None else self.inference
        self.model_ = self._model()
        weights = None if sample_weight is None else np.asarray(sample_weight, np.float64)
        self.result_ = fit(
            self.model_,
            [examples for _, examples in self._blocks(designs, labels, weights)],
            loss,
            self.inference_,
            optimiser=self.optimiser,
            ridge=self.ridge,
            chunk_size=self.chunk_size,
            seed=self._seed(),
            progress=self.verbose,
        )
        return self

    def predict(self, X: Any) -> Any:
        """The labels of each example, as the decoder chooses them: an array if X is one, else a list of arrays."""

        def of_block(block: Examples) -> Array:
            theta = self.model_(block.graph, block.inputs)
            inference = self.inference_.on(block.graph)
            labels: Array = self.classes_[decode(block.graph, theta, inference, self.decoder).numpy()]
            return labels

        return self._predict(X, of_block)

    def predict_marginals(self, X: Any) -> Any:
        """P(label) of each variable, in a last axis ordered as `classes_` is: an array if X is one, else a list."""

        def of_block(block: Examples) -> Array:
            theta = self.model_(block.graph, block.inputs)
            solution = self.inference_.on(block.graph)(block.graph, theta)
            return np.asarray(solution.node_marginals[0].numpy())

        return self._predict(X, of_block)

    def _model(self) -> LinearModel:
        return LinearModel(len(self.classes_), self.n_features_in_ + 1, self.n_edge_features_in_, arity=self.arity_)

    def _designs(self, X: Any, sizes: tuple[int, int, int] | None = None) -> list[Design]:
        """All examples, checked; with the numbers of features given in `sizes`, or else those of the first one."""
        designs = [self._design(example, f"X[{k}]") for k, example in enumerate(X)]
        if sizes is None and not designs:
            raise ValueError("`X` must hold at least one example. Got none.")
        for k, design in enumerate(designs):
            sizes = design.sizes if sizes is None else sizes
            for what, expected, got in zip(_SIZES, sizes, design.sizes, strict=True):
                if got != expected:
                    raise ValueError(f"`X[{k}]` must have {expected} {what}, as the others in `fit`. Got {got}.")
        return designs

    def _blocks(
        self, designs: Sequence[Design], labels: Sequence[Array] | None = None, weights: Array | None = None
    ) -> Iterator[tuple[list[int], Examples]]:
        """Examples that share a graph, and which they are."""
        groups: dict[Any, list[int]] = {}
        for k, design in enumerate(designs):
            groups.setdefault(design.structure, []).append(k)
        for structure, members in groups.items():
            graph = structure.graph(len(self.classes_))
            codes = np.full((len(members), graph.num_variables), -1)
            if labels is not None:
                codes[:] = [self._codes(labels[k].reshape(-1)) for k in members]
            inputs = {
                "nodes": torch.from_numpy(np.stack([designs[k].nodes for k in members])),
                "factors": torch.from_numpy(np.stack([designs[k].factors for k in members])),
            }
            own = None if weights is None else torch.from_numpy(weights[members])
            yield members, Examples(graph, torch.from_numpy(codes), inputs, weights=own)

    @torch.no_grad()
    def _predict(self, X: Any, of_block: Callable[[Examples], Array]) -> Any:
        check_is_fitted(self)
        designs = self._designs(X, (self.n_features_in_, self.n_edge_features_in_, self.arity_))
        out: list[Any] = [None] * len(designs)
        for members, block in self._blocks(designs):
            size = self.chunk_size or len(members)
            for start in range(0, len(members), size):
                rows = slice(start, start + size)
                for k, predicted in zip(members[rows], of_block(block.select(rows)), strict=True):
                    out[k] = predicted.reshape(*designs[k].shape, *predicted.shape[1:])
        return np.stack(out) if isinstance(X, np.ndarray) and X.dtype != object and out else out
