"""ARCHITECTURE.md is true: files import only from their own layer and those above it, and the file map is complete."""

import ast
import re
from pathlib import Path

import pytest

import riskfield

PACKAGE = Path(riskfield.__file__).parent
ROOT = Path(__file__).parent.parent

# Top to bottom. A package stands for the files in it.
LAYERS = [
    ["errors", "threads", "progress", "eager", "devices"],
    ["graph"],
    ["entropy"],
    ["kernels", "_native"],
    ["inference"],
    ["adjoints"],
    ["infer", "gradient_check"],
    ["losses", "decoders", "metrics"],
    ["models", "mrf", "features", "nn"],
    ["examples", "io"],
    ["learning"],
    ["datasets", "optim"],
    ["estimators"],
    ["report"],
    ["cli", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_modules(path):
    """The dotted names below `riskfield` that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "riskfield")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: imports are absolute"
            if node.module == "riskfield":
                yield from (f"riskfield.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("riskfield."):
                yield node.module


EXPORTS = (PACKAGE / "__init__.py", PACKAGE / "_public.py")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in EXPORTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in LEVEL, f"say in which layer {own} is"
    for module in imported_modules(path):
        other = module.split(".")[1] if "." in module else None
        if other == "__version__":
            continue
        assert other in LEVEL, f"{path.name} imports {module}: import from the module that defines the name"
        assert LEVEL[other] <= LEVEL[own], f"{path.name} is above {module} and must not import it"


# A list of names, then two spaces and a description, in an indented block.
_LINE = re.compile(r"^    ( *)([\w./]+(?:, [\w./]+)*)(?:  .*)?$")


def block(heading):
    """The lines of the indented block under a heading of ARCHITECTURE.md: (depth, names)."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("    "):
            match = _LINE.match(line)
            assert match, f"no list of names: {line!r}"
            yield len(match[1]) // 2, match[2].split(", ")


def file_map():
    """The paths in the file map. A line with one folder opens it; two more spaces of indentation mean inside it."""
    found, folders = set(), []
    for depth, names in block("File map"):
        assert depth <= len(folders), f"indented too far: {names}"
        del folders[depth:]
        found.update("".join(folders) + name for name in names)
        if len(names) == 1 and names[0].endswith("/"):
            folders.append(names[0])
    return found


def test_the_layers_are_those_of_the_architecture_page():
    own = {"_native", "__main__"}  # parts of kernels and cli
    written = [[name.rstrip("/") for name in names] for _, names in block("Layers")]
    assert written == [[name for name in names if name not in own] for names in LAYERS]


def test_every_path_in_the_file_map_exists():
    assert [path for path in sorted(file_map()) if not (ROOT / path).exists()] == []


def test_the_file_map_names_every_source_file():
    suffixes = {".py", ".css", ".hpp", ".cpp"}
    files = [
        path for folder in ("src/riskfield", "cpp") for path in (ROOT / folder).rglob("*") if path.suffix in suffixes
    ]
    names = {path.relative_to(ROOT).as_posix() for path in files if path.name not in ("__init__.py", "__main__.py")}
    assert len(names) > 100
    assert sorted(names - file_map()) == []


# Naming devices, choosing the GPUs of processes, and restoring the states of their generators, are not questions of
# which kernels run.
MAY_ASK_FOR_DEVICES = ("kernels/", "devices.py", "learning/ranks.py", "learning/fit.py")
RULES = {  # what only some files may contain
    r"autograd\.Function\b": ("adjoints/",),
    r"\.device\.type (==|!=|in|not)|\.is_cuda\b|\btorch\.cuda\b": MAY_ASK_FOR_DEVICES,
    r"\btorch\._[a-z]|\bfrom torch\._": (),  # private parts of torch
    r"kernels\.(torch_reference|native|gpu)\b": ("kernels/",),
    r"isinstance\([^)]*\b(MessagePassing|MaxProduct|MeanField|Exact|ExactMAP|ConvexFreeEnergy)\b": (
        "inference/",
        "models/convex.py",
    ),
}


@pytest.mark.parametrize("pattern", RULES)
def test_rooms_keep_to_themselves(pattern):
    found = []
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(RULES[pattern] or ("/",)):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{name}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if re.search(pattern, line)]
    assert found == []


def test_files_are_short():
    """400 lines at most."""
    assert [path.name for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_constants_of_the_native_engine_are_those_of_python():
    from riskfield.adjoints import fixed_point
    from riskfield.kernels import convergence

    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "cpp").glob("*.hpp")))
    native = {name: float(value) for name, value in re.findall(r"constexpr [\w:]+ k(\w+) = ([\d.e+-]+);", text)}
    for module, names in ((convergence, ("SETTLED", "ROUNDING", "_SLOWEST")), (fixed_point, ("_NEGLIGIBLE",))):
        for name in names:
            camel = name.title().replace("_", "")
            assert native[camel] == getattr(module, name), name
    assert native["UnknownRate"] == convergence._UNKNOWN_RATE
    assert native["LongestWait"] == convergence._LONGEST_WAIT
