"""Many sweeps on a GPU in one launch, and the way back through them in another (`fused.cu`).

A sequential schedule has many levels, of which each is little work: on a grid, the anti-diagonals. Stage by stage the
torch kernels launch dozens of GPU kernels for every one of them; here a block of threads walks through all levels of
all sweeps. It serves pairwise models whose variables have one number of states; others stay with the torch kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import Parallel, Schedule
from riskfield.kernels.logspace import normalised
from riskfield.kernels.problem import MessagePassingProblem, schedule_levels

_MOST_THREADS = 384  # of a block, of which two then fit into a multiprocessor: fastest on an H200
_MOST_STATES = 32  # that fit into the registers of a thread

Launch = Callable[[str, int, int, Sequence[Tensor | int]], None]  # (kernel, blocks, threads, arguments)
# The same sweeps where autograd follows them: (theta, messages, beliefs) to messages and beliefs.
Reference = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class _Structure:
    """A graph and its schedule as `fused.cu` reads them."""

    parts: Tensor
    levels: Tensor
    order: Tensor
    first: Tensor
    links: Tensor
    renewed: Tensor
    starts: Tensor
    factors: Tensor  # link -> factor
    sizes: Tensor  # node, theta and message sizes
    num_parts: int
    states: int
    threads: int


def available(problem: MessagePassingProblem, theta: Tensor) -> bool:
    """Whether the sweeps of `problem` can run fused."""
    graph, counting = problem.graph, problem.counting
    return (
        theta.device.type == "cuda"
        and hasattr(torch.cuda, "_compile_kernel")
        and theta.dtype in (torch.float32, torch.float64)
        and not problem.maximise
        and not isinstance(problem.schedule, Parallel)
        and isinstance(problem.damping, float | int)
        and problem.damping == 0
        and not (counting.factor.requires_grad or counting.node_total.requires_grad)
        and not is_functorch_wrapped_tensor(theta)
        and forward_ad.unpack_dual(theta).tangent is None
        and len(graph.node_groups) == 1
        and graph.node_groups[0].num_states <= _MOST_STATES
        and [group.arity for group in graph.factor_groups] == [2]
    )


def run_sweeps(
    problem: MessagePassingProblem,
    theta: Tensor,
    messages: Tensor,
    beliefs: Tensor,
    sweeps: int,
    reference: Reference,
) -> tuple[Tensor, Tensor, Tensor]:
    """Messages and beliefs, in normalised logarithms of shape (batch, ...), after `sweeps` > 0 more sweeps.

    They are differentiable in theta and in what the sweeps began from; derivatives above the first go through
    `reference`. Also returns the beliefs before the last sweep and half-way through it, of shape (2, batch, ...), which
    are not.
    """
    structure = _structure(problem, theta.device)
    counting = problem.counting.factor.to(theta)[structure.factors]
    node_rate = 1 / problem.counting.node_total.to(theta)
    fixed = problem.graph, structure, (counting, node_rate), sweeps, reference
    found = _Sweeps.apply(theta, messages, beliefs, *fixed)
    messages, beliefs, earlier = (normalised(logs.unflatten(-1, (-1, structure.states))).flatten(-2) for logs in found)
    return messages, beliefs, earlier.detach()


class _Sweeps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        theta: Tensor,
        messages: Tensor,
        beliefs: Tensor,
        graph: FactorGraph,
        structure: _Structure,
        counting: tuple[Tensor, Tensor],
        sweeps: int,
        reference: Reference,
    ) -> tuple[Tensor, Tensor, Tensor]:
        begin, tables = (theta, messages, beliefs), graph.expand(theta).contiguous()
        messages, beliefs = (logs.clone(memory_format=torch.contiguous_format) for logs in (messages, beliefs))
        earlier = beliefs.new_empty(2, *beliefs.shape)
        tape = (sweeps, *messages.shape) if any(ctx.needs_input_grad) else (0,)
        said, cavities = theta.new_empty(tape), theta.new_empty(tape)
        numbers = tables, messages, beliefs, earlier, said, cavities
        _launch("sweeps_forward", structure, counting, sweeps, numbers)
        ctx.save_for_backward(*begin, said, cavities)
        ctx.graph, ctx.structure, ctx.counting, ctx.sweeps = graph, structure, counting, sweeps
        ctx.reference = reference
        ctx.mark_non_differentiable(earlier)
        return messages, beliefs, earlier

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *begin, said, cavities = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The reference normalises what the kernels do not; grads sum to zero over states, so that is all the same.
            begin = [tensor.view_as(tensor) for tensor in begin]  # of which none is made from another
            wanted = [tensor for tensor in begin if tensor.requires_grad]
            found = iter(torch.autograd.grad(ctx.reference(*begin), wanted, grads[:2], create_graph=True))
            return *(next(found) if tensor.requires_grad else None for tensor in begin), *[None] * 5
        tables = ctx.graph.expand(begin[0]).contiguous()
        of_messages, of_beliefs = (grad.clone(memory_format=torch.contiguous_format) for grad in grads[:2])
        told, through = torch.empty_like(of_messages), torch.zeros_like(of_messages)
        of_tables = torch.zeros_like(tables)
        numbers = tables, said, cavities, of_messages, of_beliefs, told, through, of_tables
        _launch("sweeps_backward", ctx.structure, ctx.counting, ctx.sweeps, numbers)
        return ctx.graph.collapse(of_tables), of_messages, of_beliefs, *[None] * 5


def _launch(
    kernel: str, structure: _Structure, counting: tuple[Tensor, Tensor], sweeps: int, numbers: Sequence[Tensor]
) -> None:
    tables = numbers[0]
    if not len(tables):
        return
    graph = structure.parts, structure.levels, structure.order, structure.first
    links = structure.links, structure.renewed, structure.starts, *counting
    arguments: list[Tensor | int] = [*graph, *links, structure.sizes, structure.num_parts, sweeps, *numbers]
    compiled = _compiled(tables.dtype, structure.states, tables.device)
    compiled(kernel, structure.num_parts * len(tables), structure.threads, arguments)


def source(dtype: torch.dtype, states: int) -> str:
    """The text of `fused.cu` for numbers of this type and variables of so many states."""
    text = Path(__file__).with_name("fused.cu").read_text(encoding="utf-8")
    defined = {"REAL": "float" if dtype == torch.float32 else "double", "STATES": states, "THREADS": _MOST_THREADS}
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + text


@cache
def _compiled(dtype: torch.dtype, states: int, device: torch.device) -> Launch:
    with torch.cuda.device(device):
        text = f'extern "C" {{\n{source(dtype, states)}\n}}'
        kernels = {name: torch.cuda._compile_kernel(text, name) for name in ("sweeps_forward", "sweeps_backward")}

    def launch(kernel: str, blocks: int, threads: int, arguments: Sequence[Tensor | int]) -> None:
        with torch.cuda.device(device):
            kernels[kernel](grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(arguments))

    return launch


def _structure(problem: MessagePassingProblem, device: torch.device) -> _Structure:
    graph, schedule = problem.graph, problem.schedule
    return graph.derived(("fused", schedule, device), lambda: _make_structure(graph, schedule, device))


def _make_structure(graph: FactorGraph, schedule: Schedule, device: torch.device) -> _Structure:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    (group,) = graph.factor_groups
    n, states, count = graph.num_variables, group.shape[0], group.num_factors
    ranks = schedule_levels(graph, schedule)
    rows = np.arange(count)
    messages = [group.message_range(slot)[0] + states * rows for slot in (0, 1)]
    links = []
    for slot, (own, other) in enumerate([(states, 1), (1, states)]):
        variable, neighbour = group.variables[:, slot], group.variables[:, 1 - slot]
        earlier = ranks.rank[neighbour] < ranks.rank[variable]
        table = group.mu_start + states * states * rows
        columns = (variable, neighbour, messages[slot], messages[1 - slot], table)
        strides = (np.full(count, own), np.full(count, other))
        links.append(np.stack([*columns, *strides, earlier, group.factors], axis=1))
    pairs = coo_array((np.ones(count, bool), tuple(group.variables.T)), shape=(n, n))
    num_parts, part = connected_components(pairs, directed=False)
    order = np.lexsort((np.arange(n), ranks.level, part))
    level_of = np.stack([part[order], ranks.level[order]], axis=1)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    heard = np.concatenate(links)
    heard[:, 0] = place[heard[:, 0]]
    heard = heard[np.argsort(heard[:, 0], kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(heard[:, 0], minlength=n))])
    levels = np.flatnonzero(np.concatenate([[True], (np.diff(level_of, axis=0) != 0).any(1)]))
    parts = np.concatenate([np.searchsorted(part[order][levels], np.arange(num_parts)), [len(levels)]])
    starts_of_levels = np.concatenate([levels, [n]])
    level = np.repeat(np.arange(len(levels)), np.diff(starts_of_levels))[heard[:, 0]]
    forwards = heard[:, 7] != 0
    renewed = np.concatenate([np.flatnonzero(forwards), np.flatnonzero(~forwards)])
    per_step = [np.bincount(level[chosen], minlength=len(levels)) for chosen in (forwards, ~forwards)]
    starts = np.concatenate([[0], np.cumsum(np.concatenate(per_step))])
    widest = states * max(int(np.diff(starts_of_levels).max()), int(np.diff(starts).max()))
    threads = min(_MOST_THREADS, -(-widest // 32) * 32)

    def tensor(numbers: np.ndarray) -> Tensor:
        if numbers.size and numbers.max() > np.iinfo(np.int32).max:
            raise ValueError(f"A graph on a GPU may have 2^31 numbers at most. Got {numbers.max()}.")
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int32)).to(device)

    return _Structure(
        tensor(parts),
        tensor(starts_of_levels),
        tensor(order),
        tensor(first),
        tensor(heard[:, 1:8]),
        tensor(renewed),
        tensor(starts),
        torch.from_numpy(np.ascontiguousarray(heard[:, 8])).to(device),
        torch.tensor([graph.node_size, graph.mu_size, graph.message_size], device=device),
        int(num_parts),
        states,
        threads,
    )
