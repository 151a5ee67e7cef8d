"""The predictions of a run on pictures with labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from riskfield.datasets.images import LabelledImage
from riskfield.estimators.image_run import ImageRun
from riskfield.report.evaluation import Evaluation, Floats, Tally


def evaluate_run(
    run: ImageRun, pictures: Iterable[LabelledImage], see: Callable[[LabelledImage, Floats], None] | None = None
) -> Evaluation:
    """Evaluate a run on pictures with labels.

    Arguments:
        run: a run with a fitted estimator.
        pictures: their labels must be indices into the classes of the run.
        see: a function that is called with each picture and its marginals.
    """
    tally = Tally([*run.classes.values()])
    for picture in pictures:
        marginals = evaluate_image(run, picture, tally)
        if see is not None:
            see(picture, marginals)
    return tally.evaluation()


def evaluate_image(run: ImageRun, picture: LabelledImage, tally: Tally) -> Floats:
    """Add the errors on one picture to `tally`, and return the picture's marginals."""
    if picture.labels is None:
        raise ValueError(f"`pictures` must have labels. {picture.name} has none.")
    began = time.perf_counter()
    marginals: Floats = run.crf.predict_marginals([picture.image])[0]
    tally.add(picture.labels, marginals, time.perf_counter() - began)
    return marginals
