"""The defaults of the estimators and of the commands that use them. This module does not load scikit-learn."""

from __future__ import annotations

from riskfield.entropy import TRW
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.request import Stop
from riskfield.learning.lbfgs import LBFGS

LOSS = "univariate-logistic"
RIDGE = 1e-3
RHO = 0.5
SWEEPS = 10
ITERATIONS = 200
INFERENCE = ExactOnForests(Inference(MessagePassing(TRW(RHO)), Stop(SWEEPS, tol=None)))
OPTIMISER = LBFGS(ITERATIONS)
