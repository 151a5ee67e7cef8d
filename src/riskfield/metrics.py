"""Metrics that compare predictions with labels.

Labels have shape (*batch, variable). Variables with label -1, or where `mask` is False, are ignored. For the mean of a
loss, use `empirical_risk(..., per_variable=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.losses.decoded import soft_f_measure, squared_error
from riskfield.losses.marginal import over_variables


def error_rate(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return the univariate classification error: the share of targets whose predicted state is wrong.

    >>> import torch
    >>> error_rate(torch.tensor([[0, 1, 1], [0, 0, 0]]), torch.tensor([[0, 1, 0], [1, -1, -1]]))
    0.5
    """
    mask = _checked_mask(predicted, labels, mask)
    return int((mask & (predicted != labels)).sum()) / int(mask.sum())


def regression_error(
    graph: FactorGraph, weights: Sequence[Tensor], labels: Tensor, mask: Tensor | None = None
) -> float:
    """Return the mean squared error of the weights of a soft decoder, such as `ExpectedValue()(graph, mu)`.

    For binary variables this is the mean of (label - weight of state 1)^2.

    >>> import torch
    >>> from riskfield import chain
    >>> regression_error(chain(2, num_states=2), [torch.tensor([[0.5, 0.5], [0.8, 0.2]])], torch.tensor([0, -1]))
    0.25
    """
    labels = graph.check_states(labels, "labels", allow_unobserved=True)
    mask = _checked_mask(labels, labels, mask)
    return float(over_variables(graph, weights, labels, mask, squared_error).sum() / mask.sum())


def f_measure(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return the harmonic mean of precision and recall of state 1, averaged over examples.

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
    targets = labels >= 0 if mask is None else mask & (labels >= 0)
    if not targets.any():
        raise ValueError("`labels` must hold at least one target: an unmasked variable with a label. Got none.")
    return targets
