"""The layers with the rest of PyTorch: compile, autocast, several processes, functional transforms, forked workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import riskfield as rf
from ddp_worker import STEPS, parameters, train
from layer_cases import GRID, Chain, Grid, Marginals, made

MODELS = pytest.mark.parametrize("make", [Marginals, Chain, Grid])


def gradients(model, features):
    model.zero_grad()
    output = model(features)
    output.sum().backward()
    return output.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in torch, at a graph break
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compile_gives_the_same_numbers(backend):
    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Marginals(), Chain(), Grid()])

        def forward(self, features):
            return sum(part(features * 2) for part in self.parts) + 1

    model, features = made(All)
    output, wanted = gradients(model, features)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    found, own = gradients(compiled, features)
    for a, b in zip([found, *own], [output, *wanted], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(compiled(features[:2]), output[:2])


@MODELS
def test_autocast_computes_in_float32_and_returns_gradients_in_half_precision(make):
    model, features = made(make)
    seen = []
    model.linear.register_forward_hook(lambda module, inputs, output: seen.append(output) or output.retain_grad())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(features)
    assert seen[0].dtype == torch.bfloat16
    assert output.dtype == torch.float32
    output.sum().backward()
    assert seen[0].grad.dtype == torch.bfloat16
    exactly = seen[0].detach().float()
    model.linear.register_forward_hook(lambda module, inputs, output: exactly)
    torch.testing.assert_close(output, model(features), rtol=1e-6, atol=1e-6)


@MODELS
def test_functional_gradients(make):
    model, features = made(make)
    _, wanted = gradients(model, features)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = grad(lambda own: functional_call(model, own, features).sum())(parameters)
    for own, reference in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(own, reference)


@MODELS
def test_gradients_of_each_item_by_vmap(make):
    model, features = made(make)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(own, item):
        return functional_call(model, own, item.unsqueeze(0)).sum()

    output = vmap(loss, (None, 0))(parameters, features)
    found = vmap(grad(loss), (None, 0))(parameters, features)
    for k in range(len(features)):
        alone, wanted = gradients(model, features[k : k + 1])
        torch.testing.assert_close(output[k], alone[0])
        for own, reference in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(own[k], reference)


def test_vmap_over_evidence():
    graph = rf.chain(3, 2)
    layer, theta = rf.nn.MarginalInference(graph, rf.Inference(rf.Exact())), graph.zeros()
    evidence = torch.tensor([[-1, 1, -1], [0, -1, 1]])
    assert torch.equal(vmap(layer, (None, 0))(theta, evidence), layer(theta.expand(2, -1), evidence))


def test_second_derivatives_inside_vmap_are_refused():
    model, _ = made(Marginals)
    theta = torch.zeros(3, GRID.theta_size)
    with pytest.raises(rf.errors.AdjointError, match=r"Inside `torch.func.vmap` .* first derivatives only"):
        vmap(grad(lambda own: grad(lambda t: model.marginals(t)[0].log())(own).square().sum()))(theta)


def test_other_losses_inside_vmap_are_refused():
    crf = rf.nn.LinearChainCRF(2, batch_first=True, loss=rf.losses.UnivariateLogistic())
    tags = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"The loss `UnivariateLogistic` cannot run inside `torch.func.vmap`"):
        vmap(lambda emissions: crf(emissions, tags))(torch.zeros(4, 1, 3, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_what_transforms_cannot_do_is_named():
    crf, tags = rf.nn.LinearChainCRF(2, batch_first=True), torch.zeros(1, 3, dtype=torch.long)
    emissions = torch.zeros(1, 3, 2)
    for transform in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(rf.errors.AdjointError, match="no forward-mode derivatives"):
            transform(lambda own: crf(own, tags))(emissions)
    with pytest.raises(ValueError, match=r"`decode` .* cannot run inside `torch.func.vmap`"):
        vmap(crf.decode)(emissions.expand(4, 1, 3, 2))


@MODELS
def test_distributed_data_parallel(make, tmp_path):
    model, features = made(make)
    _, wanted = gradients(model, features)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        _, found = gradients(parallel, features)
    finally:
        torch.distributed.destroy_process_group()
    for own, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, reference)


@pytest.mark.slow  # two processes import torch: about five seconds
def test_two_processes_train_as_one(tmp_path):
    """Over Gloo, each with half of every batch. They start from the parameters of the first."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(Path(rf.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, str(tests / "ddp_worker.py"), str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*worker, str(rank)], stdout=-1, stderr=-1, text=True, env=environment) for rank in (0, 1)
    ]
    said = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    found = [torch.tensor(eval(out)) for out, _ in said]
    assert torch.equal(*found)
    alone = [made(make) for make in (Marginals, Chain, Grid)]
    begun = parameters([model for model, _ in alone])
    for model, features in alone:
        train(model, features)
    torch.testing.assert_close(found[0], parameters([model for model, _ in alone]), rtol=1e-4, atol=1e-6)
    assert STEPS > 1
    assert (found[0] - begun).abs().max() > 0.01


class Items(torch.utils.data.Dataset):
    """Items that are computed by a layer, in the process of a worker."""

    def __init__(self, model, features):
        self.model, self.features = model, features

    def __len__(self):
        return len(self.features)

    def __getitem__(self, k):
        with torch.no_grad():
            return self.model(self.features[k : k + 1])[0], os.getpid()


def test_workers_that_fork():
    """The threads of the engine do not live on in a forked process: it must start its own."""
    before = rf.get_num_threads()
    rf.set_num_threads(2)
    try:
        large = rf.grid(60, 60, num_states=4)
        rf.infer(large, large.zeros(), stop=rf.Stop(2, tol=None))  # the threads have started
        model, features = made(Grid)
        loader = torch.utils.data.DataLoader(
            Items(model, features), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        values, processes = (torch.cat(each) for each in zip(*loader, strict=True))
        assert torch.equal(values, torch.stack([Items(model, features)[k][0] for k in range(4)]))
        assert os.getpid() not in processes.tolist()
    finally:
        rf.set_num_threads(before)
