"""The k most probable states of a chain: list Viterbi."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def k_best(nodes: Floats, pairs: Floats, k: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The k joint states of a chain with the highest scores, best first, and their log-probabilities.

    For each position and state it keeps the k best ways to get there (Seshadri & Sundberg 1994). There are fewer than k
    results if the chain has fewer possible states.

    Arguments:
        nodes: log-potentials of shape (variable, state).
        pairs: of shape (state, state), from a variable to the next.
        k: how many.

    >>> states, log_probabilities = k_best(np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 2.0]]), k=2)
    >>> states.tolist(), np.exp(log_probabilities).round(3).tolist()
    ([[1, 1], [0, 0]], [0.644, 0.237])
    """
    score = nodes[0][None]  # (way, state)
    total = nodes[0]
    pointers = []
    for own in nodes[1:]:
        ways, states = score.shape
        following = (score[:, :, None] + pairs).reshape(ways * states, -1)  # (way and state before, state)
        kept = np.argsort(-following, axis=0, kind="stable")[:k]
        score = np.take_along_axis(following, kept, axis=0) + own
        pointers.append(kept)
        total = np.logaddexp.reduce(total[:, None] + pairs, axis=0) + own
    ends = np.argsort(-score, axis=None, kind="stable")[:k]
    ends = ends[np.isfinite(score.reshape(-1)[ends])]
    path = [ends % score.shape[1]]
    way, state = np.divmod(ends, score.shape[1])
    for kept in reversed(pointers):
        way, state = np.divmod(kept[way, state], nodes.shape[1])
        path.append(state)
    log_probabilities: Floats = score.reshape(-1)[ends] - np.logaddexp.reduce(total)
    return np.stack(path[::-1], axis=1), log_probabilities
