"""The gains of stochastic meta-descent for the study of empirical risk, compared on models not in its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from riskfield.experiments.cells import Cell, Cells, Result
from riskfield.experiments.erm_runs import GAINS, LIKELIHOOD, RECIPE, SETTINGS, trained, truth
from riskfield.experiments.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUPPLEMENTARY = ((60, 120), (80, 250))  # variables and edges: of no model in the tables
_SEED = 1000  # those of the tables are drawn from seed 0


@dataclass(frozen=True)
class Tuning(AbstractStudy):
    """The loss in each setting, trained for it, against the first gain and the meta-gain."""

    name = "tuning"
    title = "Gains of stochastic meta-descent, on supplementary models"

    models: tuple[tuple[int, int], ...] = SUPPLEMENTARY
    likelihood_gains: tuple[float, ...] = (1.0, 3.0, 10.0)
    risk_gains: tuple[float, ...] = (0.3, 1.0, 3.0)
    meta_gains: tuple[float, ...] = (10.0,)
    examples: int = 1000
    epochs: int = 25

    @property
    def num_cells(self) -> int:
        """One per model, setting and pair of gains, and the truth of each model."""
        return len(self.cells())

    def cells(self) -> Sequence[Cell]:
        """The likelihood first: the other settings begin with it, with the gains already chosen."""
        out = []
        for num_variables, num_edges in self.models:
            own: dict[str, Any] = {"num_variables": num_variables, "num_edges": num_edges, "seed": _SEED}
            own["examples"] = self.examples
            out.append(Cell("truth", truth, {**own, "sweeps": 100}))
            for setting in (LIKELIHOOD, *(name for name in SETTINGS if name != LIKELIHOOD)):
                for gain in self._gains(setting):
                    for meta_gain in self.meta_gains:
                        gains = {"setting": setting, "gain": gain, "meta_gain": meta_gain, "epochs": self.epochs}
                        out.append(Cell("tuning", tuned, own | gains | {"recipe": RECIPE}))
        return out

    def measure(self, cells: Cells) -> list[Record]:
        """All of them."""
        return [
            {"cell": cell.name} | cell.settings | cells.get(cell.name, cell.compute, **cell.settings)
            for cell in self.cells()
        ]

    def tables(self, records: list[Record]) -> str:
        """Mean differences from the true models' losses, and what the study uses."""
        names = ", ".join(f"{variables}-{edges}" for variables, edges in self.models)
        out = [
            f"Supplementary models ({names}): the mean test loss less that of the true model, after {self.epochs} "
            "passes. Each setting is trained for its own loss, all but the likelihood after three passes of that.\n"
        ]
        for setting in SETTINGS:
            rows = [
                [f"{gain:g}", *(f"{self._score(records, setting, gain, meta):.5f}" for meta in self.meta_gains)]
                for gain in self._gains(setting)
            ]
            used = GAINS[setting]
            out.append(f"\n## {setting}\n\nUsed: gain {used.gain:g}, meta-gain {used.meta_gain:g}.\n\n")
            out.append(table(["gain", *(f"meta-gain {meta:g}" for meta in self.meta_gains)], rows))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per setting, a line per meta-gain."""
        figure, axes = panels(1, len(SETTINGS))
        for axis, setting in zip(axes, SETTINGS, strict=True):
            for meta in self.meta_gains:
                gains = self._gains(setting)
                scores = [self._score(records, setting, gain, meta) for gain in gains]
                axis.semilogx(gains, scores, "o-", label=f"meta-gain {meta:g}")
            axis.set_title(setting)
            axis.set_xlabel("gain")
        axes[0].set_ylabel("loss less that of the true model")
        axes[0].legend()
        return figure

    def _gains(self, setting: str) -> tuple[float, ...]:
        return self.likelihood_gains if setting == LIKELIHOOD else self.risk_gains

    def _score(self, records: list[Record], setting: str, gain: float, meta_gain: float) -> float:
        scores = []
        for num_variables, num_edges in self.models:
            own = [r for r in records if (r["num_variables"], r["num_edges"]) == (num_variables, num_edges)]
            (true,) = select(own, cell="truth")
            runs = [record for record in own if record["cell"] == "tuning"]
            (run,) = select(runs, setting=setting, gain=gain, meta_gain=meta_gain)
            scores.append(run["losses"][setting] - true["losses"][setting])
        return float(mean(scores))


def tuned(
    num_variables: int,
    num_edges: int,
    seed: int,
    examples: int,
    setting: str,
    gain: float,
    meta_gain: float,
    epochs: int,
    recipe: str = RECIPE,
) -> Result:
    """A run with these gains in place of those of the study."""
    gains = GAINS | {setting: replace(GAINS[setting], gain=gain, meta_gain=meta_gain)}
    way = setting if setting == LIKELIHOOD else f"{setting}-in"
    return trained(num_variables, num_edges, seed, examples, way, 0, 100, 0.0, epochs, recipe, gains=gains)
