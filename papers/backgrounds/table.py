"""Eight classes of outdoor scenes: Table 3 and Figure 6 of Domke (2013), section 8.4.

The unary features are those of the horses; edges have the difference of colours only: 2208 parameters. Features are
computed at the pictures' resolution, inference runs at a fifth of it, and marginals are resized back. Pixels without a
label are hidden. Training begins with 32 pictures and 1000 iterations; then pictures are doubled and iterations halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

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
from papers.pictures.scenes import Described, Scenes, check_device, describe, predict
from papers.pictures.truncated import CONVERGED, PRECISION, PRECISION_NAME, SWEEP, WITHOUT, Mode, Trainer, chosen
from papers.side_by_side import HOW_TO_READ, Shown, beside, gallery, shade, shade_labels
from papers.splits import Recorded
from papers.study import AbstractStudy, Record, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EM = "surrogate EM"
# Not in the paper: where the likelihood with few sweeps ends if it is not stopped.
_ON = Criterion("surrogate EM unstopped", ApproximateLikelihood(), ridge=1e-3)
INFERRED = (
    Criterion(_EM, rf.losses.SurrogateEM(), ridge=1e-3),
    Criterion("univariate logistic", rf.losses.UnivariateLogistic(), ridge=1e-3),
    Criterion("clique logistic", rf.losses.CliqueLogistic(), ridge=1e-3),
    _ON,
)
ROWS = tuple(criterion.name for criterion in (*INFERRED, *WITHOUT))
PAPER_SWEEPS = (5, 10, 20)
SWEEPS = (2, *PAPER_SWEEPS)  # ours are forwards and backwards; the paper does not say what an iteration is
# (train, test) after 5, 10 and 20 sweeps.
PAPER = {
    _EM: ((0.876, 0.877), (0.239, 0.249), (0.238, 0.248)),
    "univariate logistic": ((0.210, 0.228), (0.202, 0.224), (0.201, 0.223)),
    "clique logistic": ((0.206, 0.226), (0.198, 0.223), (0.195, 0.221)),
}
PAPER[_ON.name] = PAPER[_EM]
PAPER_WITHOUT = {"pseudolikelihood": (0.516, 0.519), "piecewise": (0.335, 0.341), INDEPENDENT: (0.293, 0.299)}
_EDGES = (rf.features.Constant(), rf.features.ColourDifference())
_NUM_FOLDS = 5


@dataclass(frozen=True)
class BackgroundsTable(AbstractStudy):
    """Errors by criterion and number of sweeps, of five folds (Table 3), and marginals of test pictures (Figure 6).

    Arguments:
        root: the folder of data sets.
        folds: which to train and test; the others are shown if they are on file.
        sweeps: after how many inference stops.
        scale: the resolution of inference, as a part of the pictures'.
        num_train, num_test: how many pictures of a fold to take; by default all.
        iterations: of the first stage of training.
        first: pictures of the first stage.
        rows: the lines to train; the others are shown if they are on file.
        device: where.
    """

    name = "table"
    title = "Backgrounds (Domke 2013, Table 3 and Figure 6)"
    precision = PRECISION_NAME

    root: str | None = None
    folds: tuple[int, ...] = tuple(range(_NUM_FOLDS))
    sweeps: tuple[int, ...] = SWEEPS
    scale: float = 0.2
    num_train: int = 572
    num_test: int = 143
    iterations: int = 1000
    first: int = 32
    rows: tuple[str, ...] = ROWS
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_rows(self.rows, ROWS)

    @property
    def num_cells(self) -> int:
        """One per fold and line and, with inference, number of sweeps."""
        inferred = len(self.sweeps) * len(closure(INFERRED, chosen(self.rows, INFERRED)))
        return len(self.folds) * (inferred + len(closure(WITHOUT, chosen(self.rows, WITHOUT))))

    def measure(self, cells: Cells) -> list[Record]:
        """Fold by fold: first the criteria without inference, then few sweeps before many."""
        if self.rows:  # complain about what is missing before anything is computed
            check_device(self.device)
            rf.datasets.stanford_background(self.root)
        records: list[Record] = []
        for fold in range(_NUM_FOLDS):
            without, inferred = (chosen(self.rows, part) if fold in self.folds else [] for part in (WITHOUT, INFERRED))
            size: dict[str, Any] = {"fold": fold, "train": self.num_train, "test": self.num_test, "scale": self.scale}
            size |= {"iterations": self.iterations, "first": self.first}
            known = fit_all(cells, "backgrounds", WITHOUT, without, partial(self._fit, fold, 1), **size)
            records += [{"fold": fold, "sweeps": 0, "row": name} | result for name, result in known.items()]
            for sweeps in self.sweeps:
                fit = partial(self._fit, fold, sweeps)
                results = fit_all(cells, "backgrounds", INFERRED, inferred, fit, known=known, sweeps=sweeps, **size)
                records += [{"fold": fold, "sweeps": sweeps, "row": name} | result for name, result in results.items()]
        for record in records:  # only the figure needs parameters, of which there are thousands
            if record["fold"] != records[0]["fold"] or record["sweeps"] not in (0, self.sweeps[-1]):
                del record["parameters"]
        return records

    def tables(self, records: list[Record]) -> str:
        """The paper's table with means over our folds in it, then how training went."""
        out = [
            f"Means over folds of {self.num_train} training and {self.num_test} test pictures. Inference at "
            f"{self.scale:g} of the pictures' resolution, errors at full resolution. Training begins with {self.first} "
            f"pictures and {self.iterations} iterations; then pictures are doubled and iterations halved. "
            f"{HOW_TO_READ}{DIVERGED}{SWEEP}The number of folds is in brackets where it is not five. Surrogate EM "
            "unstopped, which is not in the paper, continues where surrogate EM is stopped.\n\n"
        ]
        header = ["loss", *(f"{sweeps} sweeps, {part}" for sweeps in self.sweeps for part in ("train", "test"))]
        rows = []
        for name, numbers in PAPER.items():
            row = [name]
            for sweeps in self.sweeps:
                paper = numbers[PAPER_SWEEPS.index(sweeps)] if sweeps in PAPER_SWEEPS else (None, None)
                row += _entries(paper, select(records, sweeps=sweeps, row=name))
            rows.append(row)
        out.append(table(header, rows) + "\n")
        without = [[name, *_entries(paper, select(records, row=name))] for name, paper in PAPER_WITHOUT.items()]
        out.append(table(["loss", "train", "test"], without))
        return "".join(out) + "\n## Training\n\n" + training_table(records, ["fold", "sweeps", "row"])

    def plot(self, records: list[Record]) -> Figure:
        """Test pictures of the first fold on file, and their marginals after the most sweeps."""
        fold = min((record["fold"] for record in records), default=0)
        tests = self._scenes(fold, "test", min(4, self.num_test))
        pictures = [scene.picture for block in tests.blocks for scene in block.scenes]
        truths = [
            shade_labels(picture.labels, len(rf.datasets.STANFORD_CLASSES))
            for picture in pictures
            if picture.labels is not None
        ]
        rows: list[tuple[str, list[Shown | None]]] = [
            ("input", [picture.image for picture in pictures]),
            ("true labels", [*truths]),
        ]
        for name in (name for name in ROWS if name != _ON.name):  # the paper's lines
            inferred = select(records, fold=fold, row=name, sweeps=self.sweeps[-1])
            found = inferred or select(records, fold=fold, row=name, sweeps=0)
            if found:
                model = with_parameters(self._trainer().model(), found[0]["parameters"])
                how = Mode.TRW.after(self.sweeps[-1]) if inferred else CONVERGED
                rows.append((name, [shade(predicted.marginals) for predicted in predict(model, tests, how, 1)]))
        return gallery(["" for _ in pictures], rows)

    def _trainer(self) -> Trainer:
        return Trainer(
            recipe(self.scale), len(rf.datasets.STANFORD_CLASSES), self.iterations, self.device, self.first, PRECISION
        )

    def _fit(self, fold: int, sweeps: int, criterion: Criterion, start: list[float] | None) -> Result:
        scenes = self._scenes(fold, "train", self.num_train), self._scenes(fold, "test", self.num_test)
        return self._trainer()(criterion, start, *scenes, Mode.TRW.after(sweeps))

    def _scenes(self, fold: int, part: str, count: int) -> Scenes:
        names = getattr(Recorded.BACKGROUNDS.read()[fold], part)[:count]
        return scenes_of(self.root, self.scale, self.device, PRECISION, names)


