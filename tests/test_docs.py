"""Every Python block in the README and the documentation runs, in order, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {  # that pages speak of
    "model.uai": "MARKOV 2  2 3  2  1 0  2 0 1   2  0.5 1   6  1 2 3 4 5 0",
    "model.uai.evid": "1 0 1",
}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def _blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start()].count("\n") + 1, match.group(1)) for match in _BLOCK.finditer(text)]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=_name)
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for name, text in FILES.items():
        Path(name).write_text(text)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, block in _blocks(page):
        # Blank lines in front make tracebacks point into the page, which does not import this file's future.
        exec(compile("\n" * line + block, str(page), "exec", dont_inherit=True), namespace)
    drawn = re.findall(r"\]\(figures/([^)]+)\)", page.read_text(encoding="utf-8"))  # by the code itself
    assert all(Path(name).is_file() for name in drawn)


@pytest.mark.parametrize("page", [*PAGES[1:], *sorted(ROOT.glob("[A-Z]*.md"))], ids=_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_chapter_of_the_tutorial_ends_in_a_figure() -> None:
    chapters = [page for page in (ROOT / "docs" / "tutorial").glob("*.md") if page.stem != "index"]
    assert len(chapters) == 8
    for page in chapters:
        assert f"](figures/{page.stem}.png)" in page.read_text(encoding="utf-8")


def test_readme_has_its_example() -> None:
    assert len(_blocks(ROOT / "README.md")) >= 1
