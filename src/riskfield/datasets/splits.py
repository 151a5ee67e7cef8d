"""Splits of images into training and test sets, by name, so that they can be recorded and repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riskfield.errors import FileFormatError
from riskfield.io._atomic import write_text


@dataclass(frozen=True)
class Split:
    """The names of training images and of test images.

    Arguments:
        train, test: the names.

    Raises:
        ValueError: if a name is in both, or twice in one of them.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [*self.train, *self.test]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"`train` and `test` must not repeat a name. Got {twice[:3]} more than once.")


def spread(names: Sequence[str], train: int, test: int) -> Split:
    """Make a deterministic split of `train` and `test` names.

    It selects `train` + `test` names at equal steps, and of these the training names, again at equal steps. If similar
    images are adjacent in `names`, both parts are then representative of the whole.

    Arguments:
        names: the names to choose from.
        train, test: how many names of each kind to select, each at least 1.

    >>> spread("abcdefghij", train=2, test=3)
    Split(train=('a', 'e'), test=('c', 'g', 'i'))
    """
    chosen = _at_equal_steps(names, train + test)
    training = _at_equal_steps(chosen, train)
    return Split(training, tuple(name for name in chosen if name not in set(training)))


def folds(names: Sequence[str], count: int) -> tuple[Split, ...]:
    """Make the splits of cross-validation. The test set of fold k is every `count`-th name, starting with the k-th.

    Arguments:
        names: all names.
        count: the number of splits, from 2 to the number of names.

    >>> [fold.test for fold in folds("abcdefg", 3)]
    [('a', 'd', 'g'), ('b', 'e'), ('c', 'f')]
    """
    if not 2 <= count <= len(names):
        raise ValueError(f"`count` must be from 2 to the number of names, {len(names)}. Got {count}.")
    return tuple(
        Split(tuple(name for k, name in enumerate(names) if k % count != fold), tuple(names[fold::count]))
        for fold in range(count)
    )


def write_splits(path: str | os.PathLike[str], splits: Sequence[Split], rule: str) -> None:
    """Write splits to a JSON file.

    Arguments:
        path: the file, which is replaced if it exists.
        splits: the splits.
        rule: a description of the rule that made them.
    """
    # One line per split keeps a file of many names readable.
    lines = ",\n".join(json.dumps({"train": split.train, "test": split.test}) for split in splits)
    write_text(path, f'{{"rule": {json.dumps(rule)},\n"splits": [\n{lines}\n]}}\n')


def read_splits(path: str | os.PathLike[str]) -> tuple[Split, ...]:
    """Read the splits in a file that `write_splits` wrote.

    Raises:
        OSError: if the file cannot be read.
        FileFormatError: if the file is not such a file.
    """
    content = Path(path).read_bytes()
    try:
        parts = json.loads(content.decode("utf-8"))["splits"]
        return tuple(Split(tuple(part["train"]), tuple(part["test"])) for part in parts)
    except Exception as error:  # whatever comes of entries that nobody has checked
        raise FileFormatError(f"{path} must have the format of `write_splits`: {error!r}") from error


def _at_equal_steps(names: Sequence[str], count: int) -> tuple[str, ...]:
    if not 1 <= count <= len(names):
        raise ValueError(f"`train` and `test` must be at least 1, together at most {len(names)}. Got {count}.")
    return tuple(names[k * len(names) // count] for k in range(count))
