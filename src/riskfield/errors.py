"""Errors and warnings a caller may want to catch by name."""


class RiskfieldError(Exception):
    """Base class of the errors this library raises beyond plain `ValueError` and `TypeError`."""


class ImpossibleEvidenceError(RiskfieldError, ValueError):
    """Every joint state has probability zero: the evidence or the hard constraints contradict each other."""


class FileFormatError(RiskfieldError, ValueError):
    """A file does not follow its format; the message says where and why."""


class MissingDataError(RiskfieldError, FileNotFoundError):
    """A data set is not where it should be; the message says what to download and where to put it."""


class TreewidthError(RiskfieldError, MemoryError):
    """Exact inference would need more memory than it is allowed to use."""


class ConvergenceWarning(UserWarning):
    """The sweeps ran out before the marginals settled to the tolerance that was asked for."""


class AdjointError(RiskfieldError):
    """A gradient could not be computed: a linear solve or an adjoint iteration failed; the message has its residual."""


class AdjointWarning(UserWarning):
    """A gradient is less accurate than was asked for; the message has its residual."""


class CheckpointError(RiskfieldError, OSError):
    """A checkpoint could not be written; the one before it is intact."""


class DivergenceWarning(UserWarning):
    """The objective is not finite, has left all bounds, or was lowered by making inference fail."""
