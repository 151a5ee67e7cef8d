"""Learning convex inference of marginals: Tables 1 to 3 and Figures 1 and 2 of Domke (2008)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import riskfield as rf
from papers.cells import Cells, Result, Setting, with_parameters
from papers.convex.digits import DIGITS, ERRORS, METHODS, PLAIN, Digits, draw_digits, measure
from papers.side_by_side import FAR, Shown, beside, gallery
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tables 1 and 2. The paper has no numbers for 10 %.
PAPER = {
    0.3: {
        "pseudo + mean field": (0.0475, 0.0445, 0.2705, -0.9109),
        "pseudo + BP": (0.0495, 0.0425, 0.2109, -0.9149),
        "mean field": (0.0300, 0.0265, 0.1265, -0.9470),
        "BP": (0.0373, 0.0314, 0.1393, -0.9371),
        "L_log": (0.0261, 0.0201, 0.0694, -0.9598),
        "L_quad": (0.0260, 0.0201, 0.0723, -0.9598),
    },
    0.5: {
        "pseudo + mean field": (0.0954, 0.0920, 0.6291, -0.8161),
        "pseudo + BP": (0.0977, 0.0866, 0.5056, -0.8268),
        "mean field": (0.0751, 0.0668, 0.3030, -0.8663),
        "BP": (0.0783, 0.0671, 0.3039, -0.8658),
        "L_log": (0.0575, 0.0417, 0.1384, -0.9165),
        "L_quad": (0.0561, 0.0414, 0.1428, -0.9172),
    },
}
SHOWN = 0.5  # the noise of Table 3 and the figures
_STATES = ("(0,0)", "(0,1)", "(1,0)", "(1,1)")
_DIFFERENCES = (
    "Known differences from the paper: its conditional random fields came from another program; here they have a free "
    "potential for every x_c and y_c, everything that convex inference has except the weights. They are trained by "
    "L-BFGS on the likelihood whose log-partition function is that of mean field or of belief propagation. Weights of "
    "b log b are exponentials of free parameters, so that they can be closer to 0 than the paper's. The table of "
    "variations shows what that program, the choice of pictures and the way they are made binary explain.\n"
)
# The order of computation.
_ORDER = ("L_quad", "L_log", "BP", "mean field", "pseudo + BP", "pseudo + mean field")


@dataclass(frozen=True)
class AbstractDigitStudy(AbstractStudy):
    """The cells that the studies of digits share.

    Arguments:
        root: the folder of data sets.
        noises: the levels, in the order of computation.
        per_digit: how many training pictures of each digit, and how many test pictures.
        iterations: of BFGS with the weights of the entropy fixed, and again with all free; other methods run twice as
            many at once.
        finished: compute nothing; use the cells on file.
    """

    root: str | None = None
    noises: tuple[float, ...] = (0.5, 0.3, 0.1)
    per_digit: int = 10
    iterations: int = 100
    finished: bool = False

    @property
    def num_cells(self) -> int:
        """One per noise level and method."""
        return len(self.noises) * len(METHODS)

    def measure(self, cells: Cells) -> list[Record]:
        """Noise level by noise level, the convex methods first."""
        compute, records = partial(measure, self.root), []
        for noise in self.noises:
            for method in _ORDER:
                own: dict[str, Any] = {"noise": noise, "method": method}
                settings = own | {"per_digit": self.per_digit, "iterations": self.iterations}
                result = self._get(cells, "digits", compute, **settings)
                if result is not None:
                    records.append(own | result)
        return records

    def _get(self, cells: Cells, name: str, compute: Callable[..., Result], **settings: Setting) -> Result | None:
        """A cell; with `finished` only if it is on file."""
        return cells.find(name, **settings) if self.finished else cells.get(name, compute, **settings)


@dataclass(frozen=True)
class DigitErrors(AbstractDigitStudy):
    """Test errors of six methods by four measures (Tables 1 and 2, Figure 1), and learned weights (Table 3)."""

    name = "errors"
    title = "Errors of learned convex inference (Domke 2008, Tables 1 to 3 and Figure 1)"

    def tables(self, records: list[Record]) -> str:
        """The paper's tables with ours in them, then how training went."""
        out = [
            f"{self.per_digit} training and {self.per_digit} other test pictures of each digit from 1 to 9, drawn from "
            "the 10,000 of MNIST's test set. The paper says neither which ones it used nor how it made them binary "
            "(here: 1 where brighter than half). Noise of 50 % sets half of the pixels to 0 or 1 at random. The errors "
            "are those of test pictures per pixel: the share of wrong labels, the mean of (x - b(1))^2, and the losses "
            "L_log and L_quad. Every entry is the paper's number, ours in bold, and the relative difference. Entries "
            f"that differ by more than {100 * FAR:.0f} % are marked ‡.\n\n{_DIFFERENCES}"
        ]
        for noise in sorted(self.noises, reverse=True):
            found = {record["method"]: record["test"] for record in select(records, noise=noise)}
            paper = PAPER.get(noise, {})
            lines = [
                [name, *(beside(*pair, digits=4) for pair in zip(_paper(paper, name), _ours(found, name), strict=True))]
                for name in METHODS
            ]
            out.append(f"\n## {100 * noise:.0f} % noise\n\n" + table(["method", *ERRORS], lines))
        for record in select(records, noise=SHOWN, method="L_quad"):
            out.append(_weights(record))
        header = ["noise", "method", "ended", "iterations", "evaluations", "objective", "converged in tests", "minutes"]
        lines = [
            [
                f"{100 * record['noise']:.0f} %",
                record["method"],
                *(", ".join(str(stage[k]) for stage in record["training"]) for k in range(3)),
                "-" if record["objective"] is None else f"{record['objective']:.5f}",
                f"{100 * record['converged']:.0f} %",
                f"{record['seconds'] / 60:.1f}",
            ]
            for record in records
        ]
        out.append("\n## Training\n\nMinutes are those of the processor.\n\n" + table(header, lines))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """Figure 1: the four measures side by side."""
        figure, axes = panels(2, 2)
        found = {record["method"]: record["test"] for record in select(records, noise=SHOWN)}
        names = list(METHODS)
        for axis, error, k in zip(axes, ERRORS, range(len(ERRORS)), strict=True):
            place = np.arange(len(names))
            axis.bar(place - 0.2, [PAPER[SHOWN][name][k] for name in names], 0.4, label="paper", color="lightgrey")
            shown = [name for name in names if name in found]
            ours = [found[name][error] for name in shown]
            axis.bar([names.index(name) + 0.2 for name in shown], ours, 0.4, label="here")
            axis.set_xticks(place, names, rotation=30, ha="right", fontsize=8)
            axis.set_title(f"{error}, {100 * SHOWN:.0f} % noise")
        axes[3].set_ylim(-0.95, -0.75)
        axes[0].legend()
        return figure


