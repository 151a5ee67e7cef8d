"""Several processes, one fit: each keeps its share of the examples, and sums go through `torch.distributed`.

`torchrun` starts the processes, and `ranks()` connects them. Outside `torchrun` there is one rank, and nothing to
connect. The result does not depend on the number of ranks, up to rounding: sums run over all of them, and what is drawn
at random (the batches, the examples of a stage) is drawn among all examples by the seed alone. The exception is what a
model or a loss draws itself, such as dropout or the chains of contrastive divergence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from riskfield.data.examples import DataSet, Examples, blocks, take


@dataclass(frozen=True)
class Ranks:
    """This process's number and how many there are; `Ranks()` is a process on its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def shard(self, data: DataSet) -> tuple[Examples, ...]:
        """This rank's share of `data`: every `size`-th example, on this rank's device. One rank keeps all as it is."""
        if self.size == 1:
            return blocks(data)
        number = sum(len(block) for block in blocks(data))
        if number < self.size:
            raise ValueError(f"`data` must hold at least one example for each of {self.size} ranks. Got {number}.")
        return tuple(block.to(self.device) for block in take(data, torch.arange(self.rank, number, self.size)))

    def numbers(self, count: int) -> Tensor:
        """The numbers of this rank's `count` examples among those of all ranks, which count them in turn.

        Where `shard` has shared them out, these are their numbers in the whole data set.
        """
        counts = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        counts[self.rank] = count
        counts = self.sum_(counts).cpu()
        mine = torch.arange(count)
        # Before its j-th example, an earlier rank has counted j + 1 of its own and a later one j, if it has so many.
        before = [
            torch.minimum(mine + (other < self.rank), counts[other]) for other in range(self.size) if other != self.rank
        ]
        return mine + sum(before, torch.zeros_like(mine))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over all ranks, the same bits on each of them."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by that of rank 0."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, 0)
        return tensor

    def broadcast_bytes(self, content: bytes) -> bytes:
        """The `content` of rank 0."""
        if self.size == 1:
            return content
        length = self.broadcast_(torch.tensor([len(content)], device=self.device))
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == 0 and content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        return bytes(self.broadcast_(buffer).cpu().numpy())


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Connect the processes that `torchrun` started: over NCCL where each has a GPU, else over Gloo.

    A rank that fails leaves with its error, and `torchrun` ends the others.

    >>> with ranks() as group:  # without torchrun: this process alone
    ...     group.rank, group.size
    (0, 1)
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Ranks()
        return
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.is_available() and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    yield Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
    # Not in a `finally`: after an error the other ranks may never come to the same call.
    torch.distributed.destroy_process_group()
