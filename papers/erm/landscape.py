"""Losses along lines through the true parameters: Figure 1 of Stoyanov, Ropson & Eisner (2011)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from papers.cells import Cell, Cells, Result
from papers.erm.random_models import random_model
from papers.erm.runs import LIKELIHOOD, RECIPES, RISKS, SETTINGS, losses_of, require_recipe, stages, started, train
from papers.study import AbstractStudy, Record, panels, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where the lines lead: the training setting and how many passes of it, none for random parameters.
_TOWARDS = {
    "random parameters": (LIKELIHOOD, 0),
    "one pass of APPR-LOGL": (LIKELIHOOD, 1),
    "APPR-LOGL": (LIKELIHOOD, 25),
    "frac-MSE": ("frac-MSE-in", 25),
}


@dataclass(frozen=True)
class Landscape(AbstractStudy):
    """The losses at (1 - alpha) theta_true + alpha theta_found, against alpha (Figure 1)."""

    name = "figure1"
    title = "Losses along lines through the true parameters (Figure 1)"

    model: tuple[int, int] = (50, 200)
    examples: int = 1000
    epochs: int = 25  # where training ends
    alphas: tuple[float, ...] = field(default_factory=lambda: tuple(np.linspace(-0.5, 1.5, 41).round(3).tolist()))

    @property
    def num_cells(self) -> int:
        """One per line."""
        return len(_TOWARDS)

    def cells(self) -> Sequence[Cell]:
        """The lines."""
        low, high, count = self.alphas[0], self.alphas[-1], len(self.alphas)
        own = {
            "num_variables": self.model[0],
            "num_edges": self.model[1],
            "examples": self.examples,
            "seed": 0,
        }
        grid = {"low": low, "high": high, "count": count}
        return [
            Cell("line", line, {**own, **grid, "setting": s, "epochs": min(n, self.epochs), "recipe": RECIPES[s]})
            for s, n in _TOWARDS.values()
        ]

    def measure(self, cells: Cells) -> list[Record]:
        """All lines."""
        return [
            {"towards": name, **cell.settings, **cells.get(cell.name, cell.compute, **cell.settings)}
            for name, cell in zip(_TOWARDS, self.cells(), strict=True)
        ]

    def tables(self, records: list[Record]) -> str:
        """Where each loss is least, and how much lower than at the true parameters."""
        variables, edges = self.model
        out = [
            f"The {variables}-{edges} model, losses on {self.examples} test examples; alpha is 0 at the true "
            "parameters and 1 at those found. In brackets: the loss at alpha = 0 minus the least loss.\n\n"
        ]
        rows = []
        for record in records:
            row = [record["towards"]]
            for setting in SETTINGS:
                values = [losses[setting] for losses in record["losses"]]
                least = int(np.argmin(values))
                at_truth = values[int(np.argmin(np.abs(self.alphas)))]
                row.append(f"{self.alphas[least]:g} ({at_truth - values[least]:.5f})")
            rows.append(row)
        out.append(table(["towards", *(f"least {setting} at" for setting in SETTINGS)], rows))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per line; the likelihood has an axis of its own."""
        figure, axes = panels(2, 2)
        for axis, record in zip(axes, records, strict=True):
            for k, setting in enumerate(RISKS):
                axis.plot(self.alphas, [losses[setting] for losses in record["losses"]], f"C{k}", label=setting)
            other = axis.twinx()
            other.plot(self.alphas, [losses[LIKELIHOOD] for losses in record["losses"]], "k--", label=LIKELIHOOD)
            axis.set_title(f"towards {record['towards']}")
            axis.axvline(0, color="grey", linewidth=0.5)
            axis.set_xlabel("alpha")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend([*handles, *other.lines], [*labels, LIKELIHOOD], loc="outside right upper")
        return figure


def line(
    num_variables: int,
    num_edges: int,
    examples: int,
    seed: int,
    setting: str,
    epochs: int,
    low: float,
    high: float,
    count: int,
    recipe: str,
) -> Result:
    """All losses at `count` points of the line from the true parameters to those that training finds."""
    require_recipe(setting, recipe)
    drawn = random_model(num_variables, num_edges, seed, 2 * examples)
    true, model = drawn.true_model(), started(drawn, restart=0)
    if epochs:
        train(model, drawn.examples(model, 0, examples), stages(setting, 100, epochs, len(drawn.outputs)), 0)
    tests = drawn.examples(model, examples, 2 * examples)
    found = [parameter.detach().clone() for parameter in model.parameters()]
    out = []
    for alpha in np.linspace(low, high, count):
        with torch.no_grad():
            for parameter, end, start in zip(model.parameters(), found, true.parameters(), strict=True):
                parameter.copy_((1 - alpha) * start + alpha * end)
        out.append(losses_of(model, tests, 100))
    return {"losses": out}
