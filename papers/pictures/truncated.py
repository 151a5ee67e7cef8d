"""What the studies of truncated fitting share (Domke 2013, sections 8.3 and 8.4).

Inference stops after a fixed number of sweeps, in training and in tests, and gradients are taken through these sweeps.
The likelihood is the truncated one. Pseudolikelihood, piecewise and independent are trained without inference and
tested with converged inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

import riskfield as rf
from papers.cells import Result
from papers.pictures.criteria import INDEPENDENT, Criterion, train
from papers.pictures.scenes import Scenes, chunk_size, evaluate

CONVERGED = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(1000, 1e-5))
# Trained without inference; the first is where all others start.
WITHOUT = (
    Criterion(INDEPENDENT, rf.losses.Independent(), start=None, ridge=1e-4),
    Criterion("pseudolikelihood", rf.losses.Pseudolikelihood(), ridge=1e-4),
    Criterion("piecewise", rf.losses.Piecewise(), ridge=1e-4),
)
# Single precision takes half the time of double precision, and gives the horses the same objectives to four decimals.
PRECISION, PRECISION_NAME = torch.float32, "float32"
SWEEP = (
    "A sweep of TRW visits the pixels forwards and backwards, and updates every message once. An iteration of the "
    "paper may be one direction only, which is half as much.\n"
)


@dataclass(frozen=True)
class RowByRow(rf.MeanField):
    """Mean field that visits the pixels row by row, whatever the size of the grid."""

    def visits(self, graph: rf.FactorGraph) -> Sequence[int]:
        """The numbering of the pixels."""
        return range(graph.num_variables)


class Mode(Enum):
    """Kinds of inference, by the names they have in the tables."""

    TRW = "TRW"
    MEAN_FIELD = "MNF"
    ROW_BY_ROW = "MNF row by row"

    def after(self, sweeps: int) -> rf.Inference:
        """Inference of this kind that stops after a number of sweeps."""
        algorithms = {
            Mode.TRW: rf.MessagePassing(rf.TRW(0.5)),
            Mode.MEAN_FIELD: rf.MeanField(),
            Mode.ROW_BY_ROW: RowByRow(),
        }
        return rf.Inference(algorithms[self], rf.Stop(sweeps, tol=None), rf.Unroll())


@dataclass(frozen=True)
class Trainer:
    """How the criteria of a table are fitted and tested.

    Arguments:
        features: of pictures.
        num_states: labels.
        iterations: of training, at most; of the first stage where there are several.
        device: of models and data.
        first: how many pictures to begin with, if not with all.
        dtype: of models and data.
    """

    features: rf.features.ImageFeatures
    num_states: int
    iterations: int
    device: str = "cpu"
    first: int | None = None
    dtype: torch.dtype = torch.float64

    @property
    def optimiser(self) -> rf.optim.LBFGS:
        """L-BFGS until an iteration gains almost nothing."""
        return rf.optim.LBFGS(iterations=self.iterations, gradient_tol=1e-5, change_tol=1e-6)

    @property
    def chunk_size(self) -> int:
        """How many pictures are evaluated at once."""
        return chunk_size(self.device)

    def model(self) -> rf.LinearModel:
        """With parameters of 0."""
        pixels, edges = self.features.num_pixel_features, self.features.num_edge_features
        model = rf.LinearModel(self.num_states, pixels, {"horizontal": edges, "vertical": edges})
        return model.to(self.device, self.dtype)

    def __call__(
        self,
        criterion: Criterion,
        start: list[float] | None,
        training: Scenes,
        tests: Scenes,
        inference: rf.Inference,
    ) -> Result:
        """Fit a criterion, and measure its errors with its own inference, or else with that of training."""
        model, size = self.model(), {"chunk_size": self.chunk_size}
        result = train(model, training, criterion, inference, self.optimiser, start, first=self.first, **size)
        used = criterion.tested or (inference if criterion.inferred else CONVERGED)
        return result | evaluate(model, (training, tests), used, self.chunk_size)


def chosen(rows: Sequence[str], criteria: Sequence[Criterion]) -> list[str]:
    """The names of the criteria among the rows to train; if there are any, with that where the others start."""
    names = [criterion.name for criterion in criteria]
    return [name for name in names if name in rows or (rows and name == INDEPENDENT)]
