"""Compare the defaults of `ImageCRF` with independent pixels and with surrogate likelihood.

Trains on some images and tests on others: mosaics of textures, and horses at reduced size. Writes error, log loss and
calibration error on the test images, for several sets of mosaics and several splits of the horses. The first split is
at equal steps through the names, the second exchanges training and test images, and so on with the next images.

    python benchmarks/honest.py --data DIR --out results/benchmarks/honest
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import riskfield as rf
from riskfield.datasets.bundled import mosaics
from riskfield.datasets.horses import weizmann_horses
from riskfield.datasets.images import LabelledImage
from riskfield.datasets.splits import Split, spread
from riskfield.estimators.defaults import ITERATIONS, LOSS
from riskfield.features.image import as_floats
from riskfield.features.resample import reduce_labels, resize
from riskfield.report.evaluation import Tally
from timing import keep


def reduced(image: LabelledImage, side: int) -> LabelledImage:
    """The image with its longer side reduced to `side` pixels."""
    assert image.labels is not None
    rows, columns = image.labels.shape
    shape = tuple(max(1, round(n * side / max(rows, columns))) for n in (rows, columns))
    pixels = resize(torch.from_numpy(as_floats(image.image)), shape).numpy()
    return LabelledImage(image.name, pixels, reduce_labels(torch.from_numpy(image.labels), shape).numpy())


def scores(crf: rf.ImageCRF, test: list[LabelledImage], classes: tuple[str, ...]) -> dict[str, float]:
    tally = Tally(classes)
    for image in test:
        tally.add(image.labels, crf.predict_marginals([image.image])[0])
    found = tally.evaluation()
    return {"error": found.error, "log loss": found.log_loss, "calibration error": found.calibration_error}


def study(
    train: list[LabelledImage], test: list[LabelledImage], classes: tuple[str, ...], iterations: int, device: str | None
) -> dict[str, Any]:
    X, y = [p.image for p in train], [p.labels for p in train]
    rows: dict[str, Any] = {}
    for name, loss in {"default": LOSS, "surrogate likelihood": "surrogate-likelihood"}.items():
        began = time.perf_counter()
        crf = rf.ImageCRF(loss=loss, optimiser=rf.optim.LBFGS(iterations=iterations), device=device).fit(X, y)
        rows[name] = {"ridge": crf.ridge_, **scores(crf, test, classes), "seconds": time.perf_counter() - began}
        print(name, rows[name], [(t.ridge, t.model, t.independent) for t in crf.path_], flush=True)
        if loss == LOSS:
            alone = crf.independent()
            rows["independent pixels"] = {"ridge": alone.ridge_, **scores(alone, test, classes)}
            print("independent pixels", rows["independent pixels"], flush=True)
    return rows


def horse_splits(names: Sequence[str], train: int, test: int, count: int) -> Iterator[Split]:
    """Splits of the names: pairs that exchange training and test images, each pair beginning one name later."""
    for k in range(count):
        split = spread(names[k // 2 :], train, test)
        yield split if k % 2 == 0 else Split(split.test, split.train)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with weizmann_horse_db/")
    parser.add_argument("--train", type=int, default=60)
    parser.add_argument("--test", type=int, default=60)
    parser.add_argument("--side", type=int, default=64, help="the longer side of an image, in pixels")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--mosaics", type=int, default=6, help="the number of sets of mosaics")
    parser.add_argument("--splits", type=int, default=2, help="the number of splits of the horses")
    parser.add_argument("--device", help="where to compute, such as cuda")
    parser.add_argument("--out", type=Path, metavar="DIR/NAME", help="write all numbers to DIR/records.jsonl")
    options = parser.parse_args()
    results: dict[str, Any] = {"settings": {k: v for k, v in vars(options).items() if k not in ("data", "out")}}

    results["textures"] = []
    for seed in range(options.mosaics):
        sets = mosaics(8, (48, 64), seed=seed), mosaics(8, (48, 64), test=True, seed=seed)
        results["textures"].append(
            study(list(sets[0]), list(sets[1]), sets[0].classes, options.iterations, options.device)
        )
    if options.data is not None:
        horses = weizmann_horses(options.data)
        results["horses"] = []
        for split in horse_splits(horses.names, options.train, options.test, options.splits):
            train, test = (
                [reduced(p, options.side) for p in horses.select(names)] for names in (split.train, split.test)
            )
            results["horses"].append(study(train, test, horses.classes, options.iterations, options.device))
    if options.out is not None:
        keep(options.out, results)
    for name in results.keys() - {"settings"}:
        print(f"\n{name}, {len(results[name])} runs, mean and standard error")
        print("| model | ridges | error | log loss | calibration error |\n|---|---|---|---|---|")
        for row in results[name][0]:
            found = [run[row] for run in results[name]]
            error, loss, calibration = (
                mean_and_error([own[key] for own in found]) for key in ("error", "log loss", "calibration error")
            )
            ridges = ", ".join(f"{own['ridge']:g}" for own in found)
            print(
                f"| {row} | {ridges} | {100 * error[0]:.1f} ± {100 * error[1]:.1f} % | {loss[0]:.3f} ± {loss[1]:.3f} "
                f"| {calibration[0]:.3f} ± {calibration[1]:.3f} |"
            )


if __name__ == "__main__":
    main()
