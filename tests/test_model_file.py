"""Estimators in files: they come back whole, old files survive a kill, and what is no such file is told so."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import riskfield as rf
from riskfield import CRF, GridCRF
from riskfield.io.model_file import read_model, write_model

X = [np.array([[0.1, 1.0], [0.9, 2.0], [0.8, 0.0]]), np.array([[0.2, 1.0], [0.1, 1.0]])]
Y = [["a", "b", "b"], ["a", "a"]]
FEW = rf.LBFGS(iterations=5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crf.safetensors"


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"graph": np.array([[0, 1]]), "loss": "likelihood", "ridge": np.float64(0.5), "chunk_size": 1},
        {"graph": [[0, 1]], "loss": rf.Hybrid(rf.L1(rf.SoftArgmax(0.5)), rf.CliqueLogistic(), 0.25)},
        {"inference": rf.Inference(rf.MessagePassing(rf.TRW(0.5), rf.Parallel(), 0.25), rf.Stop(7, None), rf.Unroll())},
        {"inference": rf.Inference(rf.Exact()), "decoder": rf.MAP(), "loss": rf.SurrogateEM(rf.MeanField())},
        {"inference": rf.WarmStart(rf.MessagePassing(), rf.Stop(tol=1e-9), rf.FixedPoint())},
        {"optimiser": rf.Torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, 1, 2), "random_state": 3},
        {"loss": rf.PatchPseudolikelihood([0, 0, 1]), "inference": rf.Inference(rf.Exact())},
    ],
)
def test_estimators_come_back_whole(path, settings):
    data = ([x[:2] for x in X], [y[:2] for y in Y]) if "graph" in settings else (X, Y)
    if isinstance(settings.get("loss"), rf.PatchPseudolikelihood):
        data = (X[:1], Y[:1])
    crf = CRF(**{"optimiser": FEW, **settings}).fit(*data)
    crf.save(path)
    twin = CRF.load(path)
    assert all(
        np.array_equal(a, b) for a, b in zip(crf.predict_proba(data[0]), twin.predict_proba(data[0]), strict=True)
    )
    assert all(np.array_equal(a, b) for a, b in zip(crf.predict(data[0]), twin.predict(data[0]), strict=True))
    assert repr(twin.get_params()) == repr({key: _plain_number(v) for key, v in crf.get_params().items()})
    assert repr(twin.inference_) == repr(crf.inference_)
    twin.fit(*data)  # it can be trained again, to the same end
    assert np.array_equal(crf.predict_proba(data[0])[0], twin.predict_proba(data[0])[0])


def _plain_number(value):
    return value.item() if isinstance(value, np.generic) else value


def test_pictures_come_back_whole(path):
    truth = (np.random.default_rng(0).random((2, 4, 5)) > 0.5).astype(np.uint8)
    truth[0, 0, 0] = 7
    noisy = truth[..., None] + 0.1
    crf = GridCRF(8, "difference", optimiser=FEW).fit(noisy, truth)
    crf.save(path)
    twin = GridCRF.load(path)
    assert np.array_equal(twin.predict(noisy), crf.predict(noisy))
    assert twin.predict(noisy).dtype == np.uint8
    assert (twin.connectivity, twin.edge_features) == (8, "difference")


def test_the_file_is_plain(path):
    """Parameters are tensors any reader of safetensors finds; all else is JSON."""
    CRF().fit(X, Y).save(path)
    assert load_file(path)["/parameters/nodes.nodes.weight"].shape == (2, 3)
    with safe_open(path, "pt") as file:
        tree = json.loads(file.metadata()["riskfield"])
    assert tree["content"]["estimator"] == "CRF"
    assert tree["content"]["inference_"]["algorithm"]["entropy"] == {"#object": "Bethe"}


def test_arrays_of_all_kinds(path):
    arrays = {
        "integers": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        "bytes": np.array([255], np.uint8),
        "floats": np.array([0.1, np.inf], np.float32),
        "truths": np.array([True, False]),
        "strings": np.array(["a", "long one"]),
        "objects": np.array(["a", None, 3], dtype=object),
        "nothing": np.empty((0, 2), int),
    }
    write_model(path, arrays)
    for name, array in read_model(path).items():
        assert np.array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


# -- what cannot be kept ----------------------------------------------------------------------------------------------


class Mine(rf.UnivariateLogistic):
    pass


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss": lambda solution, labels, mask: solution.node_marginals[0][..., 0].sum(-1)}, "loss"),
        ({"loss": rf.Custom(lambda solution, labels, mask: solution.mu.sum(-1))}, "loss.function"),
        ({"loss": Mine()}, "loss"),
        ({"random_state": np.random.RandomState(0)}, "random_state"),
    ],
)
def test_code_is_not_kept(path, settings, name):
    crf = CRF(optimiser=FEW, **settings).fit(X, Y)
    with pytest.raises(TypeError) as caught:
        crf.save(path)
    assert f"`{name}` must be made of plain values and riskfield's own objects to be kept" in str(caught.value)
    assert not path.exists()


def test_only_what_is_fitted_is_kept(path):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        CRF().save(path)
    assert not path.exists()


# -- kills ------------------------------------------------------------------------------------------------------------

SAVER = """
import os, signal, sys
import riskfield as rf

