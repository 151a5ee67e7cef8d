"""The runs behind the tables of `erm`: which models, trained in which ways, and how they compare with the true ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from papers.cells import Cell, Cells
from papers.erm.comparison import Comparison
from papers.erm.runs import CONVERGED, LIKELIHOOD, RECIPES, trained, truth
from papers.study import Record, select

# Table 1, from few edges to many: those of 2n, 4n and n ln n.
MODELS = (
    *((50, 100), (50, 195), (50, 200), (100, 200), (150, 300), (100, 400)),
    *((200, 400), (100, 461), (150, 600), (150, 752), (200, 800), (200, 1051)),
)


@dataclass(frozen=True)
class Suite:
    """Which models the tables are of, on how much data, and how long each run trains."""

    models: tuple[tuple[int, int], ...] = MODELS  # variables and edges
    examples: int = 1000  # for training, and again for tests
    epochs: int = 25
    restarts: int = 5  # of settings other than -in
    seed: int = 0
    spread: float = 1.0  # standard deviation of the true parameters; that of the paper's text

    def true(self, model: tuple[int, int]) -> Cell:
        """The losses of the true model, with inference to convergence."""
        return Cell("truth", truth, {**self._of(model), "sweeps": CONVERGED})

    def runs(self, model: tuple[int, int], setting: str, sweeps: int, mismatch: float) -> list[Cell]:
        """The runs of a training setting, one per restart."""
        own: dict[str, Any] = {
            "setting": setting,
            "sweeps": sweeps,
            "mismatch": mismatch,
            "epochs": self.epochs,
            **self._of(model),
        }
        own["recipe"] = RECIPES[setting]
        count = 1 if setting.endswith("-in") else self.restarts
        return [Cell("run", trained, {**own, "restart": restart}) for restart in range(count)]

    def _of(self, model: tuple[int, int]) -> dict[str, Any]:
        size = {"num_variables": model[0], "num_edges": model[1], "examples": self.examples}
        return {**size, "seed": self.seed, "spread": self.spread}


@dataclass(frozen=True)
class Way:
    """One way of training and testing.

    Arguments:
        setting: for which loss.
        sweeps: iterations of BP in training and in tests.
        mismatch: the share of wrong edges.
        converged: whether BP is left to converge in tests, whatever it does in training.
    """

    setting: str
    sweeps: int = CONVERGED
    mismatch: float = 0.0
    converged: bool = False

    @property
    def losses(self) -> str:
        """Where the record of a run has the losses of its tests."""
        return "converged_losses" if self.converged and self.sweeps != CONVERGED else "losses"

    @property
    def first(self) -> bool:
        """Whether the paper's claims need it: staged training, and the likelihood."""
        return self.setting == LIKELIHOOD or self.setting.endswith("-in")


