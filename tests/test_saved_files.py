"""Saved files: one format for everything, written whole or not at all, by one process at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import riskfield
import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model
from riskfield import CRF, GridCRF
from riskfield.estimators.registry import SAVED
from riskfield.io import _atomic, codec
from riskfield.io._atomic import write_bytes, write_text
from riskfield.io._lock import NAME, lock_folder
from riskfield.io.codec import pack, read_text_tree, read_tree, unpack, write_text_tree, write_tree

# Saved files: trees come back whole, old files survive a kill, and whatever is wrong with a file is named.


X = [np.array([[0.1, 1.0], [0.9, 2.0], [0.8, 0.0]]), np.array([[0.2, 1.0], [0.1, 1.0]])]
Y = [["a", "b", "b"], ["a", "a"]]
FEW = rf.optim.LBFGS(iterations=5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crf.safetensors"


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"graph": np.array([[0, 1]]), "loss": "surrogate-likelihood", "ridge": np.float64(0.5), "chunk_size": 1},
        {
            "graph": [[0, 1]],
            "loss": rf.losses.Hybrid(rf.losses.L1(rf.decoders.SoftArgmax(0.5)), rf.losses.CliqueLogistic(), 0.25),
        },
        {"inference": rf.Inference(rf.MessagePassing(rf.TRW(0.5), rf.Parallel(), 0.25), rf.Stop(7, None), rf.Unroll())},
        {
            "inference": rf.Inference(rf.Exact()),
            "decoder": rf.decoders.MAP(),
            "loss": rf.losses.SurrogateEM(rf.MeanField()),
        },
        {"decoder": rf.decoders.MAP(rf.ExactMAP())},
        {"inference": rf.Inference(rf.MessagePassing(), rf.Stop(tol=1e-9), rf.FixedPoint())},
        {"optimiser": rf.optim.Torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, 1, 2), "random_state": 3},
        {"loss": rf.losses.PatchPseudolikelihood([0, 0, 1]), "inference": rf.Inference(rf.Exact())},
    ],
)
def test_estimators_come_back_whole(path, settings):
    data = ([x[:2] for x in X], [y[:2] for y in Y]) if "graph" in settings else (X, Y)
    if isinstance(settings.get("loss"), rf.losses.PatchPseudolikelihood):
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
    assert twin.results_ == crf.results_
    assert twin.feature_seconds_ == crf.feature_seconds_
    twin.fit(*data)  # it can be trained again, to the same end
    assert np.array_equal(crf.predict_proba(data[0])[0], twin.predict_proba(data[0])[0])


def _plain_number(value):
    return value.item() if isinstance(value, np.generic) else value


def test_images_come_back_whole(path):
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
    assert load_file(path)["parameters/nodes.nodes.weight"].shape == (2, 3)
    with safe_open(path, "pt") as file:
        tree = json.loads(file.metadata()["riskfield"])
    assert tree["tree"]["estimator"] == "CRF"
    assert tree["tree"]["inference_"]["#object"] == "ExactOnForests"
    algorithm = tree["tree"]["inference_"]["fields"]["loopy"]["fields"]["algorithm"]
    assert algorithm["fields"]["entropy"] == {"#object": "TRW", "fields": {"rho": 0.5}}


def test_arrays_of_all_kinds(path):
    arrays = {
        "integers": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        "bytes": np.array([255], np.uint8),
        "floats": np.array([0.1, np.inf], np.float32),
        "truths": np.array([True, False]),
        "strings": np.array(["a", "long one"]),
        "objects": np.array(["a", None, 3], dtype=object),
        "nothing": np.empty((0, 2), int),
        "no strings": np.empty((2, 0), "U1"),
        "lists": np.array([[1, [2, 3]], [None, (4,)]], dtype=object),
        "scalar": np.array(0.5),
    }
    write_tree(path, "arrays", arrays)
    for name, array in read_tree(path, "arrays").items():
        assert np.array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


# -- what cannot be kept ----------------------------------------------------------------------------------------------


class Mine(rf.losses.UnivariateLogistic):
    pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": lambda solution, labels, mask: solution.node_marginals[0][..., 0].sum(-1)}, "`loss` holds a loss of"),
        ({"loss": rf.losses.Custom(lambda solution, labels, mask: solution.mu.sum(-1))}, "`loss` holds a loss of"),
        ({"loss": Mine()}, "`loss` holds a loss of your own"),
        ({"random_state": np.random.RandomState(0)}, "`random_state` must be made of plain values and riskfield's own"),
    ],
)
def test_code_is_not_kept(path, settings, message):
    crf = CRF(optimiser=FEW, **settings).fit(X, Y)
    with pytest.raises(TypeError) as caught:
        crf.save(path)
    assert message in str(caught.value)
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
    assert CRF.load(path).ridge == 1e-3


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_cut_is_noticed(path):
    CRF().fit(X, Y).save(path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(rf.errors.FileFormatError, match=r"crf\.safetensors is (not a safetensors file|damaged)"):
            CRF.load(path)


def test_every_flipped_bit_is_noticed(path):
    """Also in a number, where nothing else would show it."""
    content = pack("numbers", {"numbers": torch.arange(4.0), "list": [1, 2.5, "text"], "array": np.arange(3)})
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(rf.errors.FileFormatError, match=r"^file "):
            unpack(bytes(flipped), "numbers", "file")


def change(path, edit):
    """Write the file anew after `edit(tree, tensors)`, with a digest of what is in it then."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["riskfield"])
    edit(document, tensors)
    text = json.dumps(document)
    save_file(tensors, path, metadata={"riskfield": text, "sha256": codec._digest(text, tensors)})


