"""The likelihood and the squared error on several draws of the models.

A mean over twelve models, one or two of which have large losses, depends on which models were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from papers.cells import Cell, Cells
from papers.erm.comparison import Comparison
from papers.erm.runs import BACK, LIKELIHOOD
from papers.erm.suite import Runs, Suite, Way, about, of_models, require_models
from papers.erm.tables import BEST, TABLE_5
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEST = "frac-MSE"
_STAGED = BEST[_TEST]
_SETTINGS = (LIKELIHOOD, BACK, _STAGED)
# Of BP in training, and in tests: to convergence, and the fewest of Table 5.
_CONDITIONS: dict[str, dict[str, Any]] = {
    "100 iterations": {"sweeps": 100},
    "10 iterations": {"sweeps": 10},
    "10 iterations, tests to convergence": {"sweeps": 10, "converged": True},
}
_REFERENCE = next(iter(_CONDITIONS))
_WAYS = {(name, head): Way(name, **changes) for name in _SETTINGS for head, changes in _CONDITIONS.items()}
_TRAINED = tuple(way for way in _WAYS.values() if not way.converged)
_PAPER = {
    (setting, head): TABLE_5[_TEST][name][column]
    for setting, name in ((LIKELIHOOD, LIKELIHOOD), (_STAGED, _TEST))
    for head, column in zip(_CONDITIONS, (0, -1, -1), strict=True)  # it does not say how it tests
}
Key = tuple[str, str]  # setting and condition
Losses = dict[Key, tuple[float, ...]]  # model by model; none where a way is not finished on one


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
        pooled = {key: _joined([losses[key] for losses in draws.values()]) for key in _WAYS}
        rows = [row for seed, losses in draws.items() for row in _rows(str(seed), _means(losses))]
        rows += [*_rows("all", _means(pooled)), *_rows("paper", _PAPER, (LIKELIHOOD, _STAGED))]
        worse = [head for head in _CONDITIONS if head != _REFERENCE]
        head = ["draw", "train setting", *_CONDITIONS, *(f"{head} / {_REFERENCE}" for head in worse)]
        head += [f"{head} / {_STAGED}" for head in _CONDITIONS]
        return "".join(
            [
                f"{self.count} draws of edges, parameters, roles and examples, with seeds from {self.suite.seed} on. ",
                "In each: " + about(self.suite, records, self._models(records)),
                "The last columns are ratios of these means.\n\n",
                table(head, rows),
                "\n## All draws together\n\nWins, ties (the same to four decimals) and losses, and p of the two-sided ",
                "paired permutation test; with more than 13 pairs, from 9999 random permutations.\n\n",
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
        return table(["draw", "model", *map(", ".join, _WAYS)], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per condition: a point per model, likelihood across and staged training up."""
        figure, axes = panels(1, len(_CONDITIONS))
        for axis, head in zip(axes, _CONDITIONS, strict=True):
            for seed, losses in self._losses(records).items():
                if losses[LIKELIHOOD, head] and losses[_STAGED, head]:
                    axis.plot(losses[LIKELIHOOD, head], losses[_STAGED, head], "o", label=f"draw {seed}")
            axis.axline((1e-3, 1e-3), (1e-2, 1e-2), color="k", linewidth=0.5)
            axis.set(title=head, xlabel=LIKELIHOOD)
            for scale in (axis.set_xscale, axis.set_yscale):
                scale("symlog", linthresh=1e-4)  # a model may do better than the true one
            axis.legend(fontsize="small")
        axes[0].set_ylabel(_STAGED)
        return figure

    def _draws(self) -> dict[int, Runs]:
        """By their seeds."""
        seeds = range(self.suite.seed, self.suite.seed + self.count)
        return {seed: Runs(replace(self.suite, seed=seed), _TRAINED, self.finished) for seed in seeds}

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
            out[seed] = {key: runs.deltas(own, way, _TEST) for key, way in _WAYS.items()}
        return out


def _joined(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """All of them, or none if one is not there."""
    return tuple(loss for part in parts for loss in part) if all(parts) else ()


def _means(losses: Losses) -> dict[Key, float]:
    return {key: mean(found) for key, found in losses.items() if found}


def _rows(draw: str, means: dict[Key, float], settings: Sequence[str] = _SETTINGS) -> list[list[str]]:
    """A row per training setting: its losses, how they grow under worse conditions, and how many times staged ones."""

    def ratio(key: Key, other: Key) -> str:
        return f"{means[key] / means[other]:.1f}" if key in means and other in means else ""

    rows = []
    for name in settings:
        losses = [f"{means[name, head]:.5f}" if (name, head) in means else "not finished" for head in _CONDITIONS]
        growth = [ratio((name, head), (name, _REFERENCE)) for head in _CONDITIONS if head != _REFERENCE]
        beside = [ratio((name, head), (_STAGED, head)) if name != _STAGED else "" for head in _CONDITIONS]
        rows.append([draw, name, *losses, *growth, *beside])
    return rows


def _tests(losses: Losses) -> str:
    """Staged training against the likelihoods, and each to convergence against worse conditions."""
    pairs = [((_STAGED, head), (rival, head)) for head in _CONDITIONS for rival in (LIKELIHOOD, BACK)]
    pairs += [((n, _REFERENCE), (n, head)) for n in _SETTINGS for head in _CONDITIONS if head != _REFERENCE]
    rows = []
    for key, rival in pairs:
        found = ["not finished", ""]
        if losses[key] and losses[rival]:
            compared = Comparison(losses[key], losses[rival])
            found = [compared.wins, f"{compared.p_value:.4f}"]
        rows.append([", ".join(key), ", ".join(rival), *found])
    return table(["", "against", "wins, ties, losses", "p"], rows)
