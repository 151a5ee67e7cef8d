"""Numbers that compare predictions with the truth: errors, overlaps, calibration.

Labels have shape (*batch, variable). Variables with label -1, or where `mask` is False, are ignored; the others are the
targets. For the mean of a loss, use `empirical_risk(..., per_variable=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from riskfield.graph.factor_graph import FactorGraph
from riskfield.losses.l1_mse_f_measure import soft_f_measure, squared_error
from riskfield.losses.marginal import over_variables

__all__ = [
    "Reliability",
    "confusion_matrix",
    "error_rate",
    "f_measure",
    "intersection_over_union",
    "log_loss",
    "make_scorer",
    "regression_error",
    "reliability",
    "span_f_measure",
    "spans",
]

_SMALLEST = 1e-12  # a probability in a logarithm is at least this


def error_rate(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return the univariate classification error: the share of targets whose predicted state is wrong.

    Arguments:
        predicted: predicted states, int64 of shape (*batch, variable).
        labels: true states of the same shape, -1 where they are unknown.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.

    Raises:
        ValueError: if the shapes differ, or there is no target.
        TypeError: if `mask` is not bool.

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

    It is the mean over targets of 1/2 sum_x (d(x) - [x = label])^2, where d(x) is the weight of state x, and [...] is 1
    if the equation holds, else 0. For binary variables this is the mean of (label - d(1))^2.

    Arguments:
        graph: the structure.
        weights: one tensor (*batch, node, state) for each node group.
        labels: true states of shape (*batch, variable), -1 where they are unknown.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.

    Raises:
        ValueError: if `labels` do not fit `graph`, or there is no target.
        TypeError: if `mask` is not bool.

    >>> import torch
    >>> from riskfield import chain
    >>> regression_error(chain(2, num_states=2), [torch.tensor([[0.5, 0.5], [0.8, 0.2]])], torch.tensor([0, -1]))
    0.25
    """
    labels = graph.check_states(labels, "labels", allow_unobserved=True)
    mask = _checked_mask(labels, labels, mask)
    return float(over_variables(graph, weights, labels, mask, squared_error).sum() / mask.sum())


