"""What experiments report: numbers that compare predictions with the truth.

All take labels of shape (*batch, variable), with -1 (or a mask) for variables that do not count. Losses are reported by
`empirical_risk(..., per_variable=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.losses.decoded import soft_f_measure, squared_error
from riskfield.losses.marginal import over_variables


def error_rate(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """The share of counted variables whose predicted state is wrong: the univariate classification error.

    >>> import torch
    >>> error_rate(torch.tensor([[0, 1, 1], [0, 0, 0]]), torch.tensor([[0, 1, 0], [1, -1, -1]]))
    0.5
    """
    mask = _checked_mask(predicted, labels, mask)
    return int((mask & (predicted != labels)).sum()) / int(mask.sum())


def regression_error(
    graph: FactorGraph, weights: Sequence[Tensor], labels: Tensor, mask: Tensor | None = None
) -> float:
    """The mean squared error of fractional predictions, `ExpectedValue()(graph, mu)` or other soft decoders' weights.

    For binary variables the mean of (label - weight of state 1)^2.

    >>> import torch
    >>> from riskfield import chain
    >>> regression_error(chain(2, num_states=2), [torch.tensor([[0.5, 0.5], [0.8, 0.2]])], torch.tensor([0, -1]))
    0.25
    """
    labels = graph.check_states(labels, "labels", allow_unobserved=True)
    mask = _checked_mask(labels, labels, mask)
    return float(over_variables(graph, weights, labels, mask, squared_error).sum() / mask.sum())


def f_measure(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """The harmonic mean of precision and recall of state 1, averaged over examples.

    >>> import torch
    >>> round(f_measure(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0])), 4)
    0.6667
    """
    mask = _checked_mask(predicted, labels, mask)
    return float(soft_f_measure(predicted.double(), labels, mask).mean())


def _checked_mask(predicted: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    if predicted.shape != labels.shape:
        raise ValueError(
            f"`predicted` must have the shape {tuple(labels.shape)} of labels. Got {tuple(predicted.shape)}."
        )
    counted = labels >= 0 if mask is None else mask & (labels >= 0)
    if not counted.any():
        raise ValueError("`labels` must hold a counted variable. Got none.")
    return counted
