"""The lines of the papers' tables: training criteria, where each starts, and how it is fitted."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

import riskfield as rf
from papers.cells import Cells, Result, Setting, parameters_of, with_parameters
from papers.pictures.scenes import Scenes
from papers.study import Record, table

INDEPENDENT = "independent"
DIVERGED = "Entries whose training diverged and was stopped are marked †.\n"


@dataclass(frozen=True)
class ApproximateLikelihood(rf.losses.AbstractLoss):
    """`SurrogateEM` without its lower bound of 0, so that `fit` does not stop when training falls below it.

    A truncated likelihood can fall below 0, where no likelihood can be. The studies measure the harm this does.
    """

    def evaluate(
        self, graph: rf.FactorGraph, theta: Tensor, target: rf.losses.Target, inference: rf.Inference | None
    ) -> Tensor:
        """The value of `SurrogateEM`."""
        return rf.losses.SurrogateEM().evaluate(graph, theta, target, inference)


@dataclass(frozen=True)
class Criterion:
    """The training criterion of a line of a table.

    Arguments:
        name: of the line.
        loss: what is minimised.
        start: the line whose parameters training starts from; None for zeros.
        ridge: of the training.
        tested: the inference that `truncated.Trainer` tests it with, instead of its default.
    """

    name: str
    loss: rf.losses.AbstractLoss
    start: str | None = INDEPENDENT
    ridge: float = 0.0
    tested: rf.Inference | None = None

    @property
    def inferred(self) -> bool:
        """Whether training runs inference."""
        return not isinstance(self.loss, rf.losses.Independent | rf.losses.Pseudolikelihood | rf.losses.Piecewise)


# Trains one criterion from given parameters, or from zeros.
Trainer = Callable[[Criterion, list[float] | None], Result]


def fit_all(
    cells: Cells,
    name: str,
    criteria: Sequence[Criterion],
    chosen: Sequence[str],
    fit: Trainer,
    *,
    known: Mapping[str, Result] | None = None,
    **settings: Setting,
) -> dict[str, Result]:
    """The results of criteria that start from each other, by name.

    Arguments:
        cells: where results are kept, in a cell for each criterion.
        name: of the cells.
        criteria: all there are.
        chosen: those to train, with all that they start from. Of the others only what is on file is given.
        fit: trains one.
        known: results of other criteria that some of these start from.
        settings: of the cells, beside the criterion.
    """
    results: dict[str, Result] = {}
    wanted = [criterion.name for criterion in closure(criteria, chosen)]
    for criterion in closure(criteria, [criterion.name for criterion in criteria]):
        own = settings | {"row": criterion.name}
        start = (dict(known or {}) | results).get(criterion.start or "")

        def compute(criterion: Criterion = criterion, start: Result | None = start, **_: Setting) -> Result:
            return fit(criterion, None if start is None else start["parameters"])

        found = cells.get(name, compute, **own) if criterion.name in wanted else cells.find(name, **own)
        if found is not None:
            results[criterion.name] = found
    return results


def check_rows(rows: Sequence[str], known: Sequence[str]) -> None:
    """Raise a `ValueError` if a row is not among those known."""
    unknown = sorted(set(rows) - set(known))
    if unknown:
        raise ValueError(f"`rows` must be some of {', '.join(map(repr, known))}. Got {', '.join(map(repr, unknown))}.")


def closure(criteria: Sequence[Criterion], names: Sequence[str]) -> list[Criterion]:
    """The named criteria and those among `criteria` that they start from, in an order in which they can be trained.

    Raises:
        ValueError: if a name is not among them.
    """
    by_name = {criterion.name: criterion for criterion in criteria}
    check_rows(names, list(by_name))
    order: list[Criterion] = []

    def add(criterion: Criterion) -> None:
        if criterion.start in by_name:
            add(by_name[criterion.start])
        if criterion not in order:
            order.append(criterion)

    for criterion in criteria:
        if criterion.name in names:
            add(criterion)
    return order


def train(
    model: Module,
    scenes: Scenes,
    criterion: Criterion,
    inference: rf.Inference,
    optimiser: rf.optim.LBFGS,
    start: Sequence[float] | None,
    *,
    chunk_size: int,
    first: int | None = None,
) -> Result:
    """Fit `model` and report how it went. With `first`, begin with that many pictures and double them by stages."""
    if start is not None:
        with_parameters(model, start)
    # To a tolerance, inference continues from one evaluation to the next.
    warm_start = criterion.inferred and inference.stop.tol is not None
    chosen = inference if criterion.inferred else None
    stage = rf.learning.Stage(criterion.loss, chosen, optimiser, criterion.ridge, warm_start=warm_start)
    stages = [stage] if first is None else rf.learning.incremental(stage, len(scenes), start=first)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits = _fit(model, scenes, stages, chunk_size)
    last, best = fits[-1], fits[-1].best
    said = [warning.message for warning in caught]
    return {
        "parameters": [round(value, 9) for value in parameters_of(model)],
        "reason": last.reason.value,
        "explanation": last.explanation,
        "objective": None if best is None else best.objective,
        "iterations": sum(len(fit.history) for fit in fits),
        "evaluations": sum(fit.history[-1].evaluations for fit in fits if fit.history),
        "seconds": time.perf_counter() - began,
        "curve": _curve(fits),
        "diverged": next((str(message) for message in said if isinstance(message, rf.errors.DivergenceWarning)), None)
        or (last.explanation if last.reason is rf.learning.Reason.DIVERGED else None),
        "warnings": dict(Counter(type(message).__name__ for message in said)),
    }


def _fit(model: Module, scenes: Scenes, stages: Sequence[rf.learning.Stage], chunk_size: int) -> list[rf.learning.Fit]:
    """Fit stage by stage. A stage without a gradient at its first parameters is the last, and counts as diverged."""
    fits: list[rf.learning.Fit] = []
    for number, stage in enumerate(stages, start=1):
        try:
            fits += rf.learning.fit_stages(model, scenes.examples, [stage], chunk_size=chunk_size, progress=False)
        except (rf.errors.AdjointError, ValueError) as error:
            if not isinstance(error, rf.errors.AdjointError) and not isinstance(error.__cause__, rf.learning.Diverged):
                raise
            where = f"at the first parameters of stage {number} of {len(stages)}"
            fits.append(rf.learning.Fit(rf.learning.Reason.DIVERGED, f"{where}: {error}", (), None))
        if fits[-1].reason in (
            rf.learning.Reason.INTERRUPTED,
            rf.learning.Reason.DIVERGED,
            rf.learning.Reason.CALLBACK,
        ):
            break
    return fits


def _curve(fits: Sequence[rf.learning.Fit], most: int = 100) -> list[list[float]]:
    """Seconds and objectives of at most `most` iterations, at equal steps, all stages one after the other."""
    points, began = [], 0.0
    for fit in fits:
        points += [[round(began + record.seconds, 2), round(record.objective, 7)] for record in fit.history]
        began = points[-1][0] if points else 0.0
    step = -(-len(points) // most)
    return points[:: step or 1]


def mark(entry: str, records: list[Record]) -> str:
    """An entry of a table, marked if training diverged."""
    return f"{entry} †" if any(record["diverged"] for record in records) else entry


def training_table(records: list[Record], keys: list[str]) -> str:
    """How the fits of records went, a line for each."""
    header = [*keys, "objective", "iterations", "evaluations", "seconds", "unsettled tests", "ended"]
    rows = [
        [
            *(f"{record[key]}" for key in keys),
            "-" if record["objective"] is None else f"{record['objective']:.5f}",
            f"{record['iterations']}",
            f"{record['evaluations']}",
            f"{record['seconds']:.0f}",
            f"{record['unsettled']}",
            f"{record['reason']}: {record['explanation']}"
            + (f" **Diverged**: {record['diverged']}" if record["diverged"] else ""),
        ]
        for record in records
    ]
    return table(header, rows)