@dataclass(frozen=True)
class DigitBeliefs(AbstractDigitStudy):
    """One noisy picture of each digit, restored by several methods (Figure 2)."""

    name = "beliefs"
    title = "Restored digits (Domke 2008, Figure 2)"

    def tables(self, records: list[Record]) -> str:
        """The meaning of the rows."""
        return (
            f"{100 * SHOWN:.0f} % noise. From top to bottom: noisy test pictures, pseudolikelihood with belief "
            "propagation, belief propagation, beliefs of convex inference learned by L_log, pictures without noise.\n"
        )

    def plot(self, records: list[Record]) -> Figure:
        """A picture per digit and row."""
        tests = draw_digits(self.root, SHOWN, self.per_digit)[1]
        rows: list[tuple[str, list[Shown | None]]] = [("noisy", _pictures(tests, tests.noisy.double().tolist()))]
        for method in ("pseudo + BP", "BP", "L_log"):
            found = select(records, noise=SHOWN, method=method)
            if found:
                rows.append((method, [_square(values) for values in found[0]["beliefs"]]))
        rows.append(("original", _pictures(tests, tests.labels.double().tolist())))
        return gallery([str(digit) for digit in DIGITS], rows)


def _pictures(tests: Digits, values: list[list[float]]) -> list[Shown | None]:
    per_digit = len(tests.labels) // len(DIGITS)
    return [_square(row) for row in values[::per_digit]]


def _square(values: list[float]) -> Shown:
    side = round(len(values) ** 0.5)
    return np.array(values).reshape(side, side)


def _paper(paper: Mapping[str, tuple[float, ...]], name: str) -> tuple[float | None, ...]:
    return paper.get(name, (None,) * len(ERRORS))


def _ours(found: dict[str, dict[str, float]], name: str) -> list[float | None]:
    return [found[name][error] if name in found else None for error in ERRORS]


def _weights(record: Record) -> str:
    """Table 3."""
    model = with_parameters(PLAIN.model(convex=True), record["parameters"])
    assert isinstance(model, rf.models.ConvexModel)
    # The indicators are the columns of the matrices.
    nodes, factors = (parameter.exp().tolist() for parameter in model.log_weights.parameters())
    out = [
        f"\n## Weights of b log b learned by L_quad at {100 * SHOWN:.0f} % noise (Table 3)\n\nFirst of pairs: "
        "x_i x_j in lines, y_i y_j in columns. Then of pixels.\n\n"
    ]
    out.append(
        table(["x \\ y", *_STATES], [[s, *(f"{w:.2f}" for w in row)] for s, row in zip(_STATES, factors, strict=True)])
    )
    out.append(
        "\n" + table(["x \\ y", "0", "1"], [[str(x), *(f"{w:.2f}" for w in row)] for x, row in enumerate(nodes)])
    )
    return "".join(out)
