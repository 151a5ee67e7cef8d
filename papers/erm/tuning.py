"""Temperatures of soft decoders and gains of stochastic meta-descent, compared on models not in the study's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import riskfield as rf
from papers.cells import Cell, Cells, Result
from papers.erm.random_models import random_model
from papers.erm.runs import BACK, GAINS, LIKELIHOOD, RISKS, outcome, stages, truth
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUPPLEMENTARY = ((60, 120), (60, 240), (80, 320))  # variables and edges: of no model in the tables
_SEED = 1000  # those of the tables are drawn from seed 0
_SWEEPS = 100


@dataclass(frozen=True)
class Choice:
    """What is chosen for a setting: gains per output, batches, and a temperature where its decoder has one.

    `sweeps` is no choice, but after how many iterations of BP it is judged.
    """

    setting: str
    gain: float
    meta_gain: float
    batch_size: int
    temperature: float = 0.0
    sweeps: int = _SWEEPS

    @property
    def used(self) -> bool:
        """Whether the study uses it."""
        gains, decoder = GAINS[self.setting], getattr(RISKS.get(self.setting), "decoder", None)
        own = Choice(self.setting, gains.gain, gains.meta_gain, gains.batch_size, getattr(decoder, "temperature", 0.0))
        return replace(self, sweeps=own.sweeps) == own


_GRID = (
    Choice("int-F", 0.05, 5.0, 50, 0.1),
    Choice("int-F", 0.05, 5.0, 50, 0.3),
    Choice("int-F", 0.01, 5.0, 50, 0.1),
    Choice("int-L1", 0.05, 5.0, 50, 0.1),
    Choice("int-L1", 0.05, 5.0, 50, 0.3),
    Choice("frac-MSE", 0.15, 20.0, 20),
    Choice("frac-MSE", 0.5, 20.0, 20),
    Choice(LIKELIHOOD, 0.15, 0.5, 5),
    Choice(LIKELIHOOD, 0.15, 5.0, 5),
    Choice(LIKELIHOOD, 0.5, 0.5, 5),
    Choice(LIKELIHOOD, 0.15, 5.0, 20),
    Choice(LIKELIHOOD, 0.5, 0.5, 20),
    *(Choice(BACK, gain, 0.5, 5, sweeps=sweeps) for sweeps in (_SWEEPS, 10) for gain in (0.05, 0.15, 0.015)),
)
_LIKELIHOODS = (LIKELIHOOD, BACK)  # by whichever gradient, they are judged by the approximate likelihood they find


@dataclass(frozen=True)
class Tuning(AbstractStudy):
    """The loss in each setting, trained for it in its best way, against what the paper leaves open."""

    name = "tuning"
    title = "Temperatures and gains of stochastic meta-descent, on supplementary models"

    models: tuple[tuple[int, int], ...] = SUPPLEMENTARY
    choices: tuple[Choice, ...] = _GRID
    examples: int = 1000
    epochs: int = 25

    @property
    def num_cells(self) -> int:
        """One per model and choice, and the truth of each model."""
        return len(self.cells())

    def cells(self) -> Sequence[Cell]:
        """Choice by choice. All but those of the likelihood begin with it, with the gains already chosen for it."""
        out = []
        for choice in self.choices:
            for num_variables, num_edges in self.models:
                own: dict[str, Any] = {"num_variables": num_variables, "num_edges": num_edges, "seed": _SEED}
                own["examples"] = self.examples
                if choice == self.choices[0]:
                    out.append(Cell("truth", truth, {**own, "sweeps": _SWEEPS}))
                out.append(Cell("tuning", tuned, own | _settings(choice) | {"epochs": self.epochs}))
        return out

    def measure(self, cells: Cells) -> list[Record]:
        """All of them."""
        return [
            {"cell": cell.name, "sweeps": _SWEEPS} | cell.settings | cells.get(cell.name, cell.compute, **cell.settings)
            for cell in self.cells()
        ]

    def tables(self, records: list[Record]) -> str:
        """Mean differences from the true models' losses, and what the study uses."""
        names = ", ".join(f"{variables}-{edges}" for variables, edges in self.models)
        minutes = sum(record["seconds"] for record in records if record["cell"] == "tuning") / 60
        rows = [
            [
                choice.setting,
                f"{choice.sweeps}",
                f"{choice.temperature:g}" if choice.temperature else "",
                f"{choice.gain:g}",
                f"{choice.meta_gain:g}",
                str(choice.batch_size),
                f"{self._score(records, choice, 'training_losses'):.5f}",
                ", ".join(f"{delta:.5f}" for delta in self._deltas(records, choice)),
                f"**{self._score(records, choice):.5f}**" if choice.used else f"{self._score(records, choice):.5f}",
            ]
            for choice in self.choices
        ]
        return (
            f"Supplementary models ({names}): losses minus those of the true model with BP to convergence, after at "
            f"most {self.epochs} passes. Likelihoods are trained without stages, frac-MSE as frac-MSE-in, the others "
            "as -hyb-in. BP ends after the given iterations if it has not converged. Gain and meta-gain are multiplied "
            "by the number of outputs. The choices of the study are in bold. All runs took "
            f"{minutes:.0f} minutes of one core.\n\n"
        ) + table(
            ["setting", "iterations", "temperature", "gain", "meta-gain", "batch", "training", "test", "mean"], rows
        )

    def plot(self, records: list[Record]) -> Figure:
        """A panel per setting and number of iterations, a bar per choice; what the study uses in blue."""
        settings = list(dict.fromkeys((choice.setting, choice.sweeps) for choice in self.choices))
        figure, axes = panels(1, len(settings))
        for axis, (setting, sweeps) in zip(axes, settings, strict=True):
            own = [choice for choice in self.choices if (choice.setting, choice.sweeps) == (setting, sweeps)]
            names = [f"{c.gain:g}, {c.meta_gain:g}, {c.batch_size}\n{c.temperature or ''}" for c in own]
            axis.bar(names, [self._score(records, c) for c in own], color=["C0" if c.used else "C7" for c in own])
            axis.set_title(setting if sweeps == _SWEEPS else f"{setting}, {sweeps} iterations")
            axis.set_xlabel("gain, meta-gain, batch; temperature")
        axes[0].set_ylabel("loss less that of the true model")
        return figure

    def _score(self, records: list[Record], choice: Choice, of: str = "losses") -> float:
        return float(mean(self._deltas(records, choice, of)))

    def _deltas(self, records: list[Record], choice: Choice, of: str = "losses") -> list[float]:
        measure = LIKELIHOOD if choice.setting in _LIKELIHOODS else choice.setting
        out = []
        for num_variables, num_edges in self.models:
            own = select(records, num_variables=num_variables, num_edges=num_edges)
            (true,) = select(own, cell="truth")
            runs = [record for record in own if record["cell"] == "tuning"]
            (run,) = select(runs, **{"sweeps": choice.sweeps} | _settings(choice))
            out.append(run[of][measure] - true[of][measure])
        return out


