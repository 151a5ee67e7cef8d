"""Arrays of features, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from riskfield.estimators.design import Floats


def as_features(values: Any, dims: int, name: str) -> Floats:
    """`values` as finite numbers with `dims` axes, the last one of features; `name` is their name in errors."""
    array = np.asarray(values)
    axes = "(variables, features)" if dims == 2 else "(rows, columns, features)"
    if array.ndim != dims or 0 in array.shape[: dims - 1]:
        one = " If `X` is one example, pass [X]." if array.ndim == dims - 1 else ""
        raise ValueError(f"`{name}` must have shape {axes}. Got {array.shape}.{one}")
    if array.dtype.kind == "c":
        raise ValueError(f"`{name}` must hold real numbers. Complex data not supported. Got {array.dtype}.")
    if array.dtype.kind == "O":  # numbers, perhaps, as they come from tables of several types
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}` must hold numbers. Got objects: {error}.") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` must hold numbers. Got {array.dtype}.")
    features = array.astype(np.float64, copy=False)
    if not np.isfinite(features).all():
        raise ValueError(f"`{name}` must hold finite numbers. Got NaN or infinity.")
    return features
