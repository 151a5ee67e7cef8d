"""Which pictures are for training and which for testing, by name, so that it can be recorded and repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from riskfield.errors import FileFormatError
from riskfield.io._atomic import write_text


@dataclass(frozen=True)
class Split:
    """Names for training and names for testing, none in both."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [*self.train, *self.test]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"`train` and `test` must have every name once. Got {twice[:3]} more often.")


def spread(names: Sequence[str], train: int, test: int) -> Split:
    """A split without chance: `train` + `test` of the names at equal steps, and of these again at equal steps.

    In an order in which neighbours are alike, both parts are then like the whole.

    >>> spread("abcdefghij", train=2, test=3)
    Split(train=('a', 'e'), test=('c', 'g', 'i'))
    """
    chosen = _at_equal_steps(names, train + test)
    training = _at_equal_steps(chosen, train)
    return Split(training, tuple(name for name in chosen if name not in set(training)))


def folds(names: Sequence[str], count: int) -> tuple[Split, ...]:
    """Cross-validation: fold k is tested on every `count`-th name from the k-th, and trained on the others.

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
    """Keep splits in a JSON file, with the rule that made them in words."""
    # A line for every split, so that a file of many names can still be looked at.
    lines = ",\n".join(json.dumps({"train": split.train, "test": split.test}) for split in splits)
    write_text(path, f'{{"rule": {json.dumps(rule)},\n"splits": [\n{lines}\n]}}\n')


def read_splits(path: str | os.PathLike[str]) -> tuple[Split, ...]:
    """The splits in a file of `write_splits`.

    Raises:
        FileFormatError: if it holds none.
    """
    try:
        parts = json.loads(Path(path).read_text(encoding="utf-8"))["splits"]
        return tuple(Split(tuple(part["train"]), tuple(part["test"])) for part in parts)
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{path} must hold splits as `write_splits` writes them: {error!r}") from error


class Recorded(Enum):
    """The splits of the experiments with public data sets. Which pictures the papers took is not known."""

    BERKELEY_2010 = "berkeley-2010"  # Domke (2010), Table 1: 100 pictures to train on, 100 to test on
    BERKELEY_2013 = "berkeley-2013"  # Domke (2013), Table 1: 32 and 100
    HORSES = "horses"  # Domke (2013), Table 2: 200 and, without the black one, 127
    BACKGROUNDS = "backgrounds"  # Domke (2013), Table 3: five folds of 143

    def read(self) -> tuple[Split, ...]:
        """The split, or one for each fold."""
        return read_splits(Path(__file__).parent / "recorded" / f"{self.value}.json")


def _at_equal_steps(names: Sequence[str], count: int) -> tuple[str, ...]:
    if not 1 <= count <= len(names):
        raise ValueError(f"`train` and `test` must be at least 1, together at most {len(names)}. Got {count}.")
    return tuple(names[k * len(names) // count] for k in range(count))
