"""What several commands share."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from riskfield.errors import DivergenceWarning, did_you_mean

if TYPE_CHECKING:
    from riskfield.datasets.images import ImageSet
    from riskfield.estimators.image_crf import ImageCRF
    from riskfield.estimators.image_run import ImageRun

# What can be wrong with one image of many: the file, its size, its values.
BAD_IMAGE = (OSError, ValueError, MemoryError)
# Options whose argument in Python has another name.
_OPTIONS = {"max_bytes": "--memory", "runs": "MODEL", "num_shown": "--shown", "X": "--images", "y": "--masks"}
# Options of `riskfield fit`, which decides for the later commands how masks are read.
_OPTIONS_OF_FIT = {name: f"--{name.replace('_', '-')}" for name in ("threshold", "levels", "resize_masks")}

# Typer keeps a copy of click in some versions and imports it in others; this name holds in both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def complain(message: str, error: BaseException | None = None) -> int:
    """Print in one line what is wrong, and return the exit code for it.

    With RISKFIELD_TRACEBACK in the environment, the traceback of `error` comes first.
    """
    with contextlib.suppress(OSError):  # standard error may be closed as well
        if error is not None and os.environ.get("RISKFIELD_TRACEBACK"):
            traceback.print_exception(error)
        print(f"riskfield: {' '.join(message.split())}", file=sys.stderr)
    return 2


def complain_of_image(name: str | Path, error: BaseException, command: Any = None) -> None:
    """Print what is wrong with one image of many. The message names the image once, even if the error names its file.

    It names the options of `command`, or without one those of `riskfield fit`, instead of arguments of functions.
    """
    from riskfield.datasets.folders import ENDINGS

    path, original = Path(name), message_of(error)
    stem = re.escape(path.stem if path.suffix.lower() in ENDINGS else path.name)
    if command is None:
        message = re.sub(r"`(\w+)`", lambda match: _OPTIONS_OF_FIT.get(match[1], match[0]), original)
        if message != original:
            message += " Only `riskfield fit` can set this: fit again, or change the mask."
    else:
        message = name_options(original, command)
    named = re.search(rf"(^|[/\\ ]){stem}\.\w+[: ]", message)
    complain(message if named else f"{name}: {message}", error)


def note_tiles(crf: ImageCRF, shape: tuple[int, ...], name: str | Path) -> None:
    """Say on standard error if an image is predicted in tiles."""
    if tiling := crf.tiling(shape):
        rows, columns = tiling[0].window.shape
        complain(
            f"{name}: {shape[1]} x {shape[0]} pixels would take more than half of the memory. They are labelled in "
            f"{len(tiling)} overlapping tiles of {columns} x {rows}."
        )


def message_of(error: BaseException) -> str:
    """The message of an error, in sentences."""
    if isinstance(error, USAGE_ERROR):
        message = str(error.format_message()).replace("Value error, ", "")  # type: ignore[attr-defined]
        message = re.sub(r"^Invalid value(?: for '[^']*')?: (?=--)", "", message)  # ours name the option themselves
        if choice := re.search(r"('[^']*') is not one of ('.*')", message):
            message += did_you_mean(choice[1].strip("'"), re.findall(r"'([^']*)'", choice[2]))
        return message if message.endswith((".", "?")) else f"{message}."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename is not None else f"{error.strerror}."
    return str(error) or ("Out of memory." if isinstance(error, MemoryError) else type(error).__name__)


def name_options(message: str, command: Any) -> str:
    """The message with options of the command instead of arguments of Python functions: --images for `images`."""
    names = dict(_OPTIONS)
    for parameter in command.params:
        long = [option for option in parameter.opts if option.startswith("--")]
        names[parameter.name] = long[0] if long else parameter.metavar or parameter.name.upper()
    return re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), message)


def readable(images: ImageSet, models: Sequence[ImageCRF]) -> ImageSet:
    """The images that can be read and whose features fit into memory. Others are reported on standard error."""
    good = []
    for number, name in enumerate(images.names):
        try:
            shape = images[number].image.shape
            for crf in models:
                if not crf.tiling(shape):
                    crf.features_.check_memory(shape)
            note_tiles(models[0], shape, name)
        except BAD_IMAGE as error:
            complain_of_image(name, error)
        else:
            good.append(name)
    if not good:
        raise typer.Exit(2)
    return images.select(good)


def warn_of_missing_classes(run: ImageRun, counts: Sequence[int], masks: Path, names: Sequence[str]) -> None:
    """Warn if the masks have only one class, or have lost one by the threshold or the levels of the run.

    Arguments:
        run: the run that says how masks are read.
        counts: how many pixels each class has.
        masks: the folder of masks.
        names: of the masks that were read.
    """
    from riskfield.datasets.folders import mask_values

    missing = [name for name, count in zip(run.classes.values(), counts, strict=True) if count == 0]
    reading = run.reading
    changed = reading.threshold is not None or reading.levels is not None
    if not missing or not (changed or len(missing) == len(run.classes) - 1):
        return
    how, found = "", ""
    if changed:
        how = f"--threshold {reading.threshold}" if reading.threshold is not None else f"--levels {reading.levels}"
        values = mask_values(masks, names)
        how = f", because they are read as in training, with {how}"
        found = f" Their files have {'the value' if len(values) == 1 else 'values from'} {values[0]}"
        found += "." if len(values) == 1 else f" to {values[-1]}."
    complain(
        f"WARNING: no mask in {masks} has the class {' or '.join(map(repr, missing))}{how}.{found} If the masks should "
        "have it, the scores mean nothing."
    )


@contextmanager
def print_divergence(enabled: bool = True) -> Iterator[None]:
    """Print a `DivergenceWarning` as one line instead of a Python warning, or drop it if not `enabled`."""
    show = warnings.showwarning

    def show_or_print(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if not issubclass(category, DivergenceWarning):
            show(message, category, *where, **options)
        elif enabled:
            typer.echo(f"riskfield: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DivergenceWarning)
        warnings.showwarning = show_or_print
        yield


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the content of a TOML file the defaults of the options."""
    if path is None:
        return None
    try:
        content = {key: _typed(value) for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deep.") from None
    options: dict[str, str] = {}
    repeated = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    for parameter in context.command.params:
        long = [option.removeprefix("--") for option in parameter.opts if option.startswith("--")]
        options |= dict.fromkeys(set(long) - {"config", "help"}, str(parameter.name))
    for key in content:
        if key not in options:
            known = sorted(options)
            raise ValueError(f"{path} may set {', '.join(known)}. It sets {key!r}.{did_you_mean(key, known)}")
    typed = {options[key]: value for key, value in content.items()}
    typed |= {name: [value] for name, value in typed.items() if name in repeated and not isinstance(value, list)}
    context.default_map = {**(context.default_map or {}), **typed}
    return path


def _typed(value: Any) -> Any:
    """A value as it would be typed on the command line; a table as a list of KEY=VALUE."""
    if isinstance(value, dict):
        return [f"{key}={entry}" for key, entry in value.items()]
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    return value if isinstance(value, bool) else str(value)


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        is_eager=True,
        callback=_read_config,
        help="Read options from a file with lines `option = value`. Options on the command line take precedence.",
    ),
]


def check_device(name: str | None) -> str | None:
    """Return the name of a device, or raise if it cannot be used here."""
    from riskfield.devices import as_device

    if name is not None:
        try:
            as_device(name)
        except ValueError as error:
            raise typer.BadParameter(str(error).replace("`device`", "--device")) from error
    return name


Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", callback=check_device, help="The device that computes, such as cuda. [cpu]"),
]
DeviceOfRun = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", callback=check_device, help="The device that computes, such as cpu. [that of the fit]"
    ),
]


class DtypeName(StrEnum):
    """The floating-point types."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


def _set_threads(count: int | None) -> int | None:
    if count is not None:
        import torch

        from riskfield.threads import set_num_threads

        set_num_threads(count)
        torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None, typer.Option(min=1, callback=_set_threads, help="Maximum number of threads. [the number of processors]")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]
Run = Annotated[Path, typer.Argument(metavar="MODEL", help="The folder that `riskfield fit` wrote.")]
Images = Annotated[Path, typer.Option(metavar="DIR", help="A folder of images.", show_default=False)]
Masks = Annotated[
    Path, typer.Option(metavar="DIR", help="A folder of masks with the names of the images.", show_default=False)
]
