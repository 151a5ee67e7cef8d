"""Fitting parameters: the loop over data, optimisers, checkpoints, several machines."""

from riskfield.examples import Examples, join
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit
from riskfield.learning.objective import Diverged, Objective
from riskfield.learning.predict import predict
from riskfield.learning.ranks import Ranks, ranks
from riskfield.learning.result import Fit, Reason, Record
from riskfield.learning.stages import Stage, fit_stages, incremental
from riskfield.learning.validation import Validation

__all__ = [
    "Checkpoints",
    "Diverged",
    "Examples",
    "Fit",
    "Objective",
    "Ranks",
    "Reason",
    "Record",
    "Stage",
    "Validation",
    "fit",
    "fit_stages",
    "incremental",
    "join",
    "predict",
    "ranks",
]
