"""Models, evidence and answers in the file formats of the UAI inference competitions.

.uai    MARKOV or BAYES, the number of variables, their state counts, the number of factors, one scope per factor
        (arity, then variables), one table per factor (number of entries, then entries; last variable fastest)
.evid   k v1 x1 ... vk xk: k observed variables, each with its state; an empty file means none; older files begin with a
        number of samples, 1
.MAR    MAR, the number of variables, then for each its state count and probabilities
.PR     PR, then log10 of the partition function
.MPE    MPE, the number of variables, then their states
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.errors import FileFormatError
from riskfield.graph.factor_graph import FactorGraph
from riskfield.io._atomic import write_text
from riskfield.io._tokens import Tokens

IntArray = npt.NDArray[np.int64]

# The size of the file bounds the states of variables that factors name. This bounds the states of the others.
MAX_FREE_STATES = 10_000_000
# What torch and NumPy allow for the axes of a tensor, less a few for batches.
MAX_ARITY = 60
_ANY = 2.0**53  # whole numbers beyond are not exact in float64


@dataclass(frozen=True, eq=False)
class UAIModel:
    """A model read from a `.uai` file.

    The factors have the same numbers as in the file, unless the file has factors without variables. These are constants
    and are left out of the graph, and the numbers of later factors decrease accordingly.

    Arguments:
        graph: the structure.
        theta: float64 log-potentials of shape (theta,), -inf for zeros in the file.
        kind: the first word of the file.
        log_constant: the sum of the logarithms of the factors without variables, 0 if there are none. Add it to a
            log-partition value.
    """

    graph: FactorGraph
    theta: Tensor
    kind: Literal["MARKOV", "BAYES"]
    log_constant: float = 0.0


def read_uai(path: str | os.PathLike[str]) -> UAIModel:
    """Read a model in UAI format.

    A table may consist of zeros only; inference then raises `ImpossibleEvidenceError`.

    Arguments:
        path: the file.

    Raises:
        FileFormatError: if the file does not follow the format; the message says where and what was expected.
        OSError: if the file cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "pair.uai"
    ...     _ = path.write_text("MARKOV 2  2 3  2  1 0  2 0 1   2  0.5 1   6  1 2 3 4 5 0")
    ...     model = read_uai(path)
    >>> model.graph
    FactorGraph(2 variables, 2 factors, theta 13, states 2..3, arity 1..2)
    >>> model.graph.factor(model.theta, 1).exp().round(decimals=6)
    tensor([[1., 2., 3.],
            [4., 5., 0.]], dtype=torch.float64)
    """
    tokens = Tokens.read(path, ("MARKOV", "BAYES"))
    n = tokens.counter(1, "the number of variables")
    states = tokens.integers(2, n, lambda k: f"the number of states of variable {k}", 1, _ANY)
    scopes = _Scopes.read(tokens, 2 + n, n)
    sizes = _table_sizes(tokens, scopes, states)
    first, logs = _tables(tokens, scopes.end, sizes)
    _check_free_states(tokens, scopes, states)
    kept = np.flatnonzero(scopes.arity)
    graph = FactorGraph(states, scopes.blocks(kept))
    theta = np.zeros(graph.theta_size)
    for group in graph.factor_groups:
        start = first[kept[group.factors]]
        theta[group.theta_start : group.theta_stop] = logs[start[:, None] + np.arange(group.table_size)].ravel()
    kind: Literal["MARKOV", "BAYES"] = "BAYES" if tokens.word(0).upper() == "BAYES" else "MARKOV"
    constant = float(logs[first[scopes.arity == 0]].sum())
    return UAIModel(graph, torch.from_numpy(theta), kind, constant)


def read_evidence(path: str | os.PathLike[str], graph: FactorGraph) -> dict[int, int]:
    """Read observed states {variable: state} from a UAI evidence file, with or without a leading number of samples.

    Arguments:
        path: the file.
        graph: the structure of the model that the evidence is for.

    Raises:
        FileFormatError: if the file does not follow the format, names a variable or state that `graph` does not have,
            gives two different states of a variable, or holds more than one sample.
        OSError: if the file cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from riskfield import chain
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.uai.evid"
    ...     _ = path.write_text("2  0 1  3 0")
    ...     read_evidence(path, chain(4, num_states=2))
    {0: 1, 3: 0}
    """
    tokens = Tokens.read(path)
    if not len(tokens):
        return {}
    # k pairs and their count make an odd number of tokens; a number of samples in front makes it even.
    at = 1 - len(tokens) % 2
    if at:
        samples = tokens.integer(0, "the number of observed variables or of samples", 0, _ANY)
        if samples != 1:
            tokens.fail(0, "a count k and k pairs of variable and state, or the same after a number of samples of 1")
    count = tokens.integer(at, "the number of observed variables", 0, _ANY)
    found = (len(tokens) - at - 1) // 2
    if count != found:
        tokens.fail(at, f"the number of observed variables to be {found}, as {2 * found} tokens follow")
    evidence: dict[int, int] = {}
    for token in range(at + 1, len(tokens), 2):
        variable = tokens.integer(token, "an observed variable", 0, graph.num_variables - 1)
        state = tokens.integer(token + 1, f"a state of variable {variable}", 0, int(graph.num_states[variable]) - 1)
        if evidence.setdefault(variable, state) != state:
            tokens.fail(token + 1, f"state {evidence[variable]} again for variable {variable}")
    return evidence


def read_mar(path: str | os.PathLike[str], graph: FactorGraph) -> Tensor:
    """Read a `.MAR` file as the node part of a mu of `graph`: a float64 tensor of shape (graph.node_size,).

    Arguments:
        path: the file.
        graph: the structure of the model.

    Raises:
        FileFormatError: if the file does not follow the format or does not fit `graph`.
        OSError: if the file cannot be read.
    """
    tokens = Tokens.read(path, ("MAR",))
    n, states = graph.num_variables, graph.num_states
    length = n + graph.node_size
    at = 2 if len(tokens) == length + 3 and tokens.values[1] == 1 else 1  # after a number of samples, or without one
    tokens.integer(at, "the number of variables", n, n)
    counts = at + 1 + np.cumsum(states + 1) - (states + 1)
    for k in np.flatnonzero(_at(tokens, counts) != states)[:1]:
        tokens.fail(int(counts[k]), f"the number of states of variable {k}, {states[k]},")
    tokens.check_end(at + 1 + length)
    if len(tokens) < at + 1 + length:
        tokens.fail(len(tokens), f"{length} numbers after the number of variables")
    position, layout = _variable_order(graph)
    position = at + 2 + position + np.repeat(np.arange(n), states)
    probabilities = tokens.values[position]
    for k in np.flatnonzero(~((probabilities >= 0) & (probabilities <= 1)))[:1]:
        tokens.fail(int(position[k]), "a probability")
    mu = np.empty(graph.node_size)
    mu[layout] = probabilities
    return torch.from_numpy(mu)


def read_pr(path: str | os.PathLike[str]) -> float:
    """Read a `.PR` file. Return the *natural* logarithm of the partition function; the file holds log10.

    Arguments:
        path: the file.

    Raises:
        FileFormatError: if the file does not follow the format.
        OSError: if the file cannot be read.
    """
    tokens = Tokens.read(path, ("PR",))
    at = 2 if len(tokens) == 3 and tokens.values[1] == 1 else 1
    tokens.check_end(at + 1)
    value = float(tokens.values[at]) if at < len(tokens) else math.nan
    if not value < math.inf:
        tokens.fail(at, "log10 of the partition function, finite or -inf,")
    return value * math.log(10)


def write_mar(path: str | os.PathLike[str], graph: FactorGraph, mu: Tensor) -> None:
    """Write node marginals as a `.MAR` file, with 12 digits.

    If the file cannot be written completely, an existing file stays as it is.

    Arguments:
        path: the file.
        graph: the structure of the model.
        mu: marginals in the layout of the graph, of shape (mu,), or the part of the nodes alone, without a batch.

    Raises:
        ValueError: if mu has a batch axis or another length, or holds NaN or infinity.
        OSError: if the file cannot be written.
    """
    if mu.ndim != 1 or mu.shape[0] not in (graph.mu_size, graph.node_size):
        raise ValueError(f"`mu` must have shape ({graph.mu_size},), without a batch. Got {tuple(mu.shape)}.")
    numbers = mu.detach().cpu().double().numpy()[: graph.node_size]
    if not np.isfinite(numbers).all():
        raise ValueError("`mu` must hold finite numbers. Got NaN or infinity.")
    words = [f"{p:.12g}" for p in numbers[_variable_order(graph)[1]].tolist()]
    parts, first = ["MAR\n", str(graph.num_variables)], 0
    for count in graph.num_states.tolist():
        parts.append(f" {count} {' '.join(words[first : first + count])}")
        first += count
    write_text(path, "".join(parts) + "\n")


def write_pr(path: str | os.PathLike[str], log_partition: float) -> None:
    """Write a `.PR` file, which holds log10 of the partition function.

    If the file cannot be written completely, an existing file stays as it is.

    Arguments:
        path: the file.
        log_partition: the *natural* logarithm of the partition function, finite or -inf.

    Raises:
        ValueError: if the logarithm is NaN or +inf.
        OSError: if the file cannot be written.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.PR"
    ...     write_pr(path, 100 * math.log(10))
    ...     path.read_text(), round(read_pr(path) / math.log(10), 9)
    ('PR\\n100\\n', 100.0)
    """
    value = float(log_partition)
    if not value < math.inf:
        raise ValueError(f"`log_partition` must be finite or -inf. Got {value}.")
    write_text(path, f"PR\n{value / math.log(10):.12g}\n")


def write_mpe(path: str | os.PathLike[str], graph: FactorGraph, states: Tensor) -> None:
    """Write the states of all variables, such as `solution.mode()`, as an `.MPE` file.

    If the file cannot be written completely, an existing file stays as it is.

    Arguments:
        path: the file.
        graph: the structure of the model.
        states: integers of shape (variable,), without a batch.

    Raises:
        ValueError: if `states` does not hold one valid state for each variable.
        OSError: if the file cannot be written.
    """
    checked = graph.check_states(states)
    if checked.ndim != 1:
        raise ValueError(f"`states` must have shape ({graph.num_variables},). Got {tuple(checked.shape)}.")
    write_text(path, f"MPE\n{' '.join(map(str, [graph.num_variables, *checked.tolist()]))}\n")


@dataclass(frozen=True, eq=False)
class _Scopes:
    """The scopes of all factors, still in the file's tokens."""

    tokens: Tokens
    start: IntArray  # (factor,)  the token of each factor's arity
    arity: IntArray  # (factor,)
    end: int  # the token behind them

    @classmethod
    def read(cls, tokens: Tokens, at: int, num_variables: int) -> _Scopes:
        count = tokens.counter(at, "the number of factors")
        start, arity = np.empty(count, np.int64), np.empty(count, np.int64)
        highest = min(num_variables, MAX_ARITY)
        values, position = tokens.values, at + 1
        for factor in range(count):
            size = values.item(position) if position < len(values) else -1
            if not (0 <= size <= highest and size == int(size)):
                tokens.fail(position, f"the arity of factor {factor}, a whole number in 0..{highest}")
            start[factor], arity[factor] = position, size
            position += 1 + int(size)
        scopes = cls(tokens, start, arity, position)
        for size in np.unique(arity[arity > 0]).tolist():
            scopes._check(np.flatnonzero(arity == size), num_variables)
        return scopes

    def variables(self, factors: IntArray) -> IntArray:
        """Return the variables of some factors of equal arity, of shape (factor, slot)."""
        position = self.start[factors][:, None] + 1 + np.arange(int(self.arity[factors[0]]))
        variables: IntArray = self.tokens.values[position].astype(np.int64)
        return variables

    def blocks(self, factors: IntArray) -> list[IntArray]:
        """Return the variables of `factors` in order, in as few arrays as their arities allow."""
        arity = self.arity[factors]
        members = {int(size): self.variables(factors[arity == size]) for size in np.unique(arity)}
        bounds = [*np.flatnonzero(np.diff(arity, prepend=-1)).tolist(), len(factors)]
        taken = dict.fromkeys(members, 0)
        blocks = []
        for start, stop in pairwise(bounds):
            size = int(arity[start])
            blocks.append(members[size][taken[size] : taken[size] + stop - start])
            taken[size] += stop - start
        return blocks

    def _check(self, factors: IntArray, num_variables: int) -> None:
        position = self.start[factors][:, None] + 1 + np.arange(int(self.arity[factors[0]]))
        variables = _at(self.tokens, position)
        bad = ~((variables >= 0) & (variables < num_variables) & (variables == np.floor(variables)))
        for row, slot in np.argwhere(bad)[:1].tolist():
            expected = (
                f"variable {slot} of the scope of factor {factors[row]}, a whole number in 0..{num_variables - 1}"
            )
            self.tokens.fail(int(position[row, slot]), expected)
        ordered = np.sort(variables, axis=1)
        for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))[:1].tolist():
            self.tokens.fail(int(position[row, 0]), f"distinct variables in the scope of factor {factors[row]}")


