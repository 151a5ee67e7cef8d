"""`predict`: the states that a trained model predicts for a data set."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from riskfield.decoders import AbstractDecoder, decode
from riskfield.examples import DataSet, Examples, blocks
from riskfield.infer import InferenceChoice
from riskfield.learning.optimiser import check_counts
from riskfield.learning.unions import can_join, decodes_by_part, inference_on, unite
from riskfield.learning.validation import evaluating
from riskfield.models.convex import inference_of


@torch.no_grad()
def predict(
    model: Module,
    data: DataSet,
    inference: InferenceChoice,
    decoder: AbstractDecoder | None = None,
    *,
    chunk_size: int | None = None,
) -> list[Tensor]:
    """Predict the states of all variables, for every block of examples. Observed states are kept.

    Each example may have its own observed variables and its own variables to predict, `examples.asked`. A decoder that
    compares variables with each other, such as `EqualCount()`, compares those to predict. Small examples are predicted
    together, even if their graphs differ.

    Arguments:
        model: a module with `theta = model(graph, inputs)`.
        data: `Examples`, or several of them on different graphs. Only the positions of known labels matter here; their
            values are ignored.
        inference: how marginals are computed.
        decoder: how marginals become states; by default `MaxMarginal()`.
        chunk_size: how many examples are predicted at once, to limit memory; by default all that share a graph.

    Returns:
        An int64 tensor of shape (n, variable) per block.

    >>> import torch
    >>> from riskfield import Exact, Examples, Inference, chain, predict
    >>> from riskfield.models import Generative
    >>> graph = chain(3, num_states=2)
    >>> model = Generative(graph)
    >>> with torch.no_grad():
    ...     _ = model.factors.copy_(torch.tensor([1.0, 0.0, 0.0, 1.0] * 2))  # neighbours tend to agree
    >>> states = torch.full((2, 3), -1)
    >>> evidence = torch.tensor([[1, -1, -1], [-1, -1, 0]])
    >>> predict(model, Examples(graph, states, evidence=evidence), Inference(Exact()))
    [tensor([[1, 1, 1],
            [0, 0, 0]])]
    """
    if chunk_size is not None:
        check_counts(chunk_size=chunk_size)
    parts = blocks(data)
    united = None
    if decodes_by_part(decoder) and can_join(model, None, inference):
        united = unite(model, parts, chunk_size)
    with evaluating(model):
        if united is None:
            return [_of_block(model, block, inference, decoder, chunk_size or max(len(block), 1)) for block in parts]
        out = [torch.empty_like(block.labels) for block in parts]
        for union in united:
            chosen = inference_on(inference, union.examples)
            for piece, states in union.split(_states(model, union.examples, chosen, decoder)[0]):
                out[piece.block][piece.rows] = states
        return out


def _of_block(
    model: Module, block: Examples, inference: InferenceChoice, decoder: AbstractDecoder | None, chunk_size: int
) -> Tensor:
    chunks = torch.arange(len(block)).split(chunk_size)
    parts = [block if len(rows) == len(block) else block.select(rows) for rows in chunks]
    return torch.cat([_states(model, part, inference, decoder) for part in parts])


def _states(model: Module, part: Examples, inference: InferenceChoice, decoder: AbstractDecoder | None) -> Tensor:
    theta = model(part.graph, part.inputs)
    chosen = inference_of(model, inference, part.graph, part.inputs)
    assert chosen is not None
    theta = theta.expand(len(part), theta.shape[-1])  # a model without inputs has one for all examples
    return decode(part.graph, theta, chosen, decoder, evidence=part.evidence, mask=part.asked)
