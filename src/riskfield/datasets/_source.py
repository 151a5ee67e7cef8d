"""The location of public data sets on this computer, and advice on where to download them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from riskfield.errors import MissingDataError

VARIABLE = "RISKFIELD_DATA"
Root = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Source:
    """A public data set: its title, its address, and the layout of its folder."""

    title: str
    address: str
    layout: str  # paths of some of its files, relative to the folder of all data sets

    def find(self, root: Root, *paths: str) -> list[Path]:
        """Return the folders or files at `paths` below `root`, or below the folder that the environment variable names.

        Raises:
            MissingDataError: if one is missing; the message says what to download and where to put it.
        """
        folder = root if root is not None else os.environ.get(VARIABLE)
        if not folder:
            raise MissingDataError(
                f"{self.title}: pass the folder of data sets as `root`, or set the environment variable {VARIABLE} to "
                f"it. {self._advice('that folder')}"
            )
        found = [Path(folder) / path for path in paths]
        for path in found:
            if not path.exists():
                raise MissingDataError(f"{self.title} is missing: {path} does not exist. {self._advice(str(folder))}")
        return found

    def _advice(self, folder: str) -> str:
        return f"Download it from {self.address} and unpack it in {folder}, which then contains {self.layout}."
