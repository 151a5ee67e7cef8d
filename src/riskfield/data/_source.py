"""Where public data sets are on this computer, and what to do if they are not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from riskfield.errors import MissingDataError

VARIABLE = "RISKFIELD_DATA"
Root = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Source:
    """A public data set: what it is called, where it comes from, and what its folder looks like."""

    title: str
    address: str
    layout: str  # a file of it, below the folder of all data sets, as its publishers lay it out

    def find(self, root: Root, *paths: str) -> list[Path]:
        """The folders or files at `paths` below `root`, or below the folder that the environment names.

        Raises:
            MissingDataError: if one is not there; it says what to download and where to put it.
        """
        folder = root if root is not None else os.environ.get(VARIABLE)
        if not folder:
            raise MissingDataError(
                f"{self.title}: give the folder of data sets as `root`, or name it in the environment variable "
                f"{VARIABLE}. {self._advice('that folder')}"
            )
        found = [Path(folder) / path for path in paths]
        for path in found:
            if not path.exists():
                raise MissingDataError(f"{self.title} is not there: no {path}. {self._advice(str(folder))}")
        return found

    def _advice(self, folder: str) -> str:
        return f"Download it from {self.address} and unpack it in {folder}, so that there is {self.layout}."
