"""Where the studies of pictures run."""

from __future__ import annotations

import torch


def check_device(device: str) -> None:
    """Raise if a device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device` must be 'cpu' here: torch finds no CUDA device.")


def chunk_size(device: str) -> int:
    """How many pictures are worked on at once: few that fit caches, or many that fill a device."""
    return 8 if device == "cpu" else 1024
