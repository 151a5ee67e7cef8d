"""Tensors as the arrays that the C++ engine reads and writes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from riskfield import _native

_SMALL = 1 << 12  # numbers
_LARGE = 1 << 22  # bytes
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.complex128: np.complex128}


def as_array(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """The numbers of a tensor, copied only if they are not contiguous or of another type."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor.contiguous().numpy()


def empty_array(rows: int, size: int, dtype: torch.dtype) -> np.ndarray:
    """An array to be filled. `np.empty` is faster, but the peak of memory is higher with it: it is for small ones."""
    if rows * size <= _SMALL:
        return np.empty((rows, size), _DTYPES[dtype])
    if (size_in_bytes := rows * size * dtype.itemsize) >= _LARGE:  # which would have to be cleared page by page
        kept: np.ndarray = _native.empty_bytes(size_in_bytes)
        return kept.view(_DTYPES[dtype]).reshape(rows, size)
    return torch.empty(rows, size, dtype=dtype).numpy()
