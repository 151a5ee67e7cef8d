"""Binary denoising of Berkeley pictures: Table 1 and Figure 4 of Domke (2013).

A picture is 1 where it is brighter than its mean, and y = x (1 - t^n) + (1 - x) t^n with t uniform. Unary features are
1 and y; horizontal and vertical edges have a table each: 12 parameters, without a ridge. Inference is tree-reweighted
(rho = 1/2) until marginals change by less than 1e-4; losses on marginals are differentiated by back-propagation at the
fixed point, the surrogate likelihood by its direct gradient, mu - f(x).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.data.berkeley import bsds500
from riskfield.data.noise import PowerNoise, denoising
from riskfield.data.splits import Recorded
from riskfield.entropy import TRW
from riskfield.experiments.cells import Cells, Result
from riskfield.experiments.criteria import (
    INDEPENDENT,
    Criterion,
    closure,
    fit_all,
    train,
    training_table,
    with_parameters,
)
from riskfield.experiments.scenes import Scenes, describe, error_rate, marginals
from riskfield.experiments.side_by_side import HOW_TO_READ, Shown, beside, gallery, shade
from riskfield.experiments.study import AbstractStudy, Record, select, table
from riskfield.features.image import Constant, ImageFeatures, Intensity
from riskfield.inference.infer import Stop
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.settings import Inference
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.warm_start import WarmStart
from riskfield.losses.likelihood import SurrogateLikelihood
from riskfield.losses.marginal import CliqueLogistic, SmoothedClassification, UnivariateLogistic, UnivariateQuadratic
from riskfield.losses.piecewise import Independent, Piecewise
from riskfield.losses.pseudolikelihood import Pseudolikelihood
from riskfield.models.conditional import LinearModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SURROGATE = "surrogate likelihood"
CRITERIA = (
    Criterion(_SURROGATE, SurrogateLikelihood()),
    Criterion("univariate logistic", UnivariateLogistic()),
    Criterion("clique logistic", CliqueLogistic()),
    Criterion("pseudo-likelihood", Pseudolikelihood()),
    Criterion("piecewise", Piecewise()),
    Criterion(INDEPENDENT, Independent(), start=None),
    Criterion("univariate quad", UnivariateQuadratic()),
    Criterion("smooth class. 5", SmoothedClassification(5), start=_SURROGATE),
    Criterion("smooth class. 15", SmoothedClassification(15), start=_SURROGATE),
    Criterion("smooth class. 50", SmoothedClassification(50), start=_SURROGATE),
)
# Error rates (train, test) at these levels, in the order of the paper's table.
PAPER_LEVELS = (1.25, 1.5, 5.0)
PAPER = {
    _SURROGATE: ((0.149, 0.143), (0.103, 0.097), (0.031, 0.030)),
    "univariate logistic": ((0.133, 0.126), (0.102, 0.096), (0.031, 0.030)),
    "clique logistic": ((0.132, 0.126), (0.102, 0.096), (0.031, 0.030)),
    "univariate quad": ((0.132, 0.126), (0.102, 0.096), (0.031, 0.030)),
    "smooth class. 5": ((0.136, 0.129), (0.105, 0.099), (0.032, 0.030)),
    "smooth class. 15": ((0.132, 0.126), (0.102, 0.096), (0.031, 0.030)),
    "smooth class. 50": ((0.132, 0.125), (0.102, 0.096), (0.030, 0.030)),
    "pseudo-likelihood": ((0.207, 0.204), (0.117, 0.112), (0.032, 0.030)),
    "piecewise": ((0.466, 0.481), (0.466, 0.481), (0.063, 0.058)),
    INDEPENDENT: ((0.421, 0.424), (0.367, 0.368), (0.129, 0.129)),
}
FEATURES = ImageFeatures(pixels=(Constant(), Intensity()), edges=(Constant(),))
CHUNK_SIZE = 8
_FIRST = 8  # pictures to begin with; most of the way is gone on them


def inference(tol: float, sweeps: int = 300) -> WarmStart:
    """Tree-reweighted message passing to a tolerance, and back-propagation to the same, for training.

    Where a line search goes so far that these sweeps do not suffice, it is told that the objective diverges, and turns.
    """
    return WarmStart(MessagePassing(TRW(0.5)), Stop(sweeps, tol), FixedPoint(tol, sweeps, accelerate=False))


def prediction(tol: float) -> Inference:
    """The same inference for testing, which may take its time."""
    return Inference(MessagePassing(TRW(0.5)), Stop(3000, tol))


def optimiser() -> LBFGS:
    """L-BFGS until iterations gain less than the accuracy of inference allows to tell apart."""
    return LBFGS(iterations=200, gradient_tol=1e-5, change_tol=1e-6)


@dataclass(frozen=True)
class PowerNoiseTable(AbstractStudy):
    """Error rates for three noise levels (Domke 2013, Table 1), and the marginals of a test picture (Figure 4).

    Arguments:
        root: the folder of data sets.
        levels: the exponents n of the noise; the smaller, the more noise.
        num_train, num_test: how many pictures of the recorded split to take.
        shape: of the pictures.
        rows: the lines to train; the others are shown if they are on file.
        tol: of inference and of its gradient.
    """

    name = "table-2013"
    title = "Binary denoising (Domke 2013, Table 1 and Figure 4)"

    root: str | None = None
    levels: tuple[float, ...] = PAPER_LEVELS
    num_train: int = 32
    num_test: int = 100
    shape: tuple[int, int] = (200, 300)
    rows: tuple[str, ...] = tuple(PAPER)
    tol: float = 1e-4

    @property
    def num_cells(self) -> int:
        """One per noise level and line."""
        return len(self.levels) * len(closure(CRITERIA, self.rows))

    def measure(self, cells: Cells) -> list[Record]:
        """Level after level."""
        bsds500(self.root)  # what is missing is said before anything is done
        size: dict[str, Any] = {"train": self.num_train, "test": self.num_test, "rows": self.shape[0], "tol": self.tol}
        records = []
        for level in sorted(self.levels, key=(1.25, 5.0, 1.5).index):  # extremes first
            results = fit_all(cells, "power", CRITERIA, self.rows, partial(self._fit, level), level=level, **size)
            records += [{"level": level, "row": name} | result for name, result in results.items()]
        return records

    def tables(self, records: list[Record]) -> str:
        """The paper's table with ours in it, then how training went."""
        out = [
            f"{self.num_train} pictures to train on and {self.num_test} to test with, {self.shape[0]} x "
            f"{self.shape[1]}, chosen at equal steps of all, since it is not known which ones the paper took. "
            f"Tree-reweighted inference to a tolerance of {self.tol:g}. {HOW_TO_READ}\n"
        ]
        header = ["loss", *(f"n = {level:g}, {part}" for level in self.levels for part in ("train", "test"))]
        lines = []
        for name, numbers in PAPER.items():
            line = [name]
            for level in self.levels:
                paper = numbers[PAPER_LEVELS.index(level)]
                found = select(records, level=level, row=name)
                ours = found[0]["errors"] if found else (None, None)
                line += [beside(*pair) for pair in zip(paper, ours, strict=True)]
            lines.append(line)
        out.append(table(header, lines))
        out.append("\n## Training\n\n" + training_table(records, ["level", "row"]))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """The first test picture, its noisy versions, and marginals."""
        tests = {level: self._scenes(level, "test", 1) for level in self.levels}
        pictures = [scenes.blocks[0].scenes[0].picture for scenes in tests.values()]
        rows: list[tuple[str, list[Shown | None]]] = [
            ("input", [picture.image for picture in pictures]),
            ("true labels", [picture.labels for picture in pictures]),
        ]
        for name in PAPER:
            shown: list[Shown | None] = []
            for level, scenes in tests.items():
                found = select(records, level=level, row=name)
                shown.append(self._marginals(found[0], scenes) if found else None)
            rows.append((name, shown))
        return gallery([f"n = {level:g}" for level in self.levels], rows)

    def _fit(self, level: float, criterion: Criterion, start: list[float] | None) -> Result:
        training, tests = (self._scenes(level, part, count) for part, count in self._parts)
        model, how = two_direction_model(), inference(self.tol)
        result = train(model, training, criterion, how, optimiser(), start, chunk_size=CHUNK_SIZE, first=_FIRST)
        errors = [error_rate(model, scenes, prediction(self.tol), CHUNK_SIZE) for scenes in (training, tests)]
        return result | {"errors": errors}

    def _marginals(self, record: Record, scenes: Scenes) -> Shown:
        model = with_parameters(two_direction_model(), record["parameters"])
        return shade(next(marginals(model, scenes, prediction(self.tol), 1))[1])

    @property
    def _parts(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("train", self.num_train), ("test", self.num_test)

    def _scenes(self, level: float, part: str, count: int) -> Scenes:
        return _scenes(self.root, level, self.shape, part, count)


def two_direction_model() -> LinearModel:
    """Potentials linear in (1, y), a table for horizontal and one for vertical edges."""
    return LinearModel(2, 2, {"horizontal": 1, "vertical": 1})


@lru_cache(maxsize=2)
def _scenes(root: str | None, level: float, shape: tuple[int, int], part: str, count: int) -> Scenes:
    (split,) = Recorded.BERKELEY_2013.read()
    names = getattr(split, part)[:count]
    pictures = denoising(bsds500(root).select(names), PowerNoise(level), shape=shape)
    return Scenes.of(describe(pictures, FEATURES), 2)