def drop(name):
    return lambda document, tensors: document["tree"].pop(name)


def put(name, value):
    return lambda document, tensors: document["tree"].update({name: value})


def half_precision(name):
    """An array in a type that NumPy does not have."""

    def edit(document, tensors):
        tensors["half"] = torch.zeros(3, dtype=torch.bfloat16)
        document["tree"][name] = {"#array": "half", "dtype": "<f4"}

    return edit


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda document, tensors: document.update(format=1), "has format 1; this version reads format 2."),
        (
            lambda document, tensors: document.update(kind="run"),
            "must hold a tree of kind 'estimator'. It holds 'run'.",
        ),
        (lambda document, tensors: document.pop("tree"), "is damaged: it holds no tree."),
        (lambda document, tensors: tensors.pop("parameters/nodes.nodes.weight"), "is damaged: it has no tensor 'param"),
        (put("loss", {"#object": "os", "fields": {}}), "is damaged: a file of this kind may not name 'os'."),
        (put("loss", {"#object": "CRF", "fields": {}}), "is damaged: a file of this kind may not name 'CRF'."),
        (put("loss", {"#object": ["L1"], "fields": {}}), "is damaged: a file of this kind may not name ['L1']."),
        (put("loss", {"#object": "L1"}), "is damaged: L1 cannot be made of None."),
        (put("loss", {"#object": "torch.optim.Adam", "fields": {}}), "is damaged: Adam cannot be made of {}."),
        (put("loss", {"#object": "SmoothedClassification", "fields": {"alpha": -1}}), "`alpha` must be above 0"),
        (
            put("optimiser", {"#class": "torch.optim.lr_scheduler"}),
            "names the class 'torch.optim.lr_scheduler', which is not registered.",
        ),
        (put("loss", {"#code": "print()"}), "is damaged: this version does not know '#code'."),
        (put("loss", {"#tuple": 3}), "is damaged: expected a list. Got 3."),
        (put("loss", {"#pairs": [[1, 2, 3]]}), "is damaged: the entries of a dict must be pairs."),
        (put("loss", {"#pairs": [[[], 2]]}), "is damaged: unhashable type: 'list'."),
        (put("loss", nested(500)), "is damaged: it is nested more than 64 levels deep."),
        (put("graph", {"#array": ["a"], "dtype": "U500000000", "shape": [1]}), "Got 'U500000000'."),
        (
            put("graph", {"#array": ["a"], "dtype": "U", "shape": [10**9]}),
            "of 1 entries cannot have shape [1000000000]",
        ),
        (put("graph", {"#array": ["a"], "dtype": "U", "shape": "1"}), "`shape` must be a list of integers. Got '1'."),
        (put("graph", {"#array": ["a", 1], "dtype": "U", "shape": [2]}), "an array of strings holds something else."),
        (put("graph", {"#array": ["a" * 10**5, *["b"] * 10**4], "dtype": "U", "shape": [10001]}), "67108864 bytes"),
        (put("graph", {"#array": [], "dtype": "O", "shape": [0, 2**70]}), "is damaged: "),
        (put("graph", {"#array": [], "dtype": "U", "shape": [0, 2**62, 8]}), "is damaged: "),
        (half_precision("graph"), "is damaged: Got unsupported ScalarType BFloat16"),
        (put("estimator", "Other"), "must hold a CRF. It holds Other."),
        (drop("estimator"), "must hold a CRF. It holds no estimator."),
        (drop("classes_"), "is a damaged CRF: 'classes_'"),
        (drop("parameters"), "is a damaged CRF: 'parameters'"),
        (put("parameters", [1]), "is a damaged CRF: "),
        (put("colour", "blue"), "unexpected keyword argument 'colour'"),
        (put("n_features_in_", 5), "is a damaged CRF: its parameters must be {'nodes.nodes.weight': ((2, 6), "),
        (put("n_features_in_", 10**12), "is a damaged CRF: its parameters must be {'nodes.nodes.weight': ((2, 1000"),
        (put("arity_", "two"), "is a damaged CRF: `arity_` must be of type int. Got 'two'."),
        (put("arity_", 2**40), "is a damaged CRF: `arity_` must be at most 32. Got 1099511627776."),
        (put("n_edge_features_in_", 0), "is a damaged CRF: `n_edge_features_in_` must be at least 1. Got 0."),
        (put("chunk_size", True), "is a damaged CRF: `chunk_size` must be of type int or NoneType. Got True."),
        (
            put("inference_", [1]),
            "is a damaged CRF: `inference_` must be of type Inference or",
        ),
        (
            put("decoder", {"#object": "L1", "fields": {}}),
            "is a damaged CRF: `decoder` must be of type Abstract",
        ),
        (put("classes_", {"#array": ["a"], "dtype": "U", "shape": [1]}), "`classes_` must be two or more labels."),
    ],
)
def test_damage_is_named(path, edit, message):
    CRF().fit(X, Y).save(path)
    change(path, edit)
    with pytest.raises(rf.errors.FileFormatError) as caught:
        CRF.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_deep_nesting_is_refused_in_all_places(path):
    """The parser of JSON itself gives up at a thousand levels."""
    deep = "[" * 100_000 + "]" * 100_000
    save_file({"weight": torch.zeros(2)}, path, metadata={"riskfield": deep})
    with pytest.raises(rf.errors.FileFormatError, match="nested more than 64 levels deep"):
        read_tree(path, "estimator")
    header = f'{{"a": {deep}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(rf.errors.FileFormatError, match="nested more than 64 levels deep"):
        read_tree(path, "estimator")
    for levels in (500, 100_000):
        path.write_text(f'{{"format": 2, "kind": "run", "tree": {{"a": {"[" * levels + "]" * levels}}}}}')
        with pytest.raises(rf.errors.FileFormatError, match="nested more than 64 levels deep"):
            read_text_tree(path, "run")


