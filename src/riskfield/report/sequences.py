"""The report on sequences: one HTML page about one `CRF`, or about several side by side."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from riskfield.estimators.crf import CRF
from riskfield.estimators.labels import as_labels, is_known
from riskfield.io._atomic import check_writable
from riskfield.metrics import span_f_measure
from riskfield.report.charts import histogram
from riskfield.report.evaluation import Evaluation, Floats, Tally
from riskfield.report.learned import transition_tables
from riskfield.report.tables import (
    Measure,
    confusion_table,
    reliability_chart,
    reliability_table,
    scores_table,
    tiles,
    training_curve,
)
from riskfield.report.templating import percent, several, three_digits, write_page

_MEASURES = (
    Measure("tags wrong", lambda score: score.error, percent),
    Measure("log loss per token", lambda score: score.log_loss, three_digits),
    Measure("calibration error", lambda score: score.calibration_error, three_digits),
)
_SPANS = Measure("span F1", lambda score: score.span_f_measure, percent, largest=True)


@dataclass(frozen=True)
class Token:
    """A token: its text, its true tag, the predicted tag where it differs, and the marginal of the true tag."""

    text: str
    tag: str
    predicted: str
    belief: str


@dataclass(frozen=True)
class HardSequence:
    """A sequence that is shown."""

    name: str
    note: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, eq=False)
class _Result:
    """A model, its evaluation, and for every sequence the predicted tags, the marginals and their errors."""

    name: str
    crf: CRF
    evaluation: Evaluation
    predicted: list[npt.NDArray[np.int64]]
    marginals: list[Floats]
    losses: Floats  # log loss per token
    errors: Floats  # share of wrong tags


def write_sequence_report(
    path: str | os.PathLike[str],
    models: Mapping[str, CRF],
    X: Any,
    y: Any,
    *,
    tokens: Sequence[Sequence[object]] | None = None,
    title: str | None = None,
    num_shown: int = 12,
) -> list[Evaluation]:
    """Write a page about one fitted `CRF`, or about several with the same tags.

    It shows errors, the hardest sequences, the confusion of tags, calibration, transitions and training. If the tags
    are those of spans, such as "B-PER" and "O", it also shows the F-measure of spans.

    Arguments:
        path: where to write the page. It is replaced atomically.
        models: {name: fitted estimator}.
        X, y: test sequences and their tags, as for `CRF.fit`.
        tokens: the tokens of each sequence, which the page shows; by default their positions, from 1.
        title: the title of the page; by default the names of the models.
        num_shown: how many sequences are shown, by default 12: those with the highest log loss per token under the
            first model.

    Returns:
        The evaluation of each model.

    Raises:
        ValueError: if there are no models, if they differ in their tags, if `X`, `y` and `tokens` do not fit together,
            if no token has a known tag, or if `num_shown` is not positive.
        OSError: if the page cannot be written.

    >>> import tempfile
    >>> from riskfield import CRF
    >>> X, y = [np.array([[0.1], [0.9], [0.8]]), np.array([[0.2], [0.1]])], [["a", "b", "b"], ["a", "a"]]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (found,) = write_sequence_report(f"{folder}/page.html", {"chain": CRF().fit(X, y)}, X, y)
    >>> found.confusion
    array([[3, 0],
           [0, 2]])
    """
    _check(models, X, y, tokens, num_shown)
    check_writable(path)
    tags = [str(tag) for tag in next(iter(models.values())).classes_.tolist()]
    codes = _codes(next(iter(models.values())), y)
    found = [_result(name, crf, tags, X, codes) for name, crf in models.items()]
    names, scores = list(models), [result.evaluation for result in found]
    measures = [*_MEASURES, *(() if math.isnan(scores[0].span_f_measure) else (_SPANS,))]
    order = np.argsort(-found[0].losses, kind="stable")[:num_shown]
    learned = [transition_tables(name, k, crf) for k, (name, crf) in enumerate(models.items())]
    curves = [training_curve(r.name, k, r.crf, getattr(r.crf, "results_", ())) for k, r in enumerate(found)]
    labelled = f"{several(scores[0].num_pixels, 'labelled token')} · {', '.join(tags)}"
    write_page(
        path,
        "sequences.html",
        title=title or " · ".join(names),
        about=f"{several(len(codes), 'sequence')} · {labelled}",
        names=names,
        tiles=tiles(measures, names, scores),
        scores=scores_table([*measures, *(_tag_error(k, tag) for k, tag in enumerate(tags))], names, scores),
        histogram=histogram(
            "Errors of single sequences",
            "wrong tags, %",
            "sequences",
            [[100 * error for error in result.errors.tolist() if error == error] for result in found],
        ),
        hardest=[_hard(int(k), found[0], tags, codes, tokens) for k in order],
        confusions=[confusion_table(score, "tokens") for score in scores],
        reliability=reliability_chart(scores),
        bins=reliability_table(names, scores),
        transitions=[group for group in learned if group is not None],
        curves=[curve for curve in curves if curve is not None],
    )
    return scores


def _check(models: Mapping[str, CRF], X: Any, y: Any, tokens: Any, num_shown: int) -> None:
    if not models:
        raise ValueError("`models` must hold at least one fitted estimator. Got none.")
    first_name, first = next(iter(models.items()))
    for name, crf in models.items():
        if crf.classes_.tolist() != first.classes_.tolist():
            raise ValueError(
                f"`models` must have the same tags. {first_name} has {first.classes_.tolist()}, and {name} has "
                f"{crf.classes_.tolist()}."
            )
    for name, values in (("y", y), ("tokens", tokens)):
        if values is not None and len(values) != len(X):
            raise ValueError(f"`{name}` must have an entry for each of {len(X)} sequences. Got {len(values)}.")
    if num_shown < 1:
        raise ValueError(f"`num_shown` must be positive. Got {num_shown}.")


def _codes(crf: CRF, y: Any) -> list[npt.NDArray[np.int64]]:
    """The tags of each sequence as indices into the tags of the model, with -1 where they are unknown."""
    codes = []
    for k, own in enumerate(y):
        labels = as_labels(own, (len(own),), f"y[{k}]", crf.ignore)
        places = {tag: code for code, tag in enumerate(crf.classes_.tolist())}
        known = is_known(labels, crf.ignore)
        new = [tag for tag in labels[known].tolist() if tag not in places]
        if new:
            raise ValueError(f"`y[{k}]` must hold tags of the models, {crf.classes_.tolist()}. Got {new[0]!r}.")
        codes.append(np.array([places.get(tag, -1) for tag in labels.tolist()], np.int64))
    return codes


def _result(name: str, crf: CRF, tags: Sequence[str], X: Any, codes: Sequence[npt.NDArray[np.int64]]) -> _Result:
    began = time.perf_counter()
    marginals, predicted = list(crf.predict_marginals(X)), _codes(crf, crf.predict(X))
    seconds = time.perf_counter() - began
    tally, losses, errors = Tally(tags), [], []
    for k, (own, states, beliefs) in enumerate(zip(codes, predicted, marginals, strict=True)):
        if beliefs.shape[0] != own.shape[0]:
            raise ValueError(f"`y[{k}]` must have a tag for each of {beliefs.shape[0]} tokens. Got {own.shape[0]}.")
        tally.add(own, beliefs, seconds / len(codes), predicted=states)
        known = own >= 0
        true = beliefs[known, own[known]]
        losses.append(float(-np.log(np.maximum(true, 1e-12)).mean()) if known.any() else -1.0)
        errors.append(float(np.mean(states[known] != own[known])) if known.any() else float("nan"))
    evaluation = replace(tally.evaluation(), span_f_measure=_span_f_measure(tags, codes, predicted))
    return _Result(name, crf, evaluation, predicted, marginals, np.array(losses), np.array(errors))


def _span_f_measure(
    tags: Sequence[str], codes: Sequence[npt.NDArray[np.int64]], predicted: Sequence[npt.NDArray[np.int64]]
) -> float:
    """The F-measure of spans; NaN if the tags are not those of spans. Where the true tag is unknown, both are O."""
    if not all(tag == "O" or re.match("[BIES]-.", tag) for tag in tags):
        return math.nan
    of_codes = [*tags, "O"]  # -1 is the last one
    truth = [[of_codes[code] for code in own] for own in codes]
    found = [
        [of_codes[state if code >= 0 else -1] for code, state in zip(own, states, strict=True)]
        for own, states in zip(codes, predicted, strict=True)
    ]
    return span_f_measure(truth, found)


def _hard(
    k: int,
    result: _Result,
    tags: Sequence[str],
    codes: Sequence[npt.NDArray[np.int64]],
    tokens: Sequence[Sequence[object]] | None,
) -> HardSequence:
    beliefs, predicted, own = result.marginals[k], result.predicted[k], codes[k]
    texts = [str(n + 1) for n in range(len(own))] if tokens is None else [str(token) for token in tokens[k]]
    if len(texts) != len(own):
        raise ValueError(f"`tokens[{k}]` must have {len(own)} tokens. Got {len(texts)}.")
    shown = []
    for text, code, chosen, marginal in zip(texts, own.tolist(), predicted.tolist(), beliefs, strict=True):
        wrong = code >= 0 and chosen != code
        belief = f"{marginal[code]:.2f}" if code >= 0 else ""
        shown.append(Token(text, tags[code] if code >= 0 else "?", tags[chosen] if wrong else "", belief))
    note = f"log loss {three_digits(result.losses[k])} per token, {percent(result.errors[k])} wrong"
    return HardSequence(f"Sequence {k}", note, tuple(shown))


def _tag_error(k: int, tag: str) -> Measure:
    return Measure(f"wrong {tag}", lambda score: float(score.class_errors[k]), percent)
