"""The choice of a ridge on held-out examples.

Each ridge starts from the parameters of the one before, and training on all examples starts from those of the chosen
ridge. A model with edges needs this: it starts from parameters fitted without edges, and its calibration improves for
many iterations. Edges that are added to such parameters probably count the evidence of neighbours a second time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from riskfield.examples import Examples
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.objective import Objective
from riskfield.learning.result import Fit, Reason
from riskfield.learning.stages import Stage, fit_stages
from riskfield.losses._class_weight import class_weight_of
from riskfield.losses.loss import as_loss
from riskfield.losses.marginal import UnivariateLogistic
from riskfield.losses.piecewise import Independent
from riskfield.progress import note

RIDGES = (1e-1, 1e-2, 1e-3, 1e-4)  # in the order in which they are tried
_ITERATIONS = 50  # of L-BFGS for each ridge, at most: enough to see which ridge is best


@dataclass(frozen=True)
class Trial:
    """The log loss per variable on held-out examples after training with a ridge; of the model, and without edges."""

    ridge: float
    model: float
    independent: float


class Parameters(NamedTuple):
    """The state of the model after training with a ridge, and after training it without edges."""

    model: dict[str, Tensor]
    independent: dict[str, Tensor]


class SearchInterrupted(Exception):
    """The search was interrupted by Ctrl-C.

    Arguments:
        ridge: the one in use.
        results: the fits with this ridge. The last one was interrupted.
    """

    def __init__(self, ridge: float, results: list[Fit]):
        super().__init__(f"The search for a ridge was interrupted at {ridge}.")
        self.ridge, self.results = ridge, results


def ridge_path(
    model: Module,
    train: Sequence[Examples],
    held_out: Sequence[Examples],
    stages: Sequence[Stage],
    *,
    checkpoint: Checkpoints | None = None,
    **settings: Any,
) -> tuple[list[Trial], dict[float, Parameters]]:
    """Train with smaller and smaller ridges until the log loss on held-out examples grows.

    It must have grown both for the model and for the model without edges. Each ridge starts from the parameters of the
    one before.

    Arguments:
        model: is trained. Its parameters are those of the last ridge afterwards.
        train, held_out: examples.
        stages: the stages of training, with any ridge.
        checkpoint: the folder below which every fit has its own.
        settings: further arguments of `fit_stages`.

    Returns:
        A trial for every ridge that was tried, and the parameters that training with this ridge found.

    Raises:
        SearchInterrupted: if a fit was interrupted. The model has the best parameters of that fit.
    """
    trials: list[Trial] = []
    found: dict[float, Parameters] = {}
    alone, joint = copy.deepcopy(model.state_dict()), None
    for number, ridge in enumerate(RIDGES):
        note(
            f"choosing the ridge: training with {ridge:g}, {number + 1} of at most {len(RIDGES)}",
            shown=settings.get("progress", False),
        )
        all_stages = [_short(replace(stage, ridge=ridge)) for stage in stages]
        model.load_state_dict(alone)
        first = independent_stage(all_stages)
        results = fit_stages(model, train, [first], checkpoint=_below(checkpoint, number, "alone"), **settings)
        _check_finished(ridge, results)
        alone = copy.deepcopy(model.state_dict())
        independent = _log_loss(model, held_out, first, settings)
        rest = [stage for stage in all_stages if not isinstance(as_loss(stage.loss), Independent)]
        if joint is not None:
            rest = rest[-1:]  # the parameters of the last ridge are a better start than those of easier losses
            model.load_state_dict(joint)
        if rest:
            results += fit_stages(model, train, rest, checkpoint=_below(checkpoint, number, "joint"), **settings)
            _check_finished(ridge, results)
            joint = copy.deepcopy(model.state_dict())
        score = _log_loss(model, held_out, rest[-1], settings) if rest else independent
        trials.append(Trial(ridge, score, independent))
        found[ridge] = Parameters(alone if joint is None else joint, alone)
        if len(trials) > 1 and score > trials[-2].model and independent > trials[-2].independent:
            break
    return trials, found


def _check_finished(ridge: float, results: list[Fit]) -> None:
    if results[-1].reason is Reason.INTERRUPTED:
        raise SearchInterrupted(ridge, results)


def best_ridge(trials: Sequence[Trial], name: str) -> float:
    """The ridge of the lowest log loss, of "model" or "independent".

    >>> best_ridge([Trial(0.1, 0.5, 0.4), Trial(0.01, 0.3, 0.6)], "model")
    0.01
    """
    losses = [getattr(trial, name) for trial in trials]
    return trials[min(range(len(trials)), key=lambda k: losses[k] if math.isfinite(losses[k]) else math.inf)].ridge


def limit_of_search(trials: Sequence[Trial]) -> str:
    """Whether the best ridge of the model is the "largest" or the "smallest" that is ever tried; else "".

    >>> limit_of_search([Trial(0.1, 0.3, 0.4), Trial(0.01, 0.5, 0.6)])
    'largest'
    """
    ends = {RIDGES[0]: "largest", RIDGES[-1]: "smallest"}
    return ends.get(best_ridge(trials, "model"), "")


def further(trials: Sequence[Trial]) -> float:
    """A ridge beyond the best one, if that is at a limit of the search: ten times as large, or a tenth."""
    best = best_ridge(trials, "model")
    return 10 * best if best == RIDGES[0] else best / 10


def stages_after(trials: Sequence[Trial], stages: Sequence[Stage]) -> list[Stage]:
    """The stages of training on all examples: the one without edges, and the last one, each with its best ridge.

    Other losses that come before the last one are needed only once, on the path.
    """
    first = [
        replace(stage, ridge=best_ridge(trials, "independent"))
        for stage in stages[:-1]
        if isinstance(as_loss(stage.loss), Independent)
    ]
    return [*first[:1], replace(stages[-1], ridge=best_ridge(trials, "model"))]


def independent_stage(stages: Sequence[Stage]) -> Stage:
    """Training without edges, with the settings and the class weights of `stages`."""
    weights = class_weight_of(as_loss(stages[-1].loss))
    return replace(stages[0], loss=Independent(class_weight=weights))


def _short(stage: Stage) -> Stage:
    if isinstance(stage.optimiser, LBFGS) and stage.optimiser.iterations > _ITERATIONS:
        return replace(stage, optimiser=replace(stage.optimiser, iterations=_ITERATIONS))
    return stage


def _below(checkpoint: Checkpoints | None, number: int, name: str) -> Checkpoints | None:
    return checkpoint and replace(checkpoint, folder=Path(checkpoint.folder) / f"ridge-{number}-{name}")


@torch.no_grad()
def _log_loss(model: Module, data: Sequence[Examples], stage: Stage, settings: dict[str, Any]) -> float:
    """The log loss of the marginals, or of a softmax at each variable for an independent stage."""
    kind = Independent if isinstance(stage.loss, Independent) else UnivariateLogistic
    loss = kind(class_weight=class_weight_of(as_loss(stage.loss)))
    return Objective(model, list(data), loss, stage.inference, chunk_size=settings.get("chunk_size")).risk()
