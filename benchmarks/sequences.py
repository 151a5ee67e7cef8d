"""`CRF.fit` beside CRFsuite, which is written in C: the same sentences, features, L2 penalty and number of iterations.

Sentences are drawn from a chain of 9 tags, with up to 8 features of value 1 for each token. Both programs minimise the
negative log-likelihood + c2 |w|^2 by L-BFGS with a memory of 6 steps, with a weight for every pair of feature and tag
and for every pair of tags (`feature.possible_states` and `feature.possible_transitions`; by default CRFsuite leaves out
pairs that do not occur). Time is processor time of one thread, from features to the fitted model, the least of several
runs in turn. It needs the packages python-crfsuite and scipy.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import riskfield as rf
from timing import about, add_out, least, write

TAGS, PER_TOKEN, C2 = 9, 8, 1.0


class Sentences(NamedTuple):
    """Which features each token has, and its tag."""

    features: list[np.ndarray]  # (token, feature)
    tags: list[list[str]]
    num_features: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.tags))

    def named(self) -> list[list[list[str]]]:
        """The names of the features of each token."""
        return [[[f"f{feature}" for feature in token] for token in sentence] for sentence in self.features]

    def dense(self) -> list[np.ndarray]:
        """Arrays of shape (token, feature)."""
        out = []
        for sentence in self.features:
            rows = np.zeros((len(sentence), self.num_features))
            np.add.at(rows, (np.arange(len(sentence))[:, None], sentence), 1.0)
            out.append(rows)
        return out


def draw(number: int, num_features: int, seed: int = 0) -> Sentences:
    """Sentences of 5 to 34 tokens whose features have Zipf's frequencies."""
    rng = np.random.default_rng(seed)
    pair = 1.5 * rng.normal(size=(TAGS, TAGS))
    single = 0.8 * rng.normal(size=(num_features, TAGS))
    frequency = np.arange(1, num_features + 1) ** -0.8
    cumulative = np.cumsum(frequency / frequency.sum())
    features, tags = [], []
    for _ in range(number):
        drawn = np.searchsorted(cumulative, rng.random((int(rng.integers(5, 35)), PER_TOKEN)))
        own = [np.unique(token) for token in np.minimum(drawn, num_features - 1)]
        width = min(map(len, own))
        kept = np.stack([token[:width] for token in own])
        scores, path = single[kept].sum(1), [int(rng.integers(TAGS))]
        for score in scores[1:]:
            logits = pair[path[-1]] + score
            weights = np.exp(logits - logits.max())
            path.append(int(rng.choice(TAGS, p=weights / weights.sum())))
        features.append(kept)
        tags.append([str(tag) for tag in path])
    return Sentences(features, tags, num_features)


def crfsuite(data: Sentences, X: list[list[list[str]]], iterations: int) -> float:
    """Train CRFsuite. Return the objective that it reached."""
    import pycrfsuite

    trainer = pycrfsuite.Trainer(algorithm="lbfgs", verbose=False)
    trainer.set_params(
        {
            "c1": 0.0,
            "c2": C2,
            "max_iterations": iterations,
            "num_memories": 6,
            "epsilon": 1e-12,
            "delta": 1e-13,
            "feature.possible_states": True,
            "feature.possible_transitions": True,
        }
    )
    for sentence, tags in zip(X, data.tags, strict=True):
        trainer.append(sentence, tags)
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(f"{folder}/model")
    return float(trainer.logparser.iterations[-1]["loss"])


def riskfield(data: Sentences, X: list[Any], iterations: int) -> float:
    """Fit `CRF`. Return the objective that it reached, as CRFsuite counts it."""
    crf = rf.CRF(
        loss="surrogate-likelihood",
        initial=(),
        fit_intercept=False,
        ridge=C2 / data.tokens,
        optimiser=rf.optim.LBFGS(iterations, memory=6, gradient_tol=1e-12, change_tol=1e-15),
    )
    crf.fit(X, data.tags)
    best = crf.results_[-1].best
    assert best is not None
    return best.objective * data.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 sentences, once")
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    cases = [(1000, 600, "named"), (8000, 50_000, "named"), (1000, 600, "dense"), (1000, 5000, "dense")]
    if options.quick:
        cases, options.runs, options.iterations = [(100, 600, "named"), (100, 600, "dense")], 1, 10
    rows, ratios = [], []
    for number, num_features, form in cases:
        data = draw(number, num_features)
        X = data.named()
        own: list[Any] = X if form == "named" else data.dense()
        iterations = options.iterations
        ours, theirs = least(
            options.runs, [partial(riskfield, data, own, iterations), partial(crfsuite, data, X, iterations)]
        )
        what = f"{number} sentences, {num_features} features, {form}"
        for name, (seconds, objective) in (("riskfield", ours), ("CRFsuite", theirs)):
            rows.append({"what": what, "program": name, "seconds": seconds, "objective": objective})
        ratios.append(f"{what}, {iterations} iterations: riskfield / CRFsuite = {ours[0] / theirs[0]:.2f}")
        print(ratios[-1], flush=True)
    data = draw(100 if options.quick else 1000, 600)
    X = data.named()
    optimum, other = riskfield(data, X, 1000), crfsuite(data, X, 1000)
    ratios.append(f"the minimum of {len(data.tags)} sentences: riskfield {optimum:.6f}, CRFsuite {other:.6f}")
    assert abs(optimum - other) <= 1e-6 * other, ratios[-1]
    table = "| what | program | seconds | objective |\n|---|---|---|---|\n"
    for row in rows:
        table += f"| {row['what']} | {row['program']} | {row['seconds']:.2f} | {row['objective']:.3f} |\n"
    print(table + "\n".join(ratios))
    if options.out:
        write(options.out, "Training on sentences", about(), ratios, table, rows)


if __name__ == "__main__":
    main()
