"""What the file of a fitted estimator may name: these classes, those that users register, and nothing else.

A name in a file outlives the module that defines the class. A class that is renamed keeps its old name here. What holds
a function, such as `Custom` or `ConvexFreeEnergy`, cannot be saved and is not listed.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar

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
from riskfield.inference.exact import Exact, ExactMAP
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.stop import Stop
from riskfield.io.codec import Registry
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.stochastic import SMD, Torch
from riskfield.losses.contrastive_divergence import ContrastiveDivergence
from riskfield.losses.hybrid import Hybrid
from riskfield.losses.l1_mse_f_measure import L1, MSE, FMeasure
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

_SAVED: dict[str, Any] = {"Trial": Trial, **_INFERENCE, **_LOSSES_AND_DECODERS, **_FEATURES, **_OPTIMISERS}
SAVED: Registry = MappingProxyType(_SAVED)

Class = TypeVar("Class", bound=type)


def register(own: Class) -> Class:
    """A class decorator: the files of estimators may name your algorithm, loss, decoder or feature.

    The class must be a dataclass, whose fields are saved. Its name in a file is that of its module and its own. Whoever
    loads the file must have imported the module before. A class registered before under the same name is replaced.

    >>> import tempfile
    >>> from dataclasses import dataclass
    >>> import riskfield as rf
    >>> @register
    ... @dataclass(frozen=True)
    ... class Missed(rf.losses.AbstractMarginalLoss):
    ...     scale: float = 1.0
    ...
    ...     def of_solution(self, solution, labels, mask):
    ...         return self.scale * rf.losses.UnivariateQuadratic().of_solution(solution, labels, mask)
    >>> crf = rf.CRF(loss=Missed(2.0)).fit([[[0.0], [1.0]]], [[0, 1]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     crf.save(f"{folder}/crf.safetensors")
    ...     rf.CRF.load(f"{folder}/crf.safetensors").loss
    Missed(scale=2.0)
    """
    if not isinstance(own, type) or not is_dataclass(own):
        raise TypeError(f"`own` must be a dataclass, whose fields can be saved. Got {own!r}.")
    _SAVED[f"{own.__module__}.{own.__qualname__}"] = own
    return own
