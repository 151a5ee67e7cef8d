"""Whitespace-separated numbers of a text file, parsed at once. Errors give the position."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from riskfield.errors import FileFormatError

_WHITESPACE = np.zeros(256, bool)
_WHITESPACE[[9, 10, 11, 12, 13, 32]] = True
_TEXT = _WHITESPACE.copy()
_TEXT[33:127] = True
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a file. Token 0 may be a word (then `values[0]` is NaN); all others are numbers."""

    path: Path
    text: bytes
    starts: npt.NDArray[np.int64]  # (token,)  where each begins in `text`
    values: npt.NDArray[np.float64]  # (token,)

    @classmethod
    def read(cls, path: str | os.PathLike[str], words: tuple[str, ...] = ()) -> Tokens:
        """Read a file of numbers, after one of `words` if any are given (upper or lower case)."""
        path = Path(path)
        text = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
        codes = np.frombuffer(text, np.uint8)
        foreign = ~_TEXT[codes]
        if foreign.any():
            where = int(foreign.argmax())
            raise FileFormatError(f"{path}: expected plain text. Found byte 0x{text[where]:02x} at offset {where}.")
        blank = _WHITESPACE[codes]
        starts = np.flatnonzero(~blank & np.concatenate([[True], blank[:-1]])) if len(codes) else np.empty(0, np.int64)
        tokens = cls(path, text, starts, np.full(len(starts), np.nan))
        first = 0
        if words:
            if tokens.word(0).upper() not in words:
                tokens.fail(0, f"the word {' or '.join(words)}")
            first = 1
        tokens._parse(first)
        return tokens

    def __len__(self) -> int:
        return len(self.starts)

    def word(self, token: int) -> str:
        """Return the text of a token, empty behind the last one."""
        if token >= len(self):
            return ""
        start = int(self.starts[token])
        return self.text[start : start + 400].split(maxsplit=1)[0].decode("ascii")

    def fail(self, token: int, expected: str) -> NoReturn:
        """Raise an error that says what was expected at `token`, and what was found."""
        if token >= len(self):
            raise FileFormatError(f"{self.path}: expected {expected}. Found the end of the file after {token} tokens.")
        line = self.text.count(b"\n", 0, int(self.starts[token])) + 1
        found = self.word(token)
        found = found if len(found) <= 40 else found[:37] + "..."
        raise FileFormatError(f"{self.path}: expected {expected} at token {token + 1} (line {line}). Found {found!r}.")

    def integer(self, token: int, name: str, low: int, high: float) -> int:
        """Return the whole number at `token`, which must lie in `low`..`high`."""
        return int(self.integers(token, 1, lambda _: name, low, high)[0])

    def integers(
        self, first: int, count: int, name: Callable[[int], str], low: int, high: float
    ) -> npt.NDArray[np.int64]:
        """`count` whole numbers from token `first` on, each in `low`..`high`; `name(k)` says what the k-th one is."""
        block = self.values[first : first + count]
        bad = ~((block >= low) & (block <= high) & (block == np.floor(block)))
        if bad.any() or len(block) < count:
            k = int(bad.argmax()) if bad.any() else len(block)
            self.fail(first + k, f"{name(k)}, a whole number {span(low, high)}")
        return block.astype(np.int64)

    def counter(self, token: int, name: str) -> int:
        """Return a count of things of which each takes at least one of the tokens that follow."""
        count = self.integer(token, name, 0, 2.0**53)
        left = len(self) - token - 1
        if count > left:
            raise FileFormatError(
                f"{self.path}: {name} is {count} at token {token + 1}, but only {left} tokens follow."
            )
        return count

    def check_end(self, token: int) -> None:
        """Raise unless the file ends before `token`."""
        if token < len(self):
            self.fail(token, "the end of the file")

    def check_no_underflow(self) -> None:
        """Raise if a positive number is so small that it reads as 0, which would turn possible into impossible."""
        ends = np.append(self.starts[1:], len(self.text))
        exponents = [match.start() for match in re.finditer(rb"[eE]-[0-9]{3}", self.text)]
        small = np.searchsorted(self.starts, exponents, side="right") - 1
        # With an exponent of at most two digits, such a number begins with more than 200 zeros.
        long = np.flatnonzero(ends - self.starts > 200)
        for token in np.unique(np.concatenate([small, long])).tolist():
            digits = re.split(rb"[eE]", self.text[self.starts[token] : ends[token]])[0]
            if self.values[token] == 0 and re.search(rb"[1-9]", digits):
                self.fail(token, "0 or a number of at least 5e-324")

    def _parse(self, first: int) -> None:
        if first == len(self):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # NumPy before 2.3 warns where later ones raise
                parsed = np.fromstring(self.text[self.starts[first] :], np.float64, sep=" ")
        except ValueError:
            parsed = np.empty(0)
        # NumPy reads "1-2" as two numbers, so the counts are compared.
        if len(parsed) == len(self) - first:
            self.values[first:] = parsed
            return
        for token in range(first, len(self)):
            if not _is_number(self.word(token)):
                self.fail(token, "a number")
        raise FileFormatError(f"{self.path}: expected numbers. Found some that cannot be read.")


def span(low: int, high: float) -> str:
    """Put a range in words."""
    return f"in {low}..{int(high)}" if high < 2.0**53 else f"of at least {low}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word
