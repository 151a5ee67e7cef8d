"""The Viterbi algorithm for a batch of sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def viterbi(unary: Tensor, transitions: Tensor, mask: Tensor) -> Tensor:
    """The best tags, of shape (batch, position); at padding the last tag of the sequence.

    Arguments:
        unary: of shape (batch, position, tag).
        transitions: of shape (tag, tag), from the first to the second.
        mask: of shape (batch, position): True up to the end of each sequence.
    """
    score, into = unary[:, 0], transitions.T
    itself = torch.arange(len(transitions), device=unary.device)
    pointers: list[Tensor] = []
    for position in range(1, unary.shape[1]):
        valid = mask[:, position, None]
        best, previous = (score.unsqueeze(1) + into).max(2)
        score = torch.where(valid, best + unary[:, position], score)
        pointers.append(torch.where(valid, previous, itself))
    path = [score.argmax(1, keepdim=True)]
    for previous in reversed(pointers):
        path.append(previous.gather(1, path[-1]))
    return torch.cat(path[::-1], dim=1)
