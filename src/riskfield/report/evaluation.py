"""How good marginals and the labels made of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

NUM_BINS = 10
_SMALLEST = 1e-12  # a probability in a logarithm is at least this


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What was found on pictures with labels. Pixels without one do not count.

    Arguments:
        names: of the classes.
        confusion: of shape (class, class), how many pixels of one class were labelled as the other.
        log_loss: minus the mean logarithm of the marginal of the true class.
        bin_counts: how many marginals, of all pixels and classes, are in [0, 1/10], ..., (9/10, 1].
        bin_means: the mean of the marginals in each.
        bin_shares: the share of them whose class is the true one.
        num_pictures: on how many pictures.
        seconds: that predictions took.
    """

    names: tuple[str, ...]
    confusion: Counts
    log_loss: float
    bin_counts: Counts
    bin_means: Floats
    bin_shares: Floats
    num_pictures: int
    seconds: float

    @property
    def num_pixels(self) -> int:
        """How many pixels counted."""
        return int(self.confusion.sum())

    @property
    def error(self) -> float:
        """The share of pixels that are labelled wrong."""
        return 1 - float(np.trace(self.confusion)) / self.num_pixels

    @property
    def class_errors(self) -> Floats:
        """The share of the pixels of each class that are labelled wrong; NaN where there are none."""
        return 1 - _ratio(np.diag(self.confusion), self.confusion.sum(1))

    @property
    def overlaps(self) -> Floats:
        """Intersection over union of true and predicted pixels of each class; NaN where there are neither."""
        right = np.diag(self.confusion)
        return _ratio(right, self.confusion.sum(0) + self.confusion.sum(1) - right)

    @property
    def mean_overlap(self) -> float:
        """The mean of the overlaps of the classes that occur."""
        return float(np.nanmean(self.overlaps))

    @property
    def calibration_error(self) -> float:
        """The mean distance of marginals from the share of the true class among marginals like them."""
        weights = self.bin_counts / self.bin_counts.sum()
        return float(weights @ np.abs(self.bin_means - self.bin_shares))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        errors = [None if np.isnan(error) else float(error) for error in self.class_errors]
        overlaps = [None if np.isnan(overlap) else float(overlap) for overlap in self.overlaps]
        return {
            "pictures": self.num_pictures,
            "pixels": self.num_pixels,
            "error": self.error,
            "mean_overlap": self.mean_overlap,
            "log_loss": self.log_loss,
            "calibration_error": self.calibration_error,
            "classes": [
                {"name": name, "pixels": int(pixels), "error": error, "overlap": overlap}
                for name, pixels, error, overlap in zip(
                    self.names, self.confusion.sum(1), errors, overlaps, strict=True
                )
            ],
            "confusion": self.confusion.tolist(),
            "reliability": {
                "counts": self.bin_counts.tolist(),
                "means": self.bin_means.tolist(),
                "shares": self.bin_shares.tolist(),
            },
            "seconds": self.seconds,
        }


class Tally:
    """Adds up, picture by picture, what an `Evaluation` says.

    Arguments:
        names: of the classes.

    >>> tally = Tally(["ground", "figure"])
    >>> marginals = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.4, 0.6], [0.7, 0.3]]])
    >>> tally.add(np.array([[0, 1], [0, -1]]), marginals)
    >>> tally.evaluation().confusion
    array([[1, 1],
           [0, 1]])
    """

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)
        self._confusion = np.zeros((len(names), len(names)), np.int64)
        self._log_loss = self._seconds = 0.0
        self._bins = np.zeros((3, NUM_BINS))  # how many, the sum of marginals, how many of the true class
        self._pictures = 0

    def add(self, labels: npt.NDArray[np.int64], marginals: Floats, seconds: float = 0.0) -> None:
        """Count a picture.

        Arguments:
            labels: of shape (row, column), -1 where there is none.
            marginals: of shape (row, column, class).
            seconds: that they took.
        """
        known = labels >= 0
        true, beliefs = labels[known], marginals[known]
        count = len(self._names)
        pairs = np.bincount(true * count + beliefs.argmax(-1), minlength=count**2)
        self._confusion += pairs.reshape(count, count)
        self._log_loss -= float(np.log(np.maximum(beliefs[np.arange(len(true)), true], _SMALLEST)).sum())
        bins = np.clip(np.ceil(beliefs * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1).ravel()
        is_true = (true[:, None] == np.arange(count)).ravel()
        for row, weights in zip(self._bins, (None, beliefs.ravel(), is_true), strict=True):
            row += np.bincount(bins, weights, minlength=NUM_BINS)
        self._pictures += 1
        self._seconds += seconds

    def evaluation(self) -> Evaluation:
        """What was found so far.

        Raises:
            ValueError: if no pixel had a label.
        """
        pixels = int(self._confusion.sum())
        if pixels == 0:
            raise ValueError("`masks` must hold a pixel with a label to evaluate by. All are to be ignored.")
        counts, beliefs, true = self._bins
        return Evaluation(
            self._names,
            self._confusion.copy(),
            self._log_loss / pixels,
            counts.astype(np.int64),
            np.nan_to_num(_ratio(beliefs, counts)),
            np.nan_to_num(_ratio(true, counts)),
            self._pictures,
            self._seconds,
        )


def _ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> Floats:
    """part / whole, NaN where there is nothing."""
    ratio: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)
    return ratio
