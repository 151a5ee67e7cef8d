"""The studies use public names of riskfield only: `rf.X` or `rf.namespace.X`."""

import ast
import inspect
import tomllib
from pathlib import Path

import pytest

import papers
import riskfield as rf

PAPERS = Path(papers.__file__).parent
FILES = sorted(PAPERS.rglob("*.py"))


def names(tree):
    """The dotted names that begin with rf, such as rf.losses.Hybrid."""
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == "rf":
            yield parts


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PAPERS)))
def test_only_public_names(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "riskfield" or (alias.name, alias.asname) == ("riskfield", "rf")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module.split(".")[0] != "riskfield", f"line {node.lineno}: use `import riskfield as rf`"
    for first, *rest in names(tree):
        assert first in rf.__all__ or first.startswith("__"), f"rf.{first} is not public"
        if rest and inspect.ismodule(getattr(rf, first)):
            assert rest[0] in getattr(rf, first).__all__, f"rf.{first}.{rest[0]} is not public"


def test_the_wheel_holds_only_the_package():
    with open(PAPERS.parent / "pyproject.toml", "rb") as file:
        build = tomllib.load(file)["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == ["src/riskfield"]
    assert not {path.name for path in Path(rf.__file__).parent.iterdir()} & {"papers", "experiments", "results"}


def test_the_package_knows_no_study():
    for path in Path(rf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = [node.module] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any((name or "").split(".")[0] == "papers" for name in imported), path
