"""What a release consists of agrees with itself."""

import re
import runpy
import tomllib
from pathlib import Path

import riskfield as rf

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def found(pattern, path):
    return re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_the_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == rf.__version__
    assert found(r"^version: (\S+)$", "CITATION.cff") == rf.__version__
    assert found(r'set version = "([^"]*)"', "recipe/meta.yaml") == rf.__version__
    assert found(r"^## \[?(\d[\d.]*)", "CHANGELOG.md") == rf.__version__


def test_the_recipe_requires_what_the_package_requires():
    other_names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = {
        (other_names.get(name, name), least)
        for name, least in (entry.split(">=") for entry in PROJECT["project"]["dependencies"])
    }
    run = (ROOT / "recipe/meta.yaml").read_text(encoding="utf-8").split("  run:\n")[1].split("\n\n")[0]
    assert {(name, least) for name, least in re.findall(r"- (\S+) >=(\S+)", run)} == wanted


def test_the_check_of_a_wheel_passes_here(capsys):
    runpy.run_path(str(ROOT / "packaging" / "smoke.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"riskfield {rf.__version__} works")


def test_wheels_are_built_for_the_stable_interface():
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert "STABLE_ABI" in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?://", (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
