"""Names of riskfield that the studies need and that are not public yet.

This is the only module of `papers` that may import from inside the package. When a name gets a public home, its users
import it from there and its line here goes.
"""

from riskfield.data.backgrounds import CLASSES, stanford_background
from riskfield.data.berkeley import bsds500
from riskfield.data.bundled import bundled_pictures, mosaics
from riskfield.data.horses import weizmann_horses
from riskfield.data.mnist import mnist
from riskfield.data.noise import BimodalNoise, GaussianNoise, PowerNoise, ReassignmentNoise, denoising
from riskfield.data.shapes import noisy_shapes
from riskfield.data.splits import Split, read_splits
from riskfield.features.resample import reduce_labels
from riskfield.inference.algorithm import Run
from riskfield.learning.objective import Diverged, Objective
from riskfield.losses.loss import Target
from riskfield.report.colours import class_colours

__all__ = [
    "CLASSES",
    "BimodalNoise",
    "Diverged",
    "GaussianNoise",
    "Objective",
    "PowerNoise",
    "ReassignmentNoise",
    "Run",
    "Split",
    "Target",
    "bsds500",
    "bundled_pictures",
    "class_colours",
    "denoising",
    "mnist",
    "mosaics",
    "noisy_shapes",
    "read_splits",
    "reduce_labels",
    "stanford_background",
    "weizmann_horses",
]
