"""Examples that are held out from training: to choose a ridge, or to stop early."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from riskfield.examples import Examples, take


def hold_out(
    examples: Sequence[Examples], fraction: float, seed: int
) -> tuple[tuple[Examples, ...], tuple[Examples, ...]]:
    """Divide examples at random into those to train on and a fraction that is held out, at least one.

    Only examples with a label and a positive weight are held out.
    """
    counted = torch.cat([is_counted(block) for block in examples])
    numbers = counted.nonzero()[:, 0].numpy()
    if len(numbers) < 2:
        raise ValueError(
            f"`X` must hold at least two examples with labels, since one is held out. Got {len(numbers)}: "
            "do not stop early."
        )
    count = min(max(1, round(fraction * len(numbers))), len(numbers) - 1)
    chosen = np.random.default_rng(seed).permutation(numbers)[:count]
    test = np.zeros(len(counted), np.bool_)
    test[chosen] = True
    train, held_out = np.flatnonzero(~test).tolist(), np.flatnonzero(test).tolist()
    return take(examples, train), take(examples, held_out)


def is_counted(block: Examples) -> torch.Tensor:
    """Which examples have a label and a positive weight."""
    labelled = (block.labels >= 0).any(-1).cpu()
    return labelled if block.weights is None else labelled & (block.weights > 0).cpu()
