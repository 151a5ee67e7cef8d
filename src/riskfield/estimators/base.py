"""`AbstractCRF`: what all estimators share. A subclass says what an example is, by its `Design`."""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor

from riskfield import kernels
from riskfield.decoders import AbstractDecoder, as_decoder, decode
from riskfield.devices import as_device, as_dtype
from riskfield.estimators.blocks import Blocks, OfExamples, portions, predict_each
from riskfield.estimators.defaults import OPTIMISER, default_inference, default_initial
from riskfield.estimators.design import Design, Sizes, check_sizes
from riskfield.estimators.files import load_estimator, save_estimator
from riskfield.estimators.labels import Array, as_labels, class_weights, classes_of, codes_of, share_right
from riskfield.estimators.parameters import (
    NestedParameters,
    as_sample_weight,
    check_flags,
    check_fraction,
    check_ignore,
    check_n_jobs,
    threads,
)
from riskfield.examples import Examples, take
from riskfield.infer import Inference, InferenceChoice
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.optimiser import AbstractOptimiser, check_counts
from riskfield.learning.result import Fit, dump_fit, load_fit
from riskfield.learning.stages import Stage, fit_stages
from riskfield.learning.unions import decodes_by_part
from riskfield.learning.validation import Validation, hold_out
from riskfield.losses._class_weight import takes_class_weight, with_class_weight
from riskfield.losses.loss import AbstractLoss, LossLike, as_loss
from riskfield.losses.names import LOSSES, loss_named
from riskfield.models.conditional import LinearModel

# How many variables are evaluated at once by default: those of four images of 240 x 320 pixels.
_VARIABLES_AT_ONCE = 4 * 240 * 320


