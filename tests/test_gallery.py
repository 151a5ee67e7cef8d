"""Every script of the gallery runs and draws a figure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
SCRIPTS = sorted(GALLERY.glob("*/plot_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_draws_a_figure(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    runpy.run_path(str(script))
    assert plt.get_fignums()
    plt.close("all")


def test_there_are_examples_of_every_theme() -> None:
    assert len(SCRIPTS) >= 12
    assert all((script.parent / "GALLERY_HEADER.rst").is_file() for script in SCRIPTS)
