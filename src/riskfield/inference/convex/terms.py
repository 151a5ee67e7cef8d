"""Convex functions of beliefs, and their weights: the terms of a free energy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph

Elementwise = Callable[[Tensor], Tensor]

# The beliefs at which functions are asked whether they are convex.
_PROBES = (1e-6, 1e-3, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True)
class ConvexFunction:
    """A convex function of a belief in (0, 1], with two derivatives; all three act on tensors entry by entry.

    Arguments:
        value: f.
        slope: f'.
        curvature: f''.
        steep: whether f' falls to -infinity at 0, as those of b log b and -log b do: a belief with a positive weight on
            such a function cannot be 0.

    Raises:
        TypeError: if one of them is not callable.
        ValueError: if f'' is negative, or one of them not finite, somewhere in (0, 1].

    >>> cube = ConvexFunction(lambda b: b**3, lambda b: 3 * b**2, lambda b: 6 * b)
    """

    value: Elementwise
    slope: Elementwise
    curvature: Elementwise
    steep: bool = False

    def __post_init__(self) -> None:
        probes = torch.tensor(_PROBES, dtype=torch.float64)
        for name in ("value", "slope", "curvature"):
            function = getattr(self, name)
            if not callable(function):
                raise TypeError(f"`{name}` must be a function of a tensor. Got {function!r}.")
            found = function(probes)
            if not (isinstance(found, Tensor) and found.shape == probes.shape and torch.isfinite(found).all()):
                raise ValueError(f"`{name}` must give a finite number for every belief in (0, 1]. Got {found!r}.")
        if (self.curvature(probes) < 0).any():
            raise ValueError("`curvature` must not be negative in (0, 1]: the function has to be convex.")


def _x_log_x(b: Tensor) -> Tensor:
    return torch.xlogy(b, b)


def _one_plus_log(b: Tensor) -> Tensor:
    return 1 + b.log()


def _minus_log(b: Tensor) -> Tensor:
    return -b.log()


def _minus_inverse(b: Tensor) -> Tensor:
    return -b.reciprocal()


def _inverse_square(b: Tensor) -> Tensor:
    return b.reciprocal().square()


def _double(b: Tensor) -> Tensor:
    return 2 * b


def _two(b: Tensor) -> Tensor:
    return torch.full_like(b, 2.0)


NEGATIVE_ENTROPY = ConvexFunction(_x_log_x, _one_plus_log, torch.reciprocal, steep=True)
"""b log b."""
NEGATIVE_LOG = ConvexFunction(_minus_log, _minus_inverse, _inverse_square, steep=True)
"""-log b."""
SQUARE = ConvexFunction(torch.square, _double, _two)
"""b^2."""


@dataclass(frozen=True, eq=False)
class Term:
    """A convex function and its weights.

    Arguments:
        function: `NEGATIVE_ENTROPY`, `NEGATIVE_LOG`, `SQUARE`, or a `ConvexFunction` of your own.
        weight: one number for all configurations, or a tensor of shape (*batch, mu) in the layout of mu, one per
            configuration of every variable and factor. Its batch axes are the last ones of theta, or none. It may
            require a gradient, which `KKT` computes.

    >>> import torch
    >>> log_weight = torch.zeros(3, requires_grad=True)
    >>> Term.from_log(NEGATIVE_ENTROPY, log_weight).weight
    tensor([1., 1., 1.], grad_fn=<ExpBackward0>)
    """

    function: ConvexFunction
    weight: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.function, ConvexFunction):
            raise TypeError(f"`function` must be a ConvexFunction such as NEGATIVE_ENTROPY. Got {self.function!r}.")
        if not isinstance(self.weight, Tensor | float | int):
            raise TypeError(f"`weight` must be a number or a tensor. Got {type(self.weight).__name__}.")

    @classmethod
    def from_log(cls, function: ConvexFunction, log_weight: Tensor) -> Term:
        """A term whose weights are the exponentials of free parameters, and so stay positive while these are learned.

        Parameters of 0 give weights of 1, a natural start for learning.
        """
        return cls(function, log_weight.exp())

    def weights(self, graph: FactorGraph) -> Tensor:
        """The weights of shape (*batch, mu), in float64 on the CPU, checked to be finite. Differentiable."""
        weight = torch.as_tensor(self.weight, dtype=torch.float64, device="cpu")
        weight = weight.expand(graph.mu_size) if weight.ndim == 0 else weight
        if weight.shape[-1] != graph.mu_size:
            raise ValueError(
                f"`weight` must be one number or have shape (*batch, {graph.mu_size}), the layout of mu. "
                f"Got {tuple(weight.shape)}."
            )
        bad = ~torch.isfinite(weight)
        if bad.any():
            where = tuple(int(k) for k in bad.nonzero()[0])
            raise ValueError(f"`weight` must be finite. Got {float(weight[where])} at {where}.")
        return weight
