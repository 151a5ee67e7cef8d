"""`riskfield fit`: training on pictures, or on a problem that a Python file defines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from riskfield.cli._common import Config, Quiet
from riskfield.cli._fit_pictures import Choices, InferenceName, LossName, fit_pictures
from riskfield.cli._fit_problem import fit_problem


def fit(
    problem: Annotated[
        Path | None, typer.Argument(metavar="PROBLEM.py", help="A file that defines a function `problem()`.")
    ] = None,
    *,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of images.")] = None,
    masks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of masks with the names of the images.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="The folder of the run; for PROBLEM.py, the file of the parameters.")
    ],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="VALUE=NAME", help="A mask value and its class; repeatable. [all values]"),
    ] = None,
    ignore: Annotated[int | None, typer.Option(min=0, help="The mask value of pixels without a label.")] = None,
    loss: Annotated[
        LossName | None,
        typer.Option(metavar="NAME", help=f"The loss to minimise: {', '.join(LossName)}. [clique-logistic]"),
    ] = None,
    inference: Annotated[InferenceName | None, typer.Option(help="The inference algorithm. [trw]")] = None,
    rho: Annotated[float | None, typer.Option(help="trw: the appearance probability of edges. [0.5]")] = None,
    sweeps: Annotated[
        int | None, typer.Option(min=1, help="Sweeps of inference; gradients go through all of them. [10]")
    ] = None,
    ridge: Annotated[float | None, typer.Option(min=0, help="The weight of the squared parameters. [1e-3]")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="At most this many optimiser iterations. [200]")] = None,
    scale: Annotated[
        float | None, typer.Option(help="The resolution of inference relative to the pictures. [1]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="PROBLEM.py: write checkpoints here, and resume from the newest one."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Iterations between checkpoints.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="The seed of all random numbers.")] = 0,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Fit a model to pictures, or solve the problem that a Python file defines.

    With --images and --masks, the command fits a conditional random field that labels pixels, with the features and the
    initialisation of Domke (2013). The mask of images/horse.jpg is masks/horse.png: a grey or palette image of the same
    size whose values are labels. Images may be grey or colour, and of any size. The folder --out gets
    model.safetensors, run.json and checkpoints. After an interruption, or with more --iterations, the same command with
    --resume continues the run.

    With PROBLEM.py, the file must define a function problem(), which returns the arguments of riskfield.fit as a
    dictionary: model, data, loss and, if needed, inference, optimiser, ridge, validation, ... Under torchrun every
    process uses its share of the data. With --checkpoint the same command resumes after it was interrupted or killed.

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
        raise typer.BadParameter("Give --images and --masks, or a file PROBLEM.py.")
    if problem is None:
        assert images is not None
        assert masks is not None
        if checkpoint is not None:
            raise typer.BadParameter("--checkpoint applies to PROBLEM.py. For pictures, checkpoints are in --out.")
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
            raise typer.BadParameter(f"{option} applies to pictures. Got PROBLEM.py, which defines this itself.")
    fit_problem(problem, out, checkpoint, every, seed, quiet)