@dataclass(frozen=True)
class Runs:
    """The runs of some ways of training on every model of a suite.

    Arguments:
        suite: of which models, and how they are trained.
        ways: the ways of training.
        finished: compute nothing: show the models whose likelihood and staged runs are all on file, and what else is of
            all of them.
    """

    suite: Suite
    ways: tuple[Way, ...]
    finished: bool = False

    def cells(self) -> list[Cell]:
        """The runs that the paper's claims need first, then the others."""
        return [*self.first_cells(), *self.other_cells()]

    def first_cells(self) -> list[Cell]:
        """Model by model, from the smallest: the true one, staged training and the likelihood."""
        out = []
        for model in self.suite.models:
            out += [self.suite.true(model), *(cell for way in self._first() for cell in self._cells(model, way))]
        return out

    def other_cells(self) -> list[Cell]:
        """Model by model, the other ways of training."""
        others = [way for way in self.ways if not way.first]
        return [cell for model in self.suite.models for way in others for cell in self._cells(model, way)]

    def measure(self, cells: Cells) -> list[Record]:
        """All runs, with those of the true models; or those that are finished."""
        out = []
        for cell in self.cells():
            name, own = cell.name, cell.settings
            found = cells.find(name, **own) if self.finished else cells.get(name, cell.compute, **own)
            if found is not None:
                out.append({"cell": name, **own, **found})
        return out

    def _first(self) -> list[Way]:
        return [way for way in self.ways if way.first]

    def _cells(self, model: tuple[int, int], way: Way) -> list[Cell]:
        return self.suite.runs(model, way.setting, way.sweeps, way.mismatch)

    def restarts(self, records: list[Record], model: tuple[int, int], way: Way) -> list[Record]:
        """All restarts of one way on one model; none if one is missing, or was not tested so."""
        runs = [record for record in records if record["cell"] == "run"]
        size = {"num_variables": model[0], "num_edges": model[1]}
        found = select(runs, **size, setting=way.setting, sweeps=way.sweeps, mismatch=way.mismatch)
        found = [run for run in found if way.losses in run]
        return found if len(found) == len(self._cells(model, way)) else []

    def models(self, records: list[Record]) -> list[tuple[int, int]]:
        """Those on which the likelihood and all staged runs are finished."""
        # Counted in one pass: tables ask for this again and again, and look through all records for every restart.
        tests = ("losses", "converged_losses")
        keys = ("num_variables", "num_edges", "setting", "sweeps", "mismatch")
        runs = [record for record in records if record["cell"] == "run"]
        count = Counter((test, *(run[key] for key in keys)) for run in runs for test in tests if test in run)

        def complete(model: tuple[int, int], way: Way) -> bool:
            return count[way.losses, *model, way.setting, way.sweeps, way.mismatch] == len(self._cells(model, way))

        return [model for model in self.suite.models if all(complete(model, way) for way in self._first())]

    def delta(self, records: list[Record], model: tuple[int, int], way: Way, test: str) -> float | None:
        """The loss of the restart with the best training objective, less that of the true model, if it is finished."""
        runs = self.restarts(records, model, way)
        if not runs:
            return None
        (true,) = select(records, cell="truth", num_variables=model[0], num_edges=model[1])
        best = min(runs, key=lambda run: float("inf") if run["objective"] is None else run["objective"])
        return float(best[way.losses][test] - true["losses"][test])

    def deltas(self, records: list[Record], way: Way, test: str) -> tuple[float, ...]:
        """Those of all models, or nothing if the way is not finished on one of them."""
        found = [self.delta(records, model, way, test) for model in self.models(records)]
        finished = [delta for delta in found if delta is not None]
        return tuple(finished) if len(finished) == len(found) else ()

    def comparison(self, records: list[Record], way: Way, test: str) -> Comparison | None:
        """With the likelihood under the same conditions, if it is finished on all models."""
        rival = replace(way, setting=LIKELIHOOD)
        deltas = self.deltas(records, way, test)
        return Comparison(deltas, self.deltas(records, rival, test)) if deltas else None

    def true_loss(self, records: list[Record], test: str) -> float:
        """The true models' loss, on average."""
        truths = select(of_models(records, self.models(records)), cell="truth")
        return float(mean(record["losses"][test] for record in truths))


def of_models(records: list[Record], models: Sequence[tuple[int, int]]) -> list[Record]:
    """The records of these models."""
    return [record for record in records if (record["num_variables"], record["num_edges"]) in models]


def require_models(models: Sequence[tuple[int, int]]) -> None:
    """Raise if no model can be shown."""
    if not models:
        raise ValueError("`finished` must not be given before likelihood and staged runs of some model are finished.")


def about(suite: Suite, records: list[Record], models: Sequence[tuple[int, int]]) -> str:
    """What was run on `models`, and the meaning of losses."""
    names = ", ".join(f"{variables}-{edges}" for variables, edges in models)
    shown = of_models(records, models)
    runs, worst = select(shown, cell="run"), min(true["ess"] for true in select(shown, cell="truth"))
    return (
        f"{len(models)} of the paper's {len(MODELS)} models ({names}), true parameters of standard deviation "
        f"{suite.spread:g}, {suite.examples} training and {suite.examples} test examples, at most "
        f"{suite.epochs} passes, {suite.restarts} random starts of settings other than -in. The smallest "
        f"effective sample size of any variable is {100 * worst:.0f} % of the examples. All {len(runs)} runs took "
        f"{sum(run['seconds'] for run in runs) / 60:.0f} minutes of one core.\n\n"
        "Losses are excess losses: the loss on the test examples minus that of the true model with BP to convergence, "
        "averaged over models. "
    )
