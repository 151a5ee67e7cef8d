"""How much of the tables of `erm` is the luck of the draw: the likelihood and the squared error on several draws.

A mean over twelve models of which one or two are far off depends on which models were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING

from riskfield.experiments.cells import Cell, Cells
from riskfield.experiments.comparison import Comparison
from riskfield.experiments.erm import BEST
from riskfield.experiments.erm_paper import TABLE_5
from riskfield.experiments.erm_runs import BACK, LIKELIHOOD
from riskfield.experiments.erm_suite import Runs, Suite, Way, about, of_models, require_models
from riskfield.experiments.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEST = "frac-MSE"
_STAGED = BEST[_TEST]
_SETTINGS = (LIKELIHOOD, BACK, _STAGED)
_ITERATIONS = (100, 10)  # of BP: to convergence, and the fewest of Table 5
_WAYS = tuple(Way(setting, sweeps) for setting in _SETTINGS for sweeps in _ITERATIONS)
_PAPER = {
    Way(setting, sweeps): TABLE_5[_TEST][name][column]
    for setting, name in ((LIKELIHOOD, LIKELIHOOD), (_STAGED, _TEST))
    for sweeps, column in zip(_ITERATIONS, (0, -1), strict=True)
}
Losses = dict[Way, tuple[float, ...]]  # model by model; none where a way is not finished on one


@dataclass(frozen=True)
class Draws(AbstractStudy):
    """Both ends of Table 5 for the squared error, on several draws of the same numbers of variables and edges.

    Arguments:
        suite, finished: as for `Runs`.
        count: of draws, with the seeds from that of the suite on.
    """

    name = "draws"
    title = "Squared error on several draws of the models"

    suite: Suite = field(default_factory=Suite)
    finished: bool = False
    count: int = 3

    @property
    def num_cells(self) -> int:
        """One per draw, model and run."""
        return len(self.cells())

    def cells(self) -> Sequence[Cell]:
        """Of all draws those that the paper's claims need, then the others."""
        draws = self._draws().values()
        return [
            *(cell for runs in draws for cell in runs.first_cells()),
            *(cell for runs in draws for cell in runs.other_cells()),
        ]

    def measure(self, cells: Cells) -> list[Record]:
        """All runs, or those that are finished."""
        records = [record for runs in self._draws().values() for record in runs.measure(cells)]
        require_models(self._models(records))
        return records

    def tables(self, records: list[Record]) -> str:
        """A row per draw and setting, of all draws together, and of the paper; then tests, then model by model."""
        draws = self._losses(records)
        pooled = {way: _joined([losses[way] for losses in draws.values()]) for way in _WAYS}
        rows = [row for seed, losses in draws.items() for row in _rows(str(seed), _means(losses))]
        rows += [*_rows("all", _means(pooled)), *_rows("paper", _PAPER, (LIKELIHOOD, _STAGED))]
        many, few = _ITERATIONS
        head = ["draw", "train setting", f"{many} iterations", f"{few} iterations", f"{few} / {many}"]
        head += [f"/ {_STAGED}, {sweeps}" for sweeps in _ITERATIONS]
        return "".join(
            [
                f"{self.count} draws of edges, parameters, roles and examples, with seeds from {self.suite.seed} on. ",
                "Of each: " + about(self.suite, records, self._models(records)),
                f"The last columns are ratios of these means: of {few} iterations to {many}, and to {_STAGED}.\n\n",
                table(head, rows),
                "\n## All draws together\n\nWins, ties (the same to four decimals) and losses, and p of the paired ",
                "permutation test, two-sided; above 13 pairs by 9999 random exchanges.\n\n",
                _tests(pooled),
                "\n## Model by model\n\n" + self._by_model(records),
            ]
        )

    def _by_model(self, records: list[Record]) -> str:
        rows = []
        for seed, losses in self._losses(records).items():
            for k, (variables, edges) in enumerate(self._models(records)):
                found = [f"{one[k]:.5f}" if one else "" for one in losses.values()]
                rows.append([str(seed), f"{variables}-{edges}", *found])
        return table(["draw", "model", *map(_name, _WAYS)], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per number of iterations: a point per model, likelihood across and staged training up."""
        figure, axes = panels(1, len(_ITERATIONS))
        for axis, sweeps in zip(axes, _ITERATIONS, strict=True):
            for seed, losses in self._losses(records).items():
                axis.plot(losses[Way(LIKELIHOOD, sweeps)], losses[Way(_STAGED, sweeps)], "o", label=f"draw {seed}")
            axis.axline((1e-3, 1e-3), (1e-2, 1e-2), color="k", linewidth=0.5)
            axis.set(title=f"{sweeps} iterations of BP", xlabel=LIKELIHOOD)
            for scale in (axis.set_xscale, axis.set_yscale):
                scale("symlog", linthresh=1e-4)  # a model may do better than the true one
            axis.legend(fontsize="small")
        axes[0].set_ylabel(_STAGED)
        return figure

    def _draws(self) -> dict[int, Runs]:
        """By their seeds."""
        seeds = range(self.suite.seed, self.suite.seed + self.count)
        return {seed: Runs(replace(self.suite, seed=seed), _WAYS, self.finished) for seed in seeds}

    def _models(self, records: list[Record]) -> list[tuple[int, int]]:
        """Those that are finished in every draw, so that draws compare."""
        found = [runs.models(select(records, seed=seed)) for seed, runs in self._draws().items()]
        return [model for model in self.suite.models if all(model in models for models in found)]

    def _losses(self, records: list[Record]) -> dict[int, Losses]:
        """By how much the squared error exceeds that of the true model, draw by draw."""
        models = self._models(records)
        out = {}
        for seed, runs in self._draws().items():
            own = of_models(select(records, seed=seed), models)
            out[seed] = {way: runs.deltas(own, way, _TEST) for way in _WAYS}
        return out


def _name(way: Way) -> str:
    return f"{way.setting}, {way.sweeps} iterations"


def _joined(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """All of them, or none if one is not there."""
    return tuple(loss for part in parts for loss in part) if all(parts) else ()


def _means(losses: Losses) -> dict[Way, float]:
    return {way: mean(found) for way, found in losses.items() if found}


def _rows(draw: str, means: dict[Way, float], settings: Sequence[str] = _SETTINGS) -> list[list[str]]:
    """A row per training setting: its losses, how they grow as iterations shrink, and how many times staged ones."""

    def ratio(way: Way, other: Way) -> str:
        return f"{means[way] / means[other]:.1f}" if way in means and other in means else ""

    rows = []
    for setting in settings:
        converged, cut = (Way(setting, sweeps) for sweeps in _ITERATIONS)
        losses = [f"{means[way]:.5f}" if way in means else "not finished" for way in (converged, cut)]
        beside = [ratio(way, Way(_STAGED, way.sweeps)) if setting != _STAGED else "" for way in (converged, cut)]
        rows.append([draw, setting, *losses, ratio(cut, converged), *beside])
    return rows


def _tests(losses: Losses) -> str:
    """Staged training against the likelihoods, and each with many iterations against few."""
    pairs = [(Way(_STAGED, sweeps), Way(rival, sweeps)) for sweeps in _ITERATIONS for rival in (LIKELIHOOD, BACK)]
    pairs += [(Way(setting, _ITERATIONS[0]), Way(setting, _ITERATIONS[1])) for setting in _SETTINGS]
    rows = []
    for way, rival in pairs:
        found = ["not finished", ""]
        if losses[way] and losses[rival]:
            compared = Comparison(losses[way], losses[rival])
            found = [compared.wins, f"{compared.p_value:.4f}"]
        rows.append([_name(way), _name(rival), *found])
    return table(["", "against", "wins, ties, losses", "p"], rows)
