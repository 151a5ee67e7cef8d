"""Batches of chains: the negative log-likelihood and its gradient, beside pytorch-crf and torch-struct.

    python benchmarks/chains.py [--quick] [--out results/benchmarks/chains]

All chains of a batch have their own emissions and share one table of transitions, as in pytorch-crf. One repetition
computes the loss of the batch from these two tensors and the gradients of both: in float64, on one core. The rivals are
measured in the same run, in turns, and the shortest time counts. Before that their gradients are compared.

The univariate logistic loss on the marginals is measured too. The rivals do not have it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import riskfield as rf
from timing import about, add_out, write

SHAPES = ((64, 50, 9), (64, 50, 45), (512, 30, 9), (1, 10_000, 9))  # chains, variables, states


@dataclass
class Row:
    """One measurement."""

    implementation: str
    loss: str
    chains: int
    variables: int
    states: int
    ms: float
    times_ours: float  # this time divided by that of our likelihood


class Batch:
    """Emissions, transitions and labels of one batch, and its losses."""

    def __init__(self, chains: int, variables: int, states: int):
        torch.manual_seed(0)
        self.emissions = torch.randn(chains, variables, states, dtype=torch.float64, requires_grad=True)
        self.transitions = torch.randn(states, states, dtype=torch.float64, requires_grad=True)
        self.labels = torch.randint(states, (chains, variables))
        self.graph = rf.chain(variables, states, tied=True)
        self.inference = rf.Inference(rf.Exact())

    def theta(self) -> Tensor:
        """Log-potentials, of shape (chain, theta)."""
        return self.graph.assemble([self.emissions], [self.transitions.unsqueeze(0)])

    def ours(self, loss: rf.losses.AbstractLoss) -> Tensor:
        """Our loss of the whole batch."""
        return loss(self.graph, self.theta(), self.labels, self.inference).sum()

    def pytorch_crf(self) -> Callable[[], Tensor] | None:
        """The negative log-likelihood by pytorch-crf, without potentials of its own for the first and last states."""
        try:
            from torchcrf import CRF
        except ImportError:
            return None
        crf = CRF(self.transitions.shape[0], batch_first=True).double()
        crf.transitions = torch.nn.Parameter(self.transitions.detach())
        self.transitions = crf.transitions
        with torch.no_grad():
            crf.start_transitions.zero_()
            crf.end_transitions.zero_()
        return lambda: -crf(self.emissions, self.labels)

    def torch_struct(self) -> Callable[[], Tensor] | None:
        """The same by torch-struct."""
        try:
            from torch_struct import LinearChainCRF
        except ImportError:
            return None

        def loss() -> Tensor:
            edges = self.transitions.T + self.emissions[:, 1:].unsqueeze(-1)
            edges = torch.cat([edges[:, :1] + self.emissions[:, :1].unsqueeze(-2), edges[:, 1:]], 1)
            chain = LinearChainCRF(edges)
            return -chain.log_prob(LinearChainCRF.struct.to_parts(self.labels, edges.shape[-1]).double()).sum()

        return loss

    def gradients(self, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Of the emissions and the transitions."""
        found = torch.autograd.grad(loss(), (self.emissions, self.transitions))
        return found[0], found[1]


def measure(shape: tuple[int, int, int], seconds: float) -> list[Row]:
    """Time all implementations on one batch, in turns."""
    batch = Batch(*shape)
    rivals = {"pytorch-crf": batch.pytorch_crf(), "torch-struct": batch.torch_struct()}
    work: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("riskfield", "likelihood"): lambda: batch.ours(rf.losses.SurrogateLikelihood()),
        ("riskfield", "univariate logistic"): lambda: batch.ours(rf.losses.UnivariateLogistic()),
    }
    work |= {(name, "likelihood"): loss for name, loss in rivals.items() if loss is not None}
    expected = batch.gradients(work["riskfield", "likelihood"])
    for (name, loss), compute in work.items():
        if loss == "likelihood":
            for mine, other in zip(expected, batch.gradients(compute), strict=True):
                torch.testing.assert_close(other, mine, rtol=1e-8, atol=1e-8, msg=f"{name} has another gradient")
    best = dict.fromkeys(work, float("inf"))
    ends = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < ends:
        for key, compute in work.items():
            if seconds <= best[key] < float("inf"):
                continue  # a rival that slow is timed once
            for _ in range(1 if key[0] != "riskfield" else 5):
                began = time.perf_counter()
                batch.gradients(compute)
                best[key] = min(best[key], time.perf_counter() - began)
        rounds += 1
    ours = best["riskfield", "likelihood"]
    return [Row(*key, *shape, 1e3 * took, took / ours) for key, took in best.items()]


_HEADER = "| implementation | loss | chains | variables | states | ms | x ours |\n|---|---|---|---|---|---|---|"


def _line(row: Row) -> str:
    cells = [row.implementation, row.loss, row.chains, row.variables, row.states, f"{row.ms:.3f}"]
    return "| " + " | ".join(map(str, [*cells, f"{row.times_ours:.2f}"])) + " |"


def ratios(found: list[Row]) -> list[str]:
    """The figures people ask for, as sentences."""
    lines = []
    for row in found:
        shape = f"{row.chains}x{row.variables}x{row.states}"
        if row.implementation != "riskfield":
            lines.append(f"{shape}: likelihood and gradient, {row.implementation} / riskfield: {row.times_ours:.1f}x")
        elif row.loss != "likelihood":
            lines.append(f"{shape}: univariate logistic loss / likelihood, with gradients: {row.times_ours:.2f}x")
    return lines


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without the long chain")
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    print(_HEADER)
    found: list[Row] = []
    for shape in SHAPES[: -1 if arguments.quick else None]:
        rows = measure(shape, 1.0 if arguments.quick else 8.0)
        print("\n".join(map(_line, rows)), flush=True)
        found += rows
    lines = ratios(found)
    print("\n" + "\n".join(lines))
    if arguments.out:
        table = "\n".join([_HEADER, *map(_line, found)])
        write(arguments.out, "Chains", about(), lines, table, [asdict(row) for row in found])


if __name__ == "__main__":
    main()
