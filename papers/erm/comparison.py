"""Comparing two ways of training on the same models, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """Losses of a way of training and of its rival, model by model."""

    losses: tuple[float, ...]
    rival: tuple[float, ...]
    tie: float = 5e-5  # losses that differ by less are the same to four decimals

    @property
    def mean(self) -> float:
        """The mean loss."""
        return mean(self.losses)

    @property
    def wins(self) -> str:
        """On how many models the loss is lower, the same, higher than the rival's.

        >>> Comparison((0.1, 0.2, 0.3), (0.2, 0.2, 0.2)).wins
        '1-1-1'
        """
        gaps = [rival - own for own, rival in zip(self.losses, self.rival, strict=True)]
        won, lost = sum(gap >= self.tie for gap in gaps), sum(gap <= -self.tie for gap in gaps)
        return f"{won}-{len(gaps) - won - lost}-{lost}"

    @property
    def p_value(self) -> float:
        """Of the paired permutation test, two-sided: how often exchanging pairs gives means at least this different.

        >>> Comparison((0.1, 0.2, 0.3, 0.4), (0.2, 0.3, 0.4, 0.5)).p_value  # 2 of 16 exchanges
        0.125
        """
        return paired_permutation_test(self.losses, self.rival)


def paired_permutation_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value that the means of paired values differ by chance; exact up to 13 pairs."""
    from scipy.stats import permutation_test

    if len(a) < 2:
        return 1.0

    def gap(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray(np.mean(x - y, axis=axis))

    found = permutation_test(
        (np.asarray(a), np.asarray(b)), gap, permutation_type="samples", n_resamples=9999, vectorized=True, rng=0
    )
    return float(found.pvalue)
