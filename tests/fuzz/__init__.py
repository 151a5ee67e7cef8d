"""Random examples against oracles, for as long as you like: `make fuzz MINUTES=60`, or in this folder's parent

    python -m fuzz --minutes 5                      all targets in turn, new examples each time
    python -m fuzz --target gradients --minutes 1   one target
    python -m fuzz --target gradients --seed 17     the example of a seed again
    python -m fuzz --target lanes --examples 10000  those of the seeds 0 to 9999

Each file is a kind of target with a function `example(rng)`. It draws one example from the generator and raises if
something is wrong with it. `make test` runs a few fixed seeds of every target.
"""

from __future__ import annotations

import importlib
import zlib

import numpy as np

# Slow ones stand for their share of the time, not of the examples.
TARGETS = ("inference", "lanes", "gradients", "losses", "uai", "saved", "pictures", "options", "labels", "kills")


class Uninteresting(Exception):
    """The example that was drawn cannot be checked: a run that does not converge, for one."""


def check(target: str, seed: int) -> bool:
    """Check the example of a seed; whether there was anything to check."""
    rng = np.random.default_rng([zlib.crc32(target.encode()), seed])
    try:
        importlib.import_module(f"fuzz.{target}").example(rng)
    except Uninteresting:
        return False
    return True
