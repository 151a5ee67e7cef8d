"""Features of images, the inputs of models."""

from riskfield.features.image import FeatureMaps, ImageFeatures
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
from riskfield.features.resample import reduce_labels, resize

__all__ = [
    "HOG",
    "Colour",
    "ColourDifference",
    "Constant",
    "FeatureMaps",
    "Fourier",
    "ImageFeatures",
    "Intensity",
    "Position",
    "SobelResponse",
    "reduce_labels",
    "resize",
]