def f_measure(predicted: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return the F-measure of binary variables: the harmonic mean of precision and recall of state 1.

    It is computed for each example and averaged over examples. It is 1 for an example without state 1 in its labels and
    predictions.

    Arguments:
        predicted: predicted states 0 and 1, int64 of shape (*batch, variable).
        labels: true states of the same shape, -1 where they are unknown.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.

    Raises:
        ValueError: if the shapes differ, there is no target, or a target has a state above 1.
        TypeError: if `mask` is not bool.

    >>> import torch
    >>> round(f_measure(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0])), 4)
    0.6667
    """
    mask = _checked_mask(predicted, labels, mask)
    for name, states in (("predicted", predicted[mask]), ("labels", labels[mask])):
        if states.max() > 1:
            raise ValueError(f"`{name}` must hold states 0 and 1. Got {int(states.max())}.")
    return float(soft_f_measure(predicted.double(), labels, mask).mean())


def confusion_matrix(predicted: Tensor, labels: Tensor, num_states: int, mask: Tensor | None = None) -> Tensor:
    """Return how many targets of each state were predicted as each state, int64 of shape (true, predicted).

    Arguments:
        predicted: predicted states, int64 of shape (*batch, variable).
        labels: true states of the same shape, -1 where they are unknown.
        num_states: the number of states.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.

    Raises:
        ValueError: if the shapes differ, there is no target, or a target has a state that is not below `num_states`.
        TypeError: if `mask` is not bool.

    >>> import torch
    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), num_states=2)
    tensor([[1, 1],
            [0, 1]])
    """
    mask = _checked_mask(predicted, labels, mask)
    for name, states in (("predicted", predicted[mask]), ("labels", labels[mask])):
        if states.min() < 0 or states.max() >= num_states:
            wrong = states[(states < 0) | (states >= num_states)][0]
            raise ValueError(f"`{name}` must hold states from 0 to {num_states - 1}. Got {int(wrong)}.")
    pairs = labels[mask] * num_states + predicted[mask]
    return torch.bincount(pairs, minlength=num_states**2).reshape(num_states, num_states)


def intersection_over_union(confusion: Tensor) -> Tensor:
    """Return the intersection over union of the true and the predicted variables of each state, of shape (state,).

    It is NaN for a state that occurs neither in the labels nor in the predictions.

    Arguments:
        confusion: a confusion matrix, as `confusion_matrix` returns it.

    >>> import torch
    >>> intersection_over_union(torch.tensor([[3, 1], [0, 4]]))
    tensor([0.7500, 0.8000], dtype=torch.float64)
    """
    right = confusion.diagonal().double()
    return right / (confusion.sum(0) + confusion.sum(1) - right)


def log_loss(marginals: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """Return minus the mean logarithm of the marginal of the true state, over all targets.

    Marginals below 1e-12 count as 1e-12, so that the result is finite.

    Arguments:
        marginals: of shape (*batch, variable, state).
        labels: true states of shape (*batch, variable), -1 where they are unknown.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.

    Raises:
        ValueError: if the shapes differ, or there is no target.
        TypeError: if `mask` is not bool.

    >>> import torch
    >>> round(log_loss(torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([1, -1])), 4)
    0.6931
    """
    mask = _checked_mask(marginals[..., 0], labels, mask)
    true = marginals[mask].gather(-1, labels[mask][:, None])
    return float(-true.clamp(min=_SMALLEST).log().mean())


@dataclass(frozen=True, eq=False)
class Reliability:
    """How often marginals are right, in n bins [0, 1/n], (1/n, 2/n], ..., ((n - 1)/n, 1].

    Every state of every target counts: its marginal falls into a bin, and is right if the state is the true one. The
    results of several examples can be added with `+`.
    """

    counts: Tensor  # (bin,)  how many marginals are in it
    marginals: Tensor  # (bin,)  their sum
    true: Tensor  # (bin,)  how many of them are of the true state

    def __add__(self, other: Reliability) -> Reliability:
        """Return the result for the marginals of both."""
        return Reliability(self.counts + other.counts, self.marginals + other.marginals, self.true + other.true)

    @property
    def means(self) -> Tensor:
        """The mean of the marginals in each bin; 0 for an empty bin."""
        return self.marginals / self.counts.clamp(min=1)

    @property
    def shares(self) -> Tensor:
        """The share of the marginals in each bin that are of the true state; 0 for an empty bin."""
        return self.true / self.counts.clamp(min=1)

    @property
    def calibration_error(self) -> float:
        """The mean over bins, weighted by `counts`, of the absolute difference between `means` and `shares`."""
        return float((self.counts * (self.means - self.shares).abs()).sum() / self.counts.sum())


def reliability(marginals: Tensor, labels: Tensor, mask: Tensor | None = None, *, num_bins: int = 10) -> Reliability:
    """Count how often marginals are right.

    Arguments:
        marginals: of shape (*batch, variable, state).
        labels: true states of shape (*batch, variable), -1 where they are unknown.
        mask: bool, of the same shape: which variables count; by default all. Those with label -1 never count.
        num_bins: the number of bins, by default 10.

    Raises:
        ValueError: if the shapes differ, or there is no target.
        TypeError: if `mask` is not bool.

    >>> import torch
    >>> found = reliability(torch.tensor([[0.3, 0.7], [0.3, 0.7], [0.3, 0.7]]), torch.tensor([1, 1, 0]))
    >>> found.shares[6], round(found.calibration_error, 4)
    (tensor(0.6667, dtype=torch.float64), 0.0333)
    """
    mask = _checked_mask(marginals[..., 0], labels, mask)
    values = marginals[mask].double()
    is_true = torch.nn.functional.one_hot(labels[mask], values.shape[-1]).double()
    bins = ((values * num_bins).ceil().long() - 1).clamp(0, num_bins - 1).flatten()
    counts, sums, true = (
        torch.bincount(bins, weights.flatten(), minlength=num_bins)
        for weights in (torch.ones_like(values), values, is_true)
    )
    return Reliability(counts, sums, true)


def _checked_mask(predicted: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    if predicted.shape != labels.shape:
        raise ValueError(
            f"`predicted` must have the shape {tuple(labels.shape)} of labels. Got {tuple(predicted.shape)}."
        )
    if mask is not None and mask.dtype != torch.bool:  # others would select by number
        raise TypeError(f"`mask` must be booleans. Got {mask.dtype}.")
    targets = labels >= 0 if mask is None else mask & (labels >= 0)
    if not targets.any():
        raise ValueError("`labels` must hold at least one target: an unmasked variable with a label. Got none.")
    return targets


def spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the spans that BIO or BIOES tags of one sequence describe: type, first position, last position.

    The rules are those of conlleval, which accepts sequences that break the scheme: a change of type, or an "I-X" after
    "O", begins a span.

    Arguments:
        tags: the tags of one sequence: "O", or one of B, I, E and S with a type, such as "B-PER".

    Raises:
        ValueError: if `tags` is one string, or holds anything else.

    >>> list(spans(["B-PER", "I-PER", "O", "B-LOC", "B-LOC"]))
    [('PER', 0, 1), ('LOC', 3, 3), ('LOC', 4, 4)]
    """
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"`tags` must be the tags of one sequence, strings such as 'B-X' or 'O'. Got {tags!r}.")
    start, before, kind_before = 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if prefix not in tuple("BIOES"):
            raise ValueError(f"`tags` must begin with B-, I-, E- or S-, or be 'O'. Got {tag!r}.")
        changes = prefix in "BSO" or before in "ES" or kind != kind_before
        if before != "O" and changes:
            yield kind_before, start, position - 1
        if prefix != "O" and (changes or before == "O"):
            start = position
        before, kind_before = prefix, kind


