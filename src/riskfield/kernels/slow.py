"""Warnings that a run is slow, each given once."""

from __future__ import annotations

import warnings

from riskfield.errors import PerformanceWarning

_warned: set[str] = set()


def warn_slow(text: str) -> None:
    """Warn with `text` unless that has been done before."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, PerformanceWarning, stacklevel=2)
