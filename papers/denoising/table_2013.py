"""Binary denoising of Berkeley pictures: Table 1 and Figure 4 of Domke (2013).

A picture is 1 where it is brighter than its mean, and y = x (1 - t^n) + (1 - x) t^n with t uniform. Unary features are
1 and y; horizontal and vertical edges have a table each: 12 parameters, without a ridge. Inference is tree-reweighted
(rho = 1/2) until marginals change by less than 1e-4; losses on marginals are differentiated by back-propagation at the
fixed point, the surrogate likelihood by its direct gradient, mu - f(x).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

import riskfield as rf
from papers.cells import Cells, Result, with_parameters
from papers.pictures.criteria import DIVERGED, INDEPENDENT, Criterion, closure, fit_all, mark, train, training_table
from papers.pictures.scenes import Scenes, check_device, chunk_size, describe, evaluate, predict
from papers.side_by_side import HOW_TO_READ, Shown, beside, could_be_pictures, gallery, is_far, shade
from papers.splits import Recorded
from papers.study import AbstractStudy, Record, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SURROGATE = "surrogate likelihood"
CRITERIA = (
    Criterion(_SURROGATE, rf.losses.SurrogateLikelihood()),
    Criterion("univariate logistic", rf.losses.UnivariateLogistic()),
    Criterion("clique logistic", rf.losses.CliqueLogistic()),
    Criterion("pseudo-likelihood", rf.losses.Pseudolikelihood()),
    Criterion("piecewise", rf.losses.Piecewise()),
    Criterion(INDEPENDENT, rf.losses.Independent(), start=None),
    Criterion("univariate quad", rf.losses.UnivariateQuadratic()),
    Criterion("smooth class. 5", rf.losses.SmoothedClassification(5), start=_SURROGATE),
    Criterion("smooth class. 15", rf.losses.SmoothedClassification(15), start=_SURROGATE),
    Criterion("smooth class. 50", rf.losses.SmoothedClassification(50), start=_SURROGATE),
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
FEATURES = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Intensity()), edges=(rf.features.Constant(),)
)
# Other data, to train marked entries again.
_SWAPPED, _CROPPED, _SAMPLED = "other pictures", "pictures cropped", "pixels sampled"
_OTHER_DATA = (_SWAPPED, _CROPPED, _SAMPLED)
FIRST = 8  # training starts on this many pictures; most iterations use a small subset


def inference(tol: float, backward: float, sweeps: int = 1000) -> rf.Inference:
    """Tree-reweighted message passing to a tolerance, and back-propagation to its own, for training.

    Where these sweeps do not suffice, the objective counts as diverged, and the line search takes a shorter step.
    """
    return rf.Inference(
        rf.MessagePassing(rf.TRW(0.5)),
        rf.Stop(sweeps, tol),
        rf.FixedPoint(backward, sweeps, solver=rf.adjoints.Iterate(fallback=None)),
    )


def prediction(tol: float) -> rf.Inference:
    """The same inference for testing."""
    return rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(1000, tol))


def optimiser() -> rf.optim.LBFGS:
    """L-BFGS until an iteration gains less than the accuracy of inference."""
    return rf.optim.LBFGS(iterations=200, gradient_tol=1e-5, change_tol=1e-7)


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
        again: train marked entries again, on other pictures or in other ways.
        device: where.
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
    again: bool = True
    device: str = "cpu"

    @property
    def num_cells(self) -> int:
        """One per noise level and line, without what is trained again."""
        return len(self.levels) * len(closure(CRITERIA, self.rows))

    def measure(self, cells: Cells) -> list[Record]:
        """Level after level."""
        if self.rows:  # complain about what is missing before anything is computed
            check_device(self.device)
            rf.datasets.bsds500(self.root)
        size: dict[str, Any] = {"train": self.num_train, "test": self.num_test, "rows": self.shape[0], "tol": self.tol}
        records = []
        for level in sorted(self.levels, key=(1.25, 5.0, 1.5).index):  # extremes first
            results = fit_all(cells, "power", CRITERIA, self.rows, partial(self._fit, level), level=level, **size)
            for name, result in results.items():
                again = self._again(cells, level, name, result, size)
                records.append({"level": level, "row": name, "again": again} | result)
        return records

    def tables(self, records: list[Record]) -> str:
        """The paper's table with ours in it, then how training went."""
        out = [
            f"{self.num_train} training and {self.num_test} test pictures of {self.shape[0]} x {self.shape[1]} pixels, "
            "taken at equal steps of all pictures; the paper does not say which ones it used. "
            f"Tree-reweighted inference to a tolerance of {self.tol:g}. {HOW_TO_READ}{DIVERGED}\n"
        ]
        header = ["loss", *(f"n = {level:g}, {part}" for level in self.levels for part in ("train", "test"))]
        lines = []
        for name, numbers in PAPER.items():
            line = [name]
            for level in self.levels:
                paper = numbers[PAPER_LEVELS.index(level)]
                found = select(records, level=level, row=name)
                ours = found[0] if found else {"errors": (None, None), "standard_errors": (None, None)}
                entries = zip(paper, ours["errors"], ours["standard_errors"], strict=True)
                line += [mark(beside(*entry), found) for entry in entries]
            lines.append(line)
        out.append(table(header, lines))
        out.append("\n## What differs, trained again\n\n" + self._explanations(records))
        out.append("\n## Training\n\n" + training_table(records, ["level", "row"]))
        return "".join(out)

    def _explanations(self, records: list[Record]) -> str:
        """The results of training again."""
        rows = []
        for record in records:
            paper = PAPER[record["row"]][PAPER_LEVELS.index(record["level"])]
            for how, fitted in {"as above": record, **record["again"]}.items() if record["again"] else ():
                row = [f"{record['level']:g}", record["row"], how]
                pairs = zip(paper, fitted["errors"], strict=True)
                rows.append([*row, *(mark(beside(*pair), [fitted]) for pair in pairs), f"{fitted['unsettled']}"])
        if not self.again:
            return "Nothing was trained again at this size.\n"
        if not rows:
            return "Nothing is marked, or nothing marked was trained again.\n"
        return (
            f"Marked entries were trained again on {self.num_train} of the test pictures, and tested with all others. "
            "Entries that differ from the paper by more than two standard errors of the difference of two such samples "
            "were also trained from zeros, and on the same pictures resized in other ways, because the paper does not "
            f"say how it resized them to {self.shape[0]} x {self.shape[1]}: by cropping their middle, and by sampling "
            "single pixels at equal steps instead of averaging areas. Missing lines were not run.\n\n"
            + table(["n", "loss", "training", "train", "test", "unsettled tests"], rows)
        )

    def plot(self, records: list[Record]) -> Figure:
        """The first test picture, its noisy versions, and marginals."""
        tests = {level: replace(self, num_test=1)._scenes(level, "test") for level in self.levels}
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

    def _fit(self, level: float, criterion: Criterion, start: list[float] | None, data: str = "") -> Result:
        training, tests = (self._scenes(level, part, data) for part in ("train", "test"))
        model, how, size = two_direction_model().to(self.device), inference(self.tol, self.tol), chunk_size(self.device)
        result = train(model, training, criterion, how, optimiser(), start, chunk_size=size, first=FIRST)
        return result | evaluate(model, (training, tests), prediction(self.tol), size)

    def _again(self, cells: Cells, level: float, name: str, result: Result, size: dict[str, Any]) -> dict[str, Result]:
        """The same criterion, fitted in other ways, if its errors are marked.

        Where the choice of pictures can be the reason, on other pictures only.
        """
        paper = PAPER[name][PAPER_LEVELS.index(level)]
        numbers = list(zip(paper, result["errors"], result["standard_errors"], strict=True))
        far = [each for each in numbers if is_far(*each[:2])]
        if not self.again or not far:
            return {}
        (criterion,) = (criterion for criterion in CRITERIA if criterion.name == name)
        by_pictures = all(could_be_pictures(*each) for each in far)
        ways: dict[str, Any] = {} if by_pictures else {"from zeros": lambda **_: self._fit(level, criterion, None)}
        for how in (_SWAPPED,) if by_pictures else _OTHER_DATA:
            ways[how] = lambda how, **_: self._fit(level, criterion, result["parameters"], how)
        own: dict[str, Any] = {"level": level, "row": name}
        found: dict[str, Result] = {}
        for how, fit in ways.items():
            settings = own | size | {"how": how}
            cell = cells.get("again", fit, **settings) if name in self.rows else cells.find("again", **settings)
            if cell is not None:
                found[how] = {key: cell[key] for key in ("errors", "diverged", "unsettled")}
        return found

    def _marginals(self, record: Record, scenes: Scenes) -> Shown:
        model = with_parameters(two_direction_model().to(self.device), record["parameters"])
        return shade(next(predict(model, scenes, prediction(self.tol), 1)).marginals)

    def _scenes(self, level: float, part: str, data: str = "") -> Scenes:
        """Pictures to train on or to test with, or those of `_OTHER_DATA`."""
        (split,) = Recorded.BERKELEY_2013.read()
        names = {"train": split.train[: self.num_train], "test": split.test[: self.num_test]}
        if data == _SWAPPED:
            step = max(1, self.num_test // self.num_train)
            other = names["test"][::step][: self.num_train]
            names = {"train": other, "test": tuple(name for own in names.values() for name in own if name not in other)}
        return _scenes(self.root, level, self.shape, names[part], data, self.device)


def two_direction_model() -> rf.LinearModel:
    """Potentials linear in (1, y), a table for horizontal and one for vertical edges."""
    return rf.LinearModel(2, 2, {"horizontal": 1, "vertical": 1})


@lru_cache(maxsize=2)
def _scenes(
    root: str | None, level: float, shape: tuple[int, int], names: tuple[str, ...], data: str, device: str
) -> Scenes:
    pictures = rf.datasets.bsds500(root).select(names)
    if data in (_CROPPED, _SAMPLED):
        pictures = pictures.map(partial(_cut, shape=shape, sampled=data == _SAMPLED))
    return Scenes.of(
        describe(rf.datasets.denoising(pictures, rf.datasets.PowerNoise(level), shape=shape), FEATURES),
        2,
        device=device,
    )


def _cut(picture: rf.datasets.LabelledImage, shape: tuple[int, int], sampled: bool) -> rf.datasets.LabelledImage:
    """A picture of `shape` without averaging: single pixels at equal steps, or the middle of it."""
    image = picture.image if picture.image.shape[0] < picture.image.shape[1] else np.rot90(picture.image)
    kept = []
    for length, wanted in zip(image.shape, shape, strict=False):
        steps = (np.arange(wanted) + 0.5) * length / wanted
        kept.append(steps.astype(np.int64) if sampled else np.arange(wanted) + (length - wanted) // 2)
    return rf.datasets.LabelledImage(picture.name, np.ascontiguousarray(image[np.ix_(*kept)]))
