"""Devices and dtypes of estimators, of `fit`, of layers and of commands.

The device "meta" stands for a GPU where nothing has to be computed.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.cli import main
from riskfield.devices import _memory_limits, as_device
from riskfield.estimators.defaults import default_inference
from riskfield.kernels import default_schedule
from riskfield.models import Generative

RNG = np.random.default_rng(0)
TRUTH = RNG.integers(0, 2, (3, 4, 5))
NOISY = TRUTH[..., None] + RNG.normal(size=(3, 4, 5, 1))
QUICK = {"optimiser": rf.optim.LBFGS(iterations=3), "initial": ()}


@pytest.mark.parametrize("dtype", [None, "float32", "float64"])
def test_estimators_compute_in_their_dtype(dtype, tmp_path):
    crf = rf.GridCRF(dtype=dtype, device="cpu", **QUICK).fit(NOISY, TRUTH)
    assert {str(parameter.dtype) for parameter in crf.model_.parameters()} == {f"torch.{dtype or 'float64'}"}
    marginals = crf.predict_marginals(NOISY)
    assert marginals.dtype == np.dtype(dtype or "float64")
    exact = rf.GridCRF(**QUICK).fit(NOISY, TRUTH).predict_marginals(NOISY)
    np.testing.assert_allclose(marginals, exact, atol=1e-3 if dtype == "float32" else 0)
    crf.save(tmp_path / "crf")
    twin = rf.GridCRF.load(tmp_path / "crf")
    assert (twin.device, twin.dtype) == ("cpu", dtype)
    np.testing.assert_array_equal(twin.predict_marginals(NOISY), marginals)


def test_objects_of_torch_are_saved_by_name(tmp_path):
    crf = rf.GridCRF(dtype=torch.float32, device=torch.device("cpu"), **QUICK).fit(NOISY, TRUTH)
    crf.save(tmp_path / "crf")
    twin = rf.GridCRF.load(tmp_path / "crf")
    assert (twin.device, twin.dtype) == ("cpu", "float32")


def test_a_model_can_move_when_it_is_loaded(tmp_path):
    rf.GridCRF(**QUICK).fit(NOISY, TRUTH).save(tmp_path / "crf")
    crf = rf.GridCRF.load(tmp_path / "crf", device="meta")
    assert crf.device == "meta"
    assert crf.inference_.loopy.algorithm.schedule == rf.Sequential()  # as it was trained


@pytest.mark.parametrize("crf", [rf.GridCRF(device="tpu"), rf.GridCRF(device="meta:x"), rf.CRF(device="nowhere")])
def test_devices_that_are_not_there_are_refused(crf):
    with pytest.raises(ValueError, match="`device` must be one that PyTorch can use here"):
        crf.fit(NOISY if isinstance(crf, rf.GridCRF) else NOISY[0], TRUTH if isinstance(crf, rf.GridCRF) else TRUTH[0])


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a PyTorch without CUDA")
def test_a_pytorch_without_cuda_is_named_as_the_reason(tmp_path):
    message = 'here: "cpu"(?: or "mps")?\\. Got \'cuda\': this PyTorch was built without CUDA\\. See'
    with pytest.raises(ValueError, match=message) as caught:
        as_device("cuda")
    assert caught.value.__suppress_context__
    path = tmp_path / "crf"
    rf.GridCRF(**QUICK).fit(NOISY, TRUTH).save(path)
    with pytest.raises(ValueError, match=message):
        rf.GridCRF.load(path, device="cuda")


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="needs a PyTorch without MPS")
def test_a_device_of_another_build_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"Got 'mps': this PyTorch was built without mps\.$"):
        as_device("mps")


def test_other_reasons_are_those_of_pytorch(monkeypatch):
    def fails(*arguments, **settings):
        raise RuntimeError("Found no driver.\nA second line.")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(ValueError, match=r"Got 'cpu': Found no driver\.$"):
        as_device("cpu")


def test_dtypes_that_are_not_supported_are_refused():
    with pytest.raises(ValueError, match=r"`dtype` must be .* Got 'float16'"):
        rf.GridCRF(dtype="float16").fit(NOISY, TRUTH)
    with pytest.raises(ValueError, match=r"`dtype` must be .* Got torch.int64"):
        rf.GridCRF(dtype=torch.int64).fit(NOISY, TRUTH)


def test_the_default_schedule_depends_on_the_device():
    assert default_schedule("cpu") == rf.Sequential()
    assert default_schedule("meta") == rf.Coloured()
    assert default_inference(torch.device("meta")).loopy.algorithm.schedule == rf.Coloured()
    assert rf.ImageCRF(device="meta").stages()[-1].inference.loopy.algorithm.schedule == rf.Coloured()
    assert rf.nn.GridCRF(2)._inference(torch.device("meta")).algorithm.schedule == rf.Coloured()
    named = rf.Inference(rf.MessagePassing())
    assert rf.ImageCRF(device="meta", inference=named).stages()[-1].inference is named


def test_fit_moves_model_data_and_validation():
    graph = rf.chain(3, num_states=2)
    inputs = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = rf.Examples(graph, (inputs[..., 0] > 0).long(), {"nodes": inputs, "factors": torch.ones(4, 2, 1)})
    seen = []

    class Model(rf.LinearModel):
        def forward(self, graph, inputs):
            seen.extend(value.dtype for value in inputs.values())
            return super().forward(graph, inputs)

    model = Model(2, 2, 1)
    settings = {"validation": data, "optimiser": rf.optim.LBFGS(iterations=2), "progress": False}
    rf.fit(
        model, data, rf.losses.UnivariateLogistic(), rf.Inference(rf.Exact()), device="cpu", dtype="float32", **settings
    )
    assert set(seen) == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="`device` must be one that PyTorch can use here"):
        rf.fit(Generative(graph), data, rf.losses.Pseudolikelihood(), device="nowhere", **settings)


@pytest.mark.parametrize(
    "words",
    [
        ["infer", "model.uai"],
        ["fit", "--images", "i", "--masks", "m", "--out", "o"],
        ["predict", "m", "i", "--out", "o"],
        ["evaluate", "m", "--images", "i", "--masks", "m"],
        ["report", "m", "--images", "i", "--masks", "m"],
        ["run", "problem.py", "--out", "o"],
    ],
)
def test_commands_refuse_devices_that_are_not_there(words, capsys):
    assert main([*words, "--device", "nowhere"]) == 2
    assert "--device must be one that PyTorch can use here" in " ".join(capsys.readouterr().err.split())


def test_infer_command_takes_a_device(tmp_path, capsys):
    path = tmp_path / "model.uai"
    path.write_text("MARKOV 2  2 2  1  2 0 1   4  1 2 3 4")
    assert main(["infer", str(path)]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main(["infer", str(path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == plain[:3]


def test_the_memory_is_that_of_the_cgroup_of_the_process(tmp_path):
    def limits(groups, **files):
        (tmp_path / "cgroup").write_text(groups)
        for path, limit in files.values():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(limit)
        found = [file for file in _memory_limits(tmp_path / "cgroup", tmp_path / "sys") if file.exists()]
        return [file.read_text() for file in found]

    second = {"own": ("sys/user/job/memory.max", "5"), "outer": ("sys/user/memory.max", "max")}
    assert limits("0::/user/job\n", **second) == ["5", "max"]
    first = {"own": ("sys/memory/a/b/memory.limit_in_bytes", "7"), "root": ("sys/memory/memory.limit_in_bytes", "9")}
    assert limits("3:cpu:/\n4:memory:/a/b\n0::/\n", **first) == ["7", "9"]
    assert limits("4:memory:/elsewhere\n") == ["9"]
    assert list(_memory_limits(tmp_path / "none", tmp_path)) == [tmp_path / "memory.max"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no `ulimit`")
def test_the_memory_is_at_most_that_of_ulimit():
    command = "ulimit -v 5000000; exec $0 -c 'from riskfield.devices import physical_memory; print(physical_memory())'"
    said = subprocess.run(["/bin/sh", "-c", command, sys.executable], capture_output=True, text=True, check=True)
    assert int(said.stdout) <= 5000000 * 1024
