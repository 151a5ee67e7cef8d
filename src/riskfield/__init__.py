"""Train graphical models for the predictions you will actually make."""

import typing as _typing

from riskfield import _environment, nn  # noqa: F401  (the first one before all that loads torch)
from riskfield.adjoints.adjoint import AbstractAdjoint
from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.kkt import KKT
from riskfield.adjoints.linear_fixed_point import GMRES, Iterate
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.second_order import hessian_vector_product
from riskfield.adjoints.solvers import Direct, Minres
from riskfield.adjoints.unroll import Unroll
from riskfield.data.examples import Examples, join
from riskfield.data.feature_cache import FeatureCache
from riskfield.data.folders import image_folder
from riskfield.data.image_examples import image_examples
from riskfield.data.images import ImageSet, LabelledImage
from riskfield.decoders import (
    MAP,
    AbstractDecoder,
    AbstractSoftDecoder,
    EqualCount,
    ExpectedValue,
    MaxMarginal,
    SoftArgmax,
    SoftEqualCount,
    decode,
)
from riskfield.entropy import TRW, AbstractEntropy, Bethe, Counting, CountingNumbers, spanning_tree_rho
from riskfield.errors import (
    AdjointError,
    AdjointWarning,
    CheckpointError,
    ConvergenceWarning,
    DivergenceWarning,
    FileFormatError,
    ImpossibleEvidenceError,
    MissingDataError,
    RiskfieldError,
    TreewidthError,
)
from riskfield.features.image import (
    HOG,
    Colour,
    ColourDifference,
    Constant,
    FeatureMaps,
    Fourier,
    ImageFeatures,
    Intensity,
    Position,
    SobelResponse,
)
from riskfield.features.resample import resize
from riskfield.gradient_check import GradientReport, check_gradients
from riskfield.graph.builders import Union, chain, from_edges, grid
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.groups import FactorGroup, NodeGroup
from riskfield.graph.schedule import Coloured, Levels, Parallel, Sequential, colour_order, colours, compile_levels
from riskfield.infer import ExactOnForests, Inference, Role, infer
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.convex import (
    NEGATIVE_ENTROPY,
    NEGATIVE_LOG,
    SQUARE,
    ConvexFreeEnergy,
    ConvexFunction,
    InteriorPoint,
    SumProduct,
    Term,
)
from riskfield.inference.diagnostics import effective_sample_size
from riskfield.inference.evidence import clamp
from riskfield.inference.exact import Exact
from riskfield.inference.exact_map import ExactMAP
from riskfield.inference.gibbs import frequencies, sample
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.request import Stop
from riskfield.inference.solution import JointMode, Solution
from riskfield.io.uai import UAIModel, read_evidence, read_uai, write_mar, write_pr
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.predict import predict
from riskfield.learning.ranks import Ranks, ranks
from riskfield.learning.result import Fit, Reason, Record
from riskfield.learning.smd import SMD
from riskfield.learning.stages import Stage, fit_stages, incremental
from riskfield.learning.stochastic import Torch
from riskfield.learning.validation import Validation
from riskfield.losses.contrastive_divergence import ContrastiveDivergence
from riskfield.losses.decoded import L1, MSE, FMeasure
from riskfield.losses.hybrid import Hybrid
from riskfield.losses.likelihood import SurrogateEM, SurrogateLikelihood
from riskfield.losses.loss import AbstractLoss, AbstractMarginalLoss, Custom, empirical_risk, num_counted
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
from riskfield.metrics import error_rate, f_measure, regression_error
from riskfield.models.conditional import Conditional, LinearModel, Tables
from riskfield.models.convex import ConvexModel, LearnsInference, inference_of
from riskfield.models.generative import Generative
from riskfield.threads import get_num_threads, set_num_threads

if _typing.TYPE_CHECKING:
    from riskfield.estimators.crf import CRF
    from riskfield.estimators.grid_crf import GridCRF
    from riskfield.estimators.image_crf import ImageCRF
    from riskfield.estimators.per_variable import PerVariable

__version__ = "0.1.0"

