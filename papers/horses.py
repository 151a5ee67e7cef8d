"""Figure and ground of horses: Table 2 and Figure 5 of Domke (2013), section 8.3.

100 features of pixels (sinusoids of colour and position, a histogram of gradients), 21 of edges of either direction:
368 parameters. Inference is truncated. The paper works at the pictures' own resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import riskfield as rf
from papers.cells import Cells, Result, with_parameters
from papers.pictures.criteria import (
    DIVERGED,
    INDEPENDENT,
    ApproximateLikelihood,
    Criterion,
    check_rows,
    closure,
    fit_all,
    mark,
    training_table,
)
from papers.pictures.scenes import Scenes, check_device, describe, predict
from papers.pictures.truncated import CONVERGED, PRECISION, PRECISION_NAME, SWEEP, WITHOUT, Mode, Trainer, chosen
from papers.side_by_side import HOW_TO_READ, Shown, beside, gallery, shade
from papers.splits import Recorded
from papers.study import AbstractStudy, Record, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SURROGATE = "surrogate likelihood"
# `SurrogateEM`, because the padding of scenes has hidden labels; elsewhere it is the surrogate likelihood.
_OF_MARGINALS = (
    Criterion(_SURROGATE, rf.losses.SurrogateEM(), ridge=1e-3),
    Criterion("univariate logistic", rf.losses.UnivariateLogistic(), ridge=1e-3),
    Criterion("clique logistic", rf.losses.CliqueLogistic(), ridge=1e-3),
)
_SMOOTHED = tuple(
    Criterion(f"smooth class. {alpha}", rf.losses.SmoothedClassification(alpha), _SURROGATE, 1e-3)
    for alpha in (5, 15, 50)
)
# Lines that are not in the paper. Each varies a line whose errors differ from the paper's, to explain the difference.
_BY_BP = rf.Inference(rf.MessagePassing(), rf.Stop(1000, 1e-5))
_LESS_RIDGE, _TESTED_BY_BP = "independent with ridge 1e-6", "pseudolikelihood by BP"
_WITHOUT = (
    *WITHOUT,
    Criterion(_LESS_RIDGE, rf.losses.Independent(), start=None, ridge=1e-6),
    Criterion(_TESTED_BY_BP, rf.losses.Pseudolikelihood(), ridge=1e-4, tested=_BY_BP),
)
_FROM_ZEROS = Criterion("surrogate likelihood from zeros", ApproximateLikelihood(), start=None, ridge=1e-3)
_EXTRA = (
    "Not in the paper: mean field that visits the pixels row by row instead of by the colours of a chessboard, the "
    f"likelihood from zeros without a stop at divergence, {_TESTED_BY_BP}, and {_LESS_RIDGE}. They are shown beside "
    "the paper's numbers of the lines they vary.\n"
)
_SHOWN = (Mode.TRW, Mode.MEAN_FIELD)  # in the figure, which has the paper's lines only
BY_MODE = {
    Mode.TRW: (*_OF_MARGINALS, *_SMOOTHED),
    Mode.MEAN_FIELD: _OF_MARGINALS,
    Mode.ROW_BY_ROW: (_OF_MARGINALS[0], _FROM_ZEROS),
}
ROWS = tuple(criterion.name for criterion in (*BY_MODE[Mode.TRW], _FROM_ZEROS, *_WITHOUT))
PAPER_SWEEPS = (10, 20, 40)
SWEEPS = (5, *PAPER_SWEEPS)  # ours are forwards and backwards; the paper does not say what an iteration is
# (train, test) after 10, 20 and 40 sweeps.
PAPER = {
    (_SURROGATE, Mode.TRW): ((0.421, 0.416), (0.088, 0.109), (0.088, 0.109)),
    ("univariate logistic", Mode.TRW): ((0.065, 0.094), (0.064, 0.093), (0.064, 0.093)),
    ("clique logistic", Mode.TRW): ((0.064, 0.094), (0.062, 0.093), (0.062, 0.092)),
    ("smooth class. 5", Mode.TRW): ((0.068, 0.097), (0.067, 0.097), (0.067, 0.096)),
    ("smooth class. 15", Mode.TRW): ((0.065, 0.097), (0.064, 0.096), (0.063, 0.096)),
    ("smooth class. 50", Mode.TRW): ((0.064, 0.096), (0.063, 0.095), (0.062, 0.095)),
    (_SURROGATE, Mode.MEAN_FIELD): ((0.405, 0.383), (0.236, 0.226), (0.199, 0.200)),
    ("univariate logistic", Mode.MEAN_FIELD): ((0.078, 0.108), (0.077, 0.106), (0.078, 0.106)),
    ("clique logistic", Mode.MEAN_FIELD): ((0.073, 0.101), (0.075, 0.105), (0.079, 0.107)),
}
PAPER |= {
    (criterion.name, Mode.ROW_BY_ROW): PAPER[_SURROGATE, Mode.MEAN_FIELD] for criterion in BY_MODE[Mode.ROW_BY_ROW]
}
PAPER_WITHOUT = {"pseudolikelihood": (0.222, 0.249), "piecewise": (0.202, 0.236), INDEPENDENT: (0.095, 0.125)}
PAPER_WITHOUT |= {_TESTED_BY_BP: PAPER_WITHOUT["pseudolikelihood"], _LESS_RIDGE: PAPER_WITHOUT[INDEPENDENT]}


@dataclass(frozen=True)
class HorsesTable(AbstractStudy):
    """Errors by criterion, kind of inference and number of sweeps (Table 2), and marginals of a picture (Figure 5).

    Arguments:
        root: the folder of data sets.
        scale: the resolution of inference relative to that of the pictures. Errors are measured at full resolution.
        sweeps: after how many inference stops.
        num_train, num_test: how many pictures of the recorded split to take; by default all.
        iterations: of training, at most.
        rows: the lines to train; others are shown if they are on file.
        in_order: train on the first pictures by name and test with the last. The recorded split takes both at equal
            steps, because pictures that follow each other are alike.
        step: use ten multiples of this as thresholds of both edge features, instead of those of the library. The
            paper does not give its own.
        device: where.
    """

    title = "Horses (Domke 2013, Table 2 and Figure 5)"
    precision = PRECISION_NAME

    root: str | None = None
    scale: float = 1.0
    sweeps: tuple[int, ...] = SWEEPS
    num_train: int = 200
    num_test: int = 127
    iterations: int = 500
    rows: tuple[str, ...] = ROWS
    in_order: bool = False
    step: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_rows(self.rows, ROWS)
        if self.step is not None and not 1e-6 <= self.step < math.inf:
            raise ValueError(f"`step` must be a number of at least 1e-6. Got {self.step}.")

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of its files."""
        step = "" if self.step is None else f"-step-{self.step:g}"
        return f"scale-{self.scale:g}{'-in-order' if self.in_order else ''}{step}"

    @property
    def num_cells(self) -> int:
        """One per line and, with inference, number of sweeps."""
        by_mode = sum(len(closure(criteria, chosen(self.rows, criteria))) for criteria in BY_MODE.values())
        return len(self.sweeps) * by_mode + len(closure(_WITHOUT, chosen(self.rows, _WITHOUT)))

    def measure(self, cells: Cells) -> list[Record]:
        """First the criteria without inference, then few sweeps before many."""
        if self.rows:  # complain about what is missing before anything is computed
            check_device(self.device)
            rf.datasets.weizmann_horses(self.root)
        size: dict[str, Any] = {"train": self.num_train, "test": self.num_test, "scale": self.scale}
        size |= {"iterations": self.iterations} | ({"split": "in order"} if self.in_order else {})
        size |= {} if self.step is None else {"step": self.step}
        without = chosen(self.rows, _WITHOUT)
        first = fit_all(cells, "horses", _WITHOUT, without, partial(self._fit, Mode.TRW, 1), **size)
        records: list[Record] = [{"mode": "", "sweeps": 0, "row": name} | result for name, result in first.items()]
        for mode, criteria in BY_MODE.items():
            inferred = chosen(self.rows, criteria)
            for sweeps in self.sweeps:
                own: dict[str, Any] = {"mode": mode.value, "sweeps": sweeps}
                fit = partial(self._fit, mode, sweeps)
                results = fit_all(cells, "horses", criteria, inferred, fit, known=first, **own, **size)
                records += [own | {"row": name} | result for name, result in results.items()]
        return records

    def tables(self, records: list[Record]) -> str:
        """The lines of the paper's table for which there are cells, with ours in them, then how training went."""
        out = [
            f"{self.num_train} training and {self.num_test} test pictures, "
            f"{'the first and the last by name' if self.in_order else 'taken at equal steps'}; inference at "
            f"{self.scale:g} of their resolution, errors at full resolution; at most {self.iterations} iterations. "
            f"{'' if self.step is None else f'Thresholds of edge features are multiples of {self.step:g}. '}"
            f"{HOW_TO_READ}{DIVERGED}{SWEEP}{_EXTRA}\n"
        ]
        header = ["loss", "mode", *(f"{sweeps} sweeps, {part}" for sweeps in self.sweeps for part in ("train", "test"))]
        rows = []
        for (name, mode), numbers in PAPER.items():
            own = select(records, mode=mode.value, row=name)
            if not own:
                continue
            row = [name, mode.value]
            for sweeps in self.sweeps:
                paper = numbers[PAPER_SWEEPS.index(sweeps)] if sweeps in PAPER_SWEEPS else (None, None)
                row += _entries(paper, select(own, sweeps=sweeps))
            rows.append(row)
        if rows:
            out.append(table(header, rows) + "\n")
        without = {name: select(records, row=name) for name in PAPER_WITHOUT}
        lines = [[name, *_entries(PAPER_WITHOUT[name], found)] for name, found in without.items() if found]
        out.append(table(["loss", "train", "test"], lines))
        return "".join(out) + "\n## Training\n\n" + training_table(records, ["mode", "sweeps", "row"])

    def plot(self, records: list[Record]) -> Figure:
        """A test picture and its marginals after the largest number of sweeps of each line."""
        tests = self._scenes("test", 1)
        picture = tests.blocks[0].scenes[0].picture
        rows: list[tuple[str, list[Shown | None]]] = [("input, true labels", [picture.image, picture.labels])]
        trainer = self._trainer()
        for name in (criterion.name for criterion in (*BY_MODE[Mode.TRW], *WITHOUT)):
            shown: list[Shown | None] = []
            for mode in _SHOWN:
                found = select(records, row=name, mode=mode.value)
                if mode is Mode.TRW:  # which also tests what was trained without inference
                    found += select(records, row=name, mode="")
                if not found:
                    shown.append(None)
                    continue
                last = max(found, key=lambda record: int(record["sweeps"]))
                model = with_parameters(trainer.model(), last["parameters"])
                how = mode.after(last["sweeps"]) if last["mode"] else CONVERGED
                shown.append(shade(next(predict(model, tests, how, 1)).marginals))
            if any(marginals is not None for marginals in shown):
                rows.append((name, shown))
        return gallery([mode.value for mode in _SHOWN], rows)

    def _trainer(self) -> Trainer:
        return Trainer(_features(self.scale, self.step), 2, self.iterations, self.device, dtype=PRECISION)

    def _fit(self, mode: Mode, sweeps: int, criterion: Criterion, start: list[float] | None) -> Result:
        scenes = self._scenes("train", self.num_train), self._scenes("test", self.num_test)
        return self._trainer()(criterion, start, *scenes, mode.after(sweeps))

    def _scenes(self, part: str, count: int) -> Scenes:
        return _scenes(self.root, self.scale, self.device, part, count, self.in_order, self.step)


