"""`python -m papers misspecification`."""

from __future__ import annotations

from papers.commands._app import Out, Quick, Quiet, app, run
from papers.misspecification import Errors, Marginals
from papers.study import AbstractStudy

_FULL: tuple[AbstractStudy, ...] = (Errors(), Marginals())
_QUICK: tuple[AbstractStudy, ...] = (
    Errors(shifts=(0, 1, 3), sizes=(30, 300), num_distributions=2),
    Marginals(shifts=(0, 1, 3), size=300),
)


@app.command()
def misspecification(quick: Quick = False, out: Out = None, quiet: Quiet = False) -> None:
    """The likelihood and losses on marginals under a wrong model.

    Figures 1 and 2 of Domke (2013), section 4.3: chains that are predicted from inputs of shifted positions. errors
    is the test error against the amount of data and the shift, of models fitted by likelihood, univariate and clique
    logistic loss with exact inference; marginals are those of an example input.

    \b
    Examples:
      python -m papers misspecification --quick
      python -m papers misspecification
    """
    run("misspecification", _QUICK if quick else _FULL, quick, out, quiet, [])