def test_headers_have_a_limit(path, monkeypatch):
    write_tree(path, "numbers", {"long": "a" * 5000})
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(rf.errors.FileFormatError, match=r"has a header of 5\d\d\d bytes; at most 4096 are read"):
        read_tree(path, "numbers")
    with pytest.raises(ValueError, match=r"`tree` must have at most 2048 bytes besides tensors\. Got 5"):
        write_tree(path, "numbers", {"long": "a" * 5000})
    path.write_bytes(b" " * 5000)
    with pytest.raises(rf.errors.FileFormatError, match="has 5000 bytes; at most 4096 are read"):
        read_text_tree(path, "run")


def test_files_of_others(path, tmp_path):
    path.write_text("Dear diary")
    with pytest.raises(rf.errors.FileFormatError, match="is not a safetensors file, or only part of one"):
        CRF.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(rf.errors.FileFormatError, match="was not written by riskfield"):
        CRF.load(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"riskfield": "not JSON"})
    with pytest.raises(rf.errors.FileFormatError, match="is damaged: Expecting value"):
        CRF.load(path)
    GridCRF(optimiser=FEW).fit(np.zeros((1, 2, 2, 1)), [[[0, 1], [1, 0]]]).save(path)
    with pytest.raises(rf.errors.FileFormatError, match=r"must hold a CRF\. It holds GridCRF\."):
        CRF.load(path)
    with pytest.raises(FileNotFoundError, match="No such file"):
        CRF.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="No such file"):
        CRF.load(tmp_path)


