"""`riskfield fit`: the choices of the command line as objects, and the run itself."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
import typer

from riskfield.cli._common import complain, print_divergence
from riskfield.datasets.folders import MaskReading, image_folder, unmatched_masks
from riskfield.datasets.images import LabelledImage, few
from riskfield.entropy import TRW, Bethe
from riskfield.estimators.defaults import RHO
from riskfield.features.image import ImageFeatures, physical_memory
from riskfield.infer import ExactOnForests, Inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.kernels import default_schedule
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.result import Reason
from riskfield.losses.loss import as_loss
from riskfield.losses.names import name_of
from riskfield.progress import bar


class InferenceName(StrEnum):
    """The inference algorithms that can be chosen by name."""

    TRW = "trw"
    BP = "bp"
    MEAN_FIELD = "mean-field"


@dataclass(frozen=True)
class Choices:
    """The settings of a fit."""

    loss: str
    inference: InferenceName
    rho: float | None
    sweeps: int
    ridge: float | None
    iterations: int
    scale: float
    device: str | None

    @classmethod
    def of(
        cls,
        loss: str,
        inference: InferenceName,
        rho: float | None,
        sweeps: int,
        ridge: float | None,
        iterations: int,
        scale: float,
        device: str | None,
    ) -> Self:
        """The choices of the command line, checked."""
        if inference is InferenceName.TRW:
            rho = RHO if rho is None else rho
            if not 0 < rho <= 1:
                raise typer.BadParameter(f"--rho must be a probability above 0 and at most 1. Got {rho:g}.")
        elif rho is not None:
            raise typer.BadParameter(f"--rho applies to trw. Got --inference {inference}.")
        if not 0 < scale <= 1:
            raise typer.BadParameter(f"--scale must be above 0 and at most 1. Got {scale:g}.")
        return cls(loss, inference, rho, sweeps, ridge, iterations, scale, device)

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
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings as options of the command line, for the record."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in given.items() if value is not None}


def fit_images(
    images: Path,
    masks: Path,
    classes: list[str] | None,
    ignore: int | None,
    reading: MaskReading,
    choices: Choices,
    out: Path,
    *,
    resume: bool,
    every: int,
    seed: int,
    quiet: bool,
) -> None:
    """Fit a model to two folders, and write the folder of the run."""
    from riskfield.estimators.image_crf import ImageCRF  # here, because scikit-learn takes a second to load
    from riskfield.estimators.image_run import ImageRun, prepare

    began, shown = time.perf_counter(), not quiet and sys.stderr.isatty()
    named = None if not classes else _classes(classes)
    pictures = image_folder(images, masks, classes=named, ignore=ignore, reading=reading)
    if unmatched := unmatched_masks(images, masks):
        complain(f"{masks}: there is no image for {few(unmatched)}. They are not used.")
    # Classes without names are named by their values.
    names = named or {int(name): name for name in pictures.classes}
    read = list(bar(pictures, shown=shown, what="reading"))  # finds damaged files before the work begins
    check_memory(read, ImageFeatures(scale=choices.scale))
    values = np.array([*names, -1])  # the last entry is for pixels without a label
    labels = [values[picture.labels] for picture in read]
    _check_all_occur(names, labels, masks)
    for picture, own in zip(read, labels, strict=True):
        present = np.unique(own[own != -1]).tolist()
        if len(present) < 2:
            only = f"only the class {names[present[0]]!r}" if present else "no labels"
            complain(f"{picture.name}: its mask has {only}.")
    settings = {
        **choices.settings(),
        "seed": seed,
        "ignore": "nothing" if ignore is None else ignore,
        **_given(reading),
        "classes": ", ".join(f"{name} = {value}" for value, name in sorted(names.items())),
        "images": len(read),
        "fingerprint of the data": _fingerprint(read),
    }
    crf = ImageCRF(**choices.objects(), random_state=seed, verbose=shown)
    with prepare(out, settings, resume) as checkpoint:
        loaded = time.perf_counter()
        with print_divergence():
            images_read = [picture.image for picture in read]
            crf.fit(images_read, labels, checkpoint=Checkpoints(checkpoint, every), resume=resume)
        training = sum(fit.history[-1].seconds for fit in crf.results_ if fit.history)
        # A resumed run may have had more iterations than are allowed now: the record is of those that ran.
        ran = max(len(fit.history) for fit in crf.results_)
        choices = replace(choices, iterations=max(choices.iterations, ran))
        settings["iterations"] = choices.iterations
        run = ImageRun(
            out.resolve().name,
            crf,
            {value: names[value] for value in crf.classes_.tolist()},
            ignore,
            settings,
            _command(images, masks, classes, ignore, reading, choices, out, seed),
            tuple(crf.results_),
            {"reading": loaded - began, "features": crf.feature_seconds_, "training": training},
            reading,
        )
        run.save(out)
    if len(crf.results_) < len(crf.stages()):
        typer.echo(f"riskfield: training ended before the stage with the loss {choices.loss}.", err=True)
    if not quiet:
        for stage, result in zip(crf.stages(), crf.results_, strict=False):  # an interrupted run has fewer results
            typer.echo(f"{name_of(as_loss(stage.loss))}: {result}")
        typer.echo(f"wrote {out}")
    if crf.results_[-1].reason is Reason.INTERRUPTED:
        raise typer.Exit(130)


def _classes(given: list[str]) -> dict[int, str]:
    """Read `--class VALUE=NAME`."""
    classes: dict[int, str] = {}
    for entry in given:
        value, equals, name = entry.partition("=")
        if not equals or not name.strip() or not value.strip().isdigit():
            raise typer.BadParameter(f"--class must be VALUE=NAME, such as 255=horse. Got {entry!r}.")
        if int(value) in classes or name.strip() in classes.values():
            raise typer.BadParameter(f"--class must not repeat a value or a name. Got {entry!r} again.")
        classes[int(value)] = name.strip()
    return classes


def _fingerprint(pictures: list[LabelledImage]) -> str:
    """Return a digest of images and labels, so that a run cannot be resumed with other data."""
    digest = hashlib.sha256()
    for picture in pictures:
        assert picture.labels is not None
        digest.update(f"{picture.name} {picture.image.dtype.str} {picture.image.shape} ".encode())
        digest.update(np.ascontiguousarray(picture.image).data)
        digest.update(np.ascontiguousarray(picture.labels).data)
    return digest.hexdigest()[:12]


def _check_all_occur(names: dict[int, str], labels: list[Any], masks: Path) -> None:
    found = set().union(*(np.unique(own).tolist() for own in labels))
    for value, name in names.items():
        if value not in found:
            raise ValueError(f"{masks}: no mask has the value {value} of the class {name!r}.")


def _given(reading: MaskReading) -> dict[str, Any]:
    """The options that say how masks are read, if they are not the defaults."""
    given = {"threshold": reading.threshold, "levels": reading.levels, "resize-masks": reading.resize_masks or None}
    return {name: value for name, value in given.items() if value is not None}


def check_memory(pictures: Sequence[LabelledImage], features: ImageFeatures) -> None:
    """Raise a `MemoryError` if the features of all images would not fit into memory, before any is computed."""
    entries = 0
    for picture in pictures:
        rows, columns = features.shape(*picture.image.shape[:2])
        entries += rows * columns * (features.num_pixel_features + 2 * features.num_edge_features)
    # Double precision, and a copy in single precision while they are joined.
    needed, available = 12 * entries, physical_memory()
    if needed > available:
        scale = features.scale * (0.8 * available / needed) ** 0.5
        raise MemoryError(
            f"The features of {len(pictures)} images would take about {needed / 1e9:.3g} GB; this machine has "
            f"{available / 1e9:.3g} GB. Use --scale {scale:.2g} or less, or fewer images."
        )


def _command(
    images: Path,
    masks: Path,
    classes: list[str] | None,
    ignore: int | None,
    reading: MaskReading,
    choices: Choices,
    out: Path,
    seed: int,
) -> str:
    """Return the command with all its options, including those from a configuration file."""
    words = ["riskfield", "fit", "--images", str(images), "--masks", str(masks)]
    for entry in classes or []:
        words += ["--class", entry]
    options = {"ignore": ignore, **_given(reading), **choices.settings(), "seed": seed, "out": out}
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)
