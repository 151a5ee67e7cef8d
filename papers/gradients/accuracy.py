r"""How accurate gradients by perturbation are: Figure 3 of Domke (2013).

Numbers that the paper's text does not give (strengths, multipliers, how many models) are chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import riskfield as rf
from papers.cells import Cells, Result
from papers.gradients.random_grids import RandomGrid
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALGORITHMS: dict[str, rf.inference.AbstractAlgorithm] = {
    "TRW": rf.MessagePassing(rf.TRW(0.5)),
    "mean field": rf.MeanField(),
}
_EPS = torch.finfo(torch.float64).eps
# What `Perturb` raises eps to, by its sides. The figure has 1/3 for all of them.
_POWERS = {1: 1 / 2, 2: 1 / 3, 4: 1 / 5}


@dataclass(frozen=True)
class Accuracy(AbstractStudy):
    """The error of one-, two- and four-sided perturbation against the multiplier m (Domke 2013, Figure 3).

    Binary grids, theta_i from N(0, 1), theta_ij from N(0, strength^2); inference to 1e-15 in float64; the step is
    r = m eps^(1/3) (1 + |theta|_inf) / |dL/dmu|_inf. The truth is from differences in every entry of theta (four-sided
    where the paper has two, so that it is not the limit). The error is the largest one of any entry, in units of the
    largest entry.
    """

    name = "accuracy"
    title = "Error of perturbation against its multiplier"

    side: int = 10
    strengths: tuple[float, ...] = (0.25, 1.0, 4.0)
    decades: tuple[int, int] = (-6, 4)  # log10 of the smallest and the largest multiplier
    per_decade: int = 2
    num_models: int = 10

    @property
    def num_cells(self) -> int:
        """One per algorithm, strength and model."""
        return len(_ALGORITHMS) * len(self.strengths) * self.num_models

    @property
    def multipliers(self) -> list[float]:
        """What m runs over."""
        low, high = self.decades
        return [10.0 ** (k / self.per_decade) for k in range(low * self.per_decade, high * self.per_decade + 1)]

    def measure(self, cells: Cells) -> list[Record]:
        """All of them."""
        compute = partial(_accuracy, multipliers=self.multipliers)
        low, high = self.decades
        steps = f"{low}to{high}by{self.per_decade}"
        records = []
        for algorithm in _ALGORITHMS:
            for strength in self.strengths:
                for model in range(self.num_models):
                    own: dict[str, Any] = {"algorithm": algorithm, "strength": strength, "model": model}
                    result = cells.get(f"accuracy-{steps}", compute, side=self.side, **own)
                    records.append(own | result)
        return records

    def tables(self, records: list[Record]) -> str:
        """Median errors, one table for each algorithm and strength."""
        out = [
            f"Medians over {self.num_models} random {self.side} x {self.side} binary grids of the largest error in an "
            "entry of dL/dtheta, in units of the largest entry.\n"
        ]
        for algorithm, strength, chosen in self._panels(records):
            out.append(f"\n## {algorithm}, interaction strength {strength:g}\n\n")
            rows = [
                [f"{multiplier:.3g}", *(f"{errors[k]:.1e}" for errors in self._medians(chosen).values())]
                for k, multiplier in enumerate(self.multipliers)
            ]
            out.append(table(["m", *(f"{sides}-sided" for sides in _POWERS)], rows))
            out.append(
                f"\nThe error of `FixedPoint()`, as a check of the reference gradient: {_reference(chosen):.1e}.\n"
            )
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """Panels as in the paper: TRW above, mean field below, strengths side by side."""
        figure, axes = panels(len(_ALGORITHMS), len(self.strengths))
        for axis, (algorithm, strength, chosen) in zip(axes, self._panels(records), strict=True):
            for sides, errors in self._medians(chosen).items():
                axis.loglog(self.multipliers, errors, marker=".", label=f"{sides}-sided")
            axis.axhline(_reference(chosen), color="grey", linestyle=":", label="FixedPoint()")
            axis.set_title(f"{algorithm}, strength {strength:g}")
            axis.set_xlabel("multiplier m")
        axes[0].set_ylabel("relative error")
        axes[len(self.strengths)].set_ylabel("relative error")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        return figure

    def _panels(self, records: list[Record]) -> Iterator[tuple[str, float, list[Record]]]:
        for algorithm in _ALGORITHMS:
            for strength in self.strengths:
                yield algorithm, strength, select(records, algorithm=algorithm, strength=strength)

    def _medians(self, chosen: list[Record]) -> dict[int, list[float]]:
        count = len(self.multipliers)
        return {s: [median(r["errors"][str(s)][k] for r in chosen) for k in range(count)] for s in _POWERS}


def _accuracy(algorithm: str, side: int, strength: float, model: int, *, multipliers: list[float]) -> Result:
    seed = [model, int(1000 * strength)]
    drawn = RandomGrid.draw(side, 2, strength, seed, lambda rng, size: rng.normal(size=size))
    stop = rf.Stop(sweeps=10_000, tol=1e-15)
    adjoints = [
        rf.Perturb(sides, multiplier=multiplier * _EPS ** (1 / 3 - power), tol=stop.tol)
        for sides, power in _POWERS.items()
        for multiplier in multipliers
    ]
    report = rf.check_gradients(
        drawn.graph,
        drawn.theta,
        _ALGORITHMS[algorithm],
        drawn.loss,
        stop=stop,
        adjoints=[rf.FixedPoint(), *adjoints],
        max_entries=drawn.graph.theta_size,
    )
    reference, *errors = [row.rel_error for row in report.rows]
    count = len(multipliers)
    by_sides = {str(sides): errors[k * count : (k + 1) * count] for k, sides in enumerate(_POWERS)}
    return {"errors": by_sides, "fixed point": reference, "residual": report.residual}


def _reference(chosen: list[Record]) -> float:
    errors = [record["fixed point"] for record in chosen if record["fixed point"] is not None]
    return float(median(errors)) if errors else float("nan")
