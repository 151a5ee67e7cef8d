"""Labels as users write them: which type they have, which of them are unknown, and which classes they name.

Labels are integers (floats with whole values count as such), booleans or strings, one type in all examples. The integer
-1 marks an unknown label, unless an estimator names another one. Labels that leave in doubt whether -1 is a class are
refused, since guessing would train another model than the one that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

UNKNOWN = -1


def as_labels(values: Any, shape: tuple[int, ...], name: str, ignore: Any = UNKNOWN) -> Array:
    """The labels of one example as an array of one type, checked.

    Arguments:
        values: the labels.
        shape: the shape that they must have.
        name: their name in errors.
        ignore: the label that marks unknown ones; None if all are known.

    Strings are an object array where some of them are unknown, as `np.array(["a", -1, "b"], dtype=object)`.
    """
    labels = np.asarray(values)
    if labels.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}, a label for each variable. Got {labels.shape}.")
    if labels.dtype.kind == "U" and not isinstance(values, np.ndarray):
        # NumPy has turned whatever else stood among the strings into strings.
        others = [entry for entry in np.asarray(values, dtype=object).flat if not isinstance(entry, str)]
        if others:
            raise ValueError(
                f"`{name}` must hold labels of one type. Got strings and {others[0]!r}. To mark unknown labels "
                "among strings by -1, pass np.array(labels, dtype=object)."
            )
    if labels.dtype.kind == "O":
        return _from_objects(labels, name, ignore)
    if labels.dtype.kind not in "biufU":
        raise ValueError(f"`{name}` must hold integers, booleans or strings. Got {labels.dtype}.")
    if labels.dtype.kind == "f" and not (labels == np.round(labels)).all():
        raise ValueError(f"`{name}` must hold integers or strings, no continuous values. Got fractions or NaN.")
    return labels


def is_known(labels: Array, ignore: Any = UNKNOWN) -> npt.NDArray[np.bool_]:
    """Where labels are not `ignore`."""
    kinds = "UO" if isinstance(ignore, str) else "iufO"
    if ignore is None or labels.dtype.kind not in kinds:
        return np.ones(labels.shape, np.bool_)
    return np.asarray(labels != ignore, np.bool_)


def classes_of(labels: Sequence[Array], ignore: Any = UNKNOWN) -> Array:
    """All labels that occur, sorted. Raise unless they are at least two classes of one type, all clearly known."""
    examples: dict[str, int] = {}  # the first example with labels of a type
    for k, own in enumerate(labels):
        if is_known(own, ignore).any():
            examples.setdefault(type_of(own), k)
    if not examples:
        raise ValueError(f"`y` must hold a label other than {ignore}.")
    if len(examples) > 1:
        found = " and ".join(f"{kind} in y[{k}]" for kind, k in examples.items())
        raise ValueError(f"`y` must hold labels of one type. Got {found}.")
    (kind,) = examples
    classes = np.unique(np.concatenate([known_labels(own, ignore) for own in labels if is_known(own, ignore).any()]))
    if ignore == UNKNOWN:
        if kind == "strings":
            _check_strings(classes)
        elif not all(is_known(own).all() for own in labels):
            _check_beside_unknown(classes)
    if len(classes) < 2:
        raise ValueError(f"`y` must hold at least two classes. Got one class only, {classes.tolist()[0]!r}.")
    return classes


def known_labels(labels: Array, ignore: Any = UNKNOWN) -> Array:
    """The labels that are known, in one axis."""
    known = labels[is_known(labels, ignore)]
    return known.astype(np.str_) if labels.dtype.kind == "O" else known


def codes_of(labels: Sequence[Array], classes: Array, ignore: Any = UNKNOWN) -> list[npt.NDArray[np.int64]]:
    """Labels as numbers of classes, with -1 where they are unknown."""
    codes = [np.full(own.shape, -1, np.int64) for own in labels]
    known = [is_known(own, ignore) for own in labels]
    values = [known_labels(own, ignore) for own in labels]
    found = np.searchsorted(classes, np.concatenate([own for own in values if own.size]))
    parts = np.split(found, np.cumsum([own.size for own in values])[:-1])
    for own, where, part in zip(codes, known, parts, strict=True):
        own[where] = part
    return codes


def share_right(predictions: Any, labels: Any, weights: Any, ignore: Any = UNKNOWN) -> float:
    """The share of variables with a known label that predictions get right, with a weight for each example or None."""
    right = total = 0.0
    weights = repeat(1.0) if weights is None else weights
    for k, (predicted, given, weight) in enumerate(zip(predictions, labels, weights, strict=False)):
        own = as_labels(given, predicted.shape, f"y[{k}]", ignore)
        known = is_known(own, ignore)
        if known.any() and type_of(own) != type_of(predicted):
            raise ValueError(f"`y[{k}]` must hold {type_of(predicted)}, as in `fit`. Got {type_of(own)}.")
        right += float(weight) * np.count_nonzero(predicted[known] == known_labels(own, ignore))
        total += float(weight) * np.count_nonzero(known)
    if not total > 0:
        raise ValueError(f"`y` must hold a label other than {ignore}.")
    return float(right / total)


def class_weights(
    class_weight: Any, classes: Array, codes: Sequence[npt.NDArray[np.int64]], sample_weight: Array | None
) -> tuple[float, ...] | None:
    """The weight of each class, or None if all are 1.

    Arguments:
        class_weight: None, "balanced" or a dictionary {label: weight}.
        classes: all labels.
        codes: the numbers of the classes of all examples, -1 where a label is unknown.
        sample_weight: the weight of each example.

    >>> class_weights("balanced", np.array(["a", "b"]), [np.array([0, 0, 0, 1])], None)  # n / (number * count)
    (0.6666666666666666, 2.0)
    >>> class_weights({"b": 5}, np.array(["a", "b"]), [], None)
    (1.0, 5.0)
    """
    if class_weight is None:
        return None
    if isinstance(class_weight, Mapping):
        names = classes.tolist()
        unknown = [label for label in class_weight if label not in names]
        if unknown:
            raise ValueError(f"`class_weight` must name labels in `y`, {names}. Got {unknown[0]!r}.")
        return tuple(float(class_weight.get(label, 1.0)) for label in names)
    if not isinstance(class_weight, str) or class_weight != "balanced":
        raise ValueError(f'`class_weight` must be None, "balanced" or a dictionary. Got {class_weight!r}.')
    counts = np.zeros(len(classes))
    for k, own in enumerate(codes):
        weight = 1.0 if sample_weight is None else float(sample_weight[k])
        counts += weight * np.bincount(own[own >= 0], minlength=len(classes))
    if not counts.all():
        label = classes[counts == 0].tolist()[0]
        raise ValueError(f'`class_weight="balanced"` needs an example of positive weight for {label!r}. Got none.')
    return tuple((counts.sum() / (len(classes) * counts)).tolist())


def type_of(labels: Array) -> str:
    """The type of labels, in words."""
    return {"U": "strings", "O": "strings", "b": "booleans"}.get(labels.dtype.kind, "integers")


def _from_objects(labels: Array, name: str, ignore: Any) -> Array:
    """Objects that are all numbers as an array of numbers; strings, with -1 among them, as they are."""
    entries = labels.ravel().tolist()
    strings = [isinstance(entry, str) for entry in entries]
    if not any(strings):
        odd = [entry for entry in entries if not _is_plain_number(entry)]
        if odd:
            raise ValueError(f"`{name}` must hold integers of at most 64 bits, booleans or strings. Got {odd[0]!r}.")
        return as_labels(np.array(entries).reshape(labels.shape), labels.shape, name, ignore)
    for entry, is_string in zip(entries, strings, strict=True):
        if not is_string and (isinstance(entry, bool) or ignore is None or entry != ignore):
            raise ValueError(f"`{name}` must hold labels of one type, or {ignore}. Got strings and {entry!r}.")
    return labels


def _is_plain_number(entry: Any) -> bool:
    if isinstance(entry, int):  # a boolean is one
        return -(2**63) <= entry < 2**63
    return isinstance(entry, float | np.integer | np.floating | np.bool_)


def _check_strings(classes: Array) -> None:
    if str(UNKNOWN) in classes and not all(_is_number(entry) for entry in classes):
        other = str(classes[classes != str(UNKNOWN)][0])
        raise ValueError(
            f"`y` holds the string '{UNKNOWN}' and {other!r}. It looks like the number {UNKNOWN}, which marks an "
            "unknown label, turned into a string. Pass np.array(labels, dtype=object) for unknown labels, or give the "
            "class another name."
        )


def _check_beside_unknown(classes: Array) -> None:
    """Refuse numbers among which -1 seems to be a class."""
    others = classes.tolist()
    if others == [1] or min(others) < 0:
        negative = f"{min(others)} is negative, too" if min(others) < 0 else f"{UNKNOWN} and 1 are two classes"
        raise ValueError(
            f"`y` holds {UNKNOWN}, which marks an unknown label, but it seems to be a class here: {negative}. "
            "Number the classes from 0, as np.unique(labels, return_inverse=True) does, or pass `ignore=None` to the "
            "estimator if no label is unknown."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