# -- the registry -----------------------------------------------------------------------------------------------------


def test_a_reader_says_what_may_be_named(path):
    """What an estimator's file may name, a checkpoint's may not."""
    write_tree(path, "checkpoint", {"loss": rf.losses.L1(), "optimiser": torch.optim.Adam}, SAVED)
    assert read_tree(path, "checkpoint", SAVED) == {"loss": rf.losses.L1(), "optimiser": torch.optim.Adam}
    with pytest.raises(rf.errors.FileFormatError, match=r"a file of this kind may not name 'L1'\.$"):
        read_tree(path, "checkpoint")
    with pytest.raises(rf.errors.FileFormatError, match=r"may not name 'SoftArgmax'\.$"):
        read_tree(path, "checkpoint", {"L1": rf.losses.L1})
    with pytest.raises(TypeError, match="`loss` must be made of plain values"):
        write_tree(path, "checkpoint", {"loss": rf.losses.L1()})


def test_every_choice_can_be_saved():
    """All that the package exports as a choice for an estimator, but what holds functions."""
    choices = (
        rf.inference.AbstractAlgorithm,
        rf.adjoints.AbstractAdjoint,
        rf.losses.AbstractLoss,
        rf.decoders.AbstractDecoder,
        rf.entropy.AbstractEntropy,
        rf.optim.AbstractOptimiser,
        rf.Inference,
    )
    spaces = [rf, rf.inference, rf.adjoints, rf.losses, rf.decoders, rf.entropy, rf.optim]
    exported = [getattr(space, name) for space in spaces for name in space.__all__]
    exported = [kind for kind in exported if isinstance(kind, type)]
    concrete = {kind for kind in exported if issubclass(kind, choices) and not kind.__name__.startswith("Abstract")}
    assert concrete - set(SAVED.values()) == {rf.ConvexFreeEnergy, rf.losses.Custom}


# -- text -------------------------------------------------------------------------------------------------------------


def test_text_is_the_same_tree(path):
    tree = {"numbers": [1, 0.1, float("inf"), None, True], "#odd": {1: ("a", "b")}}
    write_text_tree(path, "run", tree)
    assert read_text_tree(path, "run") == tree
    assert json.loads(path.read_text())["kind"] == "run"
    with pytest.raises(TypeError, match=r"`tree` must not hold tensors or arrays. Got a/b."):
        write_text_tree(path, "run", {"a": {"b": torch.zeros(2)}})


# Files are written whole or not at all, and what killed writers leave behind is removed by the next one.


KILLED = """
import os, signal, sys
from riskfield.io import _atomic
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
_atomic.write_text(sys.argv[1], "half")
"""
WRITER = "import sys; from riskfield.io._atomic import write_text; write_text(sys.argv[1], 'whole')"


