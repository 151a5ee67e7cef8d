"""The names of losses, for estimators, commands and reports: the name of the class in lower case with hyphens."""

from __future__ import annotations

import re

from riskfield.losses.likelihood import SurrogateEM, SurrogateLikelihood
from riskfield.losses.loss import AbstractLoss
from riskfield.losses.marginal import (
    CliqueLogistic,
    CliqueQuadratic,
    SmoothedClassification,
    UnivariateLogistic,
    UnivariateQuadratic,
)
from riskfield.losses.piecewise import Independent, Piecewise
from riskfield.losses.pseudolikelihood import Pseudolikelihood


def name_of(loss: AbstractLoss) -> str:
    """The name of a loss.

    >>> name_of(UnivariateLogistic()), name_of(SurrogateEM())
    ('univariate-logistic', 'surrogate-em')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(loss).__name__).lower()


# Losses that work with any model, inference and number of states, at their default settings.
LOSSES: dict[str, AbstractLoss] = {
    name_of(loss): loss
    for loss in (
        UnivariateLogistic(),
        UnivariateQuadratic(),
        CliqueLogistic(),
        CliqueQuadratic(),
        SmoothedClassification(),
        SurrogateLikelihood(),
        SurrogateEM(),
        Pseudolikelihood(),
        Piecewise(),
        Independent(),
    )
}