def _features(scale: float, step: float | None) -> rf.features.ImageFeatures:
    if step is None:
        return rf.features.ImageFeatures(scale=scale)
    even = tuple(round(step * number, 9) for number in range(1, len(rf.features.ColourDifference().thresholds) + 1))
    return rf.features.ImageFeatures(
        edges=(rf.features.Constant(), rf.features.ColourDifference(even), rf.features.SobelResponse(even)), scale=scale
    )


def _entries(paper: tuple[float | None, float | None], records: list[Record]) -> list[str]:
    if not records:
        return [beside(number, None) for number in paper]
    ours = zip(paper, records[0]["errors"], records[0]["standard_errors"], strict=True)
    return [mark(beside(*entry), records) for entry in ours]


@lru_cache(maxsize=3)
def _scenes(
    root: str | None, scale: float, device: str, part: str, count: int, in_order: bool, step: float | None
) -> Scenes:
    (split,) = Recorded.HORSES.read()
    names = getattr(split, part)
    if in_order:  # the same number from the beginning, or from the end
        names = sorted((*split.train, *split.test), reverse=part == "test")[: len(names)]
    pictures = rf.datasets.weizmann_horses(root).select(names[:count])
    # Almost all pictures differ in size. A GPU evaluates many at once, so they are padded to few sizes there.
    frame = 1 if device == "cpu" else 64
    described = describe(pictures, _features(scale, step))
    return Scenes.of(described, 2, frame=frame, device=device, dtype=PRECISION)
