"""`riskfield fit`: training on images and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from riskfield.cli._common import Config, Device, DtypeName, Images, Masks, Quiet, Threads
from riskfield.cli._fit_images import Choices, FitOptions, InferenceName, fit_images
from riskfield.datasets.folders import MaskReading
from riskfield.errors import did_you_mean
from riskfield.estimators.defaults import ITERATIONS, LOSS, PATIENCE, RHO, SWEEPS, VALIDATION_FRACTION
from riskfield.losses.names import LOSSES


def _loss(name: str) -> str:
    if not isinstance(name, str) or name not in LOSSES:  # a TOML file may hold anything
        close = did_you_mean(name, LOSSES)
        raise typer.BadParameter(f"--loss must be one of {', '.join(LOSSES)}. Got {name!r}.{close}")
    return name


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
