"""`riskfield fit`: its options, also as objects."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from riskfield.cli._common import Config, Device, DtypeName, Images, Masks, Quiet, Threads
from riskfield.cli._fit_images import fit_images
from riskfield.datasets.folders import MaskReading
from riskfield.entropy import TRW, Bethe
from riskfield.errors import did_you_mean
from riskfield.estimators.defaults import ITERATIONS, LOSS, PATIENCE, RHO, SWEEPS, VALIDATION_FRACTION
from riskfield.features.image import ImageFeatures
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.kernels import default_schedule
from riskfield.learning.lbfgs import LBFGS
from riskfield.losses.names import LOSSES


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
            **self.given(),
            **{name: value for name, value in self.choices.settings().items() if name != "class-weight"},
            "seed": self.seed,
            "out": self.out,
        }
        for name, value in options.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return shlex.join(words)

    def given(self) -> dict[str, Any]:
        """Return the options that say how masks are read, if they are not the defaults."""
        reading = self.reading
        given = {"threshold": reading.threshold, "levels": reading.levels, "resize-masks": reading.resize_masks or None}
        return {name: value for name, value in given.items() if value is not None}


def _loss(name: str) -> str:
    if not isinstance(name, str) or name not in LOSSES:  # a TOML file may hold anything
        close = did_you_mean(name, LOSSES)
        raise typer.BadParameter(f"--loss must be one of {', '.join(LOSSES)}. Got {name!r}.{close}")
    return name


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def fit(
    context: typer.Context,
    *,
    images: Images,
    masks: Masks,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the run.", show_default=False)],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="VALUE=NAME", help="A mask value and its class; may be repeated. [all values]"),
    ] = None,
    ignore: Annotated[int | None, typer.Option(min=0, help="The mask value of pixels without a label.")] = None,
    threshold: Annotated[
        int | None, typer.Option(min=1, help="Mask values of at least this number become 255, lower ones 0.")
    ] = None,
    levels: Annotated[
        int | None, typer.Option(min=2, max=32, help="Mask values become the nearest of this many grey levels.")
    ] = None,
    resize_masks: Annotated[
        bool, typer.Option("--resize-masks", help="Resize masks that differ in size from their images.")
    ] = False,
    loss: Annotated[
        str, typer.Option(metavar="NAME", parser=_loss, help=f"What to minimise: {', '.join(LOSSES)}.")
    ] = LOSS,
    inference: Annotated[InferenceName, typer.Option(help="How marginals are computed.")] = InferenceName.TRW,
    rho: Annotated[float | None, typer.Option(help=f"trw: appearance probability of the edges. [{RHO:g}]")] = None,
    sweeps: Annotated[int, typer.Option(min=1, help="Sweeps of inference, in training and in prediction.")] = SWEEPS,
    ridge: Annotated[
        float | None, typer.Option(min=0, help="Weight of the squared parameters. [chosen on held-out images]")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Maximum number of iterations of the optimiser.")] = ITERATIONS,
    class_weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE=WEIGHT",
            help="A mask value and the weight of its pixels in the loss; may be repeated. Or 'balanced': the rarer a "
            "class, the larger its weight. [1 for all]",
        ),
    ] = None,
    early_stopping: Annotated[
        bool,
        typer.Option(
            "--early-stopping",
            help="Train on some of the images, and stop when the loss on the others no longer improves.",
        ),
    ] = False,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the images to hold out, to choose the ridge and to stop early.")
    ] = VALIDATION_FRACTION,
    patience: Annotated[
        int, typer.Option(min=1, help="Iterations without an improvement before --early-stopping ends the training.")
    ] = PATIENCE,
    scale: Annotated[float, typer.Option(help="Resolution of inference, relative to that of the images.")] = 1.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder --out.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Iterations between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    device: Device = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Precision of the computation. [float32 on a GPU, else float64]")
    ] = None,
    threads: Threads = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Fit a model that labels the pixels of images.

    The model is a conditional random field with the features and the initialisation of Domke (2013). The mask of
    images/horse.jpg is masks/horse.png, a grey or palette image of the same size whose values are labels. Images may be
    grey or coloured and of any size. The command writes model.safetensors, run.json and checkpoints to the folder
    --out. After an interruption, or to run more --iterations, give the same command with --resume to continue the run.
    Without --ridge, the command chooses the ridge on held-out images and prints it. If the features would take more
    than half of the memory, they are kept in files in the folder --out during training. An image that is too large for
    the memory is cut into parts, which are separate examples.

    \b
    Examples:
      riskfield fit --images images/ --masks masks/ --out model/
      riskfield fit --images images/ --masks masks/ --out model/ --class 0=ground --class 255=horse --ignore 128
      riskfield fit --images images/ --masks masks/ --loss clique-logistic --inference trw --sweeps 10 --ridge 1e-3 \\
          --scale 0.5 --out model/
      riskfield fit --images images/ --masks masks/ --out model/ --class-weight balanced --early-stopping
      riskfield fit --config horses.toml --out model/ --resume
    """
    options = FitOptions(
        images,
        masks,
        tuple(classes or ()),
        ignore,
        MaskReading(threshold, levels, resize_masks),
        Choices(
            loss,
            inference,
            rho,
            sweeps,
            ridge,
            iterations,
            scale,
            device,
            tuple(class_weight or ()),
            early_stopping,
            validation_fraction,
            patience,
            dtype,
        ),
        out,
        seed,
    )
    fit_images(options, context.command, resume=resume, every=every, quiet=quiet)
