"""Histograms of oriented gradients (Dalal & Triggs 2005) around every pixel, not only on a lattice of cells."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ORIENTATIONS = 9
NUM_FEATURES = 4 * ORIENTATIONS
_EPSILON, _CLIP = 1e-5, 0.2  # of the L2-Hys norm


def dense_hog(picture: Floats, cell: int) -> Floats:
    """36 features (row, column, feature) for each pixel of a picture (row, column, channel).

    A pixel's features are the histograms of 9 orientations in the four cells of `cell` x `cell` pixels that meet in its
    upper left corner, normalised together (L2-Hys). On the corners of a lattice of cells they are the blocks of
    `skimage.feature.hog`. Beyond the picture gradients are mirrored.
    """
    rows, columns = picture.shape[:2]
    votes = _votes(picture)
    padded = np.pad(votes, [(cell, cell), (cell, cell), (0, 0)], mode="symmetric")
    total = np.zeros((padded.shape[0] + 1, padded.shape[1] + 1, ORIENTATIONS))
    np.cumsum(np.cumsum(padded, axis=0), axis=1, out=total[1:, 1:])
    along = total[cell:] - total[:-cell]
    cells = (along[:, cell:] - along[:, :-cell]) / cell**2  # (row + cell + 1, column + cell + 1, orientation)
    corners = [cells[down : down + rows, right : right + columns] for down in (0, cell) for right in (0, cell)]
    block = np.concatenate(corners, axis=-1)
    _normalise(block)
    np.clip(block, 0, _CLIP, out=block)  # differences of sums may be below 0 by rounding
    _normalise(block)
    return block


def _votes(picture: Floats) -> Floats:
    """The length of the gradient, in the channel of its orientation: (row, column, orientation)."""
    down, right = np.zeros_like(picture), np.zeros_like(picture)
    down[1:-1] = picture[2:] - picture[:-2]
    right[:, 1:-1] = picture[:, 2:] - picture[:, :-2]
    length = np.hypot(down, right)
    # Of a coloured picture the strongest channel counts.
    strongest = length.argmax(axis=-1)[..., None]
    down, right, length = (np.take_along_axis(a, strongest, axis=-1) for a in (down, right, length))
    angle = np.arctan2(down, right) * (ORIENTATIONS / np.pi)
    orientation = np.floor(angle).astype(np.int64) % ORIENTATIONS
    votes = np.zeros((*picture.shape[:2], ORIENTATIONS))
    np.put_along_axis(votes, orientation, length, axis=-1)
    return votes


def _normalise(block: Floats) -> None:
    block /= np.sqrt(np.einsum("ijk,ijk->ij", block, block)[..., None] + _EPSILON**2)
