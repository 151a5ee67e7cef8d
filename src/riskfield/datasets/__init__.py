"""Labelled images: folders of your own, public data sets, and data that need no download."""

from riskfield.datasets.backgrounds import STANFORD_CLASSES, stanford_background
from riskfield.datasets.berkeley import bsds500
from riskfield.datasets.bundled import bundled_images, mosaics
from riskfield.datasets.colours import class_colours
from riskfield.datasets.feature_cache import FeatureCache
from riskfield.datasets.folders import MaskReading, image_folder
from riskfield.datasets.horses import weizmann_horses
from riskfield.datasets.image_examples import image_examples
from riskfield.datasets.images import ImageSet, LabelledImage
from riskfield.datasets.mnist import mnist
from riskfield.datasets.noise import BimodalNoise, GaussianNoise, PowerNoise, ReassignmentNoise, denoising
from riskfield.datasets.shapes import noisy_shapes
from riskfield.datasets.splits import Split, read_splits

__all__ = [
    "STANFORD_CLASSES",
    "BimodalNoise",
    "FeatureCache",
    "GaussianNoise",
    "ImageSet",
    "LabelledImage",
    "MaskReading",
    "PowerNoise",
    "ReassignmentNoise",
    "Split",
    "bsds500",
    "bundled_images",
    "class_colours",
    "denoising",
    "image_examples",
    "image_folder",
    "mnist",
    "mosaics",
    "noisy_shapes",
    "read_splits",
    "stanford_background",
    "weizmann_horses",
]
