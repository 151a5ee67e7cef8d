"""`python -m papers convex`."""

from __future__ import annotations

from typing import Any

from papers.commands._app import Data, Finished, Out, Quick, Quiet, app, folder, run
from papers.convex.tables import DigitBeliefs, DigitErrors
from papers.convex.variations import DigitVariations

_STUDIES = (DigitErrors, DigitBeliefs, DigitVariations)
QUICK: dict[str, Any] = {"noises": (0.5,), "per_digit": 1, "iterations": 8}


@app.command()
def convex(
    data: Data = None, finished: Finished = False, quick: Quick = False, out: Out = None, quiet: Quiet = False
) -> None:
    """Learned convex inference against conditional random fields.

    errors is Tables 1 to 3 and Figure 1 of Domke (2008): digits of MNIST with 10, 30 and 50 % noise, restored by
    pseudolikelihood with mean field and belief propagation, by the likelihoods of mean field and belief propagation,
    and by convex inference that is learned by two losses on its beliefs. beliefs is Figure 2: a restored picture of
    each digit. variations repeats the experiment in other ways that the paper leaves open; --quick leaves it out.

    At full size it takes about two hours on one core.

    \b
    Examples:
      python -m papers convex --data ~/data --quick
      python -m papers convex --finished
    """
    size, kinds = (QUICK, _STUDIES[:-1]) if quick else ({}, _STUDIES)
    studies = [study(folder(data), finished=finished, **size) for study in kinds]
    run("convex", studies, quick, out, quiet, ["--finished"] if finished else [])
