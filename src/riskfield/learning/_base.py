"""What all estimators share: choices, scores and files. They take and return arrays."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from riskfield.adjoints.unroll import Unroll
from riskfield.decoders import AbstractDecoder
from riskfield.entropy import TRW
from riskfield.errors import FileFormatError
from riskfield.features.image import ImageFeatures
from riskfield.infer import ExactOnForests, Inference, InferenceChoice
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.request import Stop
from riskfield.io.codec import read_tree, write_tree
from riskfield.learning.labels import Array, as_labels, is_known, known_labels, type_of
from riskfield.learning.loss_names import LOSSES
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.registry import SAVED
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss
from riskfield.models.conditional import LinearModel

_KIND = "estimator"  # of saved files

# What a file may hold under these names. The estimators check the rest where they use it.
_TYPES: dict[str, tuple[type, ...]] = {
    "arity_": (int,),
    "chunk_size": (int, NoneType),
    "classes_": (np.ndarray,),
    "connectivity": (int,),
    "decoder": (AbstractDecoder, NoneType),
    "edge_features": (str,),
    "features": (ImageFeatures, NoneType),
    "features_": (ImageFeatures,),
    "inference": (Inference, ExactOnForests, NoneType),
    "inference_": (Inference, ExactOnForests),
    "initial": (tuple, NoneType),
    "loss": (str, AbstractLoss),
    "n_edge_features_in_": (int,),
    "n_features_in_": (int,),
    "optimiser": (AbstractOptimiser, NoneType),
    "ridge": (int, float),
    "verbose": (bool,),
}

DEFAULT_INFERENCE = ExactOnForests(Inference(MessagePassing(TRW(0.5)), Stop(sweeps=10, tol=None), Unroll()))


class AbstractEstimator(BaseEstimator):  # type: ignore[misc]
    """A linear model, a loss and an inference. Subclasses say what an example is."""

    loss: str | LossLike
    inference: InferenceChoice | None
    ridge: float
    optimiser: AbstractOptimiser | None
    chunk_size: int | None
    random_state: Any
    verbose: bool

    classes_: Array
    inference_: InferenceChoice
    model_: LinearModel
    _fitted: ClassVar[tuple[str, ...]]  # what `fit` finds out besides the parameters of `model_`

    @abstractmethod
    def _model(self) -> LinearModel:
        """The model as it begins, made of what is `_fitted`."""

    @abstractmethod
    def predict(self, X: Any) -> Any:
        """The labels of each example: an array if X is one, else a list of arrays."""

    @abstractmethod
    def predict_marginals(self, X: Any) -> Any:
        """P(label) of each variable, in a last axis ordered as `classes_` is: an array if X is one, else a list."""

    def predict_proba(self, X: Any) -> Any:
        """`predict_marginals`, under the name that pipelines pass on."""
        return self.predict_marginals(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of variables with a known label that `predict` gets right."""
        check_consistent_length(X, y, sample_weight)
        right = total = 0.0
        for k, predicted in enumerate(self.predict(X)):
            labels = as_labels(y[k], predicted.shape, f"y[{k}]")
            known = is_known(labels)
            if known.any() and type_of(labels) != type_of(predicted):
                raise ValueError(f"`y[{k}]` must hold {type_of(predicted)}, as in `fit`. Got {type_of(labels)}.")
            weight = 1.0 if sample_weight is None else float(sample_weight[k])
            right += weight * np.count_nonzero(predicted[known] == known_labels(labels))
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
        write_tree(path, _KIND, kept | {name: getattr(self, name) for name in self._fitted}, SAVED)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that `save` wrote.

        Raises:
            FileFormatError: if the file is damaged, or holds something else.
        """
        content = read_tree(path, _KIND, SAVED)
        kind = content.pop("estimator", None)
        if kind != cls.__name__:
            raise FileFormatError(f"{path} must hold a {cls.__name__}. It holds {kind or 'no estimator'}.")
        try:
            _check_types(content)
            parameters, fitted = content.pop("parameters"), {name: content.pop(name) for name in cls._fitted}
            estimator = cls(**content)
            for name, value in fitted.items():
                setattr(estimator, name, value)
            estimator.model_ = _with_parameters(estimator._model, parameters)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise FileFormatError(f"{path} is a damaged {cls.__name__}: {error}") from error
        return estimator

    def _loss(self) -> AbstractLoss:
        if not isinstance(self.loss, str):
            return as_loss(self.loss)
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be a loss object, or one of {', '.join(LOSSES)}. Got {self.loss!r}.")
        return LOSSES[self.loss]

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31))

    def _codes(self, labels: Array) -> npt.NDArray[np.int64]:
        """Labels as numbers of classes; -1 stays."""
        codes = np.full(labels.shape, -1, np.int64)
        codes[is_known(labels)] = np.searchsorted(self.classes_, known_labels(labels))
        return codes

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        tags.target_tags.required = tags.target_tags.multi_output = True
        return tags


def _check_types(content: Mapping[str, Any]) -> None:
    """Raise if an entry of a file is not of the type that it has in an estimator."""
    for name, value in content.items():
        kinds = _TYPES.get(name)
        if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"`{name}` must be of type {allowed}. Got {value!r:.80}.")
        if kinds == (int,) and value < 1:
            raise ValueError(f"`{name}` must be positive. Got {value!r}.")
    if content["classes_"].ndim != 1 or len(content["classes_"]) < 2:
        raise ValueError(f"`classes_` must be two or more labels. Got shape {content['classes_'].shape}.")


def _with_parameters(make: Callable[[], LinearModel], parameters: Mapping[str, Tensor]) -> LinearModel:
    """The model that `make` makes, with saved parameters.

    It is made without memory first: the sizes in a file cannot ask for more than the parameters in it have.
    """
    with torch.device("meta"):
        model = make()
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    saved = {name: (tuple(t.shape), t.dtype) for name, t in parameters.items()}
    if wanted != saved:
        raise ValueError(f"its parameters must be {wanted}. They are {saved}.")
    model.load_state_dict(parameters, assign=True)
    return model
