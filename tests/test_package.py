"""The package as a whole: what importing it loads, what it exports, and life without the extension."""

import inspect
import subprocess
import sys
import types

import pytest

import riskfield as rf


def python(code):
    """Run `code` in a new interpreter; what it printed."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_import_loads_torch_and_numpy_only():
    """And what those load: the rest of what is loaded is the library itself or comes with Python."""
    added = python(
        "import sys, numpy, torch; before = {m.split('.')[0] for m in sys.modules}; import riskfield;"
        "print(*sorted({m.split('.')[0] for m in sys.modules} - before - sys.stdlib_module_names))"
    )
    assert added == "riskfield"


LAZY = ("CRF", "GridCRF", "ImageCRF", "PerVariable")  # they load scikit-learn
PUBLIC = {name: value for name, value in vars(rf).items() if not name.startswith("_")}
PUBLIC |= {name: getattr(rf, name) for name in LAZY}
OBJECTS = {name: value for name, value in PUBLIC.items() if not isinstance(value, types.ModuleType)}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_public_names_are_documented(name):
    value = OBJECTS[name]
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__module__.startswith("riskfield.")
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute} has no docstring"


def test_the_public_surface():
    """Adding a name is a decision, and so is taking one away."""
    expected = {
        *("FactorGraph", "FactorGroup", "NodeGroup", "Union", "chain", "from_edges", "grid"),
        *("Coloured", "Levels", "Parallel", "Sequential", "colour_order", "colours", "compile_levels"),
        *("AbstractEntropy", "Bethe", "Counting", "CountingNumbers", "TRW", "spanning_tree_rho"),
        *("AbstractAlgorithm", "Exact", "ExactMAP", "MaxProduct", "MeanField", "MessagePassing"),
        *(
            "ConvexFreeEnergy",
            "ConvexFunction",
            "InteriorPoint",
            "SumProduct",
            "Term",
            "NEGATIVE_ENTROPY",
            "NEGATIVE_LOG",
            "SQUARE",
        ),
        *("ConvexModel", "LearnsInference", "inference_of"),
        *("JointMode", "Solution", "Stop", "clamp", "hessian_vector_product", "infer"),
        *("effective_sample_size", "frequencies", "sample"),
        *("AbstractAdjoint", "AdjointError", "AdjointWarning", "Envelope", "FixedPoint", "Perturb", "Unroll"),
        *("KKT", "Direct", "Minres", "GMRES", "Iterate", "GradientReport", "check_gradients"),
        *("Inference", "Role", "AbstractLoss", "AbstractMarginalLoss", "Custom", "empirical_risk", "num_counted"),
        *("UnivariateLogistic", "UnivariateQuadratic", "SmoothedClassification"),
        *("CliqueLogistic", "CliqueQuadratic", "CliqueSmoothedClassification"),
        *("SurrogateLikelihood", "SurrogateEM", "SaddlePoint", "ContrastiveDivergence", "Hybrid"),
        *("Pseudolikelihood", "PatchPseudolikelihood", "Piecewise", "Independent", "L1", "MSE", "FMeasure"),
        *("AbstractDecoder", "AbstractSoftDecoder", "MaxMarginal", "MAP", "EqualCount", "decode"),
        *("ExpectedValue", "SoftArgmax", "SoftEqualCount", "error_rate", "f_measure", "regression_error"),
        *("Conditional", "LinearModel", "Tables", "Generative"),
        *("ImageFeatures", "FeatureMaps", "Colour", "Intensity", "Position", "Fourier", "HOG", "Constant"),
        *("ColourDifference", "SobelResponse", "resize"),
        *("FeatureCache", "LabelledImage", "ImageSet", "image_folder", "image_examples"),
        *("UAIModel", "read_evidence", "read_uai", "write_mar", "write_pr"),
        *("get_num_threads", "set_num_threads"),
        *("ConvergenceWarning", "FileFormatError", "ImpossibleEvidenceError", "RiskfieldError", "TreewidthError"),
        "MissingDataError",
        *("Examples", "Checkpoints", "CheckpointError", "DivergenceWarning", "Fit", "Reason", "Record", "fit"),
        *("join", "predict"),
        *("AbstractOptimiser", "LBFGS", "SMD", "Torch", "Stage", "fit_stages", "incremental", "Validation"),
        *("ExactOnForests", "Ranks", "ranks", "CRF", "GridCRF", "ImageCRF", "PerVariable"),
    }
    assert set(OBJECTS) == expected
    assert set(rf.__all__) == expected | {"nn", "__version__"}


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
    assert "needs the compiled extension, which is not installed" in python(WITHOUT_EXTENSION)


def test_version():
    from importlib.metadata import PackageNotFoundError, version

    try:
        assert rf.__version__ == version("riskfield")
    except PackageNotFoundError:
        pytest.skip("riskfield is not installed")


@pytest.mark.parametrize(("given", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(given, expected, monkeypatch):
    """OpenMP reads the policy when torch is loaded, so it must be set by then."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code = """
import os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch": print(os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
import riskfield
"""
    assert python(code) == expected
