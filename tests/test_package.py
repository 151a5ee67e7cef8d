"""The package as a whole: imports, exports, life without the extension, and what a release consists of."""

import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import riskfield as rf

# The package as a whole: what importing it loads, what it exports, and life without the extension.


def python(code, environment=None):
    """Run `code` in a new interpreter; what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_first_name_loads_torch_and_numpy_only():
    """And what those load: the rest of what is loaded is the library itself or comes with Python."""
    added = python(
        "import sys, numpy, torch; before = {m.split('.')[0] for m in sys.modules}; import riskfield; riskfield.infer;"
        "print(*sorted({m.split('.')[0] for m in sys.modules} - before - sys.stdlib_module_names))"
    )
    assert added == "riskfield"


SPACES = {name: value for name in rf.__all__ if isinstance(value := getattr(rf, name), types.ModuleType)}
OBJECTS = {name: getattr(rf, name) for name in rf.__all__ if name not in SPACES and not name.startswith("_")}
IN_SPACES = {f"{space}.{name}": getattr(module, name) for space, module in SPACES.items() for name in module.__all__}
# Only instances, not classes or functions, have no docstring of their own.
DOCUMENTED = {name: value for name, value in (OBJECTS | IN_SPACES).items() if callable(value)}


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_public_names_are_documented(name):
    value = DOCUMENTED[name]
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__module__.startswith("riskfield.")
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute} has no docstring"


def test_the_public_surface():
    """Adding a name at the top is a decision, and so is taking one away."""
    assert set(OBJECTS) == {
        *("FactorGraph", "Union", "chain", "from_edges", "grid", "Coloured", "Parallel", "Sequential"),
        *("Bethe", "CountingNumbers", "TRW"),
        *("ConvexFreeEnergy", "Exact", "ExactMAP", "MaxProduct", "MeanField", "MessagePassing"),
        *("ExactOnForests", "Inference", "MRF", "Solution", "Stop", "infer", "sample"),
        *("Envelope", "FixedPoint", "KKT", "Perturb", "Unroll", "check_gradients"),
        *("Conditional", "LinearModel", "Examples", "Checkpoints", "Validation", "fit", "predict"),
        *("CRF", "GridCRF", "ImageCRF", "PerVariable"),
        *("get_num_threads", "set_num_threads"),
    }
    assert set(SPACES) == {
        *("graph", "entropy", "inference", "adjoints", "losses", "decoders", "metrics", "models", "features"),
        *("datasets", "learning", "optim", "nn", "io", "errors"),
    }
    assert len(rf.__all__) <= 60


def test_a_name_means_one_thing():
    """A name that stands in several places is the same object in all of them, but for the layer of an estimator."""
    found: dict[str, object] = dict(OBJECTS)
    for path, value in IN_SPACES.items():
        name = path.split(".")[1]
        if path != "nn.GridCRF":
            assert found.setdefault(name, value) is value, f"{path} is not the {name} of another namespace"


def test_all_names_can_be_completed():
    assert set(rf.__all__) <= set(dir(rf))


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'riskfield' has no attribute 'CRFs'"):
        rf.CRFs  # noqa: B018


WITHOUT_EXTENSION = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "riskfield._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import riskfield as rf
from riskfield.kernels import native_available
assert not native_available()
graph = rf.grid(3, 3, 2)
rf.set_num_threads(1)
for algorithm in (rf.MessagePassing(), rf.MeanField(), rf.MaxProduct(), rf.Exact(), rf.ExactMAP()):
    assert rf.infer(graph, graph.zeros(), algorithm).converged
try:
    rf.infer(graph, graph.zeros(), kernels="native")
except ValueError as error:
    print(error)
"""


def test_works_without_the_extension():
    assert "anything without the compiled extension, which is not installed" in python(WITHOUT_EXTENSION)


def test_version():
    from importlib.metadata import PackageNotFoundError, distribution

    root = Path(__file__).parent.parent
    try:
        installed = distribution("riskfield")
    except PackageNotFoundError:
        pytest.skip("riskfield is not installed")
    if root.as_uri() not in (installed.read_text("direct_url.json") or root.as_uri()):
        pytest.skip("the riskfield that is installed is that of another folder")
    assert rf.__version__ == installed.version


def test_importing_is_quick():
    """Names are loaded when they are used."""
    code = """
import sys
import riskfield
assert not {"torch", "numpy", "riskfield.infer"} & set(sys.modules)
assert "infer" in dir(riskfield)
from riskfield.infer import Inference
import riskfield.kernels
assert riskfield.infer(riskfield.grid(2, 2, 2), riskfield.grid(2, 2, 2).zeros()).converged
assert riskfield.Inference is Inference
print(riskfield.infer.__name__)
"""
    assert python(code) == "infer"


def test_importing_and_training_leave_the_environment_alone():
    """That of a process and of those it starts. What scikit-learn sets when it is loaded is its own affair."""
    # The tests have imported riskfield themselves, so that their environment cannot be the one to begin with.
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    code = """
import os, subprocess, sys
import numpy, sklearn, torch
def environment():
    of_a_child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.environ.items()))"], stdout=-1)
    return dict(os.environ), of_a_child.stdout
before = environment()
import riskfield, riskfield.cli
import riskfield.kernels.native
riskfield.set_num_threads(2)
riskfield.CRF(optimiser=riskfield.optim.LBFGS(iterations=2)).fit(numpy.eye(3)[None], [[0, 1, 1]])
graph = riskfield.grid(3, 3, 2)
theta = graph.zeros().requires_grad_()
riskfield.infer(graph, theta).log_partition.backward()
print(environment() == before)
"""
    assert python(code, kept) == "True"


# What a release consists of agrees with itself.


ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def found(pattern, path):
    return re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_the_version_is_the_same_everywhere():
    assert PROJECT["project"]["version"] == rf.__version__
    assert found(r"^version: (\S+)$", "CITATION.cff") == rf.__version__
    assert found(r'^  version: "([^"]*)"$', "recipe/recipe.yaml") == rf.__version__
    assert found(r"^## \[?(\d[\d.]*)", "CHANGELOG.md") == rf.__version__


def test_the_recipe_requires_what_the_package_requires():
    other_names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = {
        (other_names.get(name, name), least)
        for name, least in (entry.split(">=") for entry in PROJECT["project"]["dependencies"])
    }
    run = (ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8").split("  run:\n")[1].split("\n\n")[0]
    assert {(name, least) for name, least in re.findall(r"- (\S+) >=(\S+)", run)} == wanted


def test_the_check_of_a_wheel_passes_here(capsys):
    runpy.run_path(str(ROOT / "packaging" / "smoke.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"riskfield {rf.__version__} works")


def test_wheels_are_built_for_the_stable_interface():
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert "STABLE_ABI" in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?://", (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
