"""How numbers lie in GPU memory: all entries of 32 neighbouring places together, so that a program reads one piece."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from riskfield.kernels.gpu.incidences import Kind

LANES = 32  # `tiles._at` has the same number
NODES = 4 * LANES  # places of a program that has little to do for each
# With fewer places than this, smaller programs spread over more of the GPU.
MANY_PLACES = 200_000


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def padded(places: int) -> int:
    """So many places, rounded up to whole groups."""
    return -(-places // LANES) * LANES


def programs(places: int, each: int) -> tuple[int]:
    """The grid of a launch over so many places."""
    return (-(-places // each),)


def column_tile(entries: int, batch: int) -> dict[str, Any]:
    """The tile of a kernel that moves so many entries of each place between columns and storage.

    In storage the same entry of neighbouring places is together, and in columns that of neighbouring batch items. With
    few of them, all entries of a place are nearly together in columns, and the tile is turned on its way.
    """
    turn = batch < 8 and entries > 4
    return {
        "E": entries,
        "BX": min(power_of_two(entries), LANES),
        "BN": LANES if entries > 4 else 4 * LANES,
        "TURN": turn,
    }


def factor_tile(kind: Kind, places: int, wide: bool, medium: tuple[int, int] = (32, 1)) -> dict[str, Any]:
    """The tile of a kernel on so many factors of a kind: a thread holds all states of a place while they are few.

    `wide`: addresses need 64 bits. `medium`: places and warps of a program for tables of 17 to 64 entries.
    """
    dims = [*kind[1:], 1, 1, 1][:3]
    pads = [power_of_two(d) for d in dims]
    tile = tile_size(kind)
    if tile <= 16:
        size, warps = (128, 4) if places >= MANY_PLACES else (32, 1)
    elif tile <= 64:
        size, warps = medium
    else:
        size, warps = max(4, 8192 // tile), 4
    return {
        "S": kind[0], "SX": power_of_two(kind[0]), "OTHERS": len(kind) - 1,
        "D1": dims[0], "D2": dims[1], "D3": dims[2],
        "Q1": pads[0], "Q2": pads[1], "Q3": pads[2], "BN": size, "WIDE": wide, "num_warps": warps,
    }  # fmt: skip


def tile_size(kind: Kind) -> int:
    """Entries of a table with every axis padded to a power of two."""
    return math.prod(power_of_two(states) for states in kind)


def longer(tape: Tensor, size: int) -> Tensor:
    """A tape of at least so many numbers that begins with those of `tape`."""
    if len(tape) >= size:
        return tape
    longer = tape.new_empty(size)
    longer[: len(tape)] = tape
    return longer


def norms(numbers: Tensor, pieces: list[tuple[int, int, int]], batch: int) -> Tensor:
    """The norm of each batch item, in float64. Pieces have a start in `numbers`, entries and members."""
    return sums(numbers, pieces, batch, power=2).sqrt()


def sums(numbers: Tensor, pieces: list[tuple[int, int, int]], batch: int, power: int = 1) -> Tensor:
    """The sum of powers of the numbers of each batch item, in float64, over such pieces."""
    total = torch.zeros(batch, dtype=torch.float64, device=numbers.device)
    for start, entries, members in pieces:
        own = numbers[start : start + entries * padded(members * batch)].double().reshape(-1, entries, LANES)
        total += own.pow(power).sum(1).reshape(-1)[: members * batch].reshape(members, batch).sum(0)
    return total
