"""`predict`: what a trained model says of a data set."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from riskfield.decoders import AbstractDecoder, decode
from riskfield.examples import DataSet, blocks
from riskfield.infer import InferenceChoice
from riskfield.learning.optimiser import check_counts
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
    """States of all variables, for every block of examples: what is observed stays as it is.

    Examples of a block may observe and ask for different variables; a decoder that weighs variables against each other
    looks at those that are asked for, `examples.asked`.

    Arguments:
        model: a module with `theta = model(graph, inputs)`.
        data: `Examples`, or several of them on different graphs. Of labels it matters only which are known.
        inference: how marginals are computed.
        decoder: how they become states; by default `MaxMarginal()`.
        chunk_size: how many examples are predicted at once, to bound memory; by default all that share a graph.

    Returns:
        An int64 tensor of shape (n, variable) per block.

    >>> import torch
    >>> from riskfield import Exact, Examples, Inference, chain, predict
    >>> from riskfield.models import Generative
    >>> graph = chain(3, num_states=2)
    >>> model = Generative(graph)
    >>> with torch.no_grad():
    ...     _ = model.factors.copy_(torch.tensor([1.0, 0.0, 0.0, 1.0] * 2))  # neighbours like to agree
    >>> states = torch.full((2, 3), -1)
    >>> evidence = torch.tensor([[1, -1, -1], [-1, -1, 0]])
    >>> predict(model, Examples(graph, states, evidence=evidence), Inference(Exact()))
    [tensor([[1, 1, 1],
            [0, 0, 0]])]
    """
    if chunk_size is not None:
        check_counts(chunk_size=chunk_size)
    out = []
    with evaluating(model):
        for block in blocks(data):
            parts = []
            for rows in torch.arange(len(block)).split(chunk_size or max(len(block), 1)):
                part = block if len(rows) == len(block) else block.select(rows)
                theta = model(part.graph, part.inputs)
                chosen = inference_of(model, inference, part.graph, part.inputs)
                assert chosen is not None
                theta = theta.expand(len(part), theta.shape[-1])  # a model without inputs has one for all examples
                parts.append(decode(part.graph, theta, chosen, decoder, evidence=part.evidence, mask=part.asked))
            out.append(torch.cat(parts))
    return out
