"""Training in stages. Each stage starts from the parameters that the previous stage found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from riskfield.examples import DataSet, Examples, blocks, take
from riskfield.infer import InferenceChoice
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser, check_counts
from riskfield.learning.ranks import Ranks
from riskfield.learning.result import Fit, Reason
from riskfield.losses.loss import LossLike

LAST = (Reason.INTERRUPTED, Reason.DIVERGED, Reason.CALLBACK)  # no further stage follows


@dataclass(frozen=True)
class Stage:
    """One stage of training: the loss, inference and optimiser, and the number of examples.

    Arguments:
        loss, inference, optimiser, ridge, lasso, warm_start: as for `fit`, with the same defaults.
        examples: the number of examples to use; by default all. They are among the examples of a stage with more.
    """

    loss: LossLike
    inference: InferenceChoice | None = None
    optimiser: AbstractOptimiser | None = None
    ridge: float = 0.0
    lasso: float = 0.0
    examples: int | None = None
    warm_start: bool = False


def incremental(stage: Stage, num_examples: int, *, start: int = 32) -> list[Stage]:
    """Split `stage` into several: `start` examples first, then twice as many with half the iterations, and so on.

    Most iterations use a small subset of the examples (Domke 2013, section 8.4).

    Arguments:
        stage: the settings of all stages, with the number of iterations of the first one. Its optimiser must be
            `LBFGS`.
        num_examples: the number of all examples, which the last stage uses.
        start: the number of examples of the first stage, by default 32.

    Raises:
        TypeError: if the optimiser of `stage` is not `LBFGS`.
        ValueError: if `num_examples` or `start` is not a positive integer.

    >>> from riskfield.learning import Stage
    >>> from riskfield.losses import Pseudolikelihood
    >>> from riskfield.optim import LBFGS
    >>> steps = incremental(Stage(Pseudolikelihood(), optimiser=LBFGS(iterations=1000)), num_examples=100)
    >>> [(step.examples, step.optimiser.iterations) for step in steps]
    [(32, 1000), (64, 500), (None, 250)]
    """
    optimiser = LBFGS() if stage.optimiser is None else stage.optimiser
    if not isinstance(optimiser, LBFGS):
        raise TypeError(f"`stage` must use `LBFGS`, which uses all examples in each iteration. Got {optimiser!r}.")
    check_counts(num_examples=num_examples, start=start)
    stages, number, iterations = [], start, optimiser.iterations
    while number < num_examples:
        stages.append(replace(stage, examples=number, optimiser=replace(optimiser, iterations=iterations)))
        number, iterations = 2 * number, max(iterations // 2, 1)
    return [*stages, replace(stage, optimiser=replace(optimiser, iterations=iterations))]


def fit_stages(
    model: Module,
    data: DataSet,
    stages: Sequence[Stage],
    *,
    seed: int = 0,
    checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
    resume: bool = False,
    ranks: Ranks | None = None,
    after: Callable[[int, Fit], None] | None = None,
    **settings: Any,
) -> list[Fit]:
    """Fit `model` in stages: with an easier loss first, with few examples first, or both.

    A loss that is easy to minimise, such as `Independent()`, gives a good starting point for one that is not. If a
    stage is interrupted, diverges or is ended by a callback, no further stage follows.

    Arguments:
        model, data, seed, ranks: as for `fit`.
        stages: the stages in order.
        checkpoint: a folder, or `Checkpoints(folder, every=...)`; by default no checkpoints are written. Every stage
            has its own subfolder.
        resume: whether to continue from the checkpoints; by default False.
        after: called with the number of each stage, from 0, and its `Fit` when the stage has ended; by default nothing
            is called.
        settings: further arguments of `fit`.

    Returns:
        One `Fit` per stage that was started.

    >>> import torch
    >>> from riskfield import Exact, Examples, Inference, chain
    >>> from riskfield.losses import Independent, UnivariateLogistic
    >>> from riskfield.models import Generative
    >>> from riskfield.optim import LBFGS
    >>> graph = chain(3, num_states=2)
    >>> examples = Examples(graph, labels=torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 1]]))
    >>> stages = [Stage(Independent()), Stage(UnivariateLogistic(), Inference(Exact()), ridge=1e-3)]
    >>> len(fit_stages(Generative(graph), examples, stages, progress=False))
    2
    """
    ranks = Ranks() if ranks is None else ranks
    checkpoints = Checkpoints(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    results: list[Fit] = []
    for number, stage in enumerate(stages):
        own = None
        if checkpoints is not None:
            own = replace(checkpoints, folder=Path(checkpoints.folder) / f"stage-{number:02d}")
        result = fit(
            model,
            data if stage.examples is None else _subset(data, stage.examples, seed, ranks),
            stage.loss,
            stage.inference,
            optimiser=stage.optimiser,
            ridge=stage.ridge,
            lasso=stage.lasso,
            warm_start=stage.warm_start,
            seed=seed,
            checkpoint=own,
            resume=resume,
            ranks=ranks,
            **settings,
        )
        results.append(result)
        if after is not None:
            after(number, result)
        if result.reason in LAST:
            break
    return results


def _subset(data: DataSet, number: int, seed: int, ranks: Ranks) -> tuple[Examples, ...]:
    """Take the first `number` examples of all ranks in a random order, and return those of this rank."""
    check_counts(examples=number)
    count = sum(len(block) for block in blocks(data))
    total = int(ranks.sum_(torch.tensor([count], device=ranks.device)))
    here = torch.full((total,), -1)
    here[ranks.numbers(count)] = torch.arange(count)
    chosen = here[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:number]]
    return take(data, chosen[chosen >= 0])
