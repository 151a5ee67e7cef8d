"""Progress bars for work that goes picture by picture."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def bar(items: Collection[_T], *, shown: bool, what: str) -> Iterable[_T]:
    """The pictures, behind a progress bar that says what is done; tqdm is loaded only where it is shown."""
    if not shown:
        return items
    from tqdm import tqdm

    progress: Iterable[_T] = tqdm(items, desc=what, unit="picture", leave=False, delay=0.5)
    return progress
