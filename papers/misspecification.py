r"""The likelihood and losses on marginals under a wrong model: section 4.3 of Domke (2013), Figures 1 and 2.

A chain of binary x_i is to be predicted from binary inputs y_i. There are interactions of x_i with x_{i+1}, of y_i with
y_{i+1} and of x_i with y_i. The data are drawn from this model, and then x is shifted along the chain, in a circle. The
fitted model still joins x_i to y_i, which now belongs to another variable. Inference is exact throughout.

Numbers that the paper's text does not give (length, amounts of data, shifts, ridge) are chosen here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import riskfield as rf
from papers.cells import Cells, Result
from papers.study import AbstractStudy, Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOSSES: dict[str, rf.losses.AbstractLoss] = {
    "likelihood": rf.losses.SurrogateLikelihood(),
    "univariate logistic": rf.losses.UnivariateLogistic(),
    "clique logistic": rf.losses.CliqueLogistic(),
}
_TRUTH = "exact marginals"  # those of the distribution the data come from
_STYLES = dict(zip([*_LOSSES, _TRUTH], ("o-", "s-", "^-", "k--"), strict=True))
_EXACT = rf.Inference(rf.Exact())
_RIDGE = 1e-4  # keeps parameters finite where there are few data
_NUM_TRAIN, _NUM_TEST, _BURN_IN = 1000, 1000, 100  # each example is the end of a chain of its own


@dataclass(frozen=True)
class Errors(AbstractStudy):
    """Test error against the amount of data and the shift (Domke 2013, Figure 1)."""

    name = "errors"
    title = "Test error of losses under a model that is wrong by a shift"

    length: int = 20
    shifts: tuple[int, ...] = (0, 1, 2, 3, 5)
    sizes: tuple[int, ...] = (10, 30, 100, 300, 1000)
    num_distributions: int = 32

    @property
    def num_cells(self) -> int:
        """One per distribution, shift and amount of data."""
        return self.num_distributions * len(self.shifts) * len(self.sizes)

    def measure(self, cells: Cells) -> list[Record]:
        """Distribution after distribution, whose data are drawn once."""
        records = []
        for distribution in range(self.num_distributions):
            for shift in self.shifts:
                for size in self.sizes:
                    own: dict[str, Any] = {"distribution": distribution, "shift": shift, "size": size}
                    records.append(own | cells.get("errors", _errors, length=self.length, **own))
        return records

    def tables(self, records: list[Record]) -> str:
        """Errors by shift and amount of data, then how far each loss is from the likelihood, pair by pair."""
        seconds = sum(record["seconds"] for record in records)
        stuck = sum(
            reason != rf.learning.Reason.CONVERGED.value for record in records for reason in record["reasons"].values()
        )
        out = [
            f"Means over {self.num_distributions} random distributions on chains of {self.length}, each tested on "
            f"{_NUM_TEST} examples. Errors are the share of x_i that the larger marginal predicts wrongly, in per "
            "cent; in brackets the univariate logistic loss per variable, in nats. The last column predicts with the "
            "marginals of the distribution that the data come from: no model can be expected to be better. "
            f"Ridge {_RIDGE:g}; {stuck} of {len(records) * len(_LOSSES)} fits ended before they converged. All cells "
            f"took {seconds / 60:.0f} minutes of one core.\n"
        ]
        for shift in self.shifts:
            out.append(f"\n## Shift {shift}\n\n")
            rows = []
            for size in self.sizes:
                chosen = select(records, shift=shift, size=size)
                scores = [(_mean(chosen, "errors", name), _mean(chosen, "risks", name)) for name in _STYLES]
                rows.append([str(size), *(f"{100 * error:.2f} ({risk:.4f})" for error, risk in scores)])
            out.append(table(["data", *_STYLES], rows))
        for size in self.sizes:
            out.append(f"\n## Error of the likelihood minus that of the other losses, {size} data\n\n")
            out.append("In percentage points, with standard errors, and in how many distributions it is positive.\n\n")
            rivals = [name for name in _LOSSES if name != "likelihood"]
            rows = [[str(shift), *self._gaps(select(records, shift=shift, size=size), rivals)] for shift in self.shifts]
            out.append(table(["shift", *rivals], rows))
        return "".join(out)

    def _gaps(self, chosen: list[Record], rivals: list[str]) -> Iterator[str]:
        for name in rivals:
            gaps = [100 * (record["errors"]["likelihood"] - record["errors"][name]) for record in chosen]
            spread = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            yield f"{mean(gaps):+.2f} ± {spread:.2f} ({sum(gap > 0 for gap in gaps)}/{len(gaps)})"

    def plot(self, records: list[Record]) -> Figure:
        """A panel per shift, against the amount of data; the last one against the shift."""
        count = len(self.shifts) + 1
        columns = min(3, count)
        figure, axes = panels(-(-count // columns), columns)
        for axis, shift in zip(axes, self.shifts, strict=False):
            for name, style in _STYLES.items():
                errors = [_mean(select(records, shift=shift, size=size), "errors", name) for size in self.sizes]
                axis.semilogx(self.sizes, errors, style, label=name, markersize=4)
            axis.set_xticks(self.sizes, labels=[str(size) for size in self.sizes])
            axis.minorticks_off()
            axis.set_title(f"shift {shift}")
            axis.set_xlabel("training data")
        last = axes[len(self.shifts)]
        for name, style in _STYLES.items():
            at_most = [select(records, shift=shift, size=self.sizes[-1]) for shift in self.shifts]
            last.plot(self.shifts, [_mean(chosen, "errors", name) for chosen in at_most], style, markersize=4)
        last.set_xticks(self.shifts)
        last.set_title(f"{self.sizes[-1]} data")
        last.set_xlabel("shift")
        for axis in axes[count:]:
            axis.remove()
        for axis in axes[:count:columns]:
            axis.set_ylabel("test error")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        return figure


@dataclass(frozen=True)
class Marginals(AbstractStudy):
    """Exact and predicted marginals of one example input (Domke 2013, Figure 2)."""

    name = "marginals"
    title = "Marginals of an example input under a model that is wrong by a shift"

    length: int = 20
    shifts: tuple[int, ...] = (0, 1, 2, 3, 5)
    size: int = 1000

    @property
    def num_cells(self) -> int:
        """One per shift."""
        return len(self.shifts)

    def measure(self, cells: Cells) -> list[Record]:
        """The first test input of the first distribution."""
        own: dict[str, Any] = {"length": self.length, "distribution": 0, "size": self.size}
        return [{"shift": shift} | cells.get("marginals", _marginals, shift=shift, **own) for shift in self.shifts]

    def tables(self, records: list[Record]) -> str:
        """P(x_i = 1), a table for each shift."""
        out = [f"P(x_i = 1) given one input, after training on {self.size} data.\n"]
        for record in records:
            rows = [[str(i), *(f"{record['marginals'][name][i]:.3f}" for name in _STYLES)] for i in range(self.length)]
            out.append(f"\n## Shift {record['shift']}\n\n" + table(["i", *_STYLES], rows))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """A panel per shift."""
        figure, axes = panels(len(records), 1)
        for axis, record in zip(axes, records, strict=True):
            for name, style in _STYLES.items():
                axis.plot(record["marginals"][name], style, label=name, markersize=4)
            axis.set_title(f"shift {record['shift']}")
            axis.set_ylim(0, 1)
            axis.set_xticks(range(self.length))
            axis.set_ylabel("P(x = 1)")
        axes[-1].set_xlabel("variable")
        figure.set_figwidth(9)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        return figure


class InputTables(nn.Module):
    """Node potentials of variable i: the row of its own table that its binary input y_i chooses."""

    def __init__(self, length: int):
        super().__init__()
        self.values = nn.Parameter(torch.zeros(length, 2, 2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Of shape (*batch, variable, state)."""
        return self.values[torch.arange(len(self.values)), inputs]