class AbstractCRF(NestedParameters):
    """The base class of the estimators: a linear model on the graph of each example, a loss and an inference.

    All estimators have these parameters, and further ones that describe an example.

    Arguments:
        loss: the name of a loss, one of `riskfield.losses.names.LOSSES`; a loss object; or a function of (solution,
            labels, mask). By default "univariate-logistic".
        inference: how marginals are computed, in training and in prediction. By default exact inference on graphs
            without cycles, such as chains, and ten sweeps of tree-reweighted message passing with rho = 1/2 on all
            others, in the order `Coloured()` on a GPU.
        decoder: how marginals become labels. By default the most probable label of each variable.
        ridge: the weight of the squares of all parameters, relative to the loss per variable; by default 0.001. With n
            labelled variables, it is c2 / n in terms of CRFsuite.
        lasso: the weight of the absolute values of all parameters, c1 / n in terms of CRFsuite; by default 0. It makes
            many parameters exactly 0, and needs the optimiser `LBFGS`.
        optimiser: by default `LBFGS(iterations=200)`.
        initial: losses to fit first, in this order. By default, as in Domke (2013), `Independent()`, and before a
            smoothed classification error also `SurrogateEM()`. An empty tuple fits none.
        class_weight: the weight of a variable in the loss by its label: a dictionary {label: weight}, with 1 for labels
            it does not name, or "balanced", inversely proportional to how often a label occurs; by default 1. It needs
            a loss with the setting `class_weight`, such as the default. Other losses in `initial` are not weighted.
        ignore: the label that means unknown, by default -1. None if every label is a class, even -1.
        chunk_size: how many examples are evaluated at once, to limit memory. By default about 300,000 variables, and
            more on a GPU if there are few labels.
        early_stopping: hold out a part of the examples, stop each loss when its value on them has not improved for
            `n_iter_no_change` iterations, and keep the parameters that were best on them. The value of every iteration
            is in `results_[-1].history`, as `validation`. By default training does not stop early.
        validation_fraction: the share of the examples to hold out; by default 0.1, for `ImageCRF` 0.2.
        n_iter_no_change: how many iterations without an improvement end the training, by default 10.
        n_jobs: the number of threads of `fit` and `predict`, in the native engine and in torch: -1 for all processors,
            None (the default) for as many as `riskfield.set_num_threads` and `torch.set_num_threads` have set.
        random_state: seeds random choices: which examples are held out, the order of examples in `Torch` and `SMD`,
            and losses that draw samples. L-BFGS is not random. 0 by default.
        verbose: show progress bars; by default none.
        device: where to compute, such as "cuda"; by default the CPU.
        dtype: the precision, "float32" or "float64" (the default). On a GPU, float32 is much faster.

    Fitted attributes: `classes_`, the labels in order; `model_`, the `LinearModel`; `inference_`, the inference in
    use; `results_`, the `Fit` of each loss; `feature_seconds_`, the time spent on features; `n_features_in_`,
    `n_edge_features_in_` and `arity_`, which every example must share.
    """

    loss: str | LossLike
    inference: InferenceChoice | None
    decoder: AbstractDecoder | None
    ridge: float
    lasso: float
    optimiser: AbstractOptimiser | None
    initial: Sequence[LossLike] | None
    class_weight: Any
    ignore: Any
    chunk_size: int | None
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    n_jobs: int | None
    random_state: Any
    verbose: bool | int
    device: str | None
    dtype: str | None

    classes_: Array
    inference_: InferenceChoice
    model_: LinearModel
    results_: list[Fit]
    feature_seconds_: float
    n_features_in_: int
    n_edge_features_in_: int
    arity_: int
    _fitted: ClassVar[tuple[str, ...]] = (  # what a file holds besides parameters
        "classes_",
        "inference_",
        "n_features_in_",
        "n_edge_features_in_",
        "arity_",
        "feature_seconds_",
    )
    _fits: ClassVar[tuple[str, ...]] = ("results_",)  # lists of `Fit`, which a file holds as well

    @abstractmethod
    def _design(self, example: Any, name: str) -> Design:
        """One example of X, checked; `name` is its name in errors."""

    @abstractmethod
    def _edge_types(self) -> tuple[str, ...]:
        """The types of factors, each with parameters of its own."""

    def _num_constants(self) -> int:
        """How many features of 1 the designs add to those of the variables."""
        return 1

    def _check_codes(self, codes: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raise if the labels cannot be those of the model."""

    def _prepared(self, X: Any, fitting: bool) -> Any:
        """The examples as `_design` takes them."""
        return X

    # -- fit and predict ----------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> Self:
        """Fit the model.

        Arguments:
            X: the examples.
            y: their labels, an array for each, of integers, booleans or strings; `ignore` where a label is unknown.
            sample_weight: the weight of each example, of shape (n,); by default 1.
            checkpoint: a folder for checkpoints, or `Checkpoints(folder, every=...)`. By default none are written.
            resume: continue from the checkpoints in this folder.

        Returns:
            The estimator itself.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        self._check_settings()
        stages = self.stages()
        designs = self._designs(self._prepared(X, fitting=True))
        check_consistent_length(designs, y, sample_weight)
        pairs = enumerate(zip(y, designs, strict=True))
        labels = [as_labels(own, design.shape, f"y[{k}]", self.ignore) for k, (own, design) in pairs]
        self.classes_ = classes_of(labels, self.ignore)
        self.n_features_in_, self.n_edge_features_in_, self.arity_ = designs[0].sizes
        self.inference_ = self._inference()
        codes = codes_of(labels, self.classes_, self.ignore)
        self._check_codes(codes)
        self.model_ = self._model().to(as_device(self.device))
        weights = as_sample_weight(sample_weight)
        stages = self._weighted(stages, class_weights(self.class_weight, self.classes_, codes, weights))
        began = time.perf_counter()
        blocks = self._blocks()
        examples: Sequence[Examples] = list(blocks.labelled(designs, codes, weights, verbose=bool(self.verbose)))
        origins = blocks.origins(designs)
        self.feature_seconds_ = time.perf_counter() - began
        chunk_size = self._chunk_size(max(block.graph.num_variables for block in examples))
        seed, validation = int(check_random_state(self.random_state).randint(2**31)), None
        if self.early_stopping:
            train, held_out = hold_out(examples, origins, self.validation_fraction, seed)
            validation = Validation(take(examples, held_out), patience=self.n_iter_no_change)
            examples, origins = take(examples, train), [origins[k] for k in train]
        with threads(self.n_jobs):
            self._train(
                examples,
                origins,
                stages,
                seed=seed,
                validation=validation,
                checkpoint=Checkpoints(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint,
                resume=resume,
                chunk_size=chunk_size,
                progress=bool(self.verbose),
            )
        return self

    def predict(self, X: Any) -> Any:
        """The labels of each example, as the decoder chooses them: an array if X is one, else a list of arrays."""
        decoder = self._decoder()
        if decoder is None:
            return _like(X, [self.classes_[marginals.argmax(-1)] for marginals in self._marginals(X)])

        def of_examples(examples: Examples, inference: Inference) -> Tensor:
            theta = self.model_(examples.graph, examples.inputs)
            return decode(examples.graph, theta, inference, decoder)

        states = self._predict(X, of_examples, by_part=decodes_by_part(decoder))
        return _like(X, [self.classes_[own] for own in states])

    def predict_marginals(self, X: Any) -> Any:
        """The probability of each label, in a last axis ordered as `classes_`: an array if X is one, else a list."""
        return _like(X, self._marginals(X))

    def predict_proba(self, X: Any) -> Any:
        """The same as `predict_marginals`, under the name that scikit-learn uses."""
        return self.predict_marginals(X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of variables with a known label that `predict` gets right."""
        check_consistent_length(X, y, sample_weight)
        return share_right(self.predict(X), y, sample_weight, self.ignore)

    def stages(self) -> list[Stage]:
        """The stages of `fit`: one for each loss of `initial`, and one for `loss`."""
        loss = self._loss()
        optimiser = OPTIMISER if self.optimiser is None else self.optimiser
        initial = default_initial(loss) if self.initial is None else self.initial
        if not isinstance(initial, Sequence) or isinstance(initial, str):
            raise TypeError(f"`initial` must be a tuple of losses. Got {initial!r}.")
        if self.class_weight is not None and not takes_class_weight(loss):
            names = ", ".join(name for name, each in LOSSES.items() if takes_class_weight(each))
            raise ValueError(f"`class_weight` needs one of the losses {names}. Got {self.loss!r}.")
        return [Stage(each, self._inference(), optimiser, self._ridge(), self.lasso) for each in [*initial, loss]]

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file, whole or not at all: safetensors and JSON, no pickle.

        Raises:
            TypeError: if a parameter is a function, or an object that is not riskfield's own.
        """
        check_is_fitted(self)
        self._check_settings()  # they may have been set since
        fitted = {name: getattr(self, name) for name in self._fitted}
        fitted |= {name: [dump_fit(result) for result in getattr(self, name)] for name in self._fits}
        save_estimator(path, type(self).__name__, self._plain_settings(), fitted, self._placed_model())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | None = None) -> Self:
        """Return the estimator that `save` wrote.

        Arguments:
            path: the file.
            device: the device on which it computes from now on, such as "cpu"; by default that of the training.

        Raises:
            FileFormatError: if the file is damaged, or holds something else.
            ValueError: if PyTorch cannot use `device` here.
        """
        as_device(device)

        def build(settings: dict[str, Any], fitted: dict[str, Any]) -> tuple[Self, Callable[[], LinearModel]]:
            estimator = cls(**settings if device is None else {**settings, "device": device})
            estimator._check_settings()
            for name, value in fitted.items():
                setattr(estimator, name, [load_fit(result) for result in value] if name in cls._fits else value)
            return estimator, estimator._model

        return load_estimator(path, cls.__name__, (*cls._fitted, *cls._fits), build)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Raise if a setting is of a type that the estimator cannot use or save."""
        check_flags(early_stopping=self.early_stopping)
        check_fraction(validation_fraction=self.validation_fraction)
        check_counts(n_iter_no_change=self.n_iter_no_change)
        check_n_jobs(self.n_jobs)
        check_ignore(self.ignore)
        as_decoder(self.decoder)

    def _plain_settings(self) -> dict[str, Any]:
        """The settings for a file, with objects of torch by their names, and losses in a tuple."""
        settings = self.get_params(deep=False)
        for name in ("device", "dtype"):
            settings[name] = None if settings[name] is None else str(settings[name]).removeprefix("torch.")
        settings["initial"] = None if settings["initial"] is None else tuple(settings["initial"])
        return settings

    def _weighted(self, stages: Sequence[Stage], weights: tuple[float, ...] | None) -> list[Stage]:
        """The stages with class weights in the losses that take them."""
        losses = [as_loss(stage.loss) for stage in stages]
        return [
            replace(stage, loss=with_class_weight(loss, weights)) if takes_class_weight(loss) else stage
            for stage, loss in zip(stages, losses, strict=True)
        ]

    def _blocks(self) -> Blocks:
        return Blocks(len(self.classes_), as_device(self.device), as_dtype(self.dtype))

    def _placed_model(self) -> LinearModel:
        """The model on the device and in the dtype of the settings, which may have been set since `fit`."""
        return self.model_.to(as_device(self.device), as_dtype(self.dtype))

    def _loss(self) -> AbstractLoss:
        return loss_named(self.loss) if isinstance(self.loss, str) else as_loss(self.loss)

    def _decoder(self) -> AbstractDecoder | None:
        return self.decoder

    def _train(
        self, examples: Sequence[Examples], origins: Sequence[int], stages: Sequence[Stage], **settings: Any
    ) -> None:
        """Fit `model_` with settings of `fit_stages`. Examples are, or are parts of, those of X numbered `origins`."""
        self.results_ = fit_stages(self.model_, examples, stages, **settings)

    def _ridge(self) -> float:
        return self.ridge

    def _inference(self) -> InferenceChoice:
        return default_inference(as_device(self.device)) if self.inference is None else self.inference

    def _model(self) -> LinearModel:
        features = self.n_features_in_ + self._num_constants()
        types = dict.fromkeys(self._edge_types(), self.n_edge_features_in_)
        return LinearModel(len(self.classes_), features, types, arity=self.arity_, dtype=as_dtype(self.dtype))

    def _chunk_size(self, num_variables: int) -> int:
        if self.chunk_size is not None:
            check_counts(chunk_size=self.chunk_size)
            return int(self.chunk_size)
        states = len(self.classes_)
        room = kernels.marginals_at_once(as_device(self.device)) // (states + 2 * states**2)  # as in a grid
        return max(1, max(room, _VARIABLES_AT_ONCE) // num_variables)

    def _designs(self, X: Any, sizes: Sizes | None = None) -> list[Design]:
        """All examples, checked to have the given sizes, or else those of the first one."""
        designs = [self._design(example, f"X[{k}]") for k, example in enumerate(X)]
        if sizes is None and not designs:
            raise ValueError("`X` must hold at least one example. Got none.")
        check_sizes(designs, sizes)
        return designs

    def _marginals(self, X: Any) -> list[Array]:
        def of_examples(examples: Examples, inference: Inference) -> Tensor:
            theta = self.model_(examples.graph, examples.inputs)
            return inference(examples.graph, theta).node_marginals[0]

        return self._predict(X, of_examples, by_part=True)

    @torch.no_grad()
    def _predict(self, X: Any, of_examples: OfExamples, by_part: bool) -> list[Array]:
        """What `of_examples` finds for the variables of each example, in the shape of its labels.

        `by_part` says whether this is the same for examples that are joined into one.
        """
        check_is_fitted(self)
        model, blocks = self._placed_model(), self._blocks()
        sizes = Sizes(self.n_features_in_, self.n_edge_features_in_, self.arity_)
        designs = self._designs(self._prepared(X, fitting=False), sizes)
        out: list[Any] = [None] * len(designs)
        with threads(self.n_jobs):
            for portion in portions(designs, lambda design: self._chunk_size(math.prod(design.shape))):
                examples = [blocks.unlabelled([designs[k] for k in members]) for members in portion]
                for number, row, values in predict_each(model, self.inference_, examples, of_examples, by_part):
                    k = portion[number][row]
                    out[k] = designs[k].expand(values.cpu().numpy())
        return out

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        tags.target_tags.required = tags.target_tags.multi_output = True
        return tags


def _like(X: Any, values: list[Array]) -> Any:
    """One array if X is an array of numbers, else a list. Files named in an array may differ in size."""
    return np.stack(values) if isinstance(X, np.ndarray) and X.dtype.kind in "biufc" and values else values
