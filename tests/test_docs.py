"""Every Python block in the README and the documentation runs, in order, page by page."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from riskfield.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]  # the gallery has a test of its own
FILES = {  # that pages speak of
    "model.uai": "MARKOV 2  2 3  2  1 0  2 0 1   2  0.5 1   6  1 2 3 4 5 0",
    "model.uai.evid": "1 0 1",
    "train.conll": "-DOCSTART- -X- O\n\nJohn NNP B-PER\nlives VBZ O\n\nin IN O\nNew NNP B-LOC\nYork NNP I-LOC\n",
}
# A block, and what it prints if the page shows that directly below it.
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
_FILE = re.compile(r"# (\w+\.py)\n")  # a block that begins so is a file, complete in itself
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def _blocks(page: Path) -> list[tuple[int, str, str | None]]:
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start()].count("\n") + 1, *match.groups()) for match in _BLOCK.finditer(text)]


def _same_output(printed: str, shown: str) -> bool:
    """Whether two texts are equal but for numbers that rounding may change, on another machine say."""

    def close(a: str, b: str) -> bool:
        if "e" in a:  # a rounding error
            return float(a) <= 1e-6 and float(b) <= 1e-6
        unit = 10.0 ** -len(b.partition(".")[2])
        return abs(float(a) - float(b)) <= 2 * unit + 0.05 * abs(float(b))

    words = [re.sub(r"\s+", " ", _NUMBER.sub("#", text)).strip() for text in (printed, shown)]
    return words[0] == words[1] and all(map(close, _NUMBER.findall(printed), _NUMBER.findall(shown)))


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=_name)
def test_code_blocks_run_and_print_what_the_page_shows(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for name, text in FILES.items():
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, block, shown in _blocks(page):
        if file := _FILE.match(block):
            Path(file[1]).write_text(block, encoding="utf-8")
            if "problem" in runpy.run_path(file[1], run_name="__main__"):
                assert main(["run", file[1], "--out", "parameters.safetensors", "--quiet"]) == 0
            continue
        capsys.readouterr()
        # Blank lines in front make tracebacks point into the page, which does not import this file's future.
        exec(compile("\n" * line + block, str(page), "exec", dont_inherit=True), namespace)
        printed = capsys.readouterr().out
        assert shown is None or _same_output(printed, shown), f"line {line} prints\n{printed}"
    drawn = re.findall(r"\]\(figures/([^)]+)\)", page.read_text(encoding="utf-8"))  # by the code itself
    assert all(Path(name).is_file() for name in drawn)


@pytest.mark.parametrize("page", [*PAGES[1:], *sorted(ROOT.glob("[A-Z]*.md"))], ids=_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_line_of_a_paragraph_begins_a_list(page: Path) -> None:
    """A sentence that ends in "costs 1." must not be wrapped before the number: it would become a list."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    wrapped = re.findall(r"^[A-Za-z(`*].*\n {0,3}1[.)] .*$", text, flags=re.MULTILINE)
    assert not wrapped


def test_every_chapter_of_the_tutorial_ends_in_a_figure() -> None:
    chapters = [page for page in (ROOT / "docs" / "tutorial").glob("*.md") if page.stem != "index"]
    assert len(chapters) == 8
    for page in chapters:
        assert f"](figures/{page.stem}.png)" in page.read_text(encoding="utf-8")
        assert "savefig" in _blocks(page)[-1][1]


def test_printed_numbers_may_differ_by_rounding_only() -> None:
    assert _same_output("a  12.1% of 0.33\n", "a 12.3% of 0.34")
    assert _same_output("3e-11", "8e-12")
    assert not any(_same_output(*texts) for texts in (("a 14%", "a 18%"), ("a 1", "b 1"), ("3e-3", "8e-12")))


_DOCUMENTED = re.compile(r"\.\. auto(?:class|function|data|exception):: (riskfield[\w.]+)")


def test_the_reference_documents_public_names_by_their_shortest_path() -> None:
    """And all of them. Errors are documented as a module."""
    import types

    import riskfield as rf

    spaces = [name for name in rf.__all__ if isinstance(getattr(rf, name), types.ModuleType)]
    public: dict[str, set[str]] = {name: {f"riskfield.{name}"} for name in rf.__all__ if not name.startswith("_")}
    for space in spaces:
        for name in getattr(rf, space).__all__:
            public.setdefault(name, set()).add(f"riskfield.{space}.{name}")
    pages = (ROOT / "docs" / "reference").glob("*.md")
    documented = {path for page in pages for path in _DOCUMENTED.findall(page.read_text(encoding="utf-8"))}
    for path in documented:
        name = path.rsplit(".", 1)[1]
        if name in public:
            assert path in public[name], f"document {min(public[name], key=len)} instead of {path}"
    missing = [
        name
        for name, paths in public.items()
        if name not in spaces and not paths & documented and f"riskfield.errors.{name}" not in paths
    ]
    assert not missing


def test_the_check_of_the_built_site_finds_what_is_wrong(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "check_site.py"))
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="own.css"><a href="https://example.org">fine</a><a href="#here">fine</a>'
        '<p id="here"></p><a href="gone.html">dead</a><a href="index.html#gone">dead</a>'
        '<script src="https://cdn.example.org/x.js"></script><img src="//cdn.example.org/x.png">'
    )
    (tmp_path / "own.css").write_text('@import "https://fonts.example.org/a.css"; p { background: url(own.png) }')
    found = script["problems"](tmp_path)
    assert len(found) == 5
    assert sum("does not exist" in line for line in found) == 2
    assert sum("example.org" in line for line in found) == 3


def test_a_version_is_added_to_a_hosted_site(tmp_path: Path) -> None:
    add_version = runpy.run_path(str(ROOT / "docs" / "add_version.py"))["add_version"]
    built, site = tmp_path / "built", tmp_path / "site"
    (built / "_static").mkdir(parents=True)
    for version in ("0.2.0", "0.10.0", "0.9.1", "0.2.0"):  # the last one replaces the first
        (built / "index.html").write_text(version)
        versions = add_version(built, site, version)
    assert versions == json.loads((site / "versions.json").read_text()) == ["0.10.0", "0.9.1", "0.2.0"]
    assert "0.10.0/" in (site / "index.html").read_text()
    assert (site / "0.2.0" / "index.html").read_text() == "0.2.0"
    with pytest.raises(SystemExit, match=r"Got '\.\./x'"):
        add_version(built, site, "../x")


def test_readme_has_its_example() -> None:
    assert len(_blocks(ROOT / "README.md")) >= 1
