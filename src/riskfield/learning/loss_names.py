"""The losses that have a name, for estimators and the command line."""

from __future__ import annotations

from riskfield.losses.likelihood import SurrogateEM
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

# With -1 among the labels, the likelihood sums over what is hidden: expectation maximisation.
LOSSES: dict[str, AbstractLoss] = {
    "univariate-logistic": UnivariateLogistic(),
    "univariate-quadratic": UnivariateQuadratic(),
    "clique-logistic": CliqueLogistic(),
    "clique-quadratic": CliqueQuadratic(),
    "smoothed-classification": SmoothedClassification(),
    "likelihood": SurrogateEM(),
    "pseudolikelihood": Pseudolikelihood(),
    "piecewise": Piecewise(),
    "independent": Independent(),
}
