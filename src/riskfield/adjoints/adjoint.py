"""What every adjoint provides."""

from __future__ import annotations

from abc import ABC, abstractmethod

from riskfield.inference.request import Request
from riskfield.inference.solution import Solution


class AbstractAdjoint(ABC):
    """How the gradient of a loss on the marginals reaches theta."""

    @abstractmethod
    def apply(self, request: Request) -> Solution:
        """Run `request`; the mu (and so the log-partition) of the solution carries a gradient to `request.theta`."""
