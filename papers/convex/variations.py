"""The experiment with learned convex inference, varied to explain differences from the paper.

Each variation changes one thing that the paper leaves open: which pictures, how many, how they were made binary, and
the program that its conditional random fields came from (see `crf_program`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from papers.cells import Cells, Result, Setting, with_parameters
from papers.convex import crf_program
from papers.convex.digits import ERRORS, METHODS, PLAIN, SIDE, Setup, draw_digits, errors, measure, predict
from papers.convex.tables import PAPER, AbstractDigitStudy
from papers.side_by_side import FAR, beside
from papers.study import Record, panels, select, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIELDS = METHODS[:4]  # the conditional random fields
_AS_ABOVE, _OTHER_TESTS = "as in errors", "other test pictures"


@dataclass(frozen=True)
class Variation:
    """Another way to do the experiment.

    Arguments:
        name: of the way.
        setups: what is changed; of several, means and standard deviations are shown.
        methods: those to train.
        per_digit: how many pictures of each digit, if it differs from the experiment.
    """

    name: str
    setups: tuple[Setup, ...]
    methods: tuple[str, ...] = _FIELDS
    per_digit: int | None = None


VARIATIONS = (
    Variation("other pictures", tuple(Setup(sample=k) for k in (1, 2, 3))),
    Variation("nine pictures", tuple(Setup(sample=k) for k in range(5)), METHODS, per_digit=1),
    Variation("any ink is 1", (Setup(bright=0),), METHODS),
    Variation("bright ink is 1", (Setup(bright=191),)),
    Variation("Ising", (Setup(field=crf_program.ising),)),
    Variation("Ising, any ink is 1", (Setup(bright=0, field=crf_program.ising),)),
    Variation(
        "the program",
        (
            Setup(
                field=crf_program.ising,
                mean_field=crf_program.mean_field(SIDE**2),
                belief_propagation=crf_program.belief_propagation(),
            ),
        ),
    ),
)
_EXPLANATION = f"""Every entry is the paper's number, ours in bold, and the relative difference. Entries that differ by
more than {100 * FAR:.0f} % are marked ‡. Where several samples of pictures were drawn, ours is their mean, and ± is
followed by the standard deviation of one sample.

- {_AS_ABOVE}: 10 training and 10 test pictures of each digit.
- {_OTHER_TESTS}: the same parameters, tested with other samples of the same size.
- other pictures: trained and tested with other pictures.
- nine pictures: one training and one test picture of each digit. "Ten images of the digits 1-9" can mean so few.
- any ink, bright ink is 1: pixels above 0, or above 191 of 255, are 1 in the true picture. In the table of errors they
  are 1 above 127.