def chain_model(length: int) -> rf.Conditional:
    """theta(x_i) + theta(x_i, y_i) and theta(x_i, x_{i+1}), a table for every i."""
    return rf.Conditional(InputTables(length), rf.models.Tables(length - 1, 2, 2))


@dataclass(frozen=True, eq=False)
class World:
    """A random distribution, and data drawn from it."""

    graph: rf.FactorGraph  # of x
    model: rf.Conditional  # the true one, of x given y
    x: Tensor  # (example, variable)
    y: Tensor  # (example, variable)

    @classmethod
    def draw(cls, length: int, seed: int, num_examples: int = _NUM_TRAIN + _NUM_TEST) -> World:
        """All potentials uniform in [-1, 1]; interactions are t where states agree, -t elsewhere."""
        rng = np.random.default_rng(seed)
        index = np.arange(length)
        along = np.stack([index[:-1], index[1:]], axis=1)
        across = np.stack([index, length + index], axis=1)
        joint = rf.from_edges(2, np.concatenate([along, length + along, across]), num_variables=2 * length)
        theta = joint.zeros()
        (nodes,), (edges,) = joint.node_views(theta), joint.factor_views(theta)
        nodes[:] = torch.from_numpy(rng.uniform(-1, 1, size=nodes.shape))
        strengths = torch.from_numpy(rng.uniform(-1, 1, size=len(edges)))
        edges[:] = strengths[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        states = rf.sample(joint, theta, 1, chains=num_examples, burn_in=_BURN_IN, seed=seed)[:, 0]
        model = chain_model(length)
        # A row of theta(x_i, y_i) for each y_i: the table is symmetric.
        model.load_state_dict(
            {
                "nodes.nodes.values": nodes[:length, None] + edges[len(along) * 2 :],
                "factors.factors.values": edges[: len(along)],
            }
        )
        return cls(rf.chain(length, 2), model, states[:, :length], states[:, length:])

    def shifted(self, shift: int, first: int, last: int) -> rf.Examples:
        """Examples `first` to `last`, with x shifted in a circle."""
        return rf.Examples(self.graph, self.x[first:last].roll(shift, dims=-1), {"nodes": self.y[first:last]})


_world = lru_cache(maxsize=1)(World.draw)


def _fitted(world: World, shift: int, size: int) -> dict[str, tuple[rf.Conditional, str]]:
    """For each loss the model, and why its fit ended."""
    examples, out = world.shifted(shift, 0, size), {}
    for name, loss in _LOSSES.items():
        model = chain_model(world.graph.num_variables)
        result = rf.fit(
            model, examples, loss, _EXACT, optimiser=rf.optim.LBFGS(gradient_tol=1e-5), ridge=_RIDGE, progress=False
        )
        out[name] = model, result.reason.value
    return out


@torch.no_grad()
def _predicted(world: World, model: rf.Conditional, examples: rf.Examples) -> rf.Solution:
    return _EXACT(world.graph, model(world.graph, examples.inputs))


def _true_marginals(world: World, shift: int, examples: rf.Examples) -> Tensor:
    """P(x_i | y) of the distribution the examples come from, of shape (example, variable, state)."""
    return _predicted(world, world.model, examples).node_marginals[0].roll(shift, dims=-2)


def _errors(length: int, distribution: int, shift: int, size: int) -> Result:
    began = time.process_time()
    world = _world(length, distribution)
    tests = world.shifted(shift, _NUM_TRAIN, _NUM_TRAIN + _NUM_TEST)
    fits = _fitted(world, shift, size)
    nodes = {name: _predicted(world, model, tests).node_marginals[0] for name, (model, _) in fits.items()}
    nodes[_TRUTH] = _true_marginals(world, shift, tests)
    right = {name: view.gather(-1, tests.labels.unsqueeze(-1)) for name, view in nodes.items()}
    return {
        "errors": {name: rf.metrics.error_rate(view.argmax(-1), tests.labels) for name, view in nodes.items()},
        "risks": {name: -float(probability.log().mean()) for name, probability in right.items()},
        "reasons": {name: reason for name, (_, reason) in fits.items()},
        "seconds": time.process_time() - began,
    }


def _marginals(length: int, distribution: int, shift: int, size: int) -> Result:
    world = _world(length, distribution)
    test = world.shifted(shift, _NUM_TRAIN, _NUM_TRAIN + 1)
    fits = _fitted(world, shift, size)
    nodes = {name: _predicted(world, model, test).node_marginals[0] for name, (model, _) in fits.items()}
    nodes[_TRUTH] = _true_marginals(world, shift, test)
    return {"marginals": {name: view[0, :, 1].tolist() for name, view in nodes.items()}}


def _mean(chosen: list[Record], what: str, name: str) -> float:
    return float(mean(record[what][name] for record in chosen))
