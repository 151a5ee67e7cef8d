r"""Empirical risk minimisation given approximate inference, decoding and structure: Stoyanov, Ropson & Eisner (2011).

Tables 3 to 6: what training for the loss of the decoded output gains over approximate likelihood, if all is well (3),
if the structure is wrong (4), if inference ends early (5), and if another loss was trained for (6).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from riskfield.experiments.cells import Cell, Cells
from riskfield.experiments.comparison import Comparison
from riskfield.experiments.erm_paper import TABLE_3, TABLE_4, TABLE_5, TABLE_6
from riskfield.experiments.erm_runs import BACK, LIKELIHOOD, RISKS, SETTINGS, recipe_of, trained, truth
from riskfield.experiments.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Table 1, from few edges to many: those of 2n, 4n and n ln n.
MODELS = (
    *((50, 100), (50, 195), (50, 200), (100, 200), (150, 300), (100, 400)),
    *((200, 400), (100, 461), (150, 600), (150, 752), (200, 800), (200, 1051)),
)
BEST = {"frac-MSE": "frac-MSE-in", "int-F": "int-F-hyb-in", "int-L1": "int-L1-hyb-in", LIKELIHOOD: LIKELIHOOD}
_SWEEPS = 100  # of BP, where it is left to converge


@dataclass(frozen=True)
class Suite:
    """Which models the tables are of, on how much data, and how long each run trains."""

    models: tuple[tuple[int, int], ...] = MODELS  # variables and edges
    examples: int = 1000  # to train with, and as many to test
    epochs: int = 25
    restarts: int = 5  # of settings other than -in
    seed: int = 0
    spread: float = 1.0  # standard deviation of the true parameters; that of the paper's text

    def true(self, model: tuple[int, int]) -> Cell:
        """The losses of the true model, with inference to convergence."""
        return Cell("truth", truth, {**self._of(model), "sweeps": _SWEEPS})

    def runs(self, model: tuple[int, int], setting: str, sweeps: int, mismatch: float) -> list[Cell]:
        """The runs of a training setting, one per restart."""
        own: dict[str, Any] = {
            "setting": setting,
            "sweeps": sweeps,
            "mismatch": mismatch,
            "epochs": self.epochs,
            **self._of(model),
        }
        own["recipe"] = recipe_of(setting)
        count = 1 if setting.endswith("-in") else self.restarts
        return [Cell("run", trained, {**own, "restart": restart}) for restart in range(count)]

    def _of(self, model: tuple[int, int]) -> dict[str, Any]:
        size = {"num_variables": model[0], "num_edges": model[1], "examples": self.examples}
        return {**size, "seed": self.seed, "spread": self.spread}


@dataclass(frozen=True)
class Way:
    """One way of training: a setting, how many iterations BP has, and the share of wrong edges."""

    setting: str
    sweeps: int = _SWEEPS
    mismatch: float = 0.0

    @property
    def first(self) -> bool:
        """Whether the paper's claims need it: staged training, and the likelihood."""
        return self.setting == LIKELIHOOD or self.setting.endswith("-in")


