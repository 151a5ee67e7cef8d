"""The names of losses, for estimators, commands and reports: the name of the class in lower case with hyphens."""

from __future__ import annotations

import re

from riskfield.errors import did_you_mean
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


def loss_named(name: str) -> AbstractLoss:
    """The loss with this name."""
    if name not in LOSSES:
        known, hint = ", ".join(LOSSES), did_you_mean(name, LOSSES)
        raise ValueError(f"`loss` must be a loss object, or one of {known}. Got {name!r}.{hint}")
    return LOSSES[name]
