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
from riskfield.experiments.erm_suite import Runs, Suite, Way
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
        """Draw by draw."""
        return [cell for runs in self._draws().values() for cell in runs.cells()]

    def measure(self, cells: Cells) -> list[Record]:
        """All runs, or those that are finished."""
        return [record for runs in self._draws().values() for record in runs.measure(cells)]

    def tables(self, records: list[Record]) -> str:
        """Three rows per draw, for all draws together and for the paper; then tests, then model by model."""
        draws = self._losses(records)
        pooled = {way: _joined([losses[way] for losses in draws.values()]) for way in _WAYS}
        rows = [row for seed, losses in draws.items() for row in _rows(str(seed), _means(losses))]
        rows += [*_rows("all", _means(pooled)), *_rows("paper", _PAPER, (LIKELIHOOD, _STAGED))]
        sides = [f"to {_STAGED}, {sweeps}" for sweeps in _ITERATIONS]
        head = ["draw", "train setting", "100 iterations", "10 iterations", "10 to 100", *sides]
        return "".join(
            [
                f"{self.count} draws of edges, parameters, roles and examples, with seeds from {self.suite.seed} on. ",
                "Of the first: " + self._draws()[self.suite.seed].about(select(records, seed=self.suite.seed)),
                "Ratios are those of the means.\n\n" + table(head, rows),
                "\n## All draws together\n\n" + _tests(pooled),
                "\n## Model by model\n\n" + self._by_model(records),
            ]
        )

    def _by_model(self, records: list[Record]) -> str:
        rows = []
        for seed, losses in self._losses(records).items():
            models = self._draws()[seed].models(select(records, seed=seed))
            for k, (variables, edges) in enumerate(models):
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
            axis.set(xscale="log", yscale="log", title=f"{sweeps} iterations of BP", xlabel=LIKELIHOOD)
            axis.legend(fontsize="small")
        axes[0].set_ylabel(_STAGED)
        return figure

    def _draws(self) -> dict[int, Runs]:
        """By their seeds."""
        seeds = range(self.suite.seed, self.suite.seed + self.count)
        return {seed: Runs(replace(self.suite, seed=seed), _WAYS, self.finished) for seed in seeds}

    def _losses(self, records: list[Record]) -> dict[int, Losses]:
        """By how much the squared error exceeds that of the true model, draw by draw."""
        return {
            seed: {way: runs.deltas(select(records, seed=seed), way, _TEST) for way in _WAYS}
            for seed, runs in self._draws().items()
        }


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
    """Staged training against the likelihoods, and all after 100 iterations against 10."""
    pairs = [(Way(_STAGED, sweeps), Way(rival, sweeps)) for sweeps in _ITERATIONS for rival in (LIKELIHOOD, BACK)]
    pairs += [(Way(setting, 100), Way(setting, 10)) for setting in _SETTINGS]
    rows = []
    for way, rival in pairs:
        found = ["not finished", ""]
        if losses[way] and losses[rival]:
            compared = Comparison(losses[way], losses[rival])
            found = [compared.wins, f"{compared.p_value:.4f}"]
        rows.append([_name(way), _name(rival), *found])
    return table(["", "against", "wins, ties, losses", "p"], rows)
