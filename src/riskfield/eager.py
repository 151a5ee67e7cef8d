"""Functions that `torch.compile` calls as they are, instead of tracing them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Make `torch.compile` break its graph at `function` and run it eagerly.

    Compiled kernels and loops that end at convergence cannot be traced. `torch.compiler.disable` alone would load the
    compiler, which takes more than a second, on `import riskfield`.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            disabled: Callable[P, T] = torch.compiler.disable(function)
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
