"""What the estimators share: a linear model, a loss and an inference, fitted by `fit`, that take and return arrays."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from riskfield.adjoints.unroll import Unroll
from riskfield.data.examples import Examples
from riskfield.decoders import AbstractDecoder, as_decoder, decode
from riskfield.entropy import TRW
from riskfield.errors import FileFormatError
from riskfield.inference.infer import Stop
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.settings import Inference
from riskfield.io.model_file import read_model, write_model
from riskfield.learning._designs import Chain, Design
from riskfield.learning.fit import fit
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.losses.likelihood import SurrogateEM
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss
from riskfield.losses.marginal import (
    CliqueLogistic,
    CliqueQuadratic,
    SmoothedClassification,
    UnivariateLogistic,
    UnivariateQuadratic,
)
from riskfield.losses.piecewise import Independent, Piecewise
from riskfield.losses.pseudolikelihood import Pseudolikelihood
from riskfield.models.conditional import LinearModel

Array: TypeAlias = npt.NDArray[Any]

# With -1 among the labels, the likelihood sums over what is hidden: expectation maximisation.
LOSSES: dict[str, AbstractLoss] = {
    "univariate-logistic": UnivariateLogistic(),
    "univariate-quadratic": UnivariateQuadratic(),
    "clique-logistic": CliqueLogistic(),
    "clique-quadratic": CliqueQuadratic(),
    "smoothed-classification": SmoothedClassification(),
    "likelihood": SurrogateEM(),
    "pseudolikelihood": Pseudolikelihood(),
    "piecewise": Piecewise(),
    "independent": Independent(),
}
_TRUNCATED = Inference(MessagePassing(TRW(0.5)), Stop(sweeps=10, tol=None), Unroll())
_EXACT_ON_CHAINS = Inference(MessagePassing(), Stop(sweeps=1, tol=None), Unroll())
_FITTED = ("classes_", "inference_", "n_features_in_", "n_edge_features_in_", "arity_")
_SIZES = ("features per variable", "features per edge (a constant among them)", "variables per edge")


class AbstractCRF(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. Subclasses say what an example looks like."""

    loss: str | LossLike
    inference: Inference | None
    decoder: AbstractDecoder | None
    ridge: float
    optimiser: AbstractOptimiser | None
    chunk_size: int | None
    random_state: Any
    verbose: bool

    @abstractmethod
    def _design(self, example: Any, name: str) -> Design:
        """One example of X, checked; `name` is its name in errors."""

    def _default_inference(self, designs: Sequence[Design]) -> Inference:
        """Exact on chains, else truncated tree-reweighting."""
        return _EXACT_ON_CHAINS if all(isinstance(d.structure, Chain) for d in designs) else _TRUNCATED

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
        labels = [_labels(entry, design, f"y[{k}]") for k, (entry, design) in enumerate(zip(y, designs, strict=True))]
        known = np.concatenate([entry[_is_known(entry)] for entry in labels])
        if not known.size:
            raise ValueError("`y` must hold a label other than -1.")
        self.classes_ = np.unique(known)
        self.n_features_in_, self.n_edge_features_in_, self.arity_ = designs[0].sizes
        self.inference_ = self._default_inference(designs) if self.inference is None else self.inference
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
            seed=int(check_random_state(self.random_state).randint(2**31)),
            progress=self.verbose,
        )
        return self

    def predict(self, X: Any) -> Any:
        """The labels of each example, as the decoder chooses them: an array if X is one, else a list of arrays."""

        def of_block(block: Examples) -> Array:
            theta = self.model_(block.graph, block.inputs)
            labels: Array = self.classes_[decode(block.graph, theta, self.inference_, self.decoder).numpy()]
            return labels

        return self._predict(X, of_block)

    def predict_marginals(self, X: Any) -> Any:
        """P(label) of each variable, in a last axis ordered as `classes_` is: an array if X is one, else a list."""

        def of_block(block: Examples) -> Array:
            theta = self.model_(block.graph, block.inputs)
            return np.asarray(self.inference_(block.graph, theta).node_marginals[0].numpy())

        return self._predict(X, of_block)

    def predict_proba(self, X: Any) -> Any:
        """`predict_marginals`, under the name that pipelines pass on."""
        return self.predict_marginals(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of variables with a known label that `predict` gets right."""
        check_consistent_length(X, y, sample_weight)
        right = total = 0.0
        for k, predicted in enumerate(self.predict(X)):
            labels = np.asarray(y[k])
            if labels.shape != predicted.shape:
                raise ValueError(f"`y[{k}]` must have shape {predicted.shape}. Got {labels.shape}.")
            weight = 1.0 if sample_weight is None else float(sample_weight[k])
            known = _is_known(labels)
            right += weight * np.count_nonzero(known & (predicted == labels))
            total += weight * np.count_nonzero(known)
        if not total > 0:
            raise ValueError("`y` must hold a label other than -1.")
        return float(right / total)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file, whole or not at all: safetensors and JSON, no pickle.

        Raises:
            TypeError: if a parameter is a function, or an object that is not riskfield's own.
        """
        check_is_fitted(self)
        kept = {"estimator": type(self).__name__, "parameters": self.model_.state_dict(), **self.get_params(deep=False)}
        write_model(path, kept | {name: getattr(self, name) for name in _FITTED})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that `save` wrote.

        Raises:
            FileFormatError: if the file is damaged, or holds something else.
        """
        content = read_model(path)
        kind = content.pop("estimator", None)
        if kind != cls.__name__:
            raise FileFormatError(f"{path} must hold a {cls.__name__}. It holds {kind or 'no estimator'}.")
        try:
            parameters, fitted = content.pop("parameters"), {name: content.pop(name) for name in _FITTED}
            estimator = cls(**content)
            for name, value in fitted.items():
                setattr(estimator, name, value)
            estimator.model_ = estimator._model()
            estimator.model_.load_state_dict(parameters)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FileFormatError(f"{path} is a damaged {cls.__name__}: {error}") from error
        return estimator

    def _loss(self) -> LossLike:
        if not isinstance(self.loss, str):
            return as_loss(self.loss)
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be a loss object, or one of {', '.join(LOSSES)}. Got {self.loss!r}.")
        return LOSSES[self.loss]

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

    def _codes(self, labels: Array) -> Array:
        """Labels as numbers of classes; -1 stays."""
        codes = np.full(len(labels), -1)
        known = _is_known(labels)
        codes[known] = np.searchsorted(self.classes_, labels[known])
        return codes

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

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        tags.target_tags.required = tags.target_tags.multi_output = True
        return tags


def _labels(values: Any, design: Design, name: str) -> Array:
    labels = np.asarray(values)
    if labels.shape != design.shape:
        raise ValueError(f"`{name}` must have shape {design.shape}, a label for each variable. Got {labels.shape}.")
    if labels.dtype.kind == "f" and not (labels == np.round(labels)).all():
        raise ValueError(f"`{name}` must hold integers or strings. Got fractions or NaN.")
    return labels


def _is_known(labels: Array) -> npt.NDArray[np.bool_]:
    return labels != -1 if labels.dtype.kind in "ifO" else np.ones(labels.shape, np.bool_)
