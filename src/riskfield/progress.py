"""Progress bars for loops over examples."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def bar(items: Collection[_T], *, shown: bool, what: str) -> Iterable[_T]:
    """Iterate over `items`, with a progress bar named `what` if `shown`. Without a bar tqdm is not imported."""
    if not shown:
        return items
    from tqdm import tqdm

    progress: Iterable[_T] = tqdm(items, desc=what, leave=False, delay=0.5)
    return progress
