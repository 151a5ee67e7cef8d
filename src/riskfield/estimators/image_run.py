"""A fitted `ImageCRF` and an account of its training, in one folder.

model.safetensors   the estimator
run.json            the command, its settings, the classes, the files and which of them were held out, the ridges that
                    were tried and the one that was chosen, the history of the training, how long things took
checkpoint/         what is needed to resume the training
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from riskfield.datasets.folders import MaskReading
from riskfield.errors import FileFormatError
from riskfield.estimators.image_crf import MODEL_FILE, ImageCRF
from riskfield.io._atomic import check_writable
from riskfield.io._lock import lock_folder
from riskfield.io.codec import read_text_tree, write_text_tree
from riskfield.learning.checkpoint import newest_below
from riskfield.learning.result import Fit, dump_fit, load_fit

_KIND = "run"  # of saved files
_MODEL, _RUN, _CHECKPOINT = MODEL_FILE, "run.json", "checkpoint"
_MAY_CHANGE = ("iterations",)  # settings that may change when a run is resumed


@dataclass(frozen=True, eq=False)
class ImageRun:
    """A fitted estimator and a record of its training.

    Arguments:
        name: the name of the run in reports, where it must differ from those of other runs.
        crf: the estimator, fitted to the values in the masks.
        classes: {value in the masks: name}, in the order of `crf.classes_`.
        ignore: the value of pixels without a label; by default every pixel has one.
        settings: the settings of the fit, which reports show; by default none.
        command: the command that fitted the estimator; by default none.
        fits: the `Fit` of each stage of the training; by default none.
        seconds: the time of each part of the training, {part: seconds}; by default none.
        reading: how the values in the files of masks became labels; by default they are used unchanged.
        files: the names of the training images; by default none.
        held_out: those of them that were held out, to choose the ridge or to stop early; by default none.

    Raises:
        ValueError: if `classes` are not the labels of `crf`.
    """

    name: str
    crf: ImageCRF
    classes: Mapping[int, str]
    ignore: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    fits: tuple[Fit, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    reading: MaskReading = field(default_factory=MaskReading)
    files: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if list(self.classes) != self.crf.classes_.tolist():
            raise ValueError(
                f"`classes` must name the labels of `crf`, {self.crf.classes_.tolist()}. Got {dict(self.classes)}."
            )

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, device: str | None = None) -> ImageRun:
        """Return the run in a folder that `save` or `riskfield fit` wrote.

        Arguments:
            folder: the folder.
            device: the device of the model, such as "cpu"; by default that on which it was trained.

        Raises:
            FileNotFoundError: if the folder holds no run, or an unfinished one.
            FileFormatError: if a file is damaged.
        """
        path = Path(folder)
        if not (path / _MODEL).is_file():
            unfinished = path / _CHECKPOINT if (path / _CHECKPOINT).is_dir() else path / _RUN
            what = "holds an unfinished run. Use `riskfield fit --resume` to continue it"
            raise FileNotFoundError(2, what if unfinished.exists() else "holds no fitted model", str(folder))
        crf = ImageCRF.load(path / _MODEL, device=device)
        kept = _read(path / _RUN)
        try:
            return cls(
                path.resolve().name,
                crf,
                {int(value): str(name) for value, name in kept["classes"]},
                None if kept["ignore"] is None else int(kept["ignore"]),
                kept["settings"],
                str(kept["command"]),
                tuple(map(load_fit, kept["fits"])),
                {str(what): float(seconds) for what, seconds in kept["seconds"].items()},
                MaskReading(**kept.get("reading", {})),
                tuple(map(str, kept.get("files", ()))),
                tuple(map(str, kept.get("held out", ()))),
            )
        except Exception as error:  # whatever comes of entries that nobody has checked
            raise FileFormatError(f"{path / _RUN} is damaged: {error!r}") from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the run to a folder, which is created if necessary. Each file is written whole or not at all."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _write(
            path / _RUN,
            {
                "command": self.command,
                "settings": dict(self.settings),
                "classes": list(map(list, self.classes.items())),
                "ignore": self.ignore,
                "fits": [dump_fit(fit) for fit in self.fits],
                "seconds": dict(self.seconds),
                "reading": asdict(self.reading),
                "files": list(self.files),
                "held out": list(self.held_out),
                "ridge": self.crf.ridge_,
                "ridges": [asdict(trial) for trial in self.crf.path_],
            },
        )
        self.crf.save(path / _MODEL)  # last: where there is a model, there is all of a run


@contextmanager
def prepare(folder: str | os.PathLike[str], settings: Mapping[str, Any], resume: bool) -> Iterator[Path]:
    """Make the folder of a run, or check that the run in it can be resumed; give the folder of its checkpoints.

    No other process can prepare the folder until the context is left.

    Arguments:
        folder: of the run.
        settings: how it will be fitted.
        resume: continue the run in it, if there is one.

    Raises:
        FileExistsError: if there is a run, and `resume` is false.
        ValueError: if the run in it was begun with other settings.
        BlockingIOError: if another process writes to it.
        OSError: if it cannot be written to.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    check_writable(path / _RUN)
    with lock_folder(path):
        _check_or_begin(path, settings, resume)
        yield path / _CHECKPOINT


def refuse_existing(folder: str | os.PathLike[str]) -> None:
    """Raise a `FileExistsError` if the folder holds a run."""
    if _holds_run(Path(folder)):
        raise FileExistsError(17, "already holds a run. Use --resume to continue it, or another folder", str(folder))


def _holds_run(path: Path) -> bool:
    return (path / _MODEL).exists() or newest_below(path / _CHECKPOINT) is not None


def _check_or_begin(path: Path, settings: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        refuse_existing(path)
    if _holds_run(path):
        was = _read(path / _RUN)["settings"]
        for name in {**was, **settings}:
            old, new = was.get(name), settings.get(name)
            if name not in _MAY_CHANGE and old != new:
                raise ValueError(
                    f"{path} holds a run with {name} {old!r}. It cannot be resumed with {new!r}. To begin a new run, "
                    "use another folder, or delete this one."
                )
    else:
        _write(path / _RUN, {"settings": dict(settings)})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_text_tree(path, _KIND, content)


def _read(path: Path) -> dict[str, Any]:
    content = read_text_tree(path, _KIND)
    if not isinstance(content.get("settings"), dict):
        raise FileFormatError(f"{path} is damaged: it holds no settings.")
    return content
