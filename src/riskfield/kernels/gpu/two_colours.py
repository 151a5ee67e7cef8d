"""The backward pass of sweeps in two colours over small pairwise tables: one launch does all that a block needs.

All messages into nodes of one colour are updated together, and their cavities are used by the other colour only. So a
program sums the cotangents of a node's belief and at once goes back through the messages to it. Other sweeps take two
launches for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riskfield.kernels.gpu.cotangents import node_cotangent
from riskfield.kernels.gpu.plan import Block, Part, Plan
from riskfield.kernels.gpu.storage import LANES, power_of_two, programs, tile_size

if TYPE_CHECKING:
    from riskfield.kernels.gpu.backward import _Backward

_LARGEST_TILE = 16  # entries of a table; with larger ones, two launches are faster: they need fewer registers
_LARGEST_DEGREE = 8


def two_coloured(plan: Plan) -> bool:
    """Whether `go_back` can do the sweeps of a plan."""
    if plan.at_once or len(plan.stages) != 2:
        return False
    blocks = [entry for stage in plan.stages for entry in stage]
    return all(len(block.parts) == 1 and _fits(block.parts[0], direction) for block, direction in blocks)


def _fits(part: Part, direction: int) -> bool:
    """Whether all messages from the factors of a part are updated, and a tile has room for those to a node."""
    whole = part.fresh[direction] == (0, part.degree) and not part.masked[direction]
    return whole and len(part.kind) == 2 and tile_size(part.kind) <= _LARGEST_TILE and part.degree <= _LARGEST_DEGREE


def go_back(
    going: _Backward, block: Block, *, sweep: int, place: int, tape: tuple[int, int], add: bool, clear: bool
) -> None:
    """From the cotangents of what the nodes of a block received in a sweep to those of theta and of their neighbours.

    `place`: of the sweep on the tape; `tape`: where the block begins there; `add` and `clear`: see `message_cotangent`.
    """
    (part,) = block.parts
    engine, buffers, slots = going.engine, going.buffers, power_of_two(part.degree)
    own, start = engine.plan.kinds[part.kind], engine.node_start[block.states]
    each, nodes = (4, 2 * LANES) if engine.odds else (1, LANES)  # slots of a thread
    if slots > 4:
        nodes //= 2
    tile = engine.tile(part.kind, 0)
    tile = {name: tile[name] for name in ("S", "SX", "D1", "Q1", "WIDE", "CANONICAL", "ODDS")}
    node_cotangent[programs(block.count * engine.batch, nodes)](
        buffers.tables[part.kind], going.cavities[0], going.direct[start:], going.theta[start:],
        buffers.rates[block.states], going.grads, buffers.counting[part.kind], own.cavities,
        own.tables, engine.starts[part.kind], buffers.tape, going.ended, part.first, part.degree, own.slots,
        block.first, block.count, engine.batch, place * engine.tape_size + tape[0],
        place * engine.grad_size + tape[1], engine.message_start[part.kind], engine.counting_step, engine.rate_step,
        sweep, int(block in going.pending), int(add), int(clear),
        K=slots, BN=nodes, SHARED=own.shared, STREAM=engine.streams(part, block),
        num_warps=max(1, slots * nodes // (each * LANES)), **tile,
    )  # fmt: skip
    going.pending.discard(block)
