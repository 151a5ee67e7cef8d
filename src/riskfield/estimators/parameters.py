"""The settings of estimators: nested ones, such as `optimiser__iterations`, checks of plain ones, and `n_jobs`.

A setting that cannot be saved, or would be read back as another one, is refused by `fit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator

from riskfield.estimators.defaults import INFERENCE, OPTIMISER
from riskfield.threads import num_processors, num_threads

_DEFAULTS: dict[str, Any] = {"optimiser": OPTIMISER, "inference": INFERENCE}  # in place of None


class NestedParameters(BaseEstimator):  # type: ignore[misc]
    """An estimator whose parameters may be frozen dataclasses."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters, and with `deep` the settings of those that are objects, such as "optimiser__iterations"."""
        params: dict[str, Any] = super().get_params(deep=deep)
        for name, value in list(params.items()) if deep else ():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                params |= {f"{name}__{own.name}": getattr(value, own.name) for own in dataclasses.fields(value)}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters, or settings of those that are objects: `set_params(optimiser__iterations=50)`."""
        super().set_params(**{key: value for key, value in params.items() if "__" not in key})
        for key, value in params.items():
            name, nested, setting = key.partition("__")
            if not nested:
                continue
            held: Any = self.get_params(deep=False).get(name)
            held = _DEFAULTS.get(name) if held is None else held
            known = dataclasses.is_dataclass(held) and not isinstance(held, type)
            if not known or setting not in {own.name for own in dataclasses.fields(held)}:
                raise ValueError(f"`{key}` is not a setting of this estimator: `{name}` is {held!r}.")
            setattr(self, name, dataclasses.replace(held, **{setting: value}))
        return self


def check_flags(**settings: Any) -> None:
    """Raise unless all settings are booleans."""
    for name, value in settings.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False. Got {value!r}.")


def check_fraction(**settings: Any) -> None:
    """Raise unless all settings are between 0 and 1."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not 0 < value < 1:
            raise ValueError(f"`{name}` must be between 0 and 1. Got {value!r}.")


def check_ignore(ignore: Any) -> None:
    """Raise unless `ignore` can be a label."""
    if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int | np.integer | str)):
        raise ValueError(f"`ignore` must be an integer, a string or None. Got {ignore!r}.")


def as_sample_weight(values: Any) -> npt.NDArray[np.float64] | None:
    """The weights of examples, checked; None if they all are 1."""
    if values is None:
        return None
    weights = np.asarray(values, np.float64)
    if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
        found = f"shape {weights.shape}" if weights.ndim != 1 else "NaN, infinity or negative numbers"
        raise ValueError(f"`sample_weight` must be finite numbers of shape (n,), not negative. Got {found}.")
    if not weights.any():
        raise ValueError("`sample_weight` must be positive for an example. Got a weight of zero for all of them.")
    return weights


def check_n_jobs(n_jobs: int | None) -> None:
    """Raise unless `n_jobs` is None or an integer other than 0."""
    if n_jobs is not None and (not isinstance(n_jobs, int | np.integer) or isinstance(n_jobs, bool) or n_jobs == 0):
        raise ValueError(f"`n_jobs` must be a positive integer, -1 for all processors, or None. Got {n_jobs!r}.")


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Use this number of threads in the native engine and in torch, and the previous number afterwards.

    Both are settings of the whole process. None changes nothing. As in joblib, -1 stands for all usable processors, -2
    for all but one, and so on.
    """
    if n_jobs is None:
        yield
        return
    check_n_jobs(n_jobs)
    before = torch.get_num_threads()
    count = int(n_jobs) if n_jobs > 0 else max(num_processors() + 1 + int(n_jobs), 1)
    with num_threads(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
