"""Errors and warnings that callers may want to catch."""

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "AdjointError",
    "AdjointWarning",
    "CheckpointError",
    "ConvergenceWarning",
    "DivergenceWarning",
    "FileFormatError",
    "ImpossibleEvidenceError",
    "KernelError",
    "MissingDataError",
    "PerformanceWarning",
    "PrecisionError",
    "RiskfieldError",
    "TreewidthError",
]


class RiskfieldError(Exception):
    """Base class of all errors of this library except plain `ValueError` and `TypeError`."""


class ImpossibleEvidenceError(RiskfieldError, ValueError):
    """Every joint state has probability zero: evidence and hard constraints contradict each other."""


class FileFormatError(RiskfieldError, ValueError):
    """A file violates its format. The message says where and how."""


class MissingDataError(RiskfieldError, FileNotFoundError):
    """The files of a data set are missing. The message says what to download and where to put it."""


class PrecisionError(RiskfieldError, ValueError):
    """Potentials are so large that differences between probable states are lost in rounding."""


class KernelError(RiskfieldError, ValueError):
    """The kernels asked for do not support something. The message names it."""


class TreewidthError(RiskfieldError, MemoryError):
    """Exact inference would need more memory than the limit allows. `need` says how much."""

    def __init__(self, need: str, remedy: str):
        super().__init__(need, remedy)  # with both, it can be pickled
        self.need = need

    def __str__(self) -> str:
        return "; ".join(self.args)


class ConvergenceWarning(UserWarning):
    """Inference used all its sweeps before the residual reached the tolerance."""


class PerformanceWarning(UserWarning):
    """Inference is much slower than it could be on this device. The message names the reason. Each is issued once."""


class AdjointError(RiskfieldError):
    """A gradient could not be computed, for example because a linear solve or an adjoint iteration failed."""


class AdjointWarning(UserWarning):
    """A gradient is less accurate than requested. The message contains the residual."""


class CheckpointError(RiskfieldError, OSError):
    """A checkpoint could not be written. The previous checkpoint is intact."""


class DivergenceWarning(UserWarning):
    """The objective is not finite, fell below its lower bound, or decreased because inference failed."""


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """The end of an error message: the first name of which the word is a part, or else the one it resembles most.

    >>> did_you_mean("clique-logstic", ["univariate-logistic", "clique-logistic"])
    " Did you mean 'clique-logistic'?"
    >>> did_you_mean("likelihood", ["pseudolikelihood", "surrogate-likelihood"])
    " Did you mean 'surrogate-likelihood'?"
    >>> did_you_mean("hinge", ["univariate-logistic", "clique-logistic"])
    ''
    """
    from difflib import get_close_matches

    known = list(names)
    close = [name for name in known if str(word) in name.split("-")] or get_close_matches(str(word), known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning that names the line of the caller's code which led to it."""
    # Code between that line and here: this library, and torch in a backward pass. Importing this loads no torch.
    files = [__file__] + ([sys.modules["torch"].__file__ or ""] if "torch" in sys.modules else [])
    inner = tuple(str(Path(file).parent) + os.sep for file in files)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


_warned_slow: set[str] = set()


def warn_slow(text: str) -> None:
    """Issue a `PerformanceWarning` with this text, unless it was issued before."""
    if text not in _warned_slow:
        _warned_slow.add(text)
        warn(text, PerformanceWarning)
