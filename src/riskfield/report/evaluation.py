"""Measures of the quality of marginals and of the labels predicted from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from riskfield.metrics import Reliability, confusion_matrix, intersection_over_union, log_loss, reliability

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

NUM_BINS = 10


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The errors of marginals and labels on images. Pixels without a label do not count.

    Arguments:
        names: the names of the classes.
        confusion: how many pixels of each class were labelled as each class, of shape (true, predicted).
        log_loss: minus the mean logarithm of the marginal of the true class.
        reliability: how often the marginals of all pixels and classes are right, in ten bins.
        num_images: the number of images.
        seconds: the time that the predictions took, in seconds.
        span_f_measure: the F-measure of spans; NaN, as by default, if the classes are not tags of spans.
    """

    names: tuple[str, ...]
    confusion: Counts
    log_loss: float
    reliability: Reliability
    num_images: int
    seconds: float
    span_f_measure: float = math.nan

    @property
    def num_pixels(self) -> int:
        """How many pixels counted."""
        return int(self.confusion.sum())

    @property
    def error(self) -> float:
        """The share of the pixels that are labelled wrong."""
        return 1 - float(np.trace(self.confusion)) / self.num_pixels

    @property
    def class_errors(self) -> Floats:
        """The share of the pixels of each class that are labelled wrong; NaN for a class without pixels."""
        return 1 - _ratio(np.diag(self.confusion), self.confusion.sum(1))

    @property
    def overlaps(self) -> Floats:
        """Intersection over union of the true and predicted pixels of each class; NaN for a class without either."""
        overlaps: Floats = intersection_over_union(torch.from_numpy(self.confusion)).numpy()
        return overlaps

    @property
    def mean_overlap(self) -> float:
        """The mean of the overlaps of the classes that occur."""
        return float(np.nanmean(self.overlaps))

    @property
    def calibration_error(self) -> float:
        """The calibration error of the marginals, as `Reliability.calibration_error` defines it."""
        return self.reliability.calibration_error

    @property
    def bin_counts(self) -> Counts:
        """How many marginals are in [0, 1/10], ..., (9/10, 1]."""
        return self.reliability.counts.long().numpy()

    @property
    def bin_means(self) -> Floats:
        """The mean of the marginals in each bin."""
        means: Floats = self.reliability.means.numpy()
        return means

    @property
    def bin_shares(self) -> Floats:
        """The share of the marginals in each bin that belong to the true class."""
        shares: Floats = self.reliability.shares.numpy()
        return shares

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values, for JSON, with None for NaN."""
        errors = [None if np.isnan(error) else float(error) for error in self.class_errors]
        overlaps = [None if np.isnan(overlap) else float(overlap) for overlap in self.overlaps]
        return {
            "images": self.num_images,
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
    """Computes an `Evaluation` image by image.

    Arguments:
        names: the names of the classes.

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
        self._reliability = Reliability(*torch.zeros(3, NUM_BINS, dtype=torch.float64))
        self._images = 0

    def add(
        self,
        labels: npt.NDArray[np.int64],
        marginals: Floats,
        seconds: float = 0.0,
        *,
        predicted: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add the predictions for one image.

        Arguments:
            labels: true labels of shape (row, column), -1 for pixels without a label.
            marginals: of shape (row, column, class).
            seconds: the time that the prediction took, in seconds; by default 0.
            predicted: the predicted labels, of the shape of `labels`; by default the most probable ones.
        """
        self._images += 1
        self._seconds += seconds
        known = int((labels >= 0).sum())
        if known == 0:
            return
        beliefs, true = torch.from_numpy(marginals), torch.from_numpy(labels)
        states = beliefs.argmax(-1) if predicted is None else torch.from_numpy(predicted)
        self._confusion += confusion_matrix(states, true, len(self._names)).numpy()
        self._log_loss += known * log_loss(beliefs, true)
        self._reliability = self._reliability + reliability(beliefs, true, num_bins=NUM_BINS)

    def evaluation(self) -> Evaluation:
        """Return the evaluation of the images that were added so far.

        Raises:
            ValueError: if no pixel had a label.
        """
        pixels = int(self._confusion.sum())
        if pixels == 0:
            raise ValueError("`masks` must have at least one labelled pixel. All pixels have the ignored value.")
        return Evaluation(
            self._names,
            self._confusion.copy(),
            self._log_loss / pixels,
            self._reliability,
            self._images,
            self._seconds,
        )


def _ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> Floats:
    """part / whole, NaN where `whole` is 0."""
    ratio: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)
    return ratio
