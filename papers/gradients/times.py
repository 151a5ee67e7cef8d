r"""How long gradients take: Figure 2 of Domke (2010).

Numbers that the paper's text does not give (sizes, strengths, how many models) are chosen here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import riskfield as rf
from papers.cells import Cells, Result
from papers.gradients.random_grids import RandomGrid
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENTROPIES = {"Bethe": rf.Bethe(), "TRW": rf.TRW(0.49)}
_METHODS: dict[str, rf.adjoints.AbstractAdjoint] = {
    "perturbation": rf.Perturb(2),
    "fixed point": rf.FixedPoint(tol=1e-4),
    "direct": rf.KKT(rf.adjoints.Direct()),
    "iterative": rf.KKT(rf.adjoints.Minres(tol=1e-6)),
    "unroll": rf.Unroll(),
}
_STOP = rf.Stop(sweeps=2000, tol=1e-5)
_TIGHT = rf.Stop(sweeps=20_000, tol=1e-12)


@dataclass(frozen=True)
class Times(AbstractStudy):
    """The time a gradient takes, against grid size and interaction strength (Domke 2010, Figure 2).

    Grids of five states, theta_i uniform in [-1, 1], theta_ij in [-strength, strength]; the Bethe entropy, and TRW with
    rho = .49, with which the paper avoids a singular D. Inference runs until no marginal changes by more than 1e-5,
    back-propagation at the fixed point to 1e-4. Times are those of one core, for the gradient once inference is done.
    Every gradient is compared with one at a tolerance near rounding: a time means little without its error.
    """

    name = "times"
    title = "Time of a gradient against grid size and interaction strength"

    sides: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    strengths: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
    side: int = 32  # where the strength varies
    num_models: int = 5
    limit: float = 5.0  # seconds; a method that took longer is left out on larger grids

    @property
    def num_cells(self) -> int:
        """One per entropy, grid and model."""
        return len(_ENTROPIES) * (len(self.sides) + len(self.strengths)) * self.num_models

    def measure(self, cells: Cells) -> list[Record]:
        """First the sizes, then the strengths."""
        records = []
        for entropy in _ENTROPIES:
            slow: frozenset[str] = frozenset()
            for side in self.sides:
                measured = self._models(cells, entropy, side, 1.0, slow)
                records += [{"varied": "side", **record} for record in measured]
                slow |= {name for record in measured for name in _METHODS if _seconds(record, name) > self.limit}
            for strength in self.strengths:
                measured = self._models(cells, entropy, self.side, strength, frozenset())
                records += [{"varied": "strength", **record} for record in measured]
        return records

    def _models(self, cells: Cells, entropy: str, side: int, strength: float, slow: frozenset[str]) -> list[Record]:
        out = []
        for model in range(self.num_models):
            settings: dict[str, Any] = {"entropy": entropy, "side": side, "strength": strength, "model": model}
            out.append(settings | cells.get("times", partial(_times, without=slow), **settings))
        return out

    def tables(self, records: list[Record]) -> str:
        """Seconds and errors, one table for each panel."""
        out = [
            f"Medians over {self.num_models} random grids of five states: seconds on one core and, in brackets, the "
            "largest error of the gradient in units of its largest entry. The time of a gradient does not include that "
            f"of inference. A method that took more than {self.limit:g} s was not run on larger grids.\n"
        ]
        for entropy, varied, values in self._panels():
            where = "strength 1" if varied == "side" else f"{self.side} x {self.side}"
            out.append(f"\n## {entropy}, {where}\n\n")
            rows = []
            for value in values:
                chosen = select(records, entropy=entropy, varied=varied, **{varied: value})
                settled = sum(record["converged"] for record in chosen)
                sweeps = median(record["sweeps"] for record in chosen)
                entries = [_entry(chosen, name) for name in _METHODS]
                inference = f"{median(record['inference'] for record in chosen):.2g}"
                rows.append([f"{value:g}", f"{sweeps:g}", f"{settled}/{len(chosen)}", inference, *entries])
            out.append(table([varied, "sweeps", "converged", "inference", *_METHODS], rows))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """Panels as in the paper: Bethe above, TRW below; sizes at the left, strengths at the right."""
        figure, axes = panels(len(_ENTROPIES), 2)
        for axis, (entropy, varied, values) in zip(axes, self._panels(), strict=True):
            chosen = {value: select(records, entropy=entropy, varied=varied, **{varied: value}) for value in values}
            inference = {v: median(r["inference"] for r in rows) for v, rows in chosen.items()}
            axis.plot(list(inference), list(inference.values()), "k--", label="inference")
            for name in _METHODS:
                times = {v: _median_seconds(rows, name) for v, rows in chosen.items()}
                shown = {v: seconds for v, seconds in times.items() if seconds is not None}
                axis.plot(list(shown), list(shown.values()), marker=".", label=name)
            axis.set_yscale("log")
            if varied == "side":
                axis.set_xscale("log", base=2)
            axis.set_xlabel("grid size" if varied == "side" else "interaction strength")
            axis.set_ylabel("seconds")
            axis.set_title(entropy + ("" if varied == "side" else f", grid size {self.side}"))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        return figure

    def _panels(self) -> Iterator[tuple[str, str, Sequence[float]]]:
        for entropy in _ENTROPIES:
            yield entropy, "side", self.sides
            yield entropy, "strength", self.strengths


def _times(entropy: str, side: int, strength: float, model: int, *, without: frozenset[str]) -> Result:
    seed = [model, side, int(1000 * strength)]
    drawn = RandomGrid.draw(side, 5, strength, seed, lambda rng, size: rng.uniform(-1, 1, size=size))
    algorithm = rf.MessagePassing(_ENTROPIES[entropy])
    with _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        warnings.simplefilter("ignore", rf.errors.AdjointWarning)  # the error says how good the gradient is
        attempts = [_timed(lambda: rf.infer(drawn.graph, drawn.theta, algorithm, stop=_STOP)) for _ in range(3)]
        _, solution = attempts[0]
        out: Result = {
            "inference": min(seconds for seconds, _ in attempts),
            "sweeps": int(solution.sweeps),
            "converged": bool(solution.converged),
            "gradients": {},
        }
        if not solution.converged:
            return out
        try:
            truth = _gradient(drawn, algorithm, rf.FixedPoint(), _TIGHT)[1]
        except rf.errors.AdjointError as error:
            return out | {"no truth": str(error)}
        for name, adjoint in _METHODS.items():
            if name not in without:
                out["gradients"][name] = _measured(drawn, algorithm, adjoint, truth)
    return out


def _measured(
    model: RandomGrid, algorithm: rf.inference.AbstractAlgorithm, adjoint: rf.adjoints.AbstractAdjoint, truth: Tensor
) -> Result:
    try:
        seconds, found = _gradient(model, algorithm, adjoint, _STOP)
        for _ in range(2 if seconds < 1 else 0):  # the first run of a method loads what it needs
            seconds = min(seconds, _gradient(model, algorithm, adjoint, _STOP)[0])
    except rf.errors.AdjointError as error:
        return {"failed": str(error)}
    return {"seconds": seconds, "error": float((found - truth).abs().max() / truth.abs().max())}


def _gradient(
    model: RandomGrid, algorithm: rf.inference.AbstractAlgorithm, adjoint: rf.adjoints.AbstractAdjoint, stop: rf.Stop
) -> tuple[float, Tensor]:
    """The seconds that the backward pass took, and the gradient."""
    theta = model.theta.clone().requires_grad_()
    loss = model.loss(rf.infer(model.graph, theta, algorithm, stop=stop, adjoint=adjoint))
    seconds, (gradient,) = _timed(lambda: torch.autograd.grad(loss, theta))
    return seconds, gradient


@contextmanager
def _one_thread() -> Iterator[None]:
    before = rf.get_num_threads(), torch.get_num_threads()
    rf.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        rf.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def _timed(compute: Callable[[], Any]) -> tuple[float, Any]:
    # Time of this process and not of the clock: other work on the machine does not count.
    began = time.process_time()
    result = compute()
    return time.process_time() - began, result


def _seconds(record: Record, method: str) -> float:
    return float(record["gradients"].get(method, {}).get("seconds", 0.0))


def _median_seconds(chosen: list[Record], method: str) -> float | None:
    """Of the models on which the method gave a gradient."""
    times = [_seconds(record, method) for record in chosen if "seconds" in record["gradients"].get(method, {})]
    return median(times) if times else None


def _entry(chosen: list[Record], method: str) -> str:
    seconds = _median_seconds(chosen, method)
    found = [record["gradients"][method] for record in chosen if method in record["gradients"]]
    if seconds is None:
        return "failed" if found else ""
    return f"{seconds:.2g} ({median(f['error'] for f in found if 'error' in f):.0e})"
