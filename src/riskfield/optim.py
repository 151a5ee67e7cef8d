"""Optimisers for `fit`."""

from typing import TYPE_CHECKING, Any

from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.optimiser import AbstractOptimiser
from riskfield.learning.stochastic import SMD, Torch

__all__ = [
    "LBFGS",
    "SMD",
    "AbstractOptimiser",
    "Torch",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say how an optimiser of torch is used."""
        import torch

        hint = f" Use `Torch(torch.optim.{name}, {{...}})`." if name in vars(torch.optim) and name[0].isupper() else ""
        raise AttributeError(f"module 'riskfield.optim' has no attribute {name!r}.{hint}")
