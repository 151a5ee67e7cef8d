"""How numbers lie in GPU memory: all entries of 32 neighbouring places together, so that a program reads one piece."""

from __future__ import annotations

LANES = 32  # `sweeps._at` has the same number


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def padded(places: int) -> int:
    """So many places, rounded up to whole groups."""
    return -(-places // LANES) * LANES


def programs(places: int, each: int) -> tuple[int]:
    """The grid of a launch over so many places."""
    return (-(-places // each),)