def _settings(choice: Choice) -> dict[str, Any]:
    """Those of a cell; a run that begins with the likelihood depends on what was chosen for that, too."""
    own = {key: getattr(choice, key) for key in ("setting", "gain", "meta_gain", "batch_size", "temperature")}
    likelihood = GAINS[LIKELIHOOD]
    first = {"first_gain": likelihood.gain, "first_meta_gain": likelihood.meta_gain}
    first["first_batch_size"] = likelihood.batch_size
    own |= {} if choice.sweeps == _SWEEPS else {"sweeps": choice.sweeps}
    return own if choice.setting in _LIKELIHOODS else own | first


def tuned(
    num_variables: int,
    num_edges: int,
    seed: int,
    examples: int,
    setting: str,
    gain: float,
    meta_gain: float,
    batch_size: int,
    temperature: float,
    epochs: int,
    first_gain: float = 0.0,
    first_meta_gain: float = 0.0,
    first_batch_size: int = 0,
    sweeps: int = _SWEEPS,
) -> Result:
    """A run with these choices in place of those of the study; `first_` ones are of the likelihood before it."""
    gains = dict(GAINS)
    if setting not in _LIKELIHOODS:
        gains[LIKELIHOOD] = replace(
            GAINS[LIKELIHOOD], gain=first_gain, meta_gain=first_meta_gain, batch_size=first_batch_size
        )
    gains[setting] = replace(GAINS[setting], gain=gain, meta_gain=meta_gain, batch_size=batch_size)
    risks = dict(RISKS)
    if setting == "int-F":
        risks[setting] = rf.losses.FMeasure(rf.decoders.SoftEqualCount(temperature))
    elif setting == "int-L1":
        risks[setting] = rf.losses.L1(rf.decoders.SoftArgmax(temperature))
    by_itself = {name: name for name in _LIKELIHOODS} | {"frac-MSE": "frac-MSE-in"}
    way = by_itself.get(setting, f"{setting}-hyb-in")
    drawn = random_model(num_variables, num_edges, seed, 2 * examples)
    plan = stages(way, sweeps, epochs, len(drawn.outputs), risks=risks, gains=gains)
    return outcome(drawn, plan, sweeps)
