"""Training in several processes. Each holds a share of the examples, and sums are computed with `torch.distributed`.

`torchrun` starts the processes, and `ranks()` connects them. Without `torchrun` there is one rank. Up to rounding, the
result does not depend on the number of ranks: sums are over all ranks, and random choices (the batches, the examples of
a stage) are made among all examples and depend on the seed alone. The exceptions are the random numbers of a model or a
loss, such as those of dropout or of the chains of contrastive divergence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from riskfield.examples import DataSet, Examples, blocks, take


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. `Ranks()` is a single process on the CPU.

    Arguments:
        rank: the number of this process, from 0 (the default).
        size: the number of all processes, by default 1.
        device: the device of this process, by default the CPU.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def shard(self, data: DataSet) -> tuple[Examples, ...]:
        """Return this rank's share of `data`: every `size`-th example, on its device.

        A single rank keeps all data, on the device where they are.

        Arguments:
            data: `Examples`, or several of them on different graphs.

        Raises:
            ValueError: if there are fewer examples than ranks.
        """
        if self.size == 1:
            return blocks(data)
        number = sum(len(block) for block in blocks(data))
        if number < self.size:
            raise ValueError(f"`data` must hold at least one example for each of {self.size} ranks. Got {number}.")
        return tuple(block.to(self.device) for block in take(data, torch.arange(self.rank, number, self.size)))

    def numbers(self, count: int) -> Tensor:
        """Return global numbers for the examples of this rank. The ranks number their examples in turn.

        If `shard` distributed the examples, these are their numbers in the whole data set.

        Arguments:
            count: how many examples this rank has.
        """
        counts = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        counts[self.rank] = count
        counts = self.sum_(counts).cpu()
        mine = torch.arange(count)
        # Before the j-th example come j + 1 examples of each lower rank and j of each higher one, as far as they exist.
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
        """Return the `content` of rank 0."""
        if self.size == 1:
            return content
        length = self.broadcast_(torch.tensor([len(content)], device=self.device))
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == 0 and content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        return bytes(self.broadcast_(buffer).cpu().numpy())


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Connect the processes that `torchrun` started, with NCCL if each has a GPU, otherwise with Gloo.

    If a rank fails, it exits with its error, and `torchrun` stops the others.

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
    # Not in a `finally`: after an error the other ranks may never make the same call.
    torch.distributed.destroy_process_group()
