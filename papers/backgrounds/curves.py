"""Objectives against time: Figure 7 of Domke (2013), section 8.4.

The univariate logistic loss on 100 pictures of outdoor scenes, by tree-reweighted inference: truncated after several
numbers of sweeps, and to several tolerances, with gradients by perturbation and by back-propagation at the fixed point.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import riskfield as rf
from papers.backgrounds.table import INFERRED, recipe, scenes_of
from papers.cells import Cells, Result, finite, with_parameters
from papers.pictures.criteria import Criterion, train, training_table
from papers.pictures.scenes import Scenes, check_device, evaluate
from papers.pictures.truncated import CONVERGED, WITHOUT, Mode, Trainer
from papers.splits import Recorded
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRUNCATED, PERTURBED, BACK_PROPAGATED = "truncated", "perturbation", "back-propagation"
_LOSS = INFERRED[1]
_MOST_SWEEPS = 1000


@dataclass(frozen=True)
class LearningCurves(AbstractStudy):
    """Objectives of training against time (Figure 7).

    Arguments:
        root: the folder of data sets.
        num_pictures: how many to train on.
        sweeps: of truncated fitting.
        tolerances: of inference and of its gradient.
        scale: the resolution of inference.
        iterations: of training, at most.
        rows: the methods to run; the others are shown if they are on file.
        device: where.
    """

    title = "Learning curves (Domke 2013, Figure 7)"

    root: str | None = None
    num_pictures: int = 100
    sweeps: tuple[int, ...] = (5, 10, 20, 40)
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    scale: float = 0.2
    iterations: int = 300
    rows: tuple[str, ...] = (TRUNCATED, PERTURBED, BACK_PROPAGATED)
    device: str = "cpu"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of its files."""
        return f"curves-{self.iterations}"

    @property
    def num_cells(self) -> int:
        """One per curve, and the parameters they start from."""
        return 1 + sum(len(self._settings(method)) for method in self.rows)

    def measure(self, cells: Cells) -> list[Record]:
        """All curves start from the independent model."""
        if self.rows:  # complain about what is missing before anything is computed
            check_device(self.device)
            rf.datasets.stanford_background(self.root)
        size: dict[str, Any] = {"train": self.num_pictures, "scale": self.scale, "iterations": self.iterations}
        start = cells.find("start", **size)
        if self.rows:
            start = cells.get("start", lambda **_: self._fit(WITHOUT[0], None, None), **size)
        records = []
        for method in (TRUNCATED, PERTURBED, BACK_PROPAGATED):
            for setting in self._settings(method):
                own: dict[str, Any] = {"method": method, "setting": setting}
                if method in self.rows and start is not None:
                    compute = partial(self._curve, start["parameters"])
                    records.append(own | cells.get("curve", compute, **own, **size))
                elif (found := cells.find("curve", **own, **size)) is not None:
                    records.append(own | found)
        return records

    def tables(self, records: list[Record]) -> str:
        """Where each curve ended."""
        rows = []
        for record in records:
            risks = ["-" if record[key] is None else f"{record[key]:.4f}" for key in ("objective", "judged")]
            row = [record["method"], f"{record['setting']:g}", *risks]
            rows.append([*row, f"{record['errors'][0]:.3f}", f"{record['seconds']:.0f}"])
        header = ["method", "sweeps or tolerance", "objective", "judged", "error", "seconds"]
        return (
            f"Univariate logistic loss with a ridge of {_LOSS.ridge:g} on {self.num_pictures} pictures, inference at "
            f"{self.scale:g} of their resolution, at most {self.iterations} iterations. All start from the independent "
            "model. The objective is that of the method itself. The columns judged (the risk) and error (the training "
            "error) are evaluated by inference to a tolerance of 1e-5.\n\n"
            + table(header, rows)
            + "\n## Training\n\n"
            + training_table(records, ["method", "setting"])
        )

    def plot(self, records: list[Record]) -> Figure:
        """A panel for each method."""
        figure, axes = panels(1, 3)
        for axis, method in zip(axes, (TRUNCATED, PERTURBED, BACK_PROPAGATED), strict=True):
            for record in select(records, method=method):
                if not record["curve"]:  # diverged at once
                    continue
                seconds, objectives = zip(*record["curve"], strict=True)
                axis.semilogx(seconds, objectives, label=f"{record['setting']:g}")
            axis.set_title(f"{method}, by {'sweeps' if method == TRUNCATED else 'tolerance'}")
            axis.set_xlabel("seconds")
            if axis.has_data():
                axis.legend()
        axes[0].set_ylabel("objective")
        for axis in axes[1:]:
            axis.sharey(axes[0])
        return figure

    def _settings(self, method: str) -> tuple[float, ...]:
        return self.sweeps if method == TRUNCATED else self.tolerances

    def _trainer(self) -> Trainer:
        return Trainer(recipe(self.scale), len(rf.datasets.STANFORD_CLASSES), self.iterations, self.device)

    def _scenes(self) -> Scenes:
        names = Recorded.BACKGROUNDS.read()[0].train[: self.num_pictures]
        return scenes_of(self.root, self.scale, self.device, torch.float64, names)

    def _fit(self, criterion: Criterion, start: list[float] | None, inference: rf.Inference | None) -> Result:
        trainer = self._trainer()
        how = CONVERGED if inference is None else inference
        return train(
            trainer.model(), self._scenes(), criterion, how, trainer.optimiser, start, chunk_size=trainer.chunk_size
        )

    def _curve(self, start: list[float], method: str, setting: float, **_: Any) -> Result:
        result = self._fit(_LOSS, start, _inference(method, setting))
        trainer, scenes = self._trainer(), self._scenes()
        model = with_parameters(trainer.model(), result["parameters"])
        size = trainer.chunk_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)  # what `evaluate` reports as unsettled
            judged = rf.learning.Objective(model, scenes.examples, _LOSS.loss, CONVERGED, chunk_size=size).risk()
        return result | {"judged": finite(judged)} | evaluate(model, [scenes], CONVERGED, size)


def _inference(method: str, setting: float) -> rf.Inference:
    if method == TRUNCATED:
        return Mode.TRW.after(int(setting))
    adjoint = (
        rf.Perturb()
        if method == PERTURBED
        else rf.FixedPoint(setting, _MOST_SWEEPS, solver=rf.adjoints.Iterate(fallback=None))
    )
    return rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(_MOST_SWEEPS, setting), adjoint)
