"""What the file of a fitted estimator may name: these classes, and nothing else.

A name in a file outlives the module that defines the class. A class that is renamed keeps its old name here. What holds
a function, such as `Custom` or `ConvexFreeEnergy`, cannot be saved and is not listed.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import optim

from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.fixed_point_solvers import GMRES, Iterate
from riskfield.adjoints.kkt import KKT
from riskfield.adjoints.kkt_solvers import Direct, Minres
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.unroll import Unroll
from riskfield.decoders import MAP, EqualCount, ExpectedValue, MaxMarginal, SoftArgmax, SoftEqualCount
from riskfield.entropy import TRW, Bethe, CountingNumbers
from riskfield.estimators.ridge_path import Trial
from riskfield.features.image import ImageFeatures
from riskfield.features.kinds import (
    HOG,
    Colour,
    ColourDifference,
    Constant,
    Fourier,
    Intensity,
    Position,
    SobelResponse,
)
from riskfield.graph.schedule import Coloured, Parallel, Sequential
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.exact import Exact
from riskfield.inference.exact_map import ExactMAP
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.stop import Stop
from riskfield.io.codec import Registry
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.smd import SMD
from riskfield.learning.stochastic import Torch
from riskfield.losses.contrastive_divergence import ContrastiveDivergence
from riskfield.losses.decoded import L1, MSE, FMeasure
from riskfield.losses.hybrid import Hybrid
from riskfield.losses.likelihood import SurrogateEM, SurrogateLikelihood
from riskfield.losses.marginal import (
    CliqueLogistic,
    CliqueQuadratic,
    CliqueSmoothedClassification,
    SmoothedClassification,
    UnivariateLogistic,
    UnivariateQuadratic,
)
from riskfield.losses.piecewise import Independent, Piecewise
from riskfield.losses.pseudolikelihood import PatchPseudolikelihood, Pseudolikelihood
from riskfield.losses.saddle_point import SaddlePoint

_INFERENCE: dict[str, Any] = {
    "Bethe": Bethe,
    "CountingNumbers": CountingNumbers,
    "Direct": Direct,
    "Envelope": Envelope,
    "Exact": Exact,
    "ExactMAP": ExactMAP,
    "ExactOnForests": ExactOnForests,
    "FixedPoint": FixedPoint,
    "GMRES": GMRES,
    "Inference": Inference,
    "Iterate": Iterate,
    "KKT": KKT,
    "MaxProduct": MaxProduct,
    "MeanField": MeanField,
    "MessagePassing": MessagePassing,
    "Minres": Minres,
    "Coloured": Coloured,
    "Parallel": Parallel,
    "Perturb": Perturb,
    "Sequential": Sequential,
    "Stop": Stop,
    "TRW": TRW,
    "Unroll": Unroll,
}
_LOSSES_AND_DECODERS: dict[str, Any] = {
    "CliqueLogistic": CliqueLogistic,
    "CliqueQuadratic": CliqueQuadratic,
    "CliqueSmoothedClassification": CliqueSmoothedClassification,
    "ContrastiveDivergence": ContrastiveDivergence,
    "EqualCount": EqualCount,
    "ExpectedValue": ExpectedValue,
    "FMeasure": FMeasure,
    "Hybrid": Hybrid,
    "Independent": Independent,
    "L1": L1,
    "MAP": MAP,
    "MSE": MSE,
    "MaxMarginal": MaxMarginal,
    "PatchPseudolikelihood": PatchPseudolikelihood,
    "Piecewise": Piecewise,
    "Pseudolikelihood": Pseudolikelihood,
    "SaddlePoint": SaddlePoint,
    "SmoothedClassification": SmoothedClassification,
    "SoftArgmax": SoftArgmax,
    "SoftEqualCount": SoftEqualCount,
    "SurrogateEM": SurrogateEM,
    "SurrogateLikelihood": SurrogateLikelihood,
    "UnivariateLogistic": UnivariateLogistic,
    "UnivariateQuadratic": UnivariateQuadratic,
}
_FEATURES: dict[str, Any] = {
    "Colour": Colour,
    "ColourDifference": ColourDifference,
    "Constant": Constant,
    "Fourier": Fourier,
    "HOG": HOG,
    "ImageFeatures": ImageFeatures,
    "Intensity": Intensity,
    "Position": Position,
    "SobelResponse": SobelResponse,
}
_OPTIMISERS: dict[str, Any] = {
    "LBFGS": LBFGS,
    "SMD": SMD,
    "Torch": Torch,
    "torch.optim.ASGD": optim.ASGD,
    "torch.optim.Adadelta": optim.Adadelta,
    "torch.optim.Adagrad": optim.Adagrad,
    "torch.optim.Adam": optim.Adam,
    "torch.optim.AdamW": optim.AdamW,
    "torch.optim.Adamax": optim.Adamax,
    "torch.optim.NAdam": optim.NAdam,
    "torch.optim.RAdam": optim.RAdam,
    "torch.optim.RMSprop": optim.RMSprop,
    "torch.optim.Rprop": optim.Rprop,
    "torch.optim.SGD": optim.SGD,
}

SAVED: Registry = MappingProxyType({"Trial": Trial, **_INFERENCE, **_LOSSES_AND_DECODERS, **_FEATURES, **_OPTIMISERS})
