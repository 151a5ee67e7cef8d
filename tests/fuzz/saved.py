"""Damaged files of estimators, checkpoints and runs: a named error, or something that works."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.torch import load, save

import riskfield as rf
from fuzz import Uninteresting
from fuzz.mutations import mutated_bytes, mutated_tree
from learning_cases import EXACT, chain_examples, chain_model
from riskfield.estimators.image_run import ImageRun
from riskfield.io import codec

FEATURES = [np.array([[0.1, 1.0], [0.9, 2.0], [0.8, 0.0]]), np.array([[0.2, 1.0], [0.1, 1.0]])]
LABELS = [["a", "b", "b"], ["a", "a"]]
RECIPE = rf.features.ImageFeatures(
    pixels=(rf.features.Constant(), rf.features.Colour()),
    edges=(rf.features.Constant(), rf.features.ColourDifference()),
)
MASK = np.array([[0, 1, 1], [0, 0, 1]])
OPTIMISERS = [rf.optim.LBFGS(iterations=3), rf.optim.Torch(epochs=3), rf.optim.SMD(epochs=3)]


def example(rng):
    kind = [_estimator, _pictures, _run, _checkpoint][rng.integers(4)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", (rf.errors.DivergenceWarning, rf.errors.ConvergenceWarning))
        kind(Path(folder), rng)


def _estimator(folder, rng):
    path = folder / "crf.safetensors"
    path.write_bytes(_damaged(_crf(), rng))
    try:
        crf = rf.CRF.load(path)
    except rf.errors.FileFormatError:
        return
    _bound_work(crf)
    with contextlib.suppress(ValueError):  # settings and parameters that do not fit these examples
        crf.predict_marginals(FEATURES)
        crf.predict(FEATURES)


def _pictures(folder, rng):
    path = folder / "crf.safetensors"
    path.write_bytes(_damaged(_image_crf(), rng))
    try:
        crf = rf.ImageCRF.load(path)
    except rf.errors.FileFormatError:
        return
    _bound_work(crf)
    with contextlib.suppress(ValueError):
        crf.predict([MASK / 1.0])


def _bound_work(crf):
    """A file may ask for any number of sweeps: what it costs to use a model is not bounded."""
    stop = crf.inference_.on(rf.grid(2, 2, 2)).stop
    if stop is not None and stop.sweeps > 10**4:
        raise Uninteresting


def _run(folder, rng):
    (folder / "model.safetensors").write_bytes(_image_crf())
    path = folder / "run.json"
    text = _account()
    path.write_bytes(
        mutated_bytes(text, rng) if rng.random() < 0.3 else json.dumps(mutated_tree(json.loads(text), rng)).encode()
    )
    try:
        run = ImageRun.load(folder)
    except rf.errors.FileFormatError:
        return
    assert len(run.classes) == 2
    assert all(fit.best is None or fit.best in fit.history for fit in run.fits)


def _checkpoint(folder, rng):
    optimiser = int(rng.integers(len(OPTIMISERS)))
    path = folder / "iteration-00000003.safetensors"
    path.write_bytes(_damaged(_state(optimiser), rng))
    model = chain_model()
    try:
        result = _fit(model, folder, OPTIMISERS[optimiser])
    except rf.errors.FileFormatError:
        return
    except ValueError as error:
        assert "in the run to be resumed" in str(error) or "run to be resumed" in str(error), error
        return
    assert len(result.history) >= 3


def _damaged(content, rng):
    """Bytes that are damaged, or a tree that is, with a digest that is right."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    size = int.from_bytes(content[:8], "little")
    document = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["riskfield"])
    tensors = {name: tensor.clone() for name, tensor in load(content).items()}
    for _ in range(rng.integers(1, 3)):
        if tensors and rng.random() < 0.2:
            name = list(tensors)[rng.integers(len(tensors))]
            change = [lambda t: t.float(), lambda t: t.long(), lambda t: t.reshape(-1)[:1], lambda t: t * np.nan]
            tensors[name] = change[rng.integers(4)](tensors[name]).clone()
        else:
            document["tree"] = mutated_tree(document["tree"], rng)
    text = json.dumps(document)
    return save(tensors, metadata={"riskfield": text, "sha256": codec._digest(text, tensors)})


def _written(save_to):
    with tempfile.TemporaryDirectory() as folder:
        save_to(Path(folder))
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


@cache
def _crf():
    crf = rf.CRF(optimiser=rf.optim.LBFGS(iterations=2)).fit(FEATURES, LABELS)
    return _written(lambda folder: crf.save(folder / "crf"))


@cache
def _fitted_pictures():
    return rf.ImageCRF(RECIPE, optimiser=rf.optim.LBFGS(iterations=2)).fit([MASK / 1.0], [MASK])


@cache
def _image_crf():
    return _written(lambda folder: _fitted_pictures().save(folder / "crf"))


@cache
def _account():
    crf = _fitted_pictures()
    run = ImageRun("run", crf, {0: "a", 1: "b"}, None, {"loss": "x"}, "command", tuple(crf.results_), {"fit": 1.0})
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        return (Path(folder) / "run.json").read_bytes()


@cache
def _state(optimiser):
    return _written(lambda folder: _fit(chain_model(), folder, OPTIMISERS[optimiser]))


def _fit(model, folder, optimiser):
    return rf.fit(
        model,
        chain_examples(6),
        rf.losses.UnivariateLogistic(),
        EXACT,
        optimiser=optimiser,
        checkpoint=rf.Checkpoints(folder, every=100),
        resume=True,
        progress=False,
    )
