"""`riskfield fit`: the run itself."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from riskfield.cli._common import BAD_IMAGE, DtypeName, complain, complain_of_image, print_divergence
from riskfield.datasets.folders import image_files, image_folder, unmatched_masks
from riskfield.datasets.images import few, size
from riskfield.devices import physical_memory
from riskfield.estimators.ridge_path import RIDGES, further, limit_of_search
from riskfield.features.image import LARGEST_SHARE, PART_SIDE, ImageFeatures, graph_bytes
from riskfield.features.resample import reduce_labels
from riskfield.kernels import gpu_memory
from riskfield.learning.checkpoint import Checkpoints, newest_below
from riskfield.learning.result import Reason
from riskfield.losses.likelihood import SurrogateLikelihood
from riskfield.losses.loss import as_loss
from riskfield.losses.names import LOSSES, name_of
from riskfield.progress import bar
from riskfield.report.templating import several

if TYPE_CHECKING:
    from riskfield.cli.fit import Choices, FitOptions
    from riskfield.estimators.image_crf import ImageCRF

_SHOWN = 10  # images whose errors are printed
_MANY = 5  # masks, of which one with a value of its own may be a mistake
FEATURES = "features"  # the folder of features in the folder of a run


@dataclass(frozen=True, eq=False)
class _Data:
    """The training data: where the images are, and their labels. The images themselves are read when needed."""

    names: dict[int, str]  # of the classes
    paths: list[Path]
    shapes: list[tuple[int, ...]]
    labels: list[npt.NDArray[np.int32]]  # values of the masks, -1 for pixels without a label
    fingerprint: str

    def having(self, value: int) -> list[int]:
        """Return the numbers of the masks with a value."""
        return [k for k, own in enumerate(self.labels) if (own == value).any()]


def fit_images(options: FitOptions, command: Any, *, resume: bool, every: int, quiet: bool) -> None:
    """Fit a model to two folders, and write the folder of the run. Errors name the options of `command`."""
    from riskfield.estimators.image_crf import ImageCRF  # here, because scikit-learn takes a second to load
    from riskfield.estimators.image_run import ImageRun, prepare, refuse_existing

    began, choices, out = time.perf_counter(), options.choices, options.out
    if not resume:
        refuse_existing(out)  # before the images are read, which may take long
    data = _read(options, command, shown=not quiet)
    crf = ImageCRF(**choices.objects(), random_state=options.seed, verbose=not quiet)
    crf.stages()  # refuses settings that do not go together, before anything is written
    features = ImageFeatures(scale=choices.scale)
    _check_complete(data, options, features)
    cache = _feature_folder(data, features, out, choices)
    settings = {
        **choices.settings(),
        "seed": options.seed,
        "ignore": "nothing" if options.ignore is None else options.ignore,
        **options.given(),
        "classes": ", ".join(f"{name} = {value}" for value, name in sorted(data.names.items())),
        "images": len(data.paths),
        "fingerprint of the data": data.fingerprint,
    }
    if not quiet:
        typer.echo(_shares(data))
    with prepare(out, settings, resume) as checkpoint:
        if resume and not quiet:
            typer.echo(_continuation(checkpoint))
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
            {
                "reading": loaded - began,
                "features": crf.feature_seconds_,
                "choice of the ridge": crf.ridge_seconds_,
                "training": training,
            },
            options.reading,
            tuple(path.name for path in data.paths),
            tuple(data.paths[k].name for k in crf.held_out_),
        )
        run.save(out)
        if cache is not None and not interrupted:
            shutil.rmtree(cache)
    if len(crf.results_) < len(crf.stages()):
        typer.echo(f"riskfield: training ended before the stage with the loss {choices.loss}.", err=True)
    if not quiet:
        _print_ridge(crf, options)
        for stage, result in zip(crf.stages(), crf.results_, strict=False):  # an interrupted run has fewer results
            found = "" if result.best is None else f", objective {result.best.objective:.6g}"
            typer.echo(
                f"{name_of(as_loss(stage.loss))}: {len(result.history)} iterations{found} "
                f"({result.reason.value}: {result.explanation})"
            )
        typer.echo(f"wrote {out}")
    if interrupted:
        raise typer.Exit(130)


def _print_ridge(crf: ImageCRF, options: FitOptions) -> None:
    """Print how the ridge was chosen, and on how many held-out images."""
    held_out = several(len(crf.held_out_), "held-out image")
    if not crf.path_:
        if options.choices.ridge is None and crf.results_[-1].reason is not Reason.INTERRUPTED:
            typer.echo(f"ridge: {crf.ridge_:g}, because there are fewer than five images with labels to train on")
        if options.choices.early_stopping:
            typer.echo(f"early stopping: by the loss on {held_out}")
        return
    best = min(crf.path_, key=lambda trial: trial.model)
    alone = min(trial.independent for trial in crf.path_)
    typer.echo(
        f"ridge: {crf.ridge_:g}, chosen on {held_out}. Log loss there: {best.model:.4f}; without edges {alone:.4f}"
    )
    if limit := limit_of_search(crf.path_):
        typer.echo(f"this is the {limit} ridge that is tried: compare with --ridge {further(crf.path_):g}")
    if best.model > alone:
        likelihood = "surrogate-likelihood" if options.ignore is None else "surrogate-em"  # for unknown labels
        complain(
            "WARNING: on the held-out images the log loss is lower without edges. If you need good marginals, "
            f"compare with --loss independent or --loss {likelihood}, or use more images."
        )


def _continuation(checkpoint: Path) -> str:
    """Where a resumed run continues, in words."""
    if (newest := newest_below(checkpoint)) is None:
        return "nothing to resume: training begins"
    number, file = newest
    part = re.fullmatch(r"ridge-(\d+)-\w+", file.parent.parent.name)
    stage = int(file.parent.name.removeprefix("stage-")) + 1
    where = f"the choice of the ridge, {int(part[1]) + 1} of at most {len(RIDGES)}" if part else f"stage {stage}"
    return f"resuming in {where}, after iteration {number}; later iterations are repeated"


def _read(options: FitOptions, command: Any, shown: bool) -> _Data:
    """Read all images and masks once, to find what is wrong with them before the work begins."""
    named = _classes(options.classes) if options.classes else None
    options.reading.check("ignore", () if options.ignore is None else (options.ignore,))
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
    data = _Data(names, [files[name] for name in images.names], shapes, labels, digest.hexdigest()[:12])
    for value, name in names.items():
        if not data.having(value):
            raise ValueError(f"{options.masks}: no mask has the value {value} of the class {name!r}.")
    if named is None:
        _warn_of_rare_values(data, options)
    return data


def _warn_of_rare_values(data: _Data, options: FitOptions) -> None:
    """Warn of values that may not be meant as classes: of few masks among many, or 1 and 255 in different masks."""
    where = {value: data.having(value) for value in data.names}
    if {1, 255} <= set(where) and not set(where[1]) & set(where[255]):
        rarer = min((1, 255), key=lambda value: len(where[value]))
        complain(
            f"WARNING: no mask has both 1 and 255, and {rarer} occurs only in the masks of "
            f"{few([data.paths[k].name for k in where[rarer]])}. They are two classes now. If they mean the same, use "
            "--threshold 1."
        )
        return
    for value, numbers in where.items():
        if len(data.paths) >= _MANY and len(numbers) <= max(1, len(data.paths) // 20):
            complain(
                f"WARNING: the value {value} occurs only in {several(len(numbers), 'mask')} of {len(data.paths)}, of "
                f"{few([data.paths[k].name for k in numbers])}. It is a class now. If it is not meant to be one, "
                f"correct the mask, or use --ignore {value}, --threshold or --levels."
            )


def _shares(data: _Data) -> str:
    """The classes and their shares of the pixels, in one line."""
    total = sum(own.size for own in data.labels)
    counts = {value: sum(int(np.count_nonzero(own == value)) for own in data.labels) for value in [*data.names, -1]}
    shares = [
        f"{name}{'' if name == str(value) else f' ({value})'} {100 * counts[value] / total:.3g} %"
        for value, name in data.names.items()
    ]
    unknown = [f"without a label {100 * counts[-1] / total:.3g} %"] if counts[-1] else []
    return f"{several(len(data.paths), 'image')}. Pixels by class: {', '.join(shares + unknown)}"


def _check_complete(data: _Data, options: FitOptions, features: ImageFeatures) -> None:
    """Raise if the loss needs a label for every pixel of the grid of inference, and an image has pixels without one."""
    loss = options.choices.loss
    if not isinstance(LOSSES[loss], SurrogateLikelihood):
        return
    for path, shape, labels in zip(data.paths, data.shapes, data.labels, strict=True):
        if (reduce_labels(torch.from_numpy(labels), features.shape(*shape[:2])) < 0).any():
            raise typer.BadParameter(
                f"--loss {loss} needs a label for every pixel. The mask of {path.name} has pixels with the value of "
                f"--ignore, {options.ignore}. Use --loss surrogate-em, which sums over unknown labels, or another loss."
            )


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
