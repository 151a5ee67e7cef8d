"""Dense histograms of oriented gradients (Dalal & Triggs 2005): one block per pixel instead of one per cell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ORIENTATIONS = 9
NUM_FEATURES = 4 * ORIENTATIONS
_EPSILON, _CLIP = 1e-5, 0.2  # of the L2-Hys norm


def dense_hog(image: Floats, cell: int) -> Floats:
    """Return 36 features per pixel, (row, column, feature), of an image (row, column, channel).

    The features of a pixel are the histograms of 9 orientations in the four cells of `cell` x `cell` pixels that meet
    at its upper left corner, normalised together (L2-Hys). At the corners of the lattice of cells they equal the blocks
    of `skimage.feature.hog`. Gradients are mirrored at the border of the image.
    """
    rows, columns = image.shape[:2]
    votes = _votes(image)
    padded = np.pad(votes, [(cell, cell), (cell, cell), (0, 0)], mode="symmetric")
    total = np.zeros((padded.shape[0] + 1, padded.shape[1] + 1, ORIENTATIONS))
    np.cumsum(np.cumsum(padded, axis=0), axis=1, out=total[1:, 1:])
    along = total[cell:] - total[:-cell]
    cells = (along[:, cell:] - along[:, :-cell]) / cell**2  # (row + cell + 1, column + cell + 1, orientation)
    corners = [cells[down : down + rows, right : right + columns] for down in (0, cell) for right in (0, cell)]
    block = np.concatenate(corners, axis=-1)
    _normalise(block)
    np.clip(block, 0, _CLIP, out=block)  # rounding may make differences of sums negative
    _normalise(block)
    return block


def _votes(image: Floats) -> Floats:
    """The gradient magnitude of every pixel, stored at its orientation: (row, column, orientation)."""
    down, right = np.zeros_like(image), np.zeros_like(image)
    down[1:-1] = image[2:] - image[:-2]
    right[:, 1:-1] = image[:, 2:] - image[:, :-2]
    length = np.hypot(down, right)
    # In a colour image, use the channel with the largest gradient.
    strongest = length.argmax(axis=-1)[..., None]
    down, right, length = (np.take_along_axis(a, strongest, axis=-1) for a in (down, right, length))
    angle = np.arctan2(down, right) * (ORIENTATIONS / np.pi)
    orientation = np.floor(angle).astype(np.int64) % ORIENTATIONS
    votes = np.zeros((*image.shape[:2], ORIENTATIONS))
    np.put_along_axis(votes, orientation, length, axis=-1)
    return votes


def _normalise(block: Floats) -> None:
    block /= np.sqrt(np.einsum("ijk,ijk->ij", block, block)[..., None] + _EPSILON**2)
