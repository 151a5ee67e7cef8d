"""Time one pass of stochastic meta-descent through the largest model of the study of empirical risk.

    PYTHONPATH=. python benchmarks/smd.py --out results/benchmarks/smd

The model has 200 binary variables, a third of them observed, and 1051 edges. There are 1000 examples. Each of the 50
steps of a pass runs 100 iterations of loopy belief propagation with the parallel schedule, and computes a gradient and
an exact Hessian-vector product of the squared error of the outputs through the iterations. The comparison is the same
arithmetic in eager PyTorch: log-messages are one tensor per batch, differentiated twice by autograd. It runs fewer
steps, from which the time of a pass is extrapolated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import riskfield as rf
from papers.erm.random_models import RandomModel
from riskfield.learning.objective import Objective
from timing import about, add_out, write

EXAMPLES, BATCH, ITERATIONS = 1000, 20, 100


def problem(num_variables: int, num_edges: int, examples: int) -> tuple[rf.models.Generative, rf.Examples]:
    """Return the model at its true parameters, and examples in which a third of the variables are observed."""
    drawn = RandomModel.draw(num_variables, num_edges, seed=0, num_examples=examples)
    graph = rf.from_edges(2, drawn.edges, num_variables=num_variables)
    model = rf.models.Generative(graph)
    with torch.no_grad():
        model.factors.copy_(drawn.tables.flatten())
    roles = torch.zeros(2, num_variables, dtype=torch.bool)
    roles[0, drawn.inputs], roles[1, drawn.outputs] = True, True
    return model, rf.Examples.conditional(graph, drawn.states, observed=roles[0], outputs=roles[1])


@dataclass(frozen=True)
class Spent:
    """Wall-clock seconds, and seconds of all processors together. On a busy machine the latter is more meaningful."""

    clock: float
    processors: float

    def __mul__(self, factor: float) -> Spent:
        return Spent(factor * self.clock, factor * self.processors)


def spent(work: Callable[[], object]) -> Spent:
    """Measure the time of `work`."""
    clock, processors = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - clock, time.process_time() - processors)


def one_pass(model: rf.models.Generative, examples: rf.Examples, iterations: int, batch: int) -> None:
    """Run one pass of SMD."""
    inference = rf.Inference(rf.MessagePassing(schedule=rf.Parallel()), rf.Stop(iterations, tol=None), rf.Unroll())
    smd = rf.optim.SMD(gain=1.0, batch_size=batch, epochs=1)
    rf.fit(model, examples, rf.losses.MSE(), inference, optimiser=smd, progress=False)


def eager_loss(theta: Tensor, examples: rf.Examples, iterations: int) -> Tensor:
    """Return the mean squared error after `iterations`, by tensor operations; theta has shape (theta,)."""
    graph, evidence = examples.graph, examples.evidence
    assert evidence is not None
    edges = torch.from_numpy(graph.factor_groups[0].variables.copy())
    nodes = theta[: graph.node_size].view(-1, 2).expand(len(examples), -1, -1)
    tables = theta[graph.node_size :].view(-1, 2, 2)
    excluded = (evidence >= 0).unsqueeze(-1) & (evidence.unsqueeze(-1) != torch.arange(2))
    nodes = torch.where(excluded, -1e3, nodes)  # -inf would make second derivatives NaN
    both = torch.cat([tables, tables.transpose(1, 2)])  # (message, sender, receiver)
    sender, receiver = torch.cat([edges, edges.flip(1)]).T
    opposite = torch.arange(len(sender)).roll(len(edges))
    messages = nodes.new_zeros(len(examples), len(sender), 2)
    for _ in range(iterations):
        beliefs = nodes.index_add(1, receiver, messages)
        incoming = beliefs[:, sender] - messages[:, opposite]
        messages = torch.logsumexp(both + incoming.unsqueeze(-1), -2).log_softmax(-1)
    marginals = nodes.index_add(1, receiver, messages).softmax(-1)
    mask = examples.labels >= 0
    return torch.where(mask, (marginals[..., 1] - examples.labels).square(), 0).sum() / mask.sum()


def eager_step(model: rf.models.Generative, examples: rf.Examples, iterations: int, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient and the product of the Hessian with v."""
    theta = parameters_to_vector(model.parameters()).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(eager_loss(theta, examples, iterations), theta, create_graph=True)
    (product,) = torch.autograd.grad(gradient @ v, theta)
    return gradient.detach(), product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variables", type=int, default=200)
    parser.add_argument("--edges", type=int, default=1051)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--steps", type=int, default=2, help="steps of eager PyTorch (default: %(default)s)")
    add_out(parser)
    options = parser.parse_args()
    model, examples = problem(options.variables, options.edges, options.examples)

    batch = examples.select(slice(0, BATCH))
    v = torch.randn(model.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inference = rf.Inference(
        rf.MessagePassing(schedule=rf.Parallel()), rf.Stop(options.iterations, tol=None), rf.Unroll()
    )
    ours = Objective(model, batch, rf.losses.MSE(), inference)(None, along=v)
    found: list[tuple[Tensor, Tensor]] = []
    steps = spent(lambda: found.extend(eager_step(model, batch, options.iterations, v) for _ in range(options.steps)))
    eager, rival = steps * (-(-options.examples // BATCH) / options.steps), found[0]
    assert ours.product is not None
    torch.testing.assert_close(ours.gradient, rival[0], rtol=1e-6, atol=1e-9)  # they compute the same
    torch.testing.assert_close(ours.product, rival[1], rtol=1e-5, atol=1e-8)

    ours_spent = spent(lambda: one_pass(model, examples, options.iterations, BATCH))
    threads = (rf.get_num_threads(), torch.get_num_threads())
    names = (f"SMD, one pass over {options.examples} examples", "the same in eager PyTorch")
    rows = [
        {"what": name, "threads": count, **asdict(took)}
        for name, count, took in zip(names, threads, (ours_spent, eager), strict=True)
    ]
    what = f"{options.variables} variables, {options.edges} edges, {options.iterations} iterations"
    ratios = [
        f"{what}: eager PyTorch / riskfield, of processors' time = {eager.processors / ours_spent.processors:.1f}"
    ]
    table = "| what | threads | seconds | seconds of all processors |\n|---|---|---|---|\n"
    for row in rows:
        table += f"| {row['what']} | {row['threads']} | {row['clock']:.1f} | {row['processors']:.1f} |\n"
    print(table + "\n".join(ratios))
    if options.out:
        write(options.out, "One pass of stochastic meta-descent", about(), ratios, table, rows)


if __name__ == "__main__":
    main()
