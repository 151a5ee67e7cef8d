"""`ImageCRF`: from images and masks to marginals, with features and resolutions seen to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from riskfield.data.picture_examples import picture_examples
from riskfield.data.pictures import Picture
from riskfield.features.image import ImageFeatures, as_floats
from riskfield.features.resample import resize
from riskfield.graph.builders import grid
from riskfield.infer import InferenceChoice
from riskfield.learning._base import DEFAULT_INFERENCE, AbstractEstimator
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.labels import Array, as_labels, classes_of
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.stages import Stage, fit_stages
from riskfield.losses.likelihood import SurrogateEM
from riskfield.losses.loss import AbstractLoss, LossLike
from riskfield.losses.marginal import CliqueSmoothedClassification, SmoothedClassification
from riskfield.losses.piecewise import Independent
from riskfield.models.conditional import LinearModel
from riskfield.progress import bar


class ImageCRF(AbstractEstimator):
    """A conditional random field that labels the pixels of pictures, as in Domke (2013), section 8.

    X is a list of pictures, arrays of shape (row, column) or (row, column, 3), grey and coloured ones of any sizes:
    bytes, 16-bit integers, booleans, or floats, taken as they are. y has an array of shape (row, column) for each, of
    integers or strings, with -1 where a label is not known.

    Arguments:
        features: what is seen of a picture, and the resolution at which inference runs. By default `ImageFeatures()`.
            Below the resolution of the pictures a pixel of the grid learns the label that covers most of it, and
            marginals are interpolated back.
        loss: a loss object, or its name, as for `CRF`.
        inference: how marginals are computed, in training as in prediction. By default as for `CRF`.
        ridge: the weight of the squares of all parameters, relative to the loss per pixel.
        optimiser: by default `LBFGS(iterations=200)`.
        initial: losses to fit first, in turn. By default, as in the paper, `Independent()`, and in front of a smoothed
            classification error `SurrogateEM()` after that; an empty tuple for none.
        chunk_size: how many pictures are looked at at once, to bound memory.
        random_state: seeds what is random; L-BFGS on a loss that draws nothing is not.
        verbose: show progress bars.

    After `fit` there are `classes_`, the labels in order; `model_`, the `LinearModel`; `features_` and `inference_`;
    `results_`, how each of the losses was fitted; and `feature_seconds_`, how long it took to compute features.

    >>> import numpy as np
    >>> from riskfield import Colour, ColourDifference, Constant, ImageCRF, ImageFeatures, LBFGS
    >>> rng = np.random.default_rng(0)
    >>> masks = [np.kron(rng.integers(0, 2, shape), np.ones((5, 5), int)) for shape in [(3, 4), (2, 5), (4, 4)]]
    >>> images = [mask[..., None] + rng.normal(size=(*mask.shape, 3)) for mask in masks]
    >>> recipe = ImageFeatures(pixels=(Constant(), Colour()), edges=(Constant(), ColourDifference()))
    >>> crf = ImageCRF(recipe, optimiser=LBFGS(iterations=20)).fit(images[:2], masks[:2])
    >>> crf.predict_marginals(images)[2].shape
    (20, 20, 2)
    >>> crf.score(images[2:], masks[2:]) > 0.9
    True
    """

    _fitted = ("classes_", "features_", "inference_")

    def __init__(
        self,
        features: ImageFeatures | None = None,
        *,
        loss: str | LossLike = "clique-logistic",
        inference: InferenceChoice | None = None,
        ridge: float = 1e-3,
        optimiser: AbstractOptimiser | None = None,
        initial: Sequence[LossLike] | None = None,
        chunk_size: int | None = 4,
        random_state: Any = 0,
        verbose: bool = False,
    ):
        self.features = features
        self.loss = loss
        self.inference = inference
        self.ridge = ridge
        self.optimiser = optimiser
        self.initial = initial
        self.chunk_size = chunk_size
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, *, checkpoint: Checkpoints | str | Path | None = None, resume: bool = False) -> Self:
        """Fit the model.

        Arguments:
            X: the pictures.
            y: their labels.
            checkpoint: a folder to keep checkpoints in, or `Checkpoints(folder, every=...)`.
            resume: go on where the checkpoints in it end.

        Returns:
            The estimator itself.
        """
        pictures = _pictures(X)
        check_consistent_length(pictures, y)
        if not pictures:
            raise ValueError("`X` must hold at least one picture. Got none.")
        self.features_ = ImageFeatures() if self.features is None else self.features
        if not isinstance(self.features_, ImageFeatures):
            raise TypeError(f"`features` must be a recipe such as `ImageFeatures()`. Got {self.features_!r}.")
        stages = self.stages()
        self.inference_ = DEFAULT_INFERENCE if self.inference is None else self.inference
        labels = [as_labels(own, p.shape[:2], f"y[{k}]") for k, (p, own) in enumerate(zip(pictures, y, strict=True))]
        self.classes_ = classes_of(labels)
        pairs = enumerate(zip(pictures, labels, strict=True))
        coded = [Picture(f"X[{k}]", picture, self._codes(own)) for k, (picture, own) in pairs]
        began = time.perf_counter()
        shown = bar(coded, shown=self.verbose, what="features")
        examples = picture_examples(shown, self.features_, len(self.classes_))
        self.feature_seconds_ = time.perf_counter() - began
        self.model_ = self._model()
        self.results_ = fit_stages(
            self.model_,
            examples,
            stages,
            seed=self._seed(),
            checkpoint=checkpoint,
            resume=resume,
            chunk_size=self.chunk_size,
            progress=self.verbose,
        )
        return self

    def predict(self, X: Any) -> Any:
        """The most probable label of each pixel: an array if X is one, else a list of arrays."""
        labels = [self.classes_[marginals.argmax(-1)] for marginals in self._marginals(X)]
        return np.stack(labels) if isinstance(X, np.ndarray) and labels else labels

    def predict_marginals(self, X: Any) -> Any:
        """P(label) of each pixel, in a last axis ordered as `classes_` is: an array if X is one, else a list."""
        marginals = self._marginals(X)
        return np.stack(marginals) if isinstance(X, np.ndarray) and marginals else marginals

    def stages(self) -> list[Stage]:
        """What `fit` does, loss after loss."""
        loss = self._loss()
        inference = DEFAULT_INFERENCE if self.inference is None else self.inference
        optimiser = LBFGS(iterations=200) if self.optimiser is None else self.optimiser
        initial = _papers_initial(loss) if self.initial is None else self.initial
        if not isinstance(initial, Sequence) or isinstance(initial, str):
            raise TypeError(f"`initial` must be a tuple of losses. Got {initial!r}.")
        return [Stage(each, inference, optimiser, self.ridge) for each in [*initial, loss]]

    @torch.no_grad()
    def _marginals(self, X: Any) -> list[npt.NDArray[np.float64]]:
        check_is_fitted(self)
        found = []
        for picture in _pictures(X):
            features = self.features_(picture)
            graph = grid(*features.shape, len(self.classes_))
            solution = self.inference_.on(graph)(graph, self.model_(graph, features.inputs()))
            coarse = solution.node_marginals[0].reshape(*features.shape, -1)
            found.append(resize(coarse, picture.shape[:2]).numpy())
        return found

    def _model(self) -> LinearModel:
        edges = self.features_.num_edge_features
        types = {"horizontal": edges, "vertical": edges}
        return LinearModel(len(self.classes_), self.features_.num_pixel_features, types)


def _papers_initial(loss: AbstractLoss) -> tuple[LossLike, ...]:
    """What Domke (2013), section 8, fits before a loss."""
    if isinstance(loss, Independent):
        return ()
    if isinstance(loss, SmoothedClassification | CliqueSmoothedClassification):
        return Independent(), SurrogateEM()
    return (Independent(),)


def _pictures(X: Any) -> list[Array]:
    """All pictures, checked."""
    if isinstance(X, np.ndarray) and X.ndim == 3 and X.shape[-1] == 3:
        # Its rows would pass for grey pictures, three pixels wide.
        raise ValueError(f"`X` must be a list of pictures. Got what looks like one picture, of shape {X.shape}.")
    pictures = [np.asarray(picture) for picture in X]
    for k, picture in enumerate(pictures):
        as_floats(picture, f"X[{k}]")
    return pictures
