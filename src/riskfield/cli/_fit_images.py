"""`riskfield fit`: the choices of the command line as objects, and the run itself."""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import typer

from riskfield.cli._common import BAD_IMAGE, DtypeName, complain, complain_of_image, print_divergence
from riskfield.datasets.folders import MaskReading, image_files, image_folder, unmatched_masks
from riskfield.datasets.images import few, size
from riskfield.devices import physical_memory
from riskfield.entropy import TRW, Bethe
from riskfield.estimators.defaults import PATIENCE, RHO, VALIDATION_FRACTION
from riskfield.features.image import LARGEST_SHARE, PART_SIDE, ImageFeatures, graph_bytes
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.kernels import default_schedule, gpu_memory
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.result import Reason
from riskfield.losses.loss import as_loss
from riskfield.losses.names import name_of
from riskfield.progress import bar

_SHOWN = 10  # images whose errors are printed
FEATURES = "features"  # the folder of features in the folder of a run


class InferenceName(StrEnum):
    """The inference algorithms that can be chosen by name."""

    TRW = "trw"
    BP = "bp"
    MEAN_FIELD = "mean-field"


@dataclass(frozen=True)
class Choices:
    """The settings of a fit, by the names of the options."""

    loss: str
    inference: InferenceName
    rho: float | None
    sweeps: int
    ridge: float | None
    iterations: int
    scale: float
    device: str | None
    class_weight: tuple[str, ...] = ()  # "balanced", or VALUE=WEIGHT
    early_stopping: bool = False
    validation_fraction: float = VALIDATION_FRACTION
    patience: int = PATIENCE
    dtype: DtypeName | None = None  # None for the usual one of the device

    def __post_init__(self) -> None:
        if self.inference is not InferenceName.TRW and self.rho is not None:
            raise typer.BadParameter(f"--rho applies to trw. Got --inference {self.inference}.")
        if self.inference is InferenceName.TRW and self.rho is None:
            object.__setattr__(self, "rho", RHO)
        if self.rho is not None and not 0 < self.rho <= 1:
            raise typer.BadParameter(f"--rho must be a probability above 0 and at most 1. Got {self.rho:g}.")
        if not 0 < self.scale <= 1:
            raise typer.BadParameter(f"--scale must be above 0 and at most 1. Got {self.scale:g}.")
        if not 0 < self.validation_fraction < 1:
            raise typer.BadParameter(
                f"--validation-fraction must be between 0 and 1. Got {self.validation_fraction:g}."
            )
        self.class_weights()  # refuse bad ones before any file is read

    @property
    def precision(self) -> DtypeName:
        """The dtype, single precision on a GPU by default."""
        on_cpu = self.device is None or self.device.startswith("cpu")
        return self.dtype or (DtypeName.FLOAT64 if on_cpu else DtypeName.FLOAT32)

    def class_weights(self) -> str | dict[int, float] | None:
        """Return the class weights as `ImageCRF` takes them."""
        if self.class_weight in ((), ("balanced",)):
            return "balanced" if self.class_weight else None
        weights: dict[int, float] = {}
        for entry in self.class_weight:
            value, _, weight = entry.partition("=")
            if not value.strip().isdecimal() or not _is_positive(weight) or int(value) in weights:
                raise typer.BadParameter(
                    f"--class-weight must be balanced, or VALUE=WEIGHT once for each value. Got {entry!r}."
                )
            weights[int(value)] = float(weight)
        return weights

    def objects(self) -> dict[str, Any]:
        """Return the settings as arguments of `ImageCRF`."""
        algorithm: AbstractAlgorithm = MeanField()
        if self.inference is not InferenceName.MEAN_FIELD:
            schedule = default_schedule(self.device or "cpu")
            algorithm = MessagePassing(Bethe() if self.rho is None else TRW(self.rho), schedule)
        return {
            "features": ImageFeatures(scale=self.scale),
            "loss": self.loss,
            "inference": ExactOnForests(Inference(algorithm, Stop(self.sweeps, tol=None))),
            "ridge": self.ridge,
            "optimiser": LBFGS(iterations=self.iterations),
            "device": self.device,
            "dtype": self.precision.value,
            "class_weight": self.class_weights(),
            "early_stopping": self.early_stopping,
            "validation_fraction": self.validation_fraction,
            "n_iter_no_change": self.patience,
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings as options of the command line, for the record."""
        given = {own.name: getattr(self, own.name) for own in fields(self)}
        given |= {"class_weight": ", ".join(self.class_weight) or None, "early_stopping": self.early_stopping or None}
        return {name.replace("_", "-"): value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class FitOptions:
    """What `riskfield fit` is asked to do: the data, the settings, and where the run goes."""

    images: Path
    masks: Path
    classes: tuple[str, ...]  # VALUE=NAME
    ignore: int | None
    reading: MaskReading
    choices: Choices
    out: Path
    seed: int

    def command(self) -> str:
        """Return the command with all its options, including those from a configuration file."""
        words = ["riskfield", "fit", "--images", str(self.images), "--masks", str(self.masks)]
        for entry in self.classes:
            words += ["--class", entry]
        for entry in self.choices.class_weight:
            words += ["--class-weight", entry]
        options = {
            "ignore": self.ignore,
            **_given(self.reading),
            **{name: value for name, value in self.choices.settings().items() if name != "class-weight"},
            "seed": self.seed,
            "out": self.out,
        }
        for name, value in options.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return shlex.join(words)


@dataclass(frozen=True, eq=False)
class _Data:
    """The training data: where the images are, and their labels. The images themselves are read when needed."""

    names: dict[int, str]  # of the classes
    paths: list[Path]
    shapes: list[tuple[int, ...]]
    labels: list[npt.NDArray[np.int32]]  # values of the masks, -1 for pixels without a label
    fingerprint: str


def fit_images(options: FitOptions, command: Any, *, resume: bool, every: int, quiet: bool) -> None:
    """Fit a model to two folders, and write the folder of the run. Errors name the options of `command`."""
    from riskfield.estimators.image_crf import ImageCRF  # here, because scikit-learn takes a second to load
    from riskfield.estimators.image_run import ImageRun, prepare, refuse_existing

    began, choices, out = time.perf_counter(), options.choices, options.out
    if not resume:
        refuse_existing(out)  # before the images are read, which may take long
    data = _read(options, command, shown=not quiet)
    cache = _feature_folder(data, ImageFeatures(scale=choices.scale), out, choices)
    settings = {
        **choices.settings(),
        "seed": options.seed,
        "ignore": "nothing" if options.ignore is None else options.ignore,
        **_given(options.reading),
        "classes": ", ".join(f"{name} = {value}" for value, name in sorted(data.names.items())),
        "images": len(data.paths),
        "fingerprint of the data": data.fingerprint,
    }
    crf = ImageCRF(**choices.objects(), random_state=options.seed, verbose=not quiet)
    crf.stages()  # refuses settings that do not go together, before anything is written
    with prepare(out, settings, resume) as checkpoint:
        loaded = time.perf_counter()
        with print_divergence():
            crf.fit(data.paths, data.labels, checkpoint=Checkpoints(checkpoint, every), resume=resume, cache=cache)
        training = sum(fit.history[-1].seconds for fit in crf.results_ if fit.history)
        # A resumed run may have had more iterations than are allowed now: the record is of those that ran.
        ran = max(len(fit.history) for fit in crf.results_)
        choices = replace(choices, iterations=max(choices.iterations, ran))
        settings["iterations"] = choices.iterations
        interrupted = crf.results_[-1].reason is Reason.INTERRUPTED
        run = ImageRun(
            out.resolve().name,
            crf,
            {value: data.names[value] for value in crf.classes_.tolist()},
            options.ignore,
            settings,
            replace(options, choices=choices).command(),
            tuple(crf.results_),
            {"reading": loaded - began, "features": crf.feature_seconds_, "training": training},
            options.reading,
            tuple(path.name for path in data.paths),
        )
        run.save(out)
        if cache is not None and not interrupted:
            shutil.rmtree(cache)
    if len(crf.results_) < len(crf.stages()):
        typer.echo(f"riskfield: training ended before the stage with the loss {choices.loss}.", err=True)
    if not quiet:
        if crf.path_:
            best = min(crf.path_, key=lambda trial: trial.model)
            alone = min(trial.independent for trial in crf.path_)
            typer.echo(
                f"ridge: {crf.ridge_:g}, chosen on held-out images. Log loss there: {best.model:.4f}; without edges "
                f"{alone:.4f}"
            )
            if best.model > alone:
                complain(
                    "WARNING: on the held-out images the log loss is lower without edges. If you need good marginals, "
                    "compare with --loss independent or --loss surrogate-likelihood, or use more images."
                )
        for stage, result in zip(crf.stages(), crf.results_, strict=False):  # an interrupted run has fewer results
            found = "" if result.best is None else f", objective {result.best.objective:.6g}"
            typer.echo(
                f"{name_of(as_loss(stage.loss))}: {len(result.history)} iterations{found} "
                f"({result.reason.value}: {result.explanation})"
            )
        typer.echo(f"wrote {out}")
    if interrupted:
        raise typer.Exit(130)


def _read(options: FitOptions, command: Any, shown: bool) -> _Data:
    """Read all images and masks once, to find what is wrong with them before the work begins."""
    named = _classes(options.classes) if options.classes else None
    images = image_folder(options.images, options.masks, classes=named, ignore=options.ignore, reading=options.reading)
    if unmatched := unmatched_masks(options.images, options.masks):
        complain(f"WARNING: masks without an image in {options.masks}, which are not used: {few(unmatched)}.")
    # Classes without names are named by their values.
    names = named or {int(name): name for name in images.classes}
    values = np.array([*names, -1], np.int32)  # the last entry is for pixels without a label
    files, digest = image_files(options.images, "images"), hashlib.sha256()
    bad, shapes = 0, list[tuple[int, ...]]()
    labels: list[npt.NDArray[np.int32]] = []
    for number, name in enumerate(bar(images.names, shown=shown, what="reading")):
        try:
            image = images[number]
        except BAD_IMAGE as error:
            bad += 1
            if bad <= _SHOWN:
                complain_of_image(name, error, command)
            continue
        assert image.labels is not None
        digest.update(f"{image.name} {image.image.dtype.str} {image.image.shape} ".encode())
        digest.update(np.ascontiguousarray(image.image).data)
        digest.update(np.ascontiguousarray(image.labels).data)
        shapes.append(image.image.shape)
        labels.append(values[image.labels])
        present = [names[value] for value in np.unique(labels[-1]).tolist() if value != -1]
        if len(present) < 2:
            only = f"only the class {present[0]!r}" if present else "no labels"
            complain(f"WARNING: the mask of {files[image.name].name} has {only}.")
    if bad > _SHOWN:
        complain(f"{bad - _SHOWN} more images or masks cannot be used.")
    if bad:
        raise typer.Exit(2)
    weights = options.choices.class_weights()
    for value in weights if isinstance(weights, dict) else ():
        if value not in names:
            raise typer.BadParameter(f"--class-weight must name values of classes, {few(list(names))}. Got {value}.")
    found = set().union(*(np.unique(own).tolist() for own in labels))
    for value, name in names.items():
        if value not in found:
            raise ValueError(f"{options.masks}: no mask has the value {value} of the class {name!r}.")
    return _Data(names, [files[name] for name in images.names], shapes, labels, digest.hexdigest()[:12])


def _classes(given: Sequence[str]) -> dict[int, str]:
    """Read `--class VALUE=NAME`."""
    classes: dict[int, str] = {}
    for entry in given:
        value, equals, name = entry.partition("=")
        if not equals or not name.strip() or not value.strip().isdecimal():
            raise typer.BadParameter(f"--class must be VALUE=NAME, such as 255=horse. Got {entry!r}.")
        if int(value) in classes or name.strip() in classes.values():
            raise typer.BadParameter(f"--class must not repeat a value or a name. Got {entry!r} again.")
        classes[int(value)] = name.strip()
    return classes


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _given(reading: MaskReading) -> dict[str, Any]:
    """The options that say how masks are read, if they are not the defaults."""
    given = {"threshold": reading.threshold, "levels": reading.levels, "resize-masks": reading.resize_masks or None}
    return {name: value for name, value in given.items() if value is not None}


def _largest_scale(features: ImageFeatures, shape: tuple[int, ...], num_classes: int) -> float | None:
    """The largest scale of some at which an image can be trained on, to two digits; None if no scale is small enough.

    Not all memory shrinks with the scale: features are computed at the resolution of the image.
    """
    for step in range(1, 40):
        scale = float(f"{features.scale * 0.9**step:.2g}")
        if replace(features, scale=scale).memory_share(shape, num_classes) <= LARGEST_SHARE:
            return scale
    return None


def _feature_folder(data: _Data, features: ImageFeatures, out: Path, choices: Choices) -> Path | None:
    """Where features are kept on the disk during training, or None if they fit into the memory of the device.

    Raises:
        MemoryError: if one image, or a part of it, is too large to train on, if the features fit neither into memory
            nor on the disk, or if the graphs of all sizes do not fit into memory.
    """
    cut = [features.training_parts(shape, len(data.names)) for shape in data.shapes]
    shares = [
        features.memory_share(shape, len(data.names), windows[-1] if windows else None)  # the last is the largest
        for shape, windows in zip(data.shapes, cut, strict=True)
    ]
    largest = max(range(len(shares)), key=shares.__getitem__)
    if shares[largest] > LARGEST_SHARE:
        scale = _largest_scale(features, data.shapes[largest], len(data.names))
        what = f"{size(data.shapes[largest])} pixels at once" if cut[largest] is None else "a part of the image"
        raise MemoryError(
            f"{data.paths[largest]}: training on {what} would take about {shares[largest]:.0%} of the memory. "
            f"{f'Use --scale {scale:g} or less, or cut' if scale else 'Cut'} the image and its mask into parts."
        )
    if any(cut):
        names = [path.name for path, windows in zip(data.paths, cut, strict=True) if windows]
        complain(
            f"WARNING: too large for the memory as a whole: {few(names)}. Training takes parts of at most "
            f"{PART_SIDE} x {PART_SIDE} pixels as separate examples, {sum(len(own) for own in cut if own)} in all."
        )
    grids = [
        grid
        for shape, windows in zip(data.shapes, cut, strict=True)
        for grid in ([window.shape for window in windows] if windows else [features.shape(*shape[:2])])
    ]
    entries = sum(map(math.prod, grids)) * (features.num_pixel_features + 2 * features.num_edge_features)
    graphs = sum(map(math.prod, set(grids))) * graph_bytes(len(data.names))
    # Double precision, and a copy in single precision while they are joined; on the disk, single precision.
    in_memory, on_disk, available = 12 * entries + graphs, 4 * entries, physical_memory()
    if (gpu := gpu_memory(choices.device)) is None:
        fits = in_memory <= available / 2
    else:  # the features go there block by block
        on_gpu = (4 if choices.precision is DtypeName.FLOAT32 else 8) * entries + graphs
        fits = on_gpu <= gpu / 2 and graphs <= available / 2
    if fits:
        return None
    existing = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if graphs > available / 2 or on_disk > free:
        scale = features.scale * (0.8 * min(available / 2 / max(graphs, 1), free / on_disk)) ** 0.5
        raise MemoryError(
            f"The features of {len(data.paths)} images would take about {in_memory / 1e9:.3g} GB of memory, or "
            f"{on_disk / 1e9:.3g} GB on the disk and {graphs / 1e9:.3g} GB of memory. This machine has "
            f"{available / 1e9:.3g} GB of memory, and {existing} has {free / 1e9:.3g} GB free. Use --scale {scale:.2g} "
            "or less, or fewer images."
        )
    complain(
        f"The features of {len(data.paths)} images would take about {in_memory / 1e9:.3g} GB of memory. They are kept "
        f"in {out / FEATURES} during training, about {on_disk / 1e9:.3g} GB."
    )
    return out / FEATURES