def run(code, path):
    environment = {**os.environ, "PYTHONPATH": str(Path(riskfield.__file__).parent.parent)}
    return subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=120, check=False).returncode


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    assert run(KILLED, tmp_path / "a") != 0
    (left,) = names(tmp_path)
    assert left.startswith(".a.")
    assert left.endswith(".tmp")
    assert run(WRITER, tmp_path / "b") == 0
    assert names(tmp_path) == ["b"]


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not written to any folder yet."""
    monkeypatch.setattr(_atomic, "_cleaned", set())


def temporary(host, pid, start):
    return f".a.{host}-{pid}-{start}-0123456789ab.tmp"


def test_files_of_living_or_unknown_writers_stay(tmp_path, fresh):
    here, pid = _atomic._host(), os.getpid()
    start = _atomic._start_time(pid)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = [temporary(here, pid, start), temporary(here, pid, 0), temporary("00000000", gone.pid, 1), ".b.tmp"]
    dead = [temporary(here, gone.pid, 1)]
    if start is not None:
        dead.append(temporary(here, pid, start + 1))  # another process that had this number
    for name in living + dead:
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "a", "whole")
    assert names(tmp_path) == sorted(["a", *living])


def test_a_folder_is_searched_once(tmp_path, fresh, monkeypatch):
    """Folders may hold many thousand files."""
    searched, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: searched.append(folder) or scan(folder))
    for _ in range(3):
        write_bytes(tmp_path / "a", b"whole")
    assert searched == [tmp_path]


# One process at a time writes to a folder, and a killed one blocks nobody.


HOLDER = """
import sys, time
from riskfield.io._lock import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder, and the folder."""
    folder = tmp_path / "run"
    path = str(Path(rf.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout.readline() == b"held\n"
    yield process, folder
    process.kill()
    process.wait()
    process.stdout.close()


def train(folder, **settings):
    optimiser = rf.optim.LBFGS(iterations=2)
    return rf.fit(
        *(chain_model(), chain_examples(), rf.losses.UnivariateLogistic(), EXACT),
        **{"optimiser": optimiser, "checkpoint": folder, "progress": False, **settings},
    )


def test_a_second_writer_is_told_who_the_first_is_and_a_killed_one_blocks_nobody(holder):
    process, folder = holder
    with pytest.raises(BlockingIOError) as caught:
        train(folder)
    assert caught.value.filename == str(folder)
    expected = f"is in use by process {process.pid} on {socket.gethostname()} since {time.strftime('%Y-')}"
    assert expected in caught.value.strerror
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / NAME).exists()
    assert train(folder).history
    assert [path.name for path in folder.iterdir()] == ["iteration-00000002.safetensors"]


def test_two_fits_of_one_process_exclude_each_other(tmp_path):
    def again(record, model):
        with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()} "):
            train(tmp_path, resume=True)

    train(tmp_path, callbacks=[again])


def test_a_lock_is_released_by_errors_and_is_no_trace(tmp_path):
    def failing():
        with lock_folder(tmp_path):
            raise RuntimeError("lost")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            failing()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_is_locked(tmp_path):
    from riskfield.estimators.image_run import prepare

    with prepare(tmp_path, {}, resume=False), pytest.raises(BlockingIOError, match="is in use by process"):  # noqa: SIM117
        with prepare(tmp_path, {}, resume=True):
            pass
    with prepare(tmp_path, {}, resume=True) as checkpoints:
        assert checkpoints.parent == tmp_path


def test_a_lock_whose_file_its_last_holder_removes_is_taken_again(tmp_path, monkeypatch):
    """Between the opening of the file and the lock on it, the holder before may end: the open file is then no lock."""
    stat, removed = os.stat, []

    def stat_after_removal(path, **options):
        if not removed and os.fspath(path) == os.fspath(tmp_path / NAME):
            removed.append((tmp_path / NAME).unlink())
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", stat_after_removal)
    with lock_folder(tmp_path):
        assert removed
        assert (tmp_path / NAME).exists()
        with pytest.raises(BlockingIOError), lock_folder(tmp_path):
            pass