def span_f_measure(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """Return the F-measure of spans over all sequences; 0 if there are no spans.

    A span is predicted correctly if its type, start and end are right. The result equals `f1_score` of seqeval (micro
    average).

    Arguments:
        truth: the true tags of each sequence.
        predicted: the predicted tags of each sequence.

    Raises:
        ValueError: if `truth` and `predicted` differ in their lengths, or a tag is none of the scheme.

    >>> span_f_measure([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "B-LOC"]])
    0.6666666666666666
    """
    if len(truth) != len(predicted):
        raise ValueError(f"`predicted` must have {len(truth)} sequences, as `truth`. Got {len(predicted)}.")
    right = found = wanted = 0
    for k, (own, other) in enumerate(zip(truth, predicted, strict=True)):
        if len(own) != len(other):
            raise ValueError(f"`predicted[{k}]` must have {len(own)} tags. Got {len(other)}.")
        of_truth, of_prediction = set(spans(own)), set(spans(other))
        right += len(of_truth & of_prediction)
        found += len(of_prediction)
        wanted += len(of_truth)
    return 2 * right / (found + wanted) if found + wanted else 0.0


def make_scorer(
    metric: Callable[..., float],
    *,
    flat: bool | None = None,
    ignore: Any = -1,
    greater_is_better: bool = True,
    **settings: Any,
) -> Callable[[Any, Any, Any], float]:
    """Make a scorer for `GridSearchCV` and similar tools, which also works for examples of different lengths.

    Arguments:
        metric: a function of the true and the predicted labels, which returns a number.
        flat: whether to pass the labels of all examples as one list. By default True for the metrics of scikit-learn,
            which expect one list, and False for others.
        ignore: the label of variables whose label is unknown, as for the estimator, by default -1; None if all labels
            are known. With `flat`, unknown labels and the predictions for them are left out.
        greater_is_better: whether a higher value is better, as by default. If not, the scorer returns minus the value.
        settings: further arguments of the metric.

    Returns:
        A function of (estimator, X, y). It raises a `ValueError` if the metric returns NaN.

    >>> scorer = make_scorer(span_f_measure)  # GridSearchCV(crf, {...}, scoring=scorer)
    >>> from sklearn.metrics import f1_score
    >>> scorer = make_scorer(f1_score, average="macro")
    """
    if flat is None:
        flat = str(getattr(metric, "__module__", "")).partition(".")[0] == "sklearn"

    def scorer(estimator: Any, X: Any, y: Any) -> float:
        predicted = estimator.predict(X)
        if flat:
            pairs = list(zip(_joined(y), _joined(predicted), strict=True))
            known = [(own, other) for own, other in pairs if ignore is None or own != ignore]
            y, predicted = [own for own, _ in known], [other for _, other in known]
        value = float(metric(y, predicted, **settings))
        if math.isnan(value):
            raise ValueError(f"`metric` must return a number. {getattr(metric, '__name__', metric)} returned NaN.")
        return value if greater_is_better else -value

    return scorer


def _joined(labels: Any) -> list[Any]:
    """The labels of all examples, also of images, in one list."""
    return [label for own in labels for label in np.asarray(own, dtype=object).ravel().tolist()]
