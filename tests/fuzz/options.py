"""Options from TOML files: the program runs, or says in one line what is wrong with them."""

from __future__ import annotations

import atexit
import contextlib
import io
import tempfile
from functools import cache
from pathlib import Path

from fuzz.mutations import mutated_bytes
from image_cases import CLASS_OPTIONS, write_folders
from riskfield.cli import main

KEYS = ["ridge", "loss", "quiet", "images", "masks", "class", "ignore", "iterations", "sweeps", "scale", "seed", "out"]
KEYS += ["json", "resume", "config", "help", "rho", "shown", "title", "nothing", '"a b"', "inference", "optimiser"]
VALUES = ["1", "-1", "0.5", "1e-3", "nan", "inf", "true", "false", '""', '"x"', "[]", "[1, 2]", '["0=a"]', "{}"]
VALUES += [
    "1979-05-27",
    "07:32:00",
    '{0 = "a", 200 = "b"}',
    "[" * 400 + "]" * 400,
    '"surrogate-likelihood"',
    "9" * 30,
    '"\\u0000"',
]
COMMANDS = [
    ["evaluate", "model", "--images", "images", "--masks", "masks"],
    ["predict", "model", "images/a.png", "--out", "predicted"],
    ["fit", "--images", "images", "--masks", "masks", "--out", "new", "--iterations", "1", *CLASS_OPTIONS],
]


def example(rng):
    lines = [f"{rng.choice(KEYS)} = {rng.choice(VALUES)}" for _ in range(rng.integers(0, 4))]
    content = "\n".join(lines).encode()
    if rng.random() < 0.2:
        content = mutated_bytes(content, rng)
    with contextlib.chdir(_folder()), tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "options.toml"
        config.write_bytes(content)
        command = [word if word not in ("predicted", "new") else str(Path(folder) / word) for word in _pick(rng)]
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main([*command, "--config", str(config)])
        assert code in (0, 2), f"{content!r}: exit code {code}: {errors.getvalue()}"
        assert code == 0 or errors.getvalue().startswith("riskfield: "), errors.getvalue()


def _pick(rng):
    return COMMANDS[rng.integers(len(COMMANDS))]


@cache
def _folder():
    """Two small folders of pictures, and a model fitted to them."""
    made = tempfile.TemporaryDirectory(prefix="fuzz-options-")
    atexit.register(made.cleanup)
    folder = write_folders(Path(made.name))
    with contextlib.chdir(folder):
        words = ["fit", "--images", "images", "--masks", "masks", "--iterations", "2", *CLASS_OPTIONS]
        assert main([*words, "--quiet", "--out", "model"]) == 0
    return folder
