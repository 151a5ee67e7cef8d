"""The public names, which `riskfield` takes from here when the first of them is used."""

from typing import TYPE_CHECKING

from riskfield import (
    adjoints,
    datasets,
    decoders,
    entropy,
    errors,
    features,
    graph,
    inference,
    io,
    learning,
    losses,
    metrics,
    models,
    nn,
    optim,
)
from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.fixed_point import FixedPoint
from riskfield.adjoints.kkt import KKT
from riskfield.adjoints.perturb import Perturb
from riskfield.adjoints.unroll import Unroll
from riskfield.entropy import TRW, Bethe, CountingNumbers
from riskfield.examples import Examples
from riskfield.gradient_check import check_gradients
from riskfield.graph.builders import Union, chain, from_edges
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.grids import grid
from riskfield.graph.schedule import Coloured, Parallel, Sequential
from riskfield.infer import ExactOnForests, Inference, infer
from riskfield.inference.convex import ConvexFreeEnergy
from riskfield.inference.exact import Exact, ExactMAP
from riskfield.inference.gibbs import sample
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.solution import Solution
from riskfield.inference.stop import Stop
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit import fit
from riskfield.learning.predict import predict
from riskfield.learning.validation import Validation
from riskfield.models.conditional import Conditional, LinearModel
from riskfield.mrf import MRF
from riskfield.threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from riskfield.estimators.crf import CRF
    from riskfield.estimators.grid_crf import GridCRF
    from riskfield.estimators.image_crf import ImageCRF
    from riskfield.estimators.per_variable import PerVariable

__all__ = [
    "CRF",
    "KKT",
    "MRF",
    "TRW",
    "Bethe",
    "Checkpoints",
    "Coloured",
    "Conditional",
    "ConvexFreeEnergy",
    "CountingNumbers",
    "Envelope",
    "Exact",
    "ExactMAP",
    "ExactOnForests",
    "Examples",
    "FactorGraph",
    "FixedPoint",
    "GridCRF",
    "ImageCRF",
    "Inference",
    "LinearModel",
    "MaxProduct",
    "MeanField",
    "MessagePassing",
    "Parallel",
    "PerVariable",
    "Perturb",
    "Sequential",
    "Solution",
    "Stop",
    "Union",
    "Unroll",
    "Validation",
    "adjoints",
    "chain",
    "check_gradients",
    "datasets",
    "decoders",
    "entropy",
    "errors",
    "features",
    "fit",
    "from_edges",
    "get_num_threads",
    "graph",
    "grid",
    "infer",
    "inference",
    "io",
    "learning",
    "losses",
    "metrics",
    "models",
    "nn",
    "optim",
    "predict",
    "sample",
    "set_num_threads",
]
