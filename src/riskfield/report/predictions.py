"""The predictions of a run on images with labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from riskfield.datasets.images import LabelledImage
from riskfield.estimators.image_run import ImageRun
from riskfield.report.evaluation import Evaluation, Floats, Tally


def evaluate_run(
    run: ImageRun, images: Iterable[LabelledImage], see: Callable[[LabelledImage, Floats], None] | None = None
) -> Evaluation:
    """Evaluate a run on images with labels.

    Arguments:
        run: a run with a fitted estimator.
        images: images whose labels are indices into the classes of the run.
        see: a function that is called with each image and its marginals; by default none.

    Raises:
        ValueError: if an image has no labels, or no pixel of any image has a label.
    """
    tally = Tally([*run.classes.values()])
    for image in images:
        marginals = evaluate_image(run, image, tally)
        if see is not None:
            see(image, marginals)
    return tally.evaluation()


def evaluate_image(run: ImageRun, image: LabelledImage, tally: Tally) -> Floats:
    """Predict the marginals of one image, add them to `tally`, and return them."""
    if image.labels is None:
        raise ValueError(f"`images` must have labels. {image.name} has none.")
    began = time.perf_counter()
    marginals: Floats = run.crf.predict_marginals([image.image])[0]
    tally.add(image.labels, marginals, time.perf_counter() - began)
    return marginals
