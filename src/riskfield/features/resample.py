"""Change of resolution: downsampling of features and labels, upsampling of marginals.

Axes are (*batch, row, column, channel). At every resolution, row r of n covers the interval [r/n, (r+1)/n].
"""

from __future__ import annotations

import torch
from torch import Tensor


def resize(values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resample maps of shape (*batch, row, column, channel) to the resolution `shape`. Differentiable.

    An axis that becomes shorter is averaged by area, exactly even if the ratio of the lengths is not an integer. An
    axis that becomes longer is interpolated linearly between pixel centres. Both keep marginals normalised.

    Arguments:
        values: a floating-point tensor.
        shape: the new numbers of rows and columns.

    Returns:
        A tensor of shape (*batch, *shape, channel).

    Raises:
        ValueError: if `values` are not floats of at least three axes, or a length is 0.

    >>> marginals = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])  # one row, two columns, two states
    >>> resize(marginals, (1, 4))[0, :, 0]
    tensor([0.9000, 0.7500, 0.4500, 0.3000])
    >>> resize(marginals, (1, 1))
    tensor([[[0.6000, 0.4000]]])
    """
    if values.ndim < 3 or not values.is_floating_point():
        raise ValueError(
            f"`values` must be floats of shape (*batch, row, column, channel). Got {values.dtype} of shape "
            f"{tuple(values.shape)}."
        )
    if len(shape) != 2 or min(shape) < 1 or 0 in values.shape[-3:-1]:
        raise ValueError(
            f"`shape` must be two positive lengths, and the map must not be empty. Got {shape} for a map of shape "
            f"{tuple(values.shape)}."
        )
    for axis, length in zip((-3, -2), shape, strict=True):
        if values.shape[axis] != length:
            weights = _weights(values.shape[axis], length).to(values)
            values = torch.tensordot(values, weights, dims=([axis], [1])).movedim(-1, axis)
    return values.contiguous()


def reduce_labels(labels: Tensor, shape: tuple[int, int]) -> Tensor:
    """Downsample a label map of shape (row, column). Each new pixel gets the label that covers most area in it.

    Pixels without a label count as the label -1, which wins only if it covers more area than each of the other labels.
    If other labels cover the same area, the smallest wins.

    Arguments:
        labels: integers from 0, or -1 for pixels without a label.
        shape: the new numbers of rows and columns, which must not be larger than the present ones.

    Raises:
        ValueError: if `labels` are not integers of two axes, or `shape` is larger than theirs.

    >>> reduce_labels(torch.tensor([[0, 0, 2, 2, -1, -1], [0, 1, 2, 1, -1, 1]]), (1, 3))
    tensor([[ 0,  2, -1]])
    """
    if labels.ndim != 2 or labels.is_floating_point():
        raise ValueError(
            f"`labels` must be integers of shape (row, column). Got {labels.dtype} of {tuple(labels.shape)}."
        )
    if shape[0] > labels.shape[0] or shape[1] > labels.shape[1]:
        raise ValueError(f"`shape` must not be larger than that of the labels, {tuple(labels.shape)}. Got {shape}.")
    if tuple(labels.shape) == tuple(shape):
        return labels
    known = torch.unique(labels[labels >= 0])
    values = torch.cat([known, known.new_tensor([-1])])
    shares = resize((labels[..., None] == values).double(), shape)
    # Round the shares, so that rounding errors do not decide ties.
    return values[(shares * 2**40).round().argmax(-1)]


def _weights(old: int, new: int) -> Tensor:
    """The matrix (new, old) that resamples an axis from length `old` to length `new`."""
    if new <= old:
        return area_weights(old, new, slice(0, new), slice(0, old))
    pixels = torch.arange(old, dtype=torch.float64)
    centres = ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
    return (1 - (centres[:, None] - pixels).abs()).clamp_min(0)


def area_weights(old: int, new: int, cells: slice, pixels: slice) -> Tensor:
    """The part (cells, pixels) of the matrix (new, old) that averages an axis of length `old` by area."""
    first = torch.arange(pixels.start, pixels.stop, dtype=torch.float64)
    bounds = torch.arange(cells.start, cells.stop + 1, dtype=torch.float64) * old / new
    overlap = torch.minimum(bounds[1:, None], first + 1) - torch.maximum(bounds[:-1, None], first)
    return overlap.clamp_min(0) * (new / old)
