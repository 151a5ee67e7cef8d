"""Compare the defaults of `ImageCRF` with independent pixels and with surrogate likelihood.

Trains on some images of horses and tests on others, at reduced size: the default loss with the ridge chosen on held-out
images, surrogate likelihood with its own choice, the default loss with the ridge of 1e-3, and the same model without
edges. Writes error, log loss and calibration error on the test images.

    python benchmarks/honest.py --data DIR --out results/benchmarks/honest
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import riskfield as rf
from riskfield.datasets.bundled import mosaics
from riskfield.datasets.horses import weizmann_horses
from riskfield.datasets.images import ImageSet, LabelledImage
from riskfield.datasets.splits import spread
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


def study(train: list[LabelledImage], test: list[LabelledImage], classes: tuple[str, ...], iterations: int) -> Any:
    X, y = [p.image for p in train], [p.labels for p in train]
    rows: dict[str, Any] = {}
    for name, settings in {
        "default": {},
        "surrogate likelihood": {"loss": "surrogate-likelihood"},
        "default loss, ridge 1e-3": {"ridge": 1e-3},
    }.items():
        began = time.perf_counter()
        crf = rf.ImageCRF(optimiser=rf.optim.LBFGS(iterations=iterations), **settings).fit(X, y)
        rows[name] = {"ridge": crf.ridge_, **scores(crf, test, classes), "seconds": time.perf_counter() - began}
        print(name, rows[name], [(t.ridge, t.model, t.independent) for t in crf.path_], flush=True)
        if name == "default":
            alone = crf.independent()
            rows["independent pixels"] = {"ridge": alone.ridge_, **scores(alone, test, classes)}
            print("independent pixels", rows["independent pixels"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with weizmann_horse_db/")
    parser.add_argument("--train", type=int, default=60)
    parser.add_argument("--test", type=int, default=60)
    parser.add_argument("--side", type=int, default=64, help="the longer side of an image, in pixels")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, metavar="DIR/NAME", help="write all numbers to DIR/records.jsonl")
    options = parser.parse_args()
    results: dict[str, Any] = {"settings": {k: v for k, v in vars(options).items() if k not in ("data", "out")}}

    textures: list[ImageSet] = [mosaics(8, (48, 64)), mosaics(8, (48, 64), test=True)]
    results["textures"] = study(list(textures[0]), list(textures[1]), textures[0].classes, options.iterations)
    if options.data is not None:
        horses = weizmann_horses(options.data)
        split = spread(horses.names, options.train, options.test)
        train, test = ([reduced(p, options.side) for p in horses.select(names)] for names in (split.train, split.test))
        results["horses"] = study(train, test, horses.classes, options.iterations)
    if options.out is not None:
        keep(options.out, results)
    for name in results.keys() - {"settings"}:
        print(f"\n{name}\n| model | ridge | error | log loss | calibration error |\n|---|---|---|---|---|")
        for row, found in results[name].items():
            error, loss, calibration = (found[key] for key in ("error", "log loss", "calibration error"))
            print(f"| {row} | {found['ridge']:g} | {100 * error:.1f} % | {loss:.3f} | {calibration:.3f} |")


if __name__ == "__main__":
    main()