__all__ = [
    "CRF",
    "GMRES",
    "HOG",
    "KKT",
    "L1",
    "LBFGS",
    "MAP",
    "MSE",
    "NEGATIVE_ENTROPY",
    "NEGATIVE_LOG",
    "SMD",
    "SQUARE",
    "TRW",
    "AbstractAdjoint",
    "AbstractAlgorithm",
    "AbstractDecoder",
    "AbstractEntropy",
    "AbstractLoss",
    "AbstractMarginalLoss",
    "AbstractOptimiser",
    "AbstractSoftDecoder",
    "AdjointError",
    "AdjointWarning",
    "Bethe",
    "CheckpointError",
    "Checkpoints",
    "CliqueLogistic",
    "CliqueQuadratic",
    "CliqueSmoothedClassification",
    "Colour",
    "ColourDifference",
    "Coloured",
    "Conditional",
    "Constant",
    "ContrastiveDivergence",
    "ConvergenceWarning",
    "ConvexFreeEnergy",
    "ConvexFunction",
    "ConvexModel",
    "Counting",
    "CountingNumbers",
    "Custom",
    "Direct",
    "DivergenceWarning",
    "Envelope",
    "EqualCount",
    "Exact",
    "ExactMAP",
    "ExactOnForests",
    "Examples",
    "ExpectedValue",
    "FMeasure",
    "FactorGraph",
    "FactorGroup",
    "FeatureCache",
    "FeatureMaps",
    "FileFormatError",
    "Fit",
    "FixedPoint",
    "Fourier",
    "Generative",
    "GradientReport",
    "GridCRF",
    "Hybrid",
    "ImageCRF",
    "ImageFeatures",
    "ImageSet",
    "ImpossibleEvidenceError",
    "Independent",
    "Inference",
    "Intensity",
    "InteriorPoint",
    "Iterate",
    "JointMode",
    "LabelledImage",
    "LearnsInference",
    "Levels",
    "LinearModel",
    "MaxMarginal",
    "MaxProduct",
    "MeanField",
    "MessagePassing",
    "Minres",
    "MissingDataError",
    "NodeGroup",
    "Parallel",
    "PatchPseudolikelihood",
    "PerVariable",
    "Perturb",
    "Piecewise",
    "Position",
    "Pseudolikelihood",
    "Ranks",
    "Reason",
    "Record",
    "RiskfieldError",
    "Role",
    "SaddlePoint",
    "Sequential",
    "SmoothedClassification",
    "SobelResponse",
    "SoftArgmax",
    "SoftEqualCount",
    "Solution",
    "Stage",
    "Stop",
    "SumProduct",
    "SurrogateEM",
    "SurrogateLikelihood",
    "Tables",
    "Term",
    "Torch",
    "TreewidthError",
    "UAIModel",
    "Union",
    "UnivariateLogistic",
    "UnivariateQuadratic",
    "Unroll",
    "Validation",
    "__version__",
    "chain",
    "check_gradients",
    "clamp",
    "colour_order",
    "colours",
    "compile_levels",
    "decode",
    "effective_sample_size",
    "empirical_risk",
    "error_rate",
    "f_measure",
    "fit",
    "fit_stages",
    "frequencies",
    "from_edges",
    "get_num_threads",
    "grid",
    "hessian_vector_product",
    "image_examples",
    "image_folder",
    "incremental",
    "infer",
    "inference_of",
    "join",
    "nn",
    "num_counted",
    "predict",
    "ranks",
    "read_evidence",
    "read_uai",
    "regression_error",
    "resize",
    "sample",
    "set_num_threads",
    "spanning_tree_rho",
    "write_mar",
    "write_pr",
]


_ESTIMATORS = {"CRF": "crf", "GridCRF": "grid_crf", "ImageCRF": "image_crf", "PerVariable": "per_variable"}

if not _typing.TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> _typing.Any:
        """Load the estimators, and scikit-learn with them, when they are asked for."""
        if name in _ESTIMATORS:
            from importlib import import_module

            return getattr(import_module(f"riskfield.estimators.{_ESTIMATORS[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