crf = rf.CRF.load(sys.argv[1])
crf.ridge = 0.5
name = sys.argv[2]
function = getattr(os, name)
def deadly(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, name, deadly)
crf.save(sys.argv[1])
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_killed_save_leaves_the_old_file(path, moment):
    CRF().fit(X, Y).save(path)
    before = path.read_bytes()
    source = str(Path(rf.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", SAVER, str(path), moment], env=environment, timeout=120)
    assert ran.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert CRF.load(path).ridge == 1e-4


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_cut_is_noticed(path):
    CRF().fit(X, Y).save(path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(rf.FileFormatError, match=r"crf\.safetensors is no model, or a damaged one: "):
            CRF.load(path)


def change(path, edit):
    """Write the file anew after `edit(tree, tensors)`."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        tree = json.loads(file.metadata()["riskfield"])
    edit(tree, tensors)
    save_file(tensors, path, metadata={"riskfield": json.dumps(tree)})


def drop(name):
    return lambda tree, tensors: tree["content"].pop(name)


def put(name, value):
    return lambda tree, tensors: tree["content"].update({name: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree, tensors: tree.update(format=2), "has format 2; this version reads format 1."),
        (lambda tree, tensors: tree.pop("content"), "is a damaged model: KeyError('content')"),
        (lambda tree, tensors: tensors.pop("/parameters/nodes.nodes.weight"), "is a damaged model: KeyError("),
        (put("loss", {"#object": "os"}), "is a damaged model: ValueError('this version has no os')"),
        (put("loss", {"#object": "CRF"}), "is a damaged model: ValueError('this version has no CRF')"),
        (put("loss", {"#object": "SmoothedClassification", "alpha": -1}), "`alpha` must be above 0"),
        (
            put("optimiser", {"#optimiser": "lr_scheduler"}),
            "is a damaged model: ValueError('lr_scheduler is no optimiser')",
        ),
        (put("estimator", "Other"), "must hold a CRF. It holds Other."),
        (drop("estimator"), "must hold a CRF. It holds no estimator."),
        (drop("classes_"), "is a damaged CRF: 'classes_'"),
        (drop("parameters"), "is a damaged CRF: 'parameters'"),
        (put("colour", "blue"), "unexpected keyword argument 'colour'"),
        (put("n_features_in_", 5), "is a damaged CRF: Error(s) in loading state_dict"),
        (put("arity_", "two"), "is a damaged CRF: "),
    ],
)
def test_damage_is_told(path, edit, message):
    CRF().fit(X, Y).save(path)
    change(path, edit)
    with pytest.raises(rf.FileFormatError) as caught:
        CRF.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_files_of_others(path, tmp_path):
    path.write_text("Dear diary")
    with pytest.raises(rf.FileFormatError, match="is no model, or a damaged one"):
        CRF.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(rf.FileFormatError, match=r"holds tensors, but no model of riskfield\."):
        CRF.load(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"riskfield": "not JSON"})
    with pytest.raises(rf.FileFormatError, match="is a damaged model: JSONDecodeError"):
        CRF.load(path)
    GridCRF(optimiser=FEW).fit(np.zeros((1, 2, 2, 1)), [[[0, 1], [1, 0]]]).save(path)
    with pytest.raises(rf.FileFormatError, match=r"must hold a CRF\. It holds GridCRF\."):
        CRF.load(path)
    with pytest.raises(FileNotFoundError, match="No such file"):
        CRF.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="No such file"):
        CRF.load(tmp_path)
