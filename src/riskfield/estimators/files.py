"""Fitted estimators as files: settings, fitted attributes and parameters, without pickle."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from riskfield.decoders import AbstractDecoder
from riskfield.errors import FileFormatError
from riskfield.estimators.registry import SAVED
from riskfield.features.image import ImageFeatures
from riskfield.infer import ExactOnForests, Inference
from riskfield.io.codec import read_tree, write_tree
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.losses.loss import AbstractLoss
from riskfield.models.conditional import LinearModel

_KIND = "estimator"  # of saved files
_MAX_ARITY = 32  # of a factor of two or more states per variable that fits into memory

# What a file may hold under these names. The estimators check the rest where they use it.
_TYPES: dict[str, tuple[type, ...]] = {
    "arity_": (int,),
    "baseline_": (dict, NoneType),
    "baseline_results_": (list,),
    "chunk_size": (int, NoneType),
    "class_weight": (str, dict, NoneType),
    "classes_": (np.ndarray,),
    "columns_": (np.ndarray, NoneType),
    "connectivity": (int,),
    "decoder": (AbstractDecoder, NoneType),
    "device": (str, NoneType),
    "dtype": (str, NoneType),
    "early_stopping": (bool,),
    "edge_features": (str,),
    "feature_seconds_": (float,),
    "fit_intercept": (bool,),
    "features": (ImageFeatures, NoneType),
    "features_": (ImageFeatures,),
    "ignore": (int, str, NoneType),
    "inference": (Inference, ExactOnForests, NoneType),
    "inference_": (Inference, ExactOnForests),
    "initial": (tuple, NoneType),
    "boundaries": (bool,),
    "forbidden": (list, tuple, NoneType),
    "lasso": (int, float),
    "scheme": (str, NoneType),
    "loss": (str, AbstractLoss),
    "n_edge_features_in_": (int,),
    "n_features_in_": (int,),
    "n_iter_no_change": (int,),
    "n_jobs": (int, NoneType),
    "optimiser": (AbstractOptimiser, NoneType),
    "results_": (list,),
    "path_": (tuple,),
    "ridge": (int, float, NoneType),
    "ridge_": (int, float),
    "validation_fraction": (int, float),
    "verbose": (bool, int),
    "vocabulary_": (np.ndarray, NoneType),
}

Estimator = TypeVar("Estimator")


def save_estimator(
    path: str | os.PathLike[str],
    name: str,
    settings: Mapping[str, Any],
    fitted: Mapping[str, Any],
    model: LinearModel,
) -> None:
    """Write an estimator to a file, whole or not at all."""
    for setting, instead in (("loss", '"univariate-logistic"'), ("initial", "()")):
        losses = settings[setting] if setting == "initial" else (settings[setting],)
        for loss in losses or ():
            if not _is_savable(loss):
                raise TypeError(
                    f"`{setting}` holds a loss of your own, {loss!r}. A file can name classes of riskfield, and "
                    "dataclasses that `riskfield.estimators.registry.register` has registered. Predictions do not need "
                    f"the loss: to save without it, call `set_params({setting}={instead})` before `save`."
                )
    parameters = {entry: tensor.cpu() for entry, tensor in model.state_dict().items()}
    write_tree(path, _KIND, {"estimator": name, "parameters": parameters, **settings, **fitted}, SAVED)


def _is_savable(loss: Any) -> bool:
    """Whether a loss, and every loss that it holds, is of a class that a file may name."""
    if isinstance(loss, str):
        return True
    if type(loss) not in SAVED.values():
        return False
    parts = [getattr(loss, own.name) for own in dataclasses.fields(loss)]
    return all(_is_savable(part) for part in parts if isinstance(part, AbstractLoss))


def load_estimator(
    path: str | os.PathLike[str],
    name: str,
    fitted: tuple[str, ...],
    build: Callable[[dict[str, Any], dict[str, Any]], tuple[Estimator, Callable[[], LinearModel]]],
) -> Estimator:
    """The estimator of class `name` in a file.

    Arguments:
        path: the file.
        name: the class that is expected.
        fitted: which entries are fitted attributes; all others are settings.
        build: makes an estimator from settings and fitted attributes, and a function that makes its model. The
            estimator's `model_` is set here.

    Raises:
        FileFormatError: if the file is damaged, or holds something else.
    """
    content = read_tree(path, _KIND, SAVED)
    kind = content.pop("estimator", None)
    if not isinstance(kind, str) or kind != name:
        held = kind if isinstance(kind, str) and kind else "no estimator"
        raise FileFormatError(f"{path} must hold a {name}. It holds {held}.")
    try:
        _check_types(content)
        parameters, own = content.pop("parameters"), {entry: content.pop(entry) for entry in fitted}
        estimator, make_model = build(content, own)
        estimator.model_ = _with_parameters(make_model, parameters)  # type: ignore[attr-defined]
    except Exception as error:  # whatever comes of entries that nobody has checked
        raise FileFormatError(f"{path} is a damaged {name}: {error}") from error
    return estimator


def _check_types(content: Mapping[str, Any]) -> None:
    """Raise if an entry of a file is not of the type that it has in an estimator."""
    for name, value in content.items():
        kinds = _TYPES.get(name)
        if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"`{name}` must be of type {allowed}. Got {value!r:.80}.")
        least = 0 if name == "n_features_in_" else 1  # tokens may have no features but the constant
        if kinds == (int,) and value < least:
            raise ValueError(f"`{name}` must be at least {least}. Got {value!r}.")
    if content.get("arity_", 1) > _MAX_ARITY:  # before a number with so many digits is computed
        raise ValueError(f"`arity_` must be at most {_MAX_ARITY}. Got {content['arity_']!r}.")
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
