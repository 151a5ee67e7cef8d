"""`ImageCRF`: from images and masks to marginals. It computes the features and handles resolutions."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from riskfield.datasets.feature_cache import FeatureCache
from riskfield.decoders import AbstractDecoder
from riskfield.devices import as_device
from riskfield.estimators.base import AbstractCRF
from riskfield.estimators.blocks import Blocks, OfExamples
from riskfield.estimators.defaults import LOSS, PATIENCE, RIDGE, VALIDATION_FRACTION
from riskfield.estimators.design import DIRECTIONS, Design, Sizes
from riskfield.estimators.image_tiles import ImageBlocks, ImageDesign, MappedBlocks, TileDesign, tiling_of
from riskfield.estimators.labels import Array
from riskfield.estimators.ridge_path import (
    Parameters,
    SearchInterrupted,
    Trial,
    best_ridge,
    ridge_path,
    stages_after,
)
from riskfield.examples import Examples, blocks, take
from riskfield.features.image import ImageFeatures
from riskfield.features.window import Tile
from riskfield.infer import InferenceChoice
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.result import Fit
from riskfield.learning.stages import LAST, Stage
from riskfield.learning.validation import Validation, counted_origins, hold_out
from riskfield.losses.likelihood import SurrogateEM, SurrogateLikelihood
from riskfield.losses.loss import LossLike, as_loss
from riskfield.losses.piecewise import Independent
from riskfield.progress import note

MODEL_FILE = "model.safetensors"  # in the folder of a run of `riskfield fit`
_FEWEST = 5  # images with labels; with fewer, none is held out


class ImageCRF(AbstractCRF):
    """A conditional random field that labels the pixels of images, as in Domke (2013), section 8.

    It is a `GridCRF` on features that it computes itself, with edges between a pixel and its four neighbours.

    X is a list of images, grey or coloured and of any size: arrays of shape (row, column) or (row, column, 3) of bytes,
    16-bit integers, booleans, or floats, which are used unchanged. An entry may also be the path of an image file,
    which is read when it is needed. y has an array of shape (row, column) for each, of integers or strings, with -1
    where a label is unknown.

    Arguments:
        features: which features of an image are computed, and the resolution at which inference runs. By default
            `ImageFeatures()`. Below the resolution of the images, a pixel of the grid learns the label that covers most
            of it, and marginals are interpolated back. States that a `decoder` chooses are repeated.
        ridge: the weight of the squares of all parameters, relative to the loss per variable. By default it is chosen:
            a part of the images is held out, the model is trained on the others with smaller and smaller ridges (from
            0.1 to 1e-4), and the one with the lowest log loss of the marginals on the held-out images is taken. The
            model is then trained on all images, or with `early_stopping` on those that are not held out. With fewer
            than five images that have labels and a positive weight, nothing is held out, and the ridge is 1e-3.
        validation_fraction: the share of the images to hold out, to choose the ridge. With `early_stopping`, they also
            decide when training ends, and the model is trained on the other images only.
        loss, inference, decoder, lasso, optimiser, initial, class_weight, ignore, chunk_size: as for `AbstractCRF`.
        early_stopping, n_iter_no_change, n_jobs, random_state, verbose, device, dtype: as for `AbstractCRF`.

    Fitted attributes besides those of `AbstractCRF`: `features_`, the features in use; `ridge_`; `path_`, a
    `Trial` for every ridge that was tried (empty if training was interrupted before one was chosen; `ridge_` is then
    the ridge that was in use); `held_out_`, the numbers of the images that were held out, and `ridge_seconds_`, the
    time that the choice of the ridge took (neither is saved to a file). `independent()` is the same model without
    edges, fitted to the same images. Compare with it to see what the edges contribute.

    An image whose prediction would take more than half of the memory is predicted in overlapping tiles of 640 x 640
    pixels. The marginals of the 64 pixels at the border of a tile are discarded. `tiling(shape)` lists the tiles. `fit`
    cuts an image that would take more than 60 % of the memory into parts, which are separate examples.

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

    ridge: float | None  # type: ignore[assignment]
    ridge_: float
    path_: tuple[Trial, ...]
    held_out_: tuple[int, ...]
    ridge_seconds_: float
    baseline_: dict[str, Tensor] | None  # parameters of the model without edges
    baseline_results_: list[Fit]  # how it was fitted
    _fitted = (*AbstractCRF._fitted, "features_", "ridge_", "path_", "baseline_")
    _fits = (*AbstractCRF._fits, "baseline_results_")
    _cache: FeatureCache | None = None  # of the features, during `fit`
    _num_images: int = 0  # in the last call

    def __init__(
        self,
        features: ImageFeatures | None = None,
        *,
        loss: str | LossLike = LOSS,
        inference: InferenceChoice | None = None,
        decoder: AbstractDecoder | None = None,
        ridge: float | None = None,
        lasso: float = 0.0,
        optimiser: AbstractOptimiser | None = None,
        initial: Sequence[LossLike] | None = None,
        class_weight: Any = None,
        ignore: Any = -1,
        chunk_size: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = VALIDATION_FRACTION,
        n_iter_no_change: int = PATIENCE,
        n_jobs: int | None = None,
        random_state: Any = 0,
        verbose: bool | int = False,
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
        self.class_weight = class_weight
        self.ignore = ignore
        self.chunk_size = chunk_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.n_jobs = n_jobs
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
        cache: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fit the model to images and their labels, as `AbstractCRF.fit`.

        An image that would take more than 60 % of the memory is cut into parts of at most 512 x 512 pixels, which are
        separate examples. Their features are those of the whole image.

        Arguments:
            X, y, sample_weight, checkpoint, resume: as for `AbstractCRF.fit`.
            cache: a folder for features. They are then written to files, and training reads them from there, image by
                image, instead of keeping them in memory. Features that are there already are not computed again.
        """
        self.features_ = ImageFeatures() if self.features is None else self.features
        if not isinstance(self.features_, ImageFeatures):
            raise TypeError(f"`features` must be an object such as `ImageFeatures()`. Got {self.features_!r}.")
        self.ridge_, self.path_ = RIDGE if self.ridge is None else self.ridge, ()
        self.held_out_, self.ridge_seconds_ = (), 0.0
        self._cache = None if cache is None else FeatureCache(cache)
        try:
            return super().fit(X, y, sample_weight, checkpoint=checkpoint, resume=resume)
        finally:
            self._cache = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | None = None) -> Self:
        """Return the estimator that `save` or `riskfield fit` wrote.

        Arguments:
            path: the file, or the folder that `riskfield fit` wrote. A model of this command predicts values of masks.
            device: as for `AbstractCRF.load`.

        Raises:
            FileNotFoundError: if there is no such file, or the folder holds no fitted model.
            FileFormatError: if the file is damaged, or holds something else.
            ValueError: if PyTorch cannot use `device` here.
        """
        if Path(path).is_dir():
            if not (Path(path) / MODEL_FILE).is_file():
                raise FileNotFoundError(2, f"holds no fitted model, {MODEL_FILE}", os.fspath(path))
            path = Path(path) / MODEL_FILE
        return super().load(path, device=device)

    def _num_constants(self) -> int:
        return 0  # a `Constant()` is among the features where it is wanted

    def independent(self) -> Self:
        """The same model without edges: logistic regression at each pixel, fitted to the same images."""
        check_is_fitted(self)
        if self.baseline_ is None:
            raise ValueError("There is no baseline: training was interrupted, or began with another loss.")
        other = copy.copy(self)
        other.loss, other.initial, other.path_ = "independent", (), ()
        other.results_ = self.baseline_results_
        if self.path_:
            other.ridge_ = best_ridge(self.path_, "independent")
        other.model_ = self._model()
        other.model_.load_state_dict(self.baseline_)
        return other

    def stages(self) -> list[Stage]:
        """The stages of `fit`, as for `AbstractCRF`. Once a ridge is chosen: those of training on all images."""
        path = getattr(self, "path_", ())
        return stages_after(path, super().stages()) if path else super().stages()

    def _train(
        self, examples: Sequence[Examples], origins: Sequence[int], stages: Sequence[Stage], **settings: Any
    ) -> None:
        """Choose the ridge if it is not given, fit the model to all examples, and keep the baseline."""
        _check_complete(stages, examples)
        self.baseline_, self.baseline_results_ = None, []
        start: Parameters | None = None
        if settings["validation"] is not None:  # the images that are not among the examples
            self.held_out_ = tuple(sorted(set(range(self._num_images)) - set(origins)))
        if self.ridge is None and len(counted_origins(examples, origins)) >= _FEWEST:
            validation: Validation | None = settings["validation"]
            if validation is None:
                parts = hold_out(examples, origins, self.validation_fraction, settings["seed"])
                train, held_out = (take(examples, part) for part in parts)
                self.held_out_ = tuple(sorted({origins[k] for k in parts[1]}))
            else:
                train, held_out = tuple(examples), blocks(validation.data)
            model, began = self._model().to(as_device(self.device)), time.perf_counter()
            try:
                path, found = ridge_path(model, train, held_out, stages, **{**settings, "validation": None})
            except SearchInterrupted as interrupted:
                self.ridge_, self.results_ = interrupted.ridge, interrupted.results
                self.model_.load_state_dict(model.state_dict())
                return
            self.ridge_seconds_ = time.perf_counter() - began
            self.path_, self.ridge_ = tuple(path), best_ridge(path, "model")
            which = "all images" if validation is None else "the images that are not held out"
            note(f"training on {which} with a ridge of {self.ridge_:g}", shown=settings.get("progress", False))
            stages = stages_after(path, stages)
            start = Parameters(found[self.ridge_].model, found[best_ridge(path, "independent")].independent)
            if isinstance(as_loss(stages[-1].loss), SurrogateLikelihood | SurrogateEM):
                # With truncated inference, long training exploits the error of the log-partition value.
                start = None
            else:
                self.model_.load_state_dict(start.model if len(stages) == 1 else start.independent)

        def keep(number: int, fit: Fit) -> None:
            if isinstance(as_loss(stages[number].loss), Independent):
                self.baseline_, self.baseline_results_ = copy.deepcopy(self.model_.state_dict()), [fit]
                if start is not None and fit.reason not in LAST:
                    self.model_.load_state_dict(start.model)

        super()._train(examples, origins, stages, after=keep, **settings)

    def _ridge(self) -> float:
        return getattr(self, "ridge_", RIDGE) if self.ridge is None else self.ridge

    def _edge_types(self) -> tuple[str, ...]:
        return DIRECTIONS[:2]

    def _designs(self, X: Any, sizes: Sizes | None = None) -> list[Design]:
        if isinstance(X, np.ndarray) and X.ndim == 3 and X.shape[-1] == 3:
            # Its rows would pass for grey images, three pixels wide.
            raise ValueError(f"`X` must be a list of images. Got what looks like one image, of shape {X.shape}.")
        designs = super()._designs(X, sizes)
        self._num_images = len(designs)
        return designs

    def _design(self, example: Any, name: str) -> Design:
        if isinstance(example, ImageDesign | TileDesign):
            return example
        return ImageDesign.of(example, self.features_, name)

    # -- large images -------------------------------------------------------------------------------------------------

    def tiling(self, shape: tuple[int, ...]) -> list[Tile] | None:
        """The tiles in which an image of this shape is predicted, or None if it is predicted as a whole."""
        check_is_fitted(self)
        return tiling_of(self.features_, shape, len(self.classes_))

    def _predict(self, X: Any, of_examples: OfExamples, by_part: bool) -> list[Array]:
        """As `AbstractCRF._predict`. Images too large for the memory are predicted tile by tile, if `by_part`."""
        check_is_fitted(self)
        sizes = Sizes(self.n_features_in_, self.n_edge_features_in_, self.arity_)
        images = cast("list[ImageDesign]", self._designs(X, sizes))
        tilings = [self.tiling(image.shape) if by_part else None for image in images]
        designs: list[ImageDesign | TileDesign] = []
        for image, tiling in zip(images, tilings, strict=True):
            designs += [image] if tiling is None else image.tiles(tiling)
        found = iter(super()._predict(designs, of_examples, by_part))
        return [
            next(found) if tiling is None else image.join(tiling, [next(found) for _ in tiling])
            for image, tiling in zip(images, tilings, strict=True)
        ]

    # -- features on the disk -----------------------------------------------------------------------------------------

    def _blocks(self) -> Blocks:
        plain = super()._blocks()
        if self._cache is None:
            return ImageBlocks(plain.num_states, plain.device, plain.dtype)
        return MappedBlocks(plain.num_states, plain.device, plain.dtype, self._cache)

    def _chunk_size(self, num_variables: int) -> int:
        return super()._chunk_size(num_variables) if self._cache is None else 1


def _check_complete(stages: Sequence[Stage], examples: Sequence[Examples]) -> None:
    """Raise before training if a loss needs a label for every pixel, and there are pixels without one."""
    for stage in stages:
        if isinstance(as_loss(stage.loss), SurrogateLikelihood) and any((own.labels < 0).any() for own in examples):
            raise ValueError(
                "`loss` is the surrogate likelihood, which needs a label for every pixel. `y` has pixels without one: "
                'use "surrogate-em", which sums over unknown labels.'
            )
