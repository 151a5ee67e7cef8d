"""The defaults of the estimators and of the commands that use them. This module does not load scikit-learn."""

from __future__ import annotations

import torch

from riskfield.entropy import TRW
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.kernels import default_schedule
from riskfield.learning.lbfgs import LBFGS
from riskfield.losses.likelihood import SurrogateEM
from riskfield.losses.loss import AbstractLoss
from riskfield.losses.marginal import CliqueSmoothedClassification, SmoothedClassification
from riskfield.losses.piecewise import Independent

LOSS = "univariate-logistic"
RIDGE = 1e-3
RHO = 0.5
SWEEPS = 10
ITERATIONS = 200
VALIDATION_FRACTION = 0.2  # of the images, to hold out
PATIENCE = 10  # iterations without an improvement on them before training ends early
OPTIMISER = LBFGS(ITERATIONS)


def default_inference(device: torch.device) -> ExactOnForests:
    """Exact on forests, truncated TRW on other graphs, in the order that suits the device."""
    trw = MessagePassing(TRW(RHO), default_schedule(device))
    return ExactOnForests(Inference(trw, Stop(SWEEPS, tol=None)))


INFERENCE = default_inference(torch.device("cpu"))


def default_initial(loss: AbstractLoss) -> tuple[AbstractLoss, ...]:
    """What Domke (2013), section 8, fits before a loss."""
    if isinstance(loss, Independent):
        return ()
    if isinstance(loss, SmoothedClassification | CliqueSmoothedClassification):
        return Independent(), SurrogateEM()
    return (Independent(),)