@dataclass(frozen=True)
class AbstractErm(AbstractStudy):
    """A table: the ways of training it compares, on every model of the suite.

    Arguments:
        suite: of which models, and how they are trained.
        finished: compute nothing: show the models whose staged runs are all on file, and what else is of all of them.
    """

    suite: Suite = field(default_factory=Suite)
    finished: bool = False

    @abstractmethod
    def ways(self) -> Sequence[Way]:
        """The ways of training in the table."""

    @property
    def num_cells(self) -> int:
        """One per model and run."""
        return len(self.cells())

    def cells(self) -> Sequence[Cell]:
        """Model by model, from the smallest: staged training and the likelihood first, then the other ways."""
        out = []
        for model in self.suite.models:
            out += [
                self.suite.true(model),
                *(cell for way in self.ways() if way.first for cell in self._of(model, way)),
            ]
        for model in self.suite.models:
            out += [cell for way in self.ways() if not way.first for cell in self._of(model, way)]
        return out

    def measure(self, cells: Cells) -> list[Record]:
        """All runs, with those of the true models; or those that are finished."""
        out = []
        for cell in self.cells():
            name, own = cell.name, cell.settings
            found = cells.find(name, **own) if self.finished else cells.get(name, cell.compute, **own)
            if found is not None:
                out.append({"cell": name, **own, **found})
        if not self._models(out):
            raise ValueError("`finished` must not be given before the staged runs of some model are finished.")
        return out

    def _of(self, model: tuple[int, int], way: Way) -> list[Cell]:
        return self.suite.runs(model, way.setting, way.sweeps, way.mismatch)

    def _runs(self, records: list[Record], model: tuple[int, int], way: Way) -> list[Record]:
        """All restarts of one way on one model; none if one is missing."""
        runs = [record for record in records if record["cell"] == "run"]
        size = {"num_variables": model[0], "num_edges": model[1]}
        found = select(runs, **size, setting=way.setting, sweeps=way.sweeps, mismatch=way.mismatch)
        return found if len(found) == len(self._of(model, way)) else []

    def _models(self, records: list[Record]) -> list[tuple[int, int]]:
        """Those the table is of."""
        needed = [way for way in self.ways() if way.first]
        return [model for model in self.suite.models if all(self._runs(records, model, way) for way in needed)]

    def _delta(self, records: list[Record], model: tuple[int, int], way: Way, test: str) -> float | None:
        """The loss of the restart with the best training objective, less that of the true model, if it is finished."""
        runs = self._runs(records, model, way)
        if not runs:
            return None
        (true,) = select(records, cell="truth", num_variables=model[0], num_edges=model[1])
        best = min(runs, key=lambda run: float("inf") if run["objective"] is None else run["objective"])
        return float(best["losses"][test] - true["losses"][test])

    def _deltas(self, records: list[Record], way: Way, test: str) -> tuple[float, ...]:
        """Those of all models, or nothing if the way is not finished on one of them."""
        found = [self._delta(records, model, way, test) for model in self._models(records)]
        finished = [delta for delta in found if delta is not None]
        return tuple(finished) if len(finished) == len(found) else ()

    def _comparison(self, records: list[Record], way: Way, test: str) -> Comparison | None:
        rival = Way(LIKELIHOOD, way.sweeps, way.mismatch)
        deltas = self._deltas(records, way, test)
        return Comparison(deltas, self._deltas(records, rival, test)) if deltas else None

    def _about(self, records: list[Record]) -> str:
        models, suite = self._models(records), self.suite
        names = ", ".join(f"{variables}-{edges}" for variables, edges in models)
        runs = [run for way in self.ways() for model in models for run in self._runs(records, model, way)]
        worst = min(true["ess"] for true in select(records, cell="truth"))
        return (
            f"{len(models)} of the paper's {len(MODELS)} models ({names}), true parameters of standard deviation "
            f"{suite.spread:g}, {suite.examples} examples to train and as many to test, at most {suite.epochs} passes, "
            f"{suite.restarts} random starts of settings other than -in. "
            "Losses on the test examples, less those of the true model with BP to convergence, on average over models. "
            "Wins, ties (the same to four decimals) and losses are against APPR-LOGL under the same conditions; p is "
            "that of the paired permutation test, two-sided, in bold below .05. The smallest effective sample size of "
            f"any variable is {100 * worst:.0f} % of the examples. All {len(runs)} runs took "
            f"{sum(run['seconds'] for run in runs) / 60:.0f} minutes of one core.\n\n"
        )

    def _truth(self, records: list[Record], test: str) -> float:
        truths = select(records, cell="truth")
        models = self._models(records)
        own = [record for record in truths if (record["num_variables"], record["num_edges"]) in models]
        return float(mean(record["losses"][test] for record in own))


def entry(found: Comparison | None, against: bool) -> str:
    """A mean difference, and how it compares where it is not that of the rival."""
    if found is None:
        return "not finished"
    if not against:
        return f"{found.mean:.5f}"
    text = f"{found.mean:.5f} ({found.wins}, p = {found.p_value:.3f})"
    return f"**{text}**" if found.p_value < 0.05 and found.mean < mean(found.rival) else text


