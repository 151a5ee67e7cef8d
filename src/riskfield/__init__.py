"""Train graphical models for the predictions you will actually make."""

from riskfield.adjoints.check import GradientReport, check_gradients
from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.kkt import KKT, Direct, Minres
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.second_order import hessian_vector_product
from riskfield.adjoints.unroll import Unroll
from riskfield.entropy import TRW, AbstractEntropy, Bethe, Counting, CountingNumbers, spanning_tree_rho
from riskfield.errors import (
    AdjointError,
    AdjointWarning,
    ConvergenceWarning,
    FileFormatError,
    ImpossibleEvidenceError,
    RiskfieldError,
    TreewidthError,
)
from riskfield.graph.builders import Union, chain, from_edges, grid
from riskfield.graph.factor_graph import FactorGraph, FactorGroup, NodeGroup
from riskfield.graph.schedule import Levels, Parallel, Sequential, colour_order, colours, compile_levels
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.evidence import clamp
from riskfield.inference.exact import Exact
from riskfield.inference.gibbs import frequencies, sample
from riskfield.inference.infer import AbstractAdjoint, Stop, infer
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.settings import Inference, Role
from riskfield.inference.solution import Solution
from riskfield.io.uai import UAIModel, read_evidence, read_uai, write_mar, write_pr
from riskfield.losses.loss import AbstractLoss, AbstractMarginalLoss, Custom, empirical_risk, num_counted
from riskfield.losses.marginal import (
    CliqueLogistic,
    CliqueQuadratic,
    CliqueSmoothedClassification,
    SmoothedClassification,
    UnivariateLogistic,
    UnivariateQuadratic,
)
from riskfield.threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "KKT",
    "TRW",
    "AbstractAdjoint",
    "AbstractAlgorithm",
    "AbstractEntropy",
    "AbstractLoss",
    "AbstractMarginalLoss",
    "AdjointError",
    "AdjointWarning",
    "Bethe",
    "CliqueLogistic",
    "CliqueQuadratic",
    "CliqueSmoothedClassification",
    "ConvergenceWarning",
    "Counting",
    "CountingNumbers",
    "Custom",
    "Direct",
    "Envelope",
    "Exact",
    "FactorGraph",
    "FactorGroup",
    "FileFormatError",
    "FixedPoint",
    "GradientReport",
    "ImpossibleEvidenceError",
    "Inference",
    "Levels",
    "MaxProduct",
    "MeanField",
    "MessagePassing",
    "Minres",
    "NodeGroup",
    "Parallel",
    "Perturb",
    "RiskfieldError",
    "Role",
    "Sequential",
    "SmoothedClassification",
    "Solution",
    "Stop",
    "TreewidthError",
    "UAIModel",
    "Union",
    "UnivariateLogistic",
    "UnivariateQuadratic",
    "Unroll",
    "__version__",
    "chain",
    "check_gradients",
    "clamp",
    "colour_order",
    "colours",
    "compile_levels",
    "empirical_risk",
    "frequencies",
    "from_edges",
    "get_num_threads",
    "grid",
    "hessian_vector_product",
    "infer",
    "num_counted",
    "read_evidence",
    "read_uai",
    "sample",
    "set_num_threads",
    "spanning_tree_rho",
    "write_mar",
    "write_pr",
]
