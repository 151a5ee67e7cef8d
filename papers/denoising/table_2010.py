"""Binary denoising in Domke (2010): Table 1 and Figure 1.

Potentials are affine in the noisy value, and all edges share one table: 8 parameters. Inference is tree-reweighted with
rho = 1/2 until marginals change by less than 1e-5, back-propagation by 1e-4. The surrogate likelihood starts from
zeros, the univariate and the clique likelihood from it, and the smoothed classification error (of steepness 50) from
the univariate one.

The pictures of the paper's columns "Bimodal" and "Gaussian" are not available. Four others stand in for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import riskfield as rf
from papers.cells import Cells, Result, finite, with_parameters
from papers.denoising.table_2013 import FEATURES, FIRST, inference, optimiser, prediction
from papers.pictures.criteria import Criterion, closure, fit_all, train, training_table
from papers.pictures.scenes import Scenes, check_device, chunk_size, describe, evaluate, predict
from papers.side_by_side import HOW_TO_READ, Shown, beside, gallery, shade
from papers.splits import Recorded
from papers.study import AbstractStudy, Record, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CRITERIA = (
    Criterion("surrogate likelihood", rf.losses.SurrogateLikelihood(), start=None),
    Criterion("clique likelihood", rf.losses.CliqueLogistic(), start="surrogate likelihood"),
    Criterion("univariate likelihood", rf.losses.UnivariateLogistic(), start="surrogate likelihood"),
    Criterion("smooth class. error", rf.losses.SmoothedClassification(50), start="univariate likelihood"),
)
_LOSSES = {criterion.name: criterion.loss for criterion in CRITERIA[:3]}
_ERROR = "class. error"
_PARTS = ("train", "test")
BERKELEY, STAND_INS = "Berkeley", {"bimodal": rf.datasets.BimodalNoise(), "Gaussian": rf.datasets.GaussianNoise()}
# (train, test) of every loss by every training loss.
PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    training: dict(zip([*_LOSSES, _ERROR], numbers, strict=True))
    for training, numbers in {
        "surrogate likelihood": ((0.251, 0.252), (1.328, 1.330), (0.417, 0.416), (0.141, 0.140)),
        "clique likelihood": ((0.275, 0.277), (1.176, 1.178), (0.316, 0.315), (0.127, 0.126)),
        "univariate likelihood": ((0.301, 0.303), (1.207, 1.210), (0.305, 0.305), (0.128, 0.127)),
        "smooth class. error": ((0.281, 0.283), (1.179, 1.181), (0.311, 0.310), (0.127, 0.126)),
    }.items()
}
# Classification errors (train, test) on Kumar and Hebert's pictures.
_PAPER_OTHERS = {
    "surrogate likelihood": {"bimodal": (0.0498, 0.0540), "Gaussian": (0.0286, 0.0239)},
    "clique likelihood": {"bimodal": (0.0488, 0.0535), "Gaussian": (0.0278, 0.0236)},
    "univariate likelihood": {"bimodal": (0.0493, 0.0541), "Gaussian": (0.0278, 0.0235)},
    "smooth class. error": {"bimodal": (0.0460, 0.0527), "Gaussian": (0.0273, 0.0241)},
}


@dataclass(frozen=True)
class ImplicitTable(AbstractStudy):
    """Losses and errors of four training losses (Domke 2010, Table 1), and marginals of test pictures (Figure 1).

    Arguments:
        root: the folder of data sets.
        num_pictures: how many Berkeley pictures to train on, and again to test with.
        shape: of these.
        num_tests: how many noisy versions of the stand-ins to test with.
        rows: the lines to train; the others are shown if they are on file.
        tol: of inference; back-propagation is allowed ten times as much, as in the paper.
        device: where.
    """

    name = "table-2010"
    title = "Binary denoising (Domke 2010, Table 1 and Figure 1)"

    root: str | None = None
    num_pictures: int = 100
    shape: tuple[int, int] = (200, 300)
    num_tests: int = 190
    rows: tuple[str, ...] = tuple(PAPER)
    tol: float = 1e-5
    device: str = "cpu"

    @property
    def num_cells(self) -> int:
        """One per data set and line."""
        return (1 + len(STAND_INS)) * len(closure(CRITERIA, self.rows))

    def measure(self, cells: Cells) -> list[Record]:
        """The Berkeley pictures, then the stand-ins."""
        if self.rows:  # complain about what is missing before anything is computed
            check_device(self.device)
            rf.datasets.bsds500(self.root)
        records = []
        for column in (BERKELEY, *STAND_INS):
            train, test = self._sizes(column)
            rows = self.shape[0] if column == BERKELEY else 64
            size: dict[str, Any] = {"train": train, "test": test, "rows": rows, "tol": self.tol}
            results = fit_all(cells, "implicit", CRITERIA, self.rows, partial(self._fit, column), data=column, **size)
            records += [{"data": column, "row": name} | result for name, result in results.items()]
        return records

    def tables(self, records: list[Record]) -> str:
        """Berkeley, then the stand-ins, then how training went."""
        out = [
            f"Tree-reweighted inference to a tolerance of {self.tol:g}; gradients by back-propagation at the fixed "
            "point. All losses are per pixel.\n\n"
            f"## Berkeley: {self.num_pictures} training and {self.num_pictures} test pictures of {self.shape[0]} x "
            f"{self.shape[1]}\n\n{HOW_TO_READ}\n"
        ]
        header = ["training loss", *(f"{loss}, {part}" for loss in (*_LOSSES, _ERROR) for part in ("train", "test"))]
        rows = []
        for name, numbers in PAPER.items():
            found = select(records, data=BERKELEY, row=name)
            row = [name]
            for loss, paper in numbers.items():
                ours = _scores(found[0])[loss] if found else (None, None)
                spread = found[0]["standard_errors"] if found and loss == _ERROR else (None, None)
                row += [beside(*entry) for entry in zip(paper, ours, spread, strict=True)]
            rows.append(row)
        out.append(table(header, rows))
        out.append(
            "\n## Stand-ins for the columns Bimodal and Gaussian\n\nFour other pictures of 64 x 64: ten noisy versions "
            f"of the first for training and {self.num_tests} of all for tests. The paper's classification errors are "
            "for other pictures, so that numbers do not compare.\n\n"
        )
        header = [f"{kind}, {whose}, {part}" for kind in STAND_INS for whose in ("paper", "ours") for part in _PARTS]
        rows = []
        for name, others in _PAPER_OTHERS.items():
            row = [name]
            for kind in STAND_INS:
                paper = others[kind]
                found = select(records, data=kind, row=name)
                ours = found[0]["errors"] if found else ("-", "-")
                row += [f"{value:.4f}" if isinstance(value, float) else value for value in (*paper, *ours)]
            rows.append(row)
        out.append(table(["training loss", *header], rows))
        return "".join(out) + "\n## Training\n\n" + training_table(records, ["data", "row"])

    def plot(self, records: list[Record]) -> Figure:
        """Three test pictures, their noisy versions, and marginals."""
        tests = self._scenes(BERKELEY, "test", min(3, self.num_pictures))
        pictures = [scene.picture for scene in tests.blocks[0].scenes]
        rows: list[tuple[str, list[Shown | None]]] = [
            ("input", [picture.image for picture in pictures]),
            ("true labels", [picture.labels for picture in pictures]),
        ]
        for record in select(records, data=BERKELEY):
            model = with_parameters(one_table_model().to(self.device), record["parameters"])
            found = predict(model, tests, prediction(self.tol), chunk_size(self.device))
            rows.append((record["row"], [shade(predicted.marginals) for predicted in found]))
        return gallery(["" for _ in pictures], rows)

    def _sizes(self, column: str) -> tuple[int, int]:
        return (self.num_pictures, self.num_pictures) if column == BERKELEY else (10, self.num_tests)

    def _scenes(self, column: str, part: str, count: int) -> Scenes:
        return _scenes(self.root, column, self.shape, part, count, self.device)

    def _fit(self, column: str, criterion: Criterion, start: list[float] | None) -> Result:
        training, tests = (self._scenes(column, *part) for part in zip(_PARTS, self._sizes(column), strict=True))
        # Parameters of the likelihood need many sweeps, which small pictures can afford.
        how = inference(self.tol, 10 * self.tol, 1000 if column == BERKELEY else 2000)
        model, parts, size = one_table_model().to(self.device), (training, tests), chunk_size(self.device)
        result = train(model, training, criterion, how, optimiser(), start, chunk_size=size, first=FIRST)
        tested = prediction(self.tol)
        of_parts = [_risks(model, part, tested, size) for part in parts]
        scores = {name: [finite(risks[name]) for risks in of_parts] for name in _LOSSES}
        return result | {"scores": scores} | evaluate(model, parts, tested, size)


@torch.no_grad()
def _risks(model: rf.Conditional, scenes: Scenes, inference: rf.Inference, chunk_size: int) -> dict[str, float]:
    """All losses per pixel, by one run of inference."""
    sums, pixels = dict.fromkeys(_LOSSES, 0.0), 0
    for block in scenes.blocks:
        for start in range(0, len(block.scenes), chunk_size):
            part = block.examples.select(slice(start, start + chunk_size))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)  # what `evaluate` reports as unsettled
                solution = inference(part.graph, model(part.graph, part.inputs))
            pixels += part.labels.numel()
            for name, loss in _LOSSES.items():
                if isinstance(loss, rf.losses.AbstractMarginalLoss):
                    values = loss.of_solution(solution, part.labels, part.labels >= 0)
                else:
                    values = solution.log_partition - part.graph.score(solution.theta, part.labels)
                sums[name] += float(values.sum())
    return {name: total / pixels for name, total in sums.items()}


def one_table_model() -> rf.Conditional:
    """Potentials affine in y, and one table for all edges."""
    nodes, edges = (nn.Linear(inputs, outputs, bias=False, dtype=torch.float64) for inputs, outputs in ((2, 2), (1, 4)))
    for linear in (nodes, edges):
        nn.init.zeros_(linear.weight)
    return rf.Conditional(nodes, {"horizontal": edges, "vertical": edges})


def _scores(record: Record) -> Result:
    return {**record["scores"], _ERROR: record["errors"]}


@lru_cache(maxsize=2)
def _scenes(root: str | None, column: str, shape: tuple[int, int], part: str, count: int, device: str) -> Scenes:
    if column == BERKELEY:
        (split,) = Recorded.BERKELEY_2010.read()
        pictures = rf.datasets.denoising(
            rf.datasets.bsds500(root).select(getattr(split, part)[:count]), rf.datasets.PowerNoise(1.25), shape=shape
        )
    else:
        pictures, split = rf.datasets.noisy_shapes(STAND_INS[column])
        names = getattr(split, part)
        pictures = pictures.select(names[:: len(names) // count][:count])
    return Scenes.of(describe(pictures, FEATURES), 2, device=device)
