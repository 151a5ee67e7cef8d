"""Label arrays of all kinds into the estimators: refused by name, or fitted to exactly these labels."""

from __future__ import annotations

import warnings

import numpy as np

import riskfield as rf

RECIPE = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Colour()), edges=(rf.features.Constant(),)
)
SHAPES = {"crf": [(4,), (3,), (1,)], "grid": [(2, 3), (3, 2), (2, 3)], "pictures": [(3, 4), (2, 3), (4, 2)]}
FEW = rf.optim.LBFGS(iterations=2)
POOLS = [
    [0, 1],
    [-1, 1],
    [-1, 0, 1],
    [-1, -2, 5],
    [0, 1, 2, 300],
    [0.0, 1.0, -1.0],
    [0.5, 1.0],
    [0.0, float("nan")],
    [True, False],
    ["a", "b"],
    ["a", "b", "-1"],
    ["a", -1, "b"],
    ["a", None],
    [b"a", b"b"],
    [1, "a"],
    [2**62, -(2**62)],
    [2**70, 1],
    [3],
    [-1],
    [1j, 1.0],
    [(0, 1), (1, 0)],
]
TYPES = [None, None, None, object, np.int8, np.uint8, np.int64, np.float32, np.float64, bool, str, "datetime64[s]"]


def example(rng):
    kind = list(SHAPES)[rng.integers(len(SHAPES))]
    labels = [_labels(rng, shape) for shape in SHAPES[kind]]
    if rng.random() < 0.2:
        labels[1] = _labels(rng, SHAPES[kind][0])
    estimator, X = _estimator(kind, rng)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rf.errors.DivergenceWarning)
            estimator.fit(X, labels)
    except (ValueError, TypeError) as error:
        assert "`" in str(error), f"refused without a name: {error!r}"
        return
    given = {entry for own in labels for entry in np.asarray(own, dtype=object).ravel().tolist()}
    classes = set(estimator.classes_.tolist())
    assert classes == {entry for entry in given if entry != -1}, f"classes {classes}, labels {given}"
    assert len(classes) > 1
    predicted = {entry for own in estimator.predict(X) for entry in np.asarray(own).ravel().tolist()}
    assert predicted <= classes
    assert 0 <= estimator.score(X, labels) <= 1


def _labels(rng, shape):
    pool = POOLS[rng.integers(len(POOLS))]
    flat = [pool[rng.integers(len(pool))] for _ in range(int(np.prod(shape)))]
    dtype = TYPES[rng.integers(len(TYPES))]
    try:
        if isinstance(pool[0], tuple):
            return [flat]
        nested = flat if len(shape) == 1 else [flat[k : k + shape[1]] for k in range(0, len(flat), shape[1])]
        return nested if dtype is None else np.array(nested, dtype=dtype)
    except (ValueError, TypeError, OverflowError):  # there is no such array
        return nested


def _estimator(kind, rng):
    shapes = SHAPES[kind]
    if kind == "crf":
        return rf.CRF(optimiser=FEW), [rng.normal(size=(*shape, 2)) for shape in shapes]
    if kind == "grid":
        return rf.GridCRF(optimiser=FEW), [rng.normal(size=(*shape, 2)) for shape in shapes]
    return rf.ImageCRF(RECIPE, optimiser=FEW, initial=()), [rng.random(size=shape) for shape in shapes]
