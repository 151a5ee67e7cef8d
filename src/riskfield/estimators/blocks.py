"""Designs as blocks of `Examples`: a block has the examples of one structure, on one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.estimators.design import Codes, Design, stacked
from riskfield.estimators.labels import Array
from riskfield.examples import Examples
from riskfield.infer import Inference, InferenceChoice
from riskfield.learning.unions import can_join, inference_on, unite
from riskfield.models.conditional import LinearModel
from riskfield.progress import bar

# Numbers of shape (example, variable, *) for some examples, and the inference on their graph.
OfExamples = Callable[[Examples, Inference], Tensor]


@dataclass(frozen=True)
class Blocks:
    """Makes blocks on graphs with `num_states` states, on a device, in a dtype."""

    num_states: int
    device: torch.device
    dtype: torch.dtype

    def labelled(
        self, designs: Sequence[Design], codes: Sequence[Codes], weights: Array | None, *, verbose: bool
    ) -> Iterator[Examples]:
        """All examples with their labels, for training."""
        # Block by block: those on a GPU need not fit into the memory of the CPU.
        groups = by_structure(designs)
        order = bar([designs[k] for members in groups for k in members], shown=verbose, what="features")
        inputs = (design.inputs() for design in order)
        for members in groups:
            graph = designs[members[0]].structure.graph(self.num_states)
            labels = np.stack([designs[k].reduce(codes[k]) for k in members])
            joined = stacked(list(islice(inputs, len(members))), self.dtype)
            own = None if weights is None else torch.from_numpy(weights[members])
            yield Examples(graph, torch.from_numpy(labels), joined, weights=own).to(self.device)
        next(inputs, None)  # ends the progress bar

    def origins(self, designs: Sequence[Design]) -> list[int]:
        """The number of the design that each example of `labelled` comes from, in their order."""
        return list(chain.from_iterable(by_structure(designs)))

    def unlabelled(self, designs: Sequence[Design]) -> Examples:
        """Examples of one structure, to be predicted."""
        graph = designs[0].structure.graph(self.num_states)
        unknown = torch.full((len(designs), graph.num_variables), -1)
        inputs = stacked([design.inputs() for design in designs], self.dtype)
        return Examples(graph, unknown, inputs).to(self.device)


def portions(designs: Sequence[Design], chunk_size: Callable[[Design], int]) -> Iterator[list[list[int]]]:
    """The numbers of designs that are predicted at once, those of each structure together.

    Features of images are computed only then, since they take far more memory than the images.

    Arguments:
        designs: all of them.
        chunk_size: how many such designs are predicted at once.
    """
    portion: list[list[int]] = []
    room = 1.0
    for members in by_structure(designs):
        each = 1 / min(chunk_size(designs[members[0]]), len(designs))  # however large the number, not 0
        left = members
        while left:
            count = max(int(room / each), 0 if portion else 1)
            if count == 0:
                yield portion
                portion, room = [], 1.0
                continue
            portion.append(left[:count])
            room -= each * len(left[:count])
            left = left[count:]
    if portion:
        yield portion


def predict_each(
    model: LinearModel, inference: InferenceChoice, blocks: Sequence[Examples], of_examples: OfExamples, by_part: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield what `of_examples` finds for each example: the number of its block, its row there, and the numbers.

    `by_part` says whether these are the same for examples that are joined into one.
    """
    united = unite(model, blocks) if by_part and can_join(model, None, inference) else None
    if united is None:
        for number, block in enumerate(blocks):
            yield from ((number, row, own) for row, own in enumerate(of_examples(block, inference.on(block.graph))))
        return
    for union in united:
        values = of_examples(union.examples, inference_on(inference, union.examples))[0]
        for piece, part in union.split(values):
            yield from ((piece.block, row, own) for row, own in zip(piece.rows.tolist(), part, strict=True))


def by_structure(designs: Sequence[Design]) -> list[list[int]]:
    """The numbers of the designs of each structure, in the order in which structures appear."""
    groups: dict[Any, list[int]] = {}
    for k, design in enumerate(designs):
        groups.setdefault(design.structure, []).append(k)
    return list(groups.values())
