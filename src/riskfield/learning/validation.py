"""Early stopping by the risk on a validation set, and examples held out for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from riskfield.examples import DataSet, Examples, take
from riskfield.infer import InferenceChoice
from riskfield.learning.objective import Objective
from riskfield.learning.optimiser import check_counts
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss


@dataclass(frozen=True, eq=False)
class Validation:
    """The criterion that selects the best parameters, in place of the training objective.

    Arguments:
        data: examples that are not used for training.
        loss: the loss to evaluate; by default that of the training. With a truncated likelihood, use a loss that is
            reliable when inference stops too early, such as `UnivariateLogistic()`.
        inference: by default that of the training.
        patience: stop after this many evaluations in a row without an improvement.
        every: the number of iterations between evaluations.
    """

    data: DataSet
    loss: LossLike | None = None
    inference: InferenceChoice | None = None
    patience: int = 10
    every: int = 1

    def __post_init__(self) -> None:
        check_counts(patience=self.patience, every=self.every)


class Watch:
    """The risk of a model on a validation set."""

    def __init__(
        self,
        validation: Validation,
        model: Module,
        loss: AbstractLoss,
        inference: InferenceChoice | None,
        **settings: Any,
    ):
        self.settings = validation
        loss = loss if validation.loss is None else as_loss(validation.loss)
        inference = inference if validation.inference is None else validation.inference
        self.objective = Objective(model, validation.data, loss, inference, **settings)

    def look(self, iteration: int) -> float | None:
        """Return the risk on the validation set, or None if it is not due in this iteration."""
        if iteration % self.settings.every:
            return None
        with evaluating(self.objective.model):
            return self.objective.risk()


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put all modules of a model into evaluation mode, and restore the mode of each of them afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
