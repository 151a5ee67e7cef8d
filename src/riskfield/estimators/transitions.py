"""Which labels of a sequence must not follow each other: tag schemes for spans, and transitions that users list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.estimators.labels import Array

Bools = npt.NDArray[np.bool_]

SCHEMES = {"BIO": "BIO", "IOB2": "BIO", "BIOES": "BIOES", "IOBES": "BIOES"}  # the prefixes of the tags of a scheme
_OPEN = ("B", "I")  # prefixes after which a span of BIOES goes on


def forbidden_transitions(classes: Array, scheme: str | None, pairs: Iterable[tuple[Any, Any]] | None) -> Bools | None:
    """Booleans of shape (classes + 1, classes + 1): which class must not follow which; None if all may.

    Arguments:
        classes: all labels.
        scheme: "BIO", also called "IOB2"; "BIOES", also called "IOBES"; or None.
        pairs: (label, next label); None stands for the start or the end of a sequence.
    """
    if scheme is None and not pairs:
        return None
    forbidden = np.zeros((len(classes) + 1, len(classes) + 1), np.bool_)
    if scheme is not None:
        if not isinstance(scheme, str) or scheme.upper() not in SCHEMES:
            raise ValueError(f'`scheme` must be "BIO" ("IOB2"), "BIOES" ("IOBES") or None. Got {scheme!r}.')
        prefixes = SCHEMES[scheme.upper()]
        tags = [_tag(label, prefixes) for label in classes.tolist()] + [("O", "")]  # outside of a sequence is outside
        for k, before in enumerate(tags):
            for j, after in enumerate(tags):
                forbidden[k, j] = not _allows(before, after, prefixes)
    number = {label: k for k, label in enumerate(classes.tolist())} | {None: len(classes)}
    for pair in pairs or ():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or any(label not in number for label in pair):
            raise ValueError(f"`forbidden` must hold pairs of labels in `y`, or of a label and None. Got {pair!r}.")
        forbidden[number[pair[0]], number[pair[1]]] = True
    return forbidden


def check_allowed(codes: Sequence[npt.NDArray[np.int64]], forbidden: Bools, classes: Array) -> None:
    """Raise if labels have a forbidden transition, so that no model could have produced them."""
    outside = len(classes)
    for k, own in enumerate(codes):
        padded = np.concatenate([[outside], own, [outside]])
        before, after = padded[:-1], padded[1:]
        bad = np.flatnonzero((before >= 0) & (after >= 0) & forbidden[before, after])
        if len(bad):
            names = [*classes.tolist(), None]
            raise ValueError(
                f"`y[{k}]` goes from {names[before[bad[0]]]!r} to {names[after[bad[0]]]!r} at position {bad[0]}, "
                "which is forbidden. (None is the start or the end.)"
            )
        if (own < 0).any() and not _can_be_completed(own, forbidden):
            raise ValueError(f"`y[{k}]` has unknown labels that cannot be filled in without a forbidden transition.")


def check_lengths(lengths: Sequence[int], forbidden: Bools) -> None:
    """Raise if all labellings of an example are forbidden; `lengths` are the numbers of variables of the examples."""
    possible = {length: _can_be_completed(np.full(length, -1), forbidden) for length in set(lengths)}
    for k, length in enumerate(lengths):
        if not possible[length]:
            raise ValueError(f"`X[{k}]` has {length} variables, and every sequence of that length is forbidden.")


def _can_be_completed(codes: npt.NDArray[np.int64], forbidden: Bools) -> bool:
    """Whether unknown labels can be filled in so that no transition is forbidden."""
    allowed, outside = ~forbidden, len(forbidden) - 1
    possible = allowed[outside, :outside]
    for position, code in enumerate(codes.tolist()):
        if position:
            possible = np.asarray(allowed[:outside, :outside][possible].any(axis=0))
        if code >= 0:
            possible = possible & (np.arange(outside) == code)
    return bool((possible & allowed[:outside, outside]).any())


def _tag(label: Any, prefixes: str) -> tuple[str, str]:
    """The prefix and the type of a label."""
    prefix, _, kind = str(label).partition("-")
    if prefix not in tuple(prefixes):
        raise ValueError(f'`y` must hold labels of the scheme {prefixes}, such as "O" or "B-X". Got {label!r}.')
    return prefix, kind


def _allows(before: tuple[str, str], after: tuple[str, str], prefixes: str) -> bool:
    if prefixes == "BIO":
        return after[0] != "I" or (before[0] in ("B", "I") and before[1] == after[1])
    goes_on = before[0] in _OPEN
    continues = after[0] in ("I", "E")
    return goes_on == continues and (not continues or before[1] == after[1])