def _table_sizes(tokens: Tokens, scopes: _Scopes, states: IntArray) -> IntArray:
    """Count the entries of each factor's table, no more than there are tokens."""
    sizes = np.ones(len(scopes.arity))
    for arity in np.unique(scopes.arity[scopes.arity > 0]):
        factors = np.flatnonzero(scopes.arity == arity)
        sizes[factors] = np.prod(states[scopes.variables(factors)].astype(np.float64), axis=1)  # may exceed integers
    left = len(tokens) - scopes.end
    for factor in np.flatnonzero(sizes >= left)[:1]:
        raise FileFormatError(
            f"{tokens.path}: expected {sizes[factor]:.15g} entries in the table of factor {factor} and their number. "
            f"Found only {left} tokens after the scopes."
        )
    return sizes.astype(np.int64)


def _tables(tokens: Tokens, at: int, sizes: IntArray) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Take the logarithms of all tokens from `at` on, and find where in them each table starts."""
    counts = at + np.cumsum(sizes + 1) - (sizes + 1)
    for factor in np.flatnonzero(_at(tokens, counts) != sizes)[:1]:
        name = f"{sizes[factor]}, the number of entries of the table of factor {factor}"
        tokens.fail(min(int(counts[factor]), len(tokens)), name)
    end = int(counts[-1] + 1 + sizes[-1]) if len(sizes) else at
    if end > len(tokens):
        tokens.fail(len(tokens), f"{sizes[-1]} entries in the table of factor {len(sizes) - 1}")
    tokens.check_end(end)
    section = tokens.values[at:]
    for k in np.flatnonzero(~((section >= 0) & (section < np.inf)))[:1].tolist():
        factor = int(np.searchsorted(counts, at + k, side="right")) - 1
        tokens.fail(at + k, f"an entry of the table of factor {factor}, a finite number of at least 0,")
    tokens.check_no_underflow()
    with np.errstate(divide="ignore"):
        return counts + 1 - at, np.log(section)


def _check_free_states(tokens: Tokens, scopes: _Scopes, states: IntArray) -> None:
    free = np.ones(len(states), bool)
    for arity in np.unique(scopes.arity[scopes.arity > 0]):
        free[scopes.variables(np.flatnonzero(scopes.arity == arity)).ravel()] = False
    total = states[free].sum(dtype=np.float64)
    if total > MAX_FREE_STATES:
        raise FileFormatError(
            f"{tokens.path}: expected at most {MAX_FREE_STATES} states among the variables that no factor names. "
            f"Found {total:.15g}; variable {int(np.flatnonzero(free)[states[free].argmax()])} has the most."
        )


def _at(tokens: Tokens, position: IntArray) -> npt.NDArray[np.float64]:
    """Return the values at some tokens, NaN behind the last one."""
    inside = position < len(tokens)
    return np.where(inside, np.append(tokens.values, np.nan)[np.where(inside, position, len(tokens))], np.nan)


def _variable_order(graph: FactorGraph) -> tuple[IntArray, IntArray]:
    """Enumerate all states, variable by variable, and find where they lie in mu."""
    states = graph.num_states
    position = np.arange(graph.node_size)
    within = position - np.repeat(np.cumsum(states) - states, states)
    return position, np.repeat(graph.node_start, states) + within
