"""How far a loop has come: a bar on a terminal, and lines in a log.

Lines have no carriage returns, so that they can be read in a file. The first comes after `SECONDS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self, TypeVar

_T = TypeVar("_T")

SECONDS = 10.0  # between two lines


class Progress:
    """Reports on standard error how many of `total` steps are done. It imports tqdm only for a bar.

    Arguments:
        what: what is done, such as "reading".
        total: the number of steps.
        done: how many are done already.
        shown: whether to report anything.
    """

    def __init__(self, what: str, total: int, *, done: int = 0, shown: bool):
        self._what, self._total, self._done = what, total, done
        self._bar: Any = None
        shown = shown and sys.stderr is not None
        self._lines = shown and not sys.stderr.isatty()
        self._began = self._last = time.monotonic()
        if shown and not self._lines:
            from tqdm import tqdm

            self._bar = tqdm(desc=what, total=total, initial=done, leave=False, delay=0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, **facts: str) -> None:
        """One more step is done; `facts` are shown beside the number of steps."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix(facts, refresh=False)
            self._bar.update(1)
        now = time.monotonic()
        if self._lines and now - self._last >= SECONDS:
            self._last = now
            listed = "".join(f", {name} {value}" for name, value in facts.items())
            print(f"{self._what}: {self._done} of {self._total}{listed}, {now - self._began:.0f} s", file=sys.stderr)


def note(text: str, *, shown: bool) -> None:
    """Print a line on standard error if `shown`."""
    if shown and sys.stderr is not None:
        print(text, file=sys.stderr)


def bar(items: Collection[_T], *, shown: bool, what: str) -> Iterable[_T]:
    """Iterate over `items`, and report how many are done if `shown`."""
    return _reported(items, what) if shown else items


def _reported(items: Collection[_T], what: str) -> Iterator[_T]:
    with Progress(what, len(items), shown=True) as progress:
        for item in items:
            yield item
            progress.advance()
