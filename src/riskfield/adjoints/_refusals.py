"""What adjoints ask of an algorithm, and the errors that name what is missing and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from riskfield.errors import AdjointError
from riskfield.inference.algorithm import AbstractOptimality, FixedPointMap
from riskfield.inference.request import Request


def require_sweeps(request: Request) -> None:
    """Refuse `Unroll` for an algorithm whose sweeps cannot be differentiated."""
    if not request.algorithm.unrolls:
        _refuse(request, "Unroll", "sweeps that can be recorded or that autograd can follow (`unrolls`)")


def require_fixed_point(
    request: Request, name: str, theta: Tensor, parameters: tuple[Tensor, ...]
) -> Iterable[FixedPointMap]:
    """The algorithm's sweeps as differentiable functions of their state."""
    maps = request.algorithm.fixed_point_maps(request.graph, theta, parameters)
    if maps is None:
        _refuse(request, name, "a sweep that is a differentiable function of its state (`fixed_point_maps`)")
    return maps


def require_optimality(request: Request, name: str) -> AbstractOptimality:
    """The algorithm's optimality conditions."""
    conditions = request.algorithm.optimality(request.graph)
    if conditions is None:
        _refuse(request, name, "optimality conditions on the local polytope (`optimality`)")
    return conditions


def require_symmetry(request: Request, name: str) -> None:
    """Refuse an algorithm that does not promise a symmetric dmu/dtheta."""
    if not request.algorithm.symmetric_jacobian:
        _refuse(request, name, "marginals whose derivative with respect to theta is symmetric (`symmetric_jacobian`)")


def require_convergence(request: Request, name: str) -> None:
    """Refuse what has no derivative at convergence, and runs that are not meant to converge."""
    algorithm = request.algorithm
    if algorithm.nonsmooth_because:
        raise ValueError(f"`{name}` cannot differentiate {type(algorithm).__name__}: {algorithm.nonsmooth_because}")
    if request.stop.tol is None and algorithm.iterative:
        other = ", or use `Unroll` for a truncated run" if algorithm.unrolls else ""
        raise ValueError(f"`{name}` needs a run to convergence: give `stop` a tolerance{other}.")


def require_theta_only(request: Request, name: str) -> None:
    """Refuse to leave out gradients of the algorithm's own numbers."""
    algorithm, graph = request.algorithm, request.graph
    if torch.is_grad_enabled() and any(number.requires_grad for number in algorithm.parameters(graph)):
        conditions = algorithm.optimality(graph)
        with_parameters = {
            "FixedPoint": algorithm.fixed_point_maps(graph, _rows(request), algorithm.parameters(graph)) is not None,
            "KKT": conditions is not None and conditions.differentiates_parameters,
            "Unroll": algorithm.unrolls,
        }
        raise ValueError(
            f"`{name}` computes gradients with respect to theta only, and the {algorithm.parameter_name} of the "
            f"{type(algorithm).__name__} require one. {_use(with_parameters)}Or detach the {algorithm.parameter_name}."
        )


def require_finite(grad: Tensor, name: str) -> None:
    """Refuse a dL/dmu with NaN or infinite entries: no gradient of theta can be right."""
    # One pass instead of several; a sum of finite numbers that overflows is examined.
    if torch.isfinite(grad.sum()):
        return
    bad = ~torch.isfinite(grad)
    if bad.any():
        where = tuple(int(k) for k in bad.nonzero()[0])
        raise AdjointError(
            f"`{name}`: the gradient of the loss with respect to the marginals is {float(grad[where])} at {where}. "
            "The loss may be infinite there, for example because a marginal is 0."
        )


def _refuse(request: Request, name: str, missing: str) -> NoReturn:
    algorithm, graph = request.algorithm, request.graph
    converges = request.stop.tol is not None or not algorithm.iterative
    parameters = algorithm.parameters(graph)
    offered = {
        "FixedPoint": converges and algorithm.fixed_point_maps(graph, _rows(request), parameters) is not None,
        "KKT": converges and algorithm.optimality(graph) is not None,
        "Perturb": converges and algorithm.symmetric_jacobian,
        "Unroll": algorithm.unrolls,
    }
    raise ValueError(
        f"`{name}` needs {missing}, which {type(algorithm).__name__} does not offer. "
        f"{_use(offered) or 'No adjoint differentiates it: detach `theta`.'}".rstrip()
    )


def _rows(request: Request) -> Tensor:
    return request.flat_theta().detach()


def _use(offered: dict[str, bool]) -> str:
    names = [f"`{name}`" for name, applies in offered.items() if applies]
    if not names:
        return ""
    *most, last = names
    return f"Use {', '.join(most)} or {last}. " if most else f"Use {last}. "
