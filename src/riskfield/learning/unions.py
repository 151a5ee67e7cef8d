"""Unions of examples: many small graphs as few large ones, so that inference runs on all of them at once.

Examples of all lengths and structures make unions of bounded size. Their graphs, and the plans that the kernels keep
with a graph, are made once and used in every evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from riskfield import kernels
from riskfield.adjoints.unroll import Unroll
from riskfield.decoders import MAP, AbstractDecoder, MaxMarginal, as_decoder
from riskfield.entropy import TRW, CountingNumbers
from riskfield.examples import Examples, join
from riskfield.infer import Inference, InferenceChoice
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.losses.loss import AbstractLoss
from riskfield.models.chain import ChainModel
from riskfield.models.conditional import Conditional, LinearModel, Tables
from riskfield.models.sparse import RowLinear

_MOST_WEIGHTS = 16  # the examples of a union have one weight


class Piece(NamedTuple):
    """Some rows of one block of a data set."""

    block: int
    rows: Tensor
    num_variables: int  # of one example


@dataclass(frozen=True, eq=False)
class United:
    """Several examples as one, and which they are, in the order of their variables."""

    examples: Examples
    pieces: list[Piece]

    def split(self, values: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Values of all variables, of shape (variable, *), piece by piece, of shape (example, variable, *)."""
        counts = [int(piece.rows.numel()) for piece in self.pieces]
        parts = values.split([count * piece.num_variables for count, piece in zip(counts, self.pieces, strict=True)])
        for piece, count, part in zip(self.pieces, counts, parts, strict=True):
            yield piece, part.reshape(count, piece.num_variables, *values.shape[1:])


def can_join(model: Module, loss: AbstractLoss | None, inference: InferenceChoice | None) -> bool:
    """Whether a union of examples has the same risk as the examples one by one.

    The model must compute potentials row by row, the loss must be a sum over the parts of a graph, and inference must
    not depend on how far other examples have converged.
    """
    known = type(model) in (Conditional, LinearModel, ChainModel)  # a subclass may do anything
    by_row = known and isinstance(model, Conditional) and _is_by_row(model)
    # A subclass of an additive loss has to say again that it is one: it may add what it likes.
    additive = loss is None or bool(vars(type(loss)).get("additive", False))
    settled = inference is None or _is_settled(inference if isinstance(inference, Inference) else inference.loopy)
    return by_row and additive and settled


def decodes_by_part(decoder: AbstractDecoder | None) -> bool:
    """Whether a decoder predicts the same states for a union of examples as for the examples one by one."""
    decoder = as_decoder(decoder)
    return isinstance(decoder, MaxMarginal) or (isinstance(decoder, MAP) and decoder.algorithm.iterative)


def inference_on(choice: InferenceChoice, examples: Examples) -> Inference:
    """The inference on a union: exact inference on a forest is one sweep of belief propagation."""
    inference = choice.on(examples.graph)
    plain = inference.adjoint is None or isinstance(inference.adjoint, Unroll)
    if not inference.algorithm.iterative and plain and examples.graph.is_forest:
        return replace(inference, algorithm=MessagePassing(), stop=Stop(sweeps=1, tol=None))
    return inference


