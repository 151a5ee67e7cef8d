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
from riskfield.experiments.erm_paper import TABLE_5
from riskfield.experiments.erm_runs import LIKELIHOOD
from riskfield.experiments.erm_suite import Runs, Suite, Way
from riskfield.experiments.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEST, _STAGED = "frac-MSE", "frac-MSE-in"
_WAYS = tuple(Way(setting, sweeps) for sweeps in (100, 10) for setting in (LIKELIHOOD, _STAGED))


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
    count: int = 4

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
        """A row per draw, then all draws together, then the paper's; below them the losses model by model."""
        head = ["draw", *(f"{way.setting}, {way.sweeps} iterations" for way in _WAYS), "100 iterations: ratio"]
        head += ["10 iterations: ratio", f"{LIKELIHOOD}: 10 to 100 iterations"]
        losses = self._losses(records)
        rows = [_row(str(seed), [mean(deltas) for deltas in found]) for seed, found in losses.items()]
        pooled = [[delta for found in losses.values() for delta in found[k]] for k in range(len(_WAYS))]
        rows.append(_row("all", [mean(deltas) for deltas in pooled]))
        rows.append(_row("paper", [TABLE_5[_TEST][name][k] for k in (0, -1) for name in (LIKELIHOOD, _TEST)]))
        tests = {
            f"{_STAGED} against {LIKELIHOOD}, 100 iterations": Comparison(tuple(pooled[1]), tuple(pooled[0])),
            f"{_STAGED} against {LIKELIHOOD}, 10 iterations": Comparison(tuple(pooled[3]), tuple(pooled[2])),
            f"{LIKELIHOOD}, 100 iterations against 10": Comparison(tuple(pooled[0]), tuple(pooled[2])),
        }
        compared = [[name, found.wins, f"{found.p_value:.4f}"] for name, found in tests.items()]
        models = [
            [f"{variables}-{edges}", str(seed), *(f"{deltas[k]:.5f}" for deltas in losses[seed])]
            for seed, runs in self._draws().items()
            for k, (variables, edges) in enumerate(runs.models(select(records, seed=seed)))
        ]
        about = self._draws()[self.suite.seed].about(select(records, seed=self.suite.seed))
        return "".join(
            [
                f"{self.count} draws of edges, parameters, roles and examples, with seeds from {self.suite.seed} on. ",
                f"Of the first: {about}Ratios are those of the means.\n\n",
                table(head, rows),
                "\n## All draws together\n\n",
                table(["", "wins, ties, losses", "p"], compared),
                "\n## Model by model\n\n",
                table(["model", *head[:5]], models),
            ]
        )

    def plot(self, records: list[Record]) -> Figure:
        """A panel per number of iterations: a point per model, likelihood across and staged training up."""
        figure, axes = panels(1, 2)
        for axis, k in zip(axes, (0, 2), strict=True):
            for seed, found in self._losses(records).items():
                axis.plot(found[k], found[k + 1], "o", label=f"draw {seed}")
            axis.axline((1e-3, 1e-3), slope=1, color="k", linewidth=0.5)
            axis.set(xscale="log", yscale="log", title=f"{_WAYS[k].sweeps} iterations of BP", xlabel=LIKELIHOOD)
            axis.legend(fontsize="small")
        axes[0].set_ylabel(_STAGED)
        return figure

    def _draws(self) -> dict[int, Runs]:
        """By their seeds."""
        seeds = range(self.suite.seed, self.suite.seed + self.count)
        return {seed: Runs(replace(self.suite, seed=seed), _WAYS, self.finished) for seed in seeds}

    def _losses(self, records: list[Record]) -> dict[int, list[tuple[float, ...]]]:
        """Of each draw, the losses of the four ways of training, model by model."""
        return {
            seed: [runs.deltas(select(records, seed=seed), way, _TEST) for way in _WAYS]
            for seed, runs in self._draws().items()
        }


def _row(name: str, means: Sequence[float]) -> list[str]:
    ratios = [means[0] / means[1], means[2] / means[3], means[2] / means[0]]
    return [name, *(f"{value:.5f}" for value in means), *(f"{ratio:.1f}" for ratio in ratios)]
