"""Where the studies of pictures run."""

from __future__ import annotations

import torch


def check_device(device: str) -> None:
    """Raise if a device is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device` must be 'cpu' here: torch finds no CUDA device.")


def chunk_size(device: str) -> int:
    """How many pictures are evaluated at once: few that fit into caches, or many that fill a GPU."""
    return 8 if device == "cpu" else 1024