- Ising: the potentials of the program that the paper's conditional random fields came from; also with any ink 1.
- the program: its potentials, and its mean field and belief propagation.
"""


@dataclass(frozen=True)
class DigitVariations(AbstractDigitStudy):
    """Test errors of the experiment done in other ways.

    Arguments:
        groups: how many other samples of test pictures to test with.
    """

    name = "variations"
    title = "What explains deviations from Domke (2008)"

    groups: int = 10

    @property
    def num_cells(self) -> int:
        """Those of the experiment, their further tests, and those of the variations."""
        varied = sum(len(variation.setups) * len(variation.methods) for variation in VARIATIONS)
        return len(self._noises) * (2 * len(METHODS) + varied)

    def measure(self, cells: Cells) -> list[Record]:
        """The experiment and its tests first."""
        records = []
        for noise in self._noises:
            known: dict[str, Any] = {"noise": noise, "iterations": self.iterations}
            for method in METHODS:
                size: dict[str, Any] = {"method": method, "per_digit": self.per_digit}
                found = self._get(cells, "digits", partial(measure, self.root), **known, **size)
                if found is None:
                    continue
                records.append({**known, "method": method, "how": _AS_ABOVE, "tests": [found["test"]]})
                compute = partial(other_tests, self.root, found["parameters"])
                tests = self._get(cells, "other-tests", compute, groups=self.groups, **known, **size)
                if tests is not None:
                    records.append({**known, "method": method, "how": _OTHER_TESTS, **tests})
            records += [record for variation in VARIATIONS for record in self._vary(cells, variation, known)]
        return records

    def tables(self, records: list[Record]) -> str:
        """A table per noise level, method by method."""
        out = [_EXPLANATION]
        for noise in self._noises:
            lines = []
            for method in METHODS:
                for how in _ways():
                    for record in select(records, noise=noise, method=method, how=how):
                        lines.append([method, how, *_entries(PAPER[noise][method], record["tests"])])
            out.append(f"\n## {100 * noise:.0f} % noise\n\n" + table(["method", "way", *ERRORS], lines))
        return "".join(out)

    def plot(self, records: list[Record]) -> Figure:
        """Errors of classification relative to the paper's, a colour for each way."""
        figure, axes = panels(1, len(self._noises))
        for axis, noise in zip(axes, self._noises, strict=True):
            for k, how in enumerate(_ways()):
                found = select(records, noise=noise, how=how)
                points = [
                    (METHODS.index(record["method"]), record, test) for record in found for test in record["tests"]
                ]
                axis.plot(
                    [place + 0.1 * (k - len(_ways()) / 2) for place, _, _ in points],
                    [test[ERRORS[0]] / PAPER[noise][record["method"]][0] for _, record, test in points],
                    "o",
                    markersize=3,
                    label=how,
                )
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xticks(range(len(METHODS)), METHODS, rotation=30, ha="right", fontsize=8)
            axis.set_title(f"error of classification / paper's, {100 * noise:.0f} % noise", fontsize=9)
            axis.legend(fontsize=6)
        return figure

    @property
    def _noises(self) -> tuple[float, ...]:
        """Those the paper has numbers for."""
        return tuple(noise for noise in self.noises if noise in PAPER)

    def _vary(self, cells: Cells, variation: Variation, known: dict[str, Any]) -> list[Record]:
        """A record per method, with what was found so far."""
        records, per_digit = [], variation.per_digit or self.per_digit
        for method in variation.methods:
            own: dict[str, Any] = known | {"method": method, "how": variation.name}
            tests = []
            for setup in variation.setups:
                compute = partial(_measure, self.root, setup)
                found = self._get(cells, "variation", compute, **own, per_digit=per_digit, sample=setup.sample)
                if found is not None:
                    tests.append(found["test"])
            if tests:
                records.append({**own, "tests": tests})
        return records


def _ways() -> tuple[str, ...]:
    """Their names, in the order of the table."""
    return (_AS_ABOVE, _OTHER_TESTS, *(variation.name for variation in VARIATIONS))


def other_tests(
    root: str | None,
    parameters: list[float],
    method: str,
    noise: float,
    per_digit: int,
    iterations: int,
    groups: int,
) -> Result:
    """Errors of trained parameters on groups of test pictures that the experiment has not seen."""
    how = PLAIN.methods[method]
    model = with_parameters(PLAIN.model(how.convex), parameters)
    drawn = draw_digits(root, noise, per_digit, groups=2 + groups)[2:]
    tests = [group.examples() for group in drawn]
    return {"tests": [errors(predict(model, each, how), each.labels) for each in tests]}


def _measure(root: str | None, setup: Setup, how: str, sample: int, **settings: Setting) -> Result:
    """Train and test in another way; the beliefs are not shown, so not kept."""
    arguments: dict[str, Any] = settings
    found = measure(root, setup=setup, **arguments)
    return {name: value for name, value in found.items() if name != "beliefs"}


def _entries(paper: tuple[float, ...], tests: list[dict[str, float]]) -> list[str]:
    """One for each measure: a mean, and the deviation of one sample if there are several."""
    out = []
    for number, error in zip(paper, ERRORS, strict=True):
        values = [test[error] for test in tests]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        out.append(beside(number, float(np.mean(values)), spread, digits=4))
    return out
