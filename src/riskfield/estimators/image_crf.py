"""`ImageCRF`: from images and masks to marginals. It computes the features and handles resolutions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.decoders import AbstractDecoder
from riskfield.estimators.base import AbstractCRF
from riskfield.estimators.defaults import LOSS, RIDGE
from riskfield.estimators.design import DIRECTIONS, Codes, Design, Grid, Sizes
from riskfield.features.image import ImageFeatures, as_floats
from riskfield.features.resample import reduce_labels, resize
from riskfield.infer import InferenceChoice
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.losses.loss import LossLike


class ImageCRF(AbstractCRF):
    """A conditional random field that labels the pixels of images, as in Domke (2013), section 8.

    It is a `GridCRF` on features that it computes itself, with edges between a pixel and its four neighbours.

    X is a list of images, arrays of shape (row, column) or (row, column, 3), grey and coloured ones of any sizes:
    bytes, 16-bit integers, booleans, or floats, taken as they are. y has an array of shape (row, column) for each, of
    integers or strings, with -1 where a label is unknown.

    Arguments:
        features: which features are computed of an image, and the resolution at which inference runs. By default
            `ImageFeatures()`. Below the resolution of the images, a pixel of the grid learns the label that covers most
            of it, and marginals are interpolated back. States that a `decoder` chooses are repeated.
        loss, inference, decoder, ridge, lasso, optimiser, initial, ignore, chunk_size, random_state, verbose, device,
            dtype: as for `AbstractCRF`.

    `features_` is what `features` came to be.

    >>> import numpy as np
    >>> from riskfield import ImageCRF
    >>> from riskfield.features import Colour, ColourDifference, Constant, ImageFeatures
    >>> from riskfield.optim import LBFGS
    >>> rng = np.random.default_rng(0)
    >>> masks = [np.kron(rng.integers(0, 2, shape), np.ones((5, 5), int)) for shape in [(3, 4), (2, 5), (4, 4)]]
    >>> images = [mask[..., None] + rng.normal(size=(*mask.shape, 3)) for mask in masks]
    >>> features = ImageFeatures(pixels=(Constant(), Colour()), edges=(Constant(), ColourDifference()))
    >>> crf = ImageCRF(features, optimiser=LBFGS(iterations=20)).fit(images[:2], masks[:2])
    >>> crf.predict_marginals(images)[2].shape
    (20, 20, 2)
    >>> crf.score(images[2:], masks[2:]) > 0.9
    True
    """

    _fitted = (*AbstractCRF._fitted, "features_")

    def __init__(
        self,
        features: ImageFeatures | None = None,
        *,
        loss: str | LossLike = LOSS,
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float = RIDGE,
        lasso: float = 0.0,
        optimiser: AbstractOptimiser | None = None,
        initial: Sequence[LossLike] | None = None,
        ignore: Any = -1,
        chunk_size: int | None = None,
        random_state: Any = 0,
        verbose: bool = False,
        device: str | None = None,
        dtype: str | None = None,
    ):
        self.features = features
        self.loss = loss
        self.inference = inference
        self.decoder = decoder
        self.ridge = ridge
        self.lasso = lasso
        self.optimiser = optimiser
        self.initial = initial
        self.ignore = ignore
        self.chunk_size = chunk_size
        self.random_state = random_state
        self.verbose = verbose
        self.device = device
        self.dtype = dtype

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> Self:
        """Fit the model to images and their labels, as `AbstractCRF.fit`."""
        self.features_ = ImageFeatures() if self.features is None else self.features
        if not isinstance(self.features_, ImageFeatures):
            raise TypeError(f"`features` must be an object such as `ImageFeatures()`. Got {self.features_!r}.")
        return super().fit(X, y, sample_weight, checkpoint=checkpoint, resume=resume)

    def _num_constants(self) -> int:
        return 0  # a `Constant()` is among the features where it is wanted

    def _edge_types(self) -> tuple[str, ...]:
        return DIRECTIONS[:2]

    def _designs(self, X: Any, sizes: Sizes | None = None) -> list[Design]:
        if isinstance(X, np.ndarray) and X.ndim == 3 and X.shape[-1] == 3:
            # Its rows would pass for grey images, three pixels wide.
            raise ValueError(f"`X` must be a list of images. Got what looks like one image, of shape {X.shape}.")
        return super()._designs(X, sizes)

    def _design(self, example: Any, name: str) -> Design:
        image = np.asarray(example)
        as_floats(image, name)  # refuses what is no image
        return _ImageDesign(image, self.features_)


@dataclass(frozen=True, eq=False)
class _ImageDesign:
    """An image. Features are computed when they are needed, since they take far more memory than the image."""

    image: npt.NDArray[Any]
    features: ImageFeatures

    @property
    def structure(self) -> Grid:
        """The grid at the resolution of inference."""
        return Grid(*self.features.shape(*self.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the image."""
        return self.image.shape[0], self.image.shape[1]

    @property
    def sizes(self) -> Sizes:
        """The same for all images."""
        return Sizes(self.features.num_pixel_features, self.features.num_edge_features, 2)

    def inputs(self) -> dict[str, Tensor]:
        """Compute the features."""
        return self.features(self.image).inputs(torch.float32)

    def reduce(self, codes: Codes) -> Codes:
        """The label that covers most of each pixel of the grid."""
        grid = self.structure
        return reduce_labels(torch.from_numpy(codes), (grid.rows, grid.columns)).flatten().numpy()

    def expand(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Marginals interpolated, or states repeated, at the resolution of the image."""
        grid = self.structure
        coarse = values.reshape(grid.rows, grid.columns, *values.shape[1:])
        if values.ndim > 1:
            return np.asarray(resize(torch.from_numpy(coarse), self.shape).numpy())
        rows, columns = self.shape
        row, column = np.arange(rows) * grid.rows // rows, np.arange(columns) * grid.columns // columns
        return coarse[np.ix_(row, column)]
