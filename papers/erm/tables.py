r"""Empirical risk minimisation given approximate inference, decoding and structure: Stoyanov, Ropson & Eisner (2011).

Tables 3 to 6: what training for the loss of the decoded output gains over approximate likelihood with the true
structure and converged inference (3), with a wrong structure (4), with few iterations of inference (5), and when
another loss was trained for (6).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from papers.cells import Cell, Cells
from papers.erm.comparison import Comparison
from papers.erm.runs import BACK, CONVERGED, LIKELIHOOD, RISKS, SETTINGS
from papers.erm.suite import Runs, Suite, Way, about, require_models
from papers.study import AbstractStudy, Record, panels, table

# The paper's numbers: losses less those of the true models.
# Test setting: the true model's loss, and for each train setting its difference, and wins-ties-losses.
TABLE_3: dict[str, tuple[float, dict[str, tuple[float, str]]]] = {
    "frac-MSE": (
        0.04610,
        {"APPR-LOGL": (0.00710, ""), "frac-MSE": (0.00482, "5-0-7"), "frac-MSE-in": (0.00057, "12-0-0")},
    ),
    "int-F": (
        0.06425,
        {
            "APPR-LOGL": (0.01170, ""),
            "int-F-hyb": (0.00411, "7-0-5"),
            "int-F-in": (0.00115, "10-1-1"),
            "int-F-hyb-in": (0.00081, "11-0-1"),
        },
    ),
    "int-L1": (
        0.06385,
        {
            "APPR-LOGL": (0.00751, ""),
            "int-L1-hyb": (0.00398, "5-1-6"),
            "int-L1-in": (0.00137, "10-2-0"),
            "int-L1-hyb-in": (0.00079, "10-2-0"),
        },
    ),
}
# Test setting, train setting: with 10, 20, 30 and 40 % of the edges exchanged.
TABLE_4: dict[str, dict[str, tuple[float, ...]]] = {
    "frac-MSE": {
        "APPR-LOGL": (0.00352, 0.00642, 0.00622, 0.01118),
        "frac-MSE": (0.00101, 0.00316, 0.00312, 0.00534),
    },
    "int-F": {
        "APPR-LOGL": (0.01042, 0.01928, 0.01026, 0.02123),
        "int-F": (0.00095, 0.00472, 0.00473, 0.00969),
    },
    "int-L1": {
        "APPR-LOGL": (0.00452, 0.00748, 0.00569, 0.01173),
        "int-L1": (0.00147, 0.00442, 0.00602, 0.00945),
    },
    "APPR-LOGL": {"APPR-LOGL": (-0.3096, -0.0180, -0.0373, -0.1169)},
}
# With 100, 30, 20 and 10 iterations of BP.
TABLE_5: dict[str, dict[str, tuple[float, ...]]] = {
    "frac-MSE": {
        "APPR-LOGL": (0.00710, 0.00301, 0.00816, 0.02461),
        "frac-MSE": (0.00057, 0.00072, 0.00063, 0.00064),
    },
    "int-F": {
        "APPR-LOGL": (0.01170, 0.00476, 0.01276, 0.03085),
        "int-F": (0.00081, 0.00126, 0.00058, 0.00091),
    },
    "int-L1": {
        "APPR-LOGL": (0.00751, 0.00344, 0.01087, 0.02984),
        "int-L1": (0.00079, 0.00101, 0.00078, 0.00096),
    },
    "APPR-LOGL": {"APPR-LOGL": (-0.3161, -0.1823, -0.2422, -0.1104)},
}
# Test setting: trained for frac-MSE, int-F, int-L1 and APPR-LOGL.
TABLE_6: dict[str, tuple[float, ...]] = {
    "frac-MSE": (0.00057, 0.00122, 0.00115, 0.0071),
    "int-F": (0.00109, 0.00081, 0.00106, 0.0117),
    "int-L1": (0.00069, 0.00096, 0.00079, 0.00751),
    "APPR-LOGL": (0.11141, 0.16153, 0.1508, -0.31618),
}

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST = {"frac-MSE": "frac-MSE-in", "int-F": "int-F-hyb-in", "int-L1": "int-L1-hyb-in", LIKELIHOOD: LIKELIHOOD}


@dataclass(frozen=True)
class AbstractErm(AbstractStudy):
    """A table: the ways of training it compares, on every model of the suite.

    Arguments:
        suite, finished: as for `Runs`.
    """

    suite: Suite = field(default_factory=Suite)
    finished: bool = False

    @abstractmethod
    def ways(self) -> Sequence[Way]:
        """The ways of training in the table."""

    @property
    def runs(self) -> Runs:
        """All ways of training on all models."""
        return Runs(self.suite, tuple(self.ways()), self.finished)

    @property
    def num_cells(self) -> int:
        """One per model and run."""
        return len(self.cells())

    def cells(self) -> Sequence[Cell]:
        """Those of the runs."""
        return self.runs.cells()

    def measure(self, cells: Cells) -> list[Record]:
        """All runs, with those of the true models; or those that are finished."""
        records = self.runs.measure(cells)
        require_models(self.runs.models(records))
        return records

    def about(self, records: list[Record]) -> str:
        """What was run, and what the numbers of a table mean."""
        return about(self.suite, records, self.runs.models(records)) + (
            "Wins, ties (the same to four decimals) and losses are against APPR-LOGL under the same conditions. p is "
            "from the two-sided paired permutation test; entries with p below .05 are in bold.\n\n"
        )


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
            name = f"{test} (true model {true:.5f}; here {self.runs.true_loss(records, test):.5f})"
            for setting, (delta, wins) in settings.items():
                found = self.runs.comparison(records, Way(setting), test)
                paper = f"{delta:.5f} ({wins})" if wins else f"{delta:.5f}"
                rows.append([name, setting, paper, entry(found, bool(wins))])
                name = ""
        likelihood = self.runs.comparison(records, Way(LIKELIHOOD), LIKELIHOOD)
        rows.append([LIKELIHOOD, LIKELIHOOD, f"{TABLE_6[LIKELIHOOD][-1]:.5f}", entry(likelihood, False)])
        out = self.about(records) + table(["test setting", "train setting", "paper", "here"], rows)
        return out + "\n## Model by model\n\n" + self._by_model(records)

    def _by_model(self, records: list[Record]) -> str:
        ways = [(test, setting) for test, (_, settings) in TABLE_3.items() for setting in settings]
        found = [self.runs.deltas(records, Way(setting), test) for test, setting in ways]
        rows = [
            [f"{variables}-{edges}", *(f"{deltas[k]:.5f}" if deltas else "" for deltas in found)]
            for k, (variables, edges) in enumerate(self.runs.models(records))
        ]
        return table(["model", *(f"{test}: {setting}" for test, setting in ways)], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per test setting: a line per way of training, models along the axis."""
        figure, axes = panels(1, len(TABLE_3))
        names = [f"{variables}-{edges}" for variables, edges in self.runs.models(records)]
        for axis, (test, (_, settings)) in zip(axes, TABLE_3.items(), strict=True):
            for setting in settings:
                deltas = self.runs.deltas(records, Way(setting), test)
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
        return self.about(records) + self._rows(records)

    def _rows(self, records: list[Record], converged: bool = False) -> str:
        """The table; `converged` as for `Way`."""

        def found(setting: str, test: str) -> list[Comparison | None]:
            ways = [Way(setting, **changes, converged=converged) for changes in self.conditions.values()]
            return [self.runs.comparison(records, way, test) for way in ways]

        rows = []
        for test in SETTINGS:
            for setting in dict.fromkeys((LIKELIHOOD, test)):
                known = [f"{value:.5f}" for value in self.paper[test][setting]]
                rows.append([test, f"{setting}, paper", *known])
                ours = [entry(one, setting != LIKELIHOOD) for one in found(BEST[setting], test)]
                rows.append(["", f"{BEST[setting]}, here", *ours])
            for setting in self.beside:
                rows.append(["", f"{setting}, here", *(entry(one, False) for one in found(setting, test))])
        return table(["test setting", "train setting", *self.conditions], rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per loss: ours in full, the paper's dotted."""
        figure, axes = panels(1, len(RISKS))
        heads = list(self.conditions)
        for axis, test in zip(axes, RISKS, strict=True):
            for setting, colour in ((LIKELIHOOD, "C1"), (test, "C0")):
                ways = [Way(BEST[setting], **changes) for changes in self.conditions.values()]
                found = [mean(self.runs.deltas(records, way, test)) for way in ways]
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
    """BP that ends after a number of iterations (Table 5): in training and in tests, then in training only.

    The paper says neither whether it ends early in tests, nor how the likelihood is differentiated. Beliefs are the
    gradient of its approximate value at convergence only. So there is a line that is not in the paper: a likelihood
    whose gradient is taken through the iterations, as that of a loss is.
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

    def tables(self, records: list[Record]) -> str:
        """Tested as trained, then tested with BP to convergence, then model by model."""
        heads = {"": False, ", tested with BP to convergence": True}
        texts = [
            super().tables(records),
            f"\n## Tested with BP to convergence\n\nTests have {CONVERGED} iterations, whatever training has.\n\n",
            self._rows(records, converged=True),
            *(f"\n## frac-MSE, model by model{head}\n\n" + self._by_model(records, c) for head, c in heads.items()),
        ]
        return "".join(texts)

    def _by_model(self, records: list[Record], converged: bool) -> str:
        """The squared error by the likelihoods, which may be finished on some models only."""
        ways = {
            f"{setting}, {head}": Way(setting, **changes, converged=converged)
            for setting in (LIKELIHOOD, BACK)
            for head, changes in self.conditions.items()
        }
        rows = []
        for model in self.runs.models(records):
            found = [self.runs.delta(records, model, way, "frac-MSE") for way in ways.values()]
            rows.append([f"{model[0]}-{model[1]}", *("" if delta is None else f"{delta:.5f}" for delta in found)])
        return table(["model", *ways], rows)


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
            found = [mean(self.runs.deltas(records, Way(BEST[setting]), test)) for setting in SETTINGS]
            rows.append([test, "paper", *_marked(TABLE_6[test])])
            rows.append(["", "here", *_marked(found)])
        head = ["test setting", "", *(f"trained for {BEST[setting]}" for setting in SETTINGS)]
        return self.about(records) + table(head, rows)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per test setting, a bar per training setting."""
        figure, axes = panels(1, len(SETTINGS))
        for axis, test in zip(axes, SETTINGS, strict=True):
            found = [mean(self.runs.deltas(records, Way(BEST[setting]), test)) for setting in SETTINGS]
            axis.bar(SETTINGS, found, color=["C0" if setting == test else "C7" for setting in SETTINGS])
            axis.set_title(f"tested in {test}")
            axis.tick_params(axis="x", rotation=45)
        axes[0].set_ylabel("loss less that of the true model")
        return figure


def _marked(values: Sequence[float]) -> list[str]:
    least = min(values)
    return [f"**{value:.5f}**" if value == least else f"{value:.5f}" for value in values]
