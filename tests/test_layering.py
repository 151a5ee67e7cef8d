"""A file imports only from its own layer and those above it."""

import ast
from pathlib import Path

import pytest

import riskfield

PACKAGE = Path(riskfield.__file__).parent

# Top to bottom. A package stands for the files in it.
LAYERS = [
    ["_environment", "errors", "threads", "progress"],
    ["graph"],
    ["entropy"],
    ["kernels", "_native"],
    ["inference"],
    ["adjoints"],
    ["infer", "gradient_check"],
    ["losses", "decoders", "metrics"],
    ["models", "features", "nn"],
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


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


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