def unite(model: Module, blocks: Sequence[Examples], most_examples: int | None = None) -> list[United] | None:
    """All examples in unions of bounded size; None where that would leave most examples alone.

    Forests are united with forests, so that inference on them stays exact. `most_examples` bounds a union, too.
    """
    weights = torch.cat([_weights(block) for block in blocks])
    shapes = {group.shape for block in blocks for group in block.graph.factor_groups}
    states = {group.num_states for block in blocks for group in block.graph.node_groups}
    if len(shapes) > 1 or len(states) > 1 or len(weights.unique()) > _MOST_WEIGHTS:
        return None
    assert isinstance(model, Conditional)
    names = [name for name, network in model.factors.items() if isinstance(network, Tables)]
    complete = [_ordered(_with_ones(block, names), ["nodes", *model.factors]) for block in blocks]
    groups: dict[tuple[bool, float], list[Piece]] = {}
    for number, block in enumerate(complete):
        for weight in _weights(block).unique().tolist():
            rows = (_weights(block) == weight).nonzero()[:, 0]
            groups.setdefault((block.graph.is_forest, weight), []).append(
                Piece(number, rows, block.graph.num_variables)
            )
    sizes = [max(block.graph.mu_size, 1) for block in blocks]
    most_marginals = kernels.marginals_at_once(blocks[0].labels.device)
    portions = [
        portion
        for members in groups.values()
        for portion in _portions(members, sizes, most_marginals, most_examples or len(weights))
    ]
    if 2 * len(portions) > len(weights) or not kernels.fits_once_more(_inputs(blocks)):
        return None
    return [United(join([complete[piece.block].select(piece.rows) for piece in own]), own) for own in portions]


def _inputs(blocks: Sequence[Examples]) -> Iterator[Tensor]:
    for block in blocks:
        inputs = block.inputs.values() if isinstance(block.inputs, Mapping) else [block.inputs]
        yield from (values for values in inputs if isinstance(values, Tensor))


def _portions(
    pieces: Sequence[Piece], sizes: Sequence[int], most_marginals: int, most_examples: int
) -> Iterator[list[Piece]]:
    """Cut pieces into portions of at most so many examples and marginals, or of one example."""
    portion: list[Piece] = []
    room, places = most_marginals, most_examples
    for piece in pieces:
        left, size = piece.rows, sizes[piece.block]
        while len(left):
            count = min(room // size, places, len(left))
            if count <= 0 and portion:
                yield portion
                portion, room, places = [], most_marginals, most_examples
                continue
            count = max(count, 1)
            portion.append(piece._replace(rows=left[:count]))
            left, room, places = left[count:], room - count * size, places - count
    if portion:
        yield portion


def _is_by_row(model: Conditional) -> bool:
    """Whether potentials are linear in the row of a variable or a factor, or one table for all factors."""
    factors = list(model.factors.values())
    shared = len(factors) == 1 and type(factors[0]) is Tables and len(factors[0].values) == 1
    linear = all(type(network) in (nn.Linear, RowLinear) for network in [*model.nodes.values(), *factors[shared:]])
    return list(model.nodes) == ["nodes"] and linear


def _is_settled(inference: Inference) -> bool:
    """Whether a run does not depend on when the other examples of a union have converged."""
    entropy = getattr(inference.algorithm, "entropy", None)
    if isinstance(entropy, CountingNumbers) or (isinstance(entropy, TRW) and not isinstance(entropy.rho, int | float)):
        return False  # numbers for each factor of one graph
    if getattr(getattr(inference.algorithm, "schedule", None), "order", None) is not None:
        return False  # an order of the variables of one graph
    return inference.memory is None and (inference.stop.tol is None or not inference.algorithm.iterative)


def _weights(block: Examples) -> Tensor:
    return torch.ones(len(block), dtype=torch.float64) if block.weights is None else block.weights.double()


def _ordered(block: Examples, names: Sequence[str]) -> Examples:
    """The block with the inputs that the model reads, in the order of its networks."""
    if not isinstance(block.inputs, Mapping):
        return block
    return replace(block, inputs={name: block.inputs[name] for name in names if name in block.inputs})


def _with_ones(block: Examples, names: Sequence[str]) -> Examples:
    """The block with a constant input for each of the named tables, which say that all factors share them."""
    if not names:
        return block
    inputs = dict(block.inputs) if isinstance(block.inputs, Mapping) else {"nodes": block.inputs}
    tables = sum(group.num_tables for group in block.graph.factor_groups)
    inputs |= {name: torch.ones(len(block), tables, 1, dtype=torch.float64) for name in names}
    return replace(block, inputs=inputs)