def recipe(scale: float) -> rf.features.ImageFeatures:
    """100 features of pixels, 11 of edges in each direction."""
    return rf.features.ImageFeatures(edges=_EDGES, scale=scale)


@lru_cache(maxsize=2)
def scenes_of(root: str | None, scale: float, device: str, dtype: torch.dtype, names: tuple[str, ...]) -> Scenes:
    """Pictures by their names, padded to four sizes."""
    known = _described(root, scale)
    new = [name for name in names if name not in known]
    computed = describe(rf.datasets.stanford_background(root).select(new), recipe(scale))
    known |= {picture.name: (picture, own) for picture, own in computed}
    return Scenes.of(
        [known[name] for name in names], len(rf.datasets.STANFORD_CLASSES), frame=16, device=device, dtype=dtype
    )


@lru_cache(maxsize=1)
def _described(root: str | None, scale: float) -> dict[str, Described]:
    """Pictures whose features have been computed; folds share them."""
    return {}


def _entries(paper: tuple[float | None, float | None], records: list[Record]) -> list[str]:
    entries = []
    for part in (0, 1):
        if not records:
            entries.append(beside(paper[part], None))
            continue
        # Folds are tested on different pictures; their training pictures overlap.
        spread = sum(record["standard_errors"][part] ** 2 for record in records) ** 0.5 / len(records)
        ours = sum(record["errors"][part] for record in records) / len(records)
        entry = mark(beside(paper[part], ours, spread), records)
        entries.append(entry if len(records) == _NUM_FOLDS else f"{entry} [{len(records)}]")
    return entries
