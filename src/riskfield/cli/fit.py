"""`riskfield fit`: training on pictures, or of what a Python file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from riskfield.cli._common import Config, Quiet
from riskfield.cli._fit_pictures import Choices, InferenceName, LossName, fit_pictures
from riskfield.cli._fit_problem import fit_problem


def fit(
    problem: Annotated[
        Path | None, typer.Argument(metavar="PROBLEM.py", help="A file with a function `problem()`.")
    ] = None,
    *,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of images.")] = None,
    masks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of masks with the names of the images.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="The folder of the run; of PROBLEM.py, a file for the parameters.")
    ],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="VALUE=NAME", help="A value in the masks; once for each. [all that occur]"),
    ] = None,
    ignore: Annotated[int | None, typer.Option(min=0, help="The value in the masks of pixels without a label.")] = None,
    loss: Annotated[
        LossName | None,
        typer.Option(metavar="NAME", help=f"What to minimise: {', '.join(LossName)}. [clique-logistic]"),
    ] = None,
    inference: Annotated[InferenceName | None, typer.Option(help="How marginals are computed. [trw]")] = None,
    rho: Annotated[float | None, typer.Option(help="trw: appearance of the edges. [0.5]")] = None,
    sweeps: Annotated[int | None, typer.Option(min=1, help="Sweeps of inference, all differentiated. [10]")] = None,
    ridge: Annotated[float | None, typer.Option(min=0, help="Weight of squared parameters. [1e-3]")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Of the optimiser, at most. [200]")] = None,
    scale: Annotated[
        float | None, typer.Option(help="Resolution of inference, as a part of that of the pictures. [1]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="PROBLEM.py: keep checkpoints here, and go on from the newest one there."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Iterations between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="All randomness comes from it.")] = 0,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Fit a model to pictures, or to what a Python file describes.

    With --images and --masks: a conditional random field that labels pixels, by the features and the initialisation of
    Domke (2013). images/horse.jpg goes with masks/horse.png, a grey or palette image of the same size whose values are
    labels. Images may be grey or coloured and of any sizes. The folder --out gets model.safetensors, run.json and
    checkpoints; the same command with --resume, after an interruption or with more --iterations, goes on from there.

    With PROBLEM.py: a file that defines a function problem(), which returns the arguments of riskfield.fit as a
    dictionary: model, data, loss and, where needed, inference, optimiser, ridge, validation, ... Under torchrun every
    process takes its share of the data. With --checkpoint the same command, interrupted or killed, goes on where it
    stopped.

    \b
    Examples:
      riskfield fit --images images/ --masks masks/ --out model/
      riskfield fit --images images/ --masks masks/ --out model/ --class 0=ground --class 255=horse --ignore 128
      riskfield fit --images images/ --masks masks/ --loss clique-logistic --inference trw --sweeps 10 --ridge 1e-3 \\
          --scale 0.5 --out model/
      riskfield fit --config horses.toml --out model/ --resume
      riskfield fit blobs.py --out blobs.safetensors
      torchrun --nproc-per-node 2 -m riskfield fit blobs.py --out blobs.safetensors --checkpoint runs/blobs
    """
    if problem is None and (images is None or masks is None):
        raise typer.BadParameter("Say what to fit: --images and --masks, or a file PROBLEM.py.")
    if problem is None:
        assert images is not None
        assert masks is not None
        if checkpoint is not None:
            raise typer.BadParameter("--checkpoint applies to PROBLEM.py. Pictures have theirs in the folder --out.")
        choices = Choices.of(loss, inference, rho, sweeps, ridge, iterations, scale)
        fit_pictures(images, masks, classes, ignore, choices, out, resume=resume, every=every, seed=seed, quiet=quiet)
        return
    given: dict[str, object] = {
        "--images": images,
        "--masks": masks,
        "--class": classes,
        "--ignore": ignore,
        "--loss": loss,
    }
    given |= {"--inference": inference, "--rho": rho, "--sweeps": sweeps, "--ridge": ridge, "--iterations": iterations}
    given |= {"--scale": scale, "--resume": resume or None}
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{option} applies to pictures. Got PROBLEM.py, which says such things itself.")
    fit_problem(problem, out, checkpoint, every, seed, quiet)
