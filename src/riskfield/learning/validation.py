"""Early stopping: watch the risk on examples that are not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from riskfield.data.examples import DataSet
from riskfield.infer import InferenceChoice
from riskfield.learning.objective import Objective
from riskfield.learning.optimiser import check_counts
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss


@dataclass(frozen=True, eq=False)
class Validation:
    """What to choose the parameters by, in place of the training objective.

    Arguments:
        data: examples that are not trained on.
        loss: what to look at; by default the loss of the training. Choose one that cannot be fooled by inference that
            ends too early, such as `UnivariateLogistic()`, beside a truncated likelihood.
        inference: by default that of the training.
        patience: stop when it was no lower for this many looks in a row.
        every: how many iterations lie between looks.
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
        """The risk, in iterations that ask for it."""
        if iteration % self.settings.every:
            return None
        with evaluating(self.objective.model):
            return self.objective.risk()


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put all parts of a model in evaluation mode, and each of them back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