@dataclass(frozen=True)
class Overall(AbstractErm):
    """All ways of training with the true structure and BP to convergence (Table 3)."""

    name = "table3"
    title = "Loss of training settings against approximate likelihood (Table 3)"

    def ways(self) -> Sequence[Way]:
        """The likelihood, then all settings of each loss."""
        risks = [Way(setting) for _, rows in TABLE_3.values() for setting in rows if setting != LIKELIHOOD]
        return [Way(LIKELIHOOD), *risks]

    def tables(self, records: list[Record]) -> str:
        """The paper's rows beside ours, then model by model."""
        rows = []
        for test, (true, settings) in TABLE_3.items():
            name = f"{test} (true model {true:.5f}; here {self._truth(records, test):.5f})"
            for setting, (delta, wins) in settings.items():
                found = self._comparison(records, Way(setting), test)
                paper = f"{delta:.5f} ({wins})" if wins else f"{delta:.5f}"
                rows.append([name, setting, paper, entry(found, bool(wins))])
                name = ""
        likelihood = self._comparison(records, Way(LIKELIHOOD), LIKELIHOOD)
        rows.append([LIKELIHOOD, LIKELIHOOD, f"{TABLE_6[LIKELIHOOD][-1]:.5f}", entry(likelihood, False)])
        out = self._about(records) + table(["test setting", "train setting", "paper", "here"], rows)
        return out + "\n## Model by model\n\n" + self._by_model(records)

    def _by_model(self, records: list[Record]) -> str:
        ways = [(test, setting) for test, (_, settings) in TABLE_3.items() for setting in settings]
        found = [self._deltas(records, Way(setting), test) for test, setting in ways]
        rows = [
            [f"{variables}-{edges}", *(f"{deltas[k]:.5f}" if deltas else "" for deltas in found)]
            for k, (variables, edges) in enumerate(self._models(records))
        ]
        return table(["model", *(f"{test}: {setting}" for test, setting in ways)], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per test setting: a line per way of training, models along the axis."""
        figure, axes = panels(1, len(TABLE_3))
        names = [f"{variables}-{edges}" for variables, edges in self._models(records)]
        for axis, (test, (_, settings)) in zip(axes, TABLE_3.items(), strict=True):
            for setting in settings:
                deltas = self._deltas(records, Way(setting), test)
                if deltas:
                    axis.plot(names, deltas, "k--" if setting == LIKELIHOOD else ".-", label=setting)
            axis.set_title(test)
            axis.tick_params(axis="x", rotation=90)
            axis.legend(fontsize="small")
        axes[0].set_ylabel("loss less that of the true model")
        return figure


@dataclass(frozen=True)
class AbstractSweep(AbstractErm):
    """The best way of training for each loss against the likelihood, under conditions that get worse."""

    paper: ClassVar[dict[str, dict[str, tuple[float, ...]]]]  # test setting, train setting: a number per condition
    beside: ClassVar[tuple[str, ...]] = ()  # settings that are not in the paper

    @property
    @abstractmethod
    def conditions(self) -> dict[str, dict[str, Any]]:
        """A column's head, and what is different in it."""

    def ways(self) -> Sequence[Way]:
        """Condition by condition."""
        settings = (*BEST.values(), *self.beside)
        return [Way(setting, **changes) for changes in self.conditions.values() for setting in settings]

    def tables(self, records: list[Record]) -> str:
        """The paper's rows above ours."""
        rows = []
        for test in SETTINGS:
            for setting in dict.fromkeys((LIKELIHOOD, test)):
                known = [f"{value:.5f}" for value in self.paper[test][setting]]
                rows.append([test, f"{setting}, paper", *known])
                found = [self._comparison(records, Way(BEST[setting], **c), test) for c in self.conditions.values()]
                rows.append(["", f"{BEST[setting]}, here", *(entry(one, setting != LIKELIHOOD) for one in found)])
            for setting in self.beside:
                found = [self._comparison(records, Way(setting, **c), test) for c in self.conditions.values()]
                rows.append(["", f"{setting}, here", *(entry(one, False) for one in found)])
        out = self._about(records) + table(["test setting", "train setting", *self.conditions], rows)
        return out + (self._by_model(records) if self.beside else "")

    def _by_model(self, records: list[Record]) -> str:
        """The squared error by the likelihood and what stands beside it, which may be finished on some models only."""
        ways = {
            f"{setting}, {head}": Way(setting, **changes)
            for setting in (LIKELIHOOD, *self.beside)
            for head, changes in self.conditions.items()
        }
        rows = []
        for model in self._models(records):
            found = [self._delta(records, model, way, "frac-MSE") for way in ways.values()]
            rows.append([f"{model[0]}-{model[1]}", *("" if delta is None else f"{delta:.5f}" for delta in found)])
        return "\n## frac-MSE, model by model\n\n" + table(["model", *ways], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per loss: ours in full, the paper's dotted."""
        figure, axes = panels(1, len(RISKS))
        heads = list(self.conditions)
        for axis, test in zip(axes, RISKS, strict=True):
            for setting, colour in ((LIKELIHOOD, "C1"), (test, "C0")):
                found = [mean(self._deltas(records, Way(BEST[setting], **c), test)) for c in self.conditions.values()]
                axis.plot(heads, found, "o-", color=colour, label=BEST[setting])
                axis.plot(heads, self.paper[test][setting], ":", color=colour, label=f"{setting}, paper")
            axis.set_title(test)
            axis.legend(fontsize="small")
        axes[0].set_ylabel("loss less that of the true model")
        return figure


@dataclass(frozen=True)
class Mismatch(AbstractSweep):
    """A share of the edges exchanged for random other ones (Table 4)."""

    name = "table4"
    title = "Loss under structure mismatch (Table 4)"
    paper = TABLE_4

    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """The shares."""
        return {f"{share:.0%}": {"mismatch": share} for share in self.shares}


@dataclass(frozen=True)
class Truncation(AbstractSweep):
    """BP that ends after so many iterations, in training and in tests (Table 5).

    Beliefs are the gradient of the likelihood's approximate value at convergence only. So there is a line that is not
    in the paper, of a likelihood whose gradient goes back through the iterations, as that of a loss does.
    """

    name = "table5"
    title = "Loss with BP that ends early (Table 5)"
    paper = TABLE_5
    beside = (BACK,)

    iterations: tuple[int, ...] = (100, 30, 20, 10)

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """The numbers of iterations."""
        return {f"{count} iterations": {"sweeps": count} for count in self.iterations}


@dataclass(frozen=True)
class Pairs(AbstractErm):
    """Every loss tested after training for every other (Table 6)."""

    name = "table6"
    title = "Loss in all pairs of training and test settings (Table 6)"

    def ways(self) -> Sequence[Way]:
        """The best way for each loss."""
        return [Way(setting) for setting in BEST.values()]

    def tables(self, records: list[Record]) -> str:
        """The paper's rows above ours; the least of each row in bold."""
        rows = []
        for test in SETTINGS:
            found = [mean(self._deltas(records, Way(BEST[setting]), test)) for setting in SETTINGS]
            rows.append([test, "paper", *_marked(TABLE_6[test])])
            rows.append(["", "here", *_marked(found)])
        head = ["test setting", "", *(f"trained for {BEST[setting]}" for setting in SETTINGS)]
        return self._about(records) + table(head, rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per test setting, a bar per training setting."""
        figure, axes = panels(1, len(SETTINGS))
        for axis, test in zip(axes, SETTINGS, strict=True):
            found = [mean(self._deltas(records, Way(BEST[setting]), test)) for setting in SETTINGS]
            axis.bar(SETTINGS, found, color=["C0" if setting == test else "C7" for setting in SETTINGS])
            axis.set_title(f"tested in {test}")
            axis.tick_params(axis="x", rotation=45)
        axes[0].set_ylabel("loss less that of the true model")
        return figure


def _marked(values: Sequence[float]) -> list[str]:
    least = min(values)
    return [f"**{value:.5f}**" if value == least else f"{value:.5f}" for value in values]
