"""Warnings that a run is slow, each given once."""

from __future__ import annotations

from riskfield.errors import PerformanceWarning, warn

_warned: set[str] = set()


def warn_slow(text: str) -> None:
    """Warn with `text` unless that has been done before."""
    if text not in _warned:
        _warned.add(text)
        warn(text, PerformanceWarning)
