"""Which pictures the studies train on and test with. The papers do not say which ones they took."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

import riskfield as rf

_FILE = Path(__file__).with_suffix(".json")


class Recorded(Enum):
    """The splits of the studies of public data sets.

    >>> (split,) = Recorded.BERKELEY_2013.read()
    >>> len(split.train), len(split.test)
    (32, 100)
    """

    BERKELEY_2010 = "berkeley-2010"  # Domke (2010), Table 1: 100 pictures to train on, 100 to test on
    BERKELEY_2013 = "berkeley-2013"  # Domke (2013), Table 1: 32 and 100
    HORSES = "horses"  # Domke (2013), Table 2: 200 and, without the black one, 127
    BACKGROUNDS = "backgrounds"  # Domke (2013), Table 3: five folds of 143

    def read(self) -> tuple[rf.datasets.Split, ...]:
        """The split, or one for each fold."""
        parts = json.loads(_FILE.read_text(encoding="utf-8"))[self.value]["splits"]
        return tuple(rf.datasets.Split(tuple(part["train"]), tuple(part["test"])) for part in parts)
