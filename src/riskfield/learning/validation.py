"""Early stopping by the risk on a validation set, examples held out for one, and a check of truncated likelihoods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from riskfield.examples import DataSet, Examples
from riskfield.infer import ExactOnForests, InferenceChoice
from riskfield.inference.stop import Stop
from riskfield.learning.objective import Objective
from riskfield.learning.optimiser import check_counts
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss


@dataclass(frozen=True, eq=False)
class Validation:
    """The criterion that selects the best parameters, instead of the training objective.

    Arguments:
        data: examples that are not used for training.
        loss: the loss to evaluate; by default that of the training. With a truncated likelihood, use a loss that is
            reliable when inference stops too early, such as `UnivariateLogistic()`.
        inference: how marginals are computed; by default as in the training.
        patience: stop after this many evaluations in a row without an improvement, by default 10.
        every: the number of iterations between evaluations, by default 1.
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
        self.objective = Objective(model, validation.data, loss, inference, name="validation", **settings)

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
    examples: Sequence[Examples], origins: Sequence[int], fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Divide examples at random into those to train on and a fraction that is held out, at least one.

    Arguments:
        examples: all of them.
        origins: what each example is a part of, such as the number of a photograph. Parts of one are not separated:
            they resemble each other, so that the risk on one would be too low after training on the others.
        fraction: the share of the origins to hold out. Only those with a label and a positive weight are held out.
        seed: of the choice.

    Returns:
        The numbers of the examples in both parts.
    """
    numbers = counted_origins(examples, origins)
    if len(numbers) < 2:
        raise ValueError(
            f"`X` must hold at least two examples with labels, since one is held out. Got {len(numbers)}: "
            "do not stop early."
        )
    count = min(max(1, round(fraction * len(numbers))), len(numbers) - 1)
    is_held_out = np.isin(origins, np.random.default_rng(seed).permutation(numbers)[:count])
    return np.flatnonzero(~is_held_out).tolist(), np.flatnonzero(is_held_out).tolist()


def counted_origins(examples: Sequence[Examples], origins: Sequence[int]) -> list[int]:
    """The origins that have an example with a label and a positive weight, in the order of the examples."""
    counted = torch.cat([_is_counted(block) for block in examples]).tolist()
    return list(dict.fromkeys(compress(origins, counted)))


def _is_counted(block: Examples) -> torch.Tensor:
    """Which examples have a label and a positive weight."""
    labelled = (block.labels >= 0).any(-1).cpu()
    return labelled if block.weights is None else labelled & (block.weights > 0).cpu()


def overstatement(objective: Objective) -> str | None:
    """Compare the risk at the present parameters with that of twice as many sweeps. None if they agree.

    A truncated log-partition value (Domke 2013, section 7.3) can decrease because inference has not converged, instead
    of because the parameters fit better. If truncation is harmless, more sweeps change the risk very little.
    """
    inference = objective.inference
    truncated = inference.loopy if isinstance(inference, ExactOnForests) else inference
    if objective.loss.lower_bound == -math.inf or truncated is None or truncated.stop.tol is not None:
        return None
    if not truncated.algorithm.iterative:
        return None
    sweeps = truncated.stop.sweeps
    longer = replace(truncated, stop=Stop(2 * sweeps, tol=None))
    other: InferenceChoice = longer
    if isinstance(inference, ExactOnForests):
        if all(block.graph.is_forest for block in objective.data):
            return None
        other = ExactOnForests(longer)
    with evaluating(objective.model):
        claimed, found = objective.risk(), objective.with_inference(other).risk()
    # Differences below a tenth of the risk plus a hundredth of a nat per variable do not matter.
    if found - claimed <= 0.1 * abs(claimed) + 0.01 * objective.unit:
        return None
    return f"the risk is {claimed:.3g} with {sweeps} sweeps of inference, but {found:.3g} with {2 * sweeps}"
