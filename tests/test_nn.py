"""Inference as a layer: gradients, state dictionaries, dtypes, copies, training."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import riskfield as rf
from riskfield.nn import MarginalInference

TRW = rf.MessagePassing(rf.TRW(0.5))
TRUNCATED = rf.Stop(3, tol=None)
GRID = rf.grid(3, 4, num_states=3, tied=True)


class Segmenter(nn.Module):
    """A network, trainable pairwise terms, marginals."""

    def __init__(self, graph=GRID):
        super().__init__()
        self.unary = nn.Conv2d(2, 3, 3, padding=1)
        self.pairwise = nn.Parameter(torch.zeros(2, 3, 3))
        self.marginals = MarginalInference(graph, rf.Inference(TRW, TRUNCATED))

    def forward(self, images, evidence=None):
        graph = self.marginals.graph
        unary = self.unary(images).flatten(2).transpose(1, 2)
        return graph.node_views(self.marginals(graph.assemble([unary], [self.pairwise]), evidence))[0]


def drawn_images(number=5, dtype=torch.float32):
    return torch.randn(number, 2, 3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("algorithm", "adjoint", "stop"),
    [
        (TRW, rf.Unroll(), TRUNCATED),
        (TRW, None, TRUNCATED),
        (TRW, rf.FixedPoint(tol=1e-12), rf.Stop(2000, 1e-13)),
        (rf.MeanField(), rf.Unroll(), TRUNCATED),
        (rf.Exact(), None, rf.Stop()),
    ],
)
def test_it_is_infer_with_its_gradient(algorithm, adjoint, stop):
    graph = rf.grid(2, 2, num_states=2)
    layer = MarginalInference(graph, rf.Inference(algorithm, stop, adjoint))
    theta = torch.randn(2, graph.theta_size, dtype=torch.float64, requires_grad=True)
    evidence = torch.tensor([[-1, 1, -1, 0], [-1] * 4])
    for given in (None, evidence):
        expected = rf.infer(graph, theta.detach(), algorithm, stop=stop, evidence=given).mu
        torch.testing.assert_close(layer(theta, given), expected, rtol=0, atol=1e-13)
        assert gradcheck(lambda theta, given=given: layer(theta, given), theta, atol=1e-6)
    assert graph.node(layer(theta, {2: 1}), 2)[:, 0].tolist() == [0, 0]


def test_without_a_gradient_nothing_is_recorded():
    with torch.no_grad():
        assert not Segmenter()(drawn_images()).requires_grad


def test_the_pairwise_terms_have_a_gradient_of_the_right_size():
    """The gradients of all parameters, by differences of the loss along random directions."""
    model = Segmenter().double()
    with torch.no_grad():
        model.pairwise.normal_()
    labels = torch.randint(0, 3, (5, 12))

    def loss():
        return -model(drawn_images(dtype=torch.float64)).gather(-1, labels.unsqueeze(-1)).log().mean()

    loss().backward()
    parameters = dict(model.named_parameters())
    assert set(parameters) == {"unary.weight", "unary.bias", "pairwise"}
    for parameter in parameters.values():
        direction, start, step = torch.randn_like(parameter), parameter.detach().clone(), 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(start + sign * step * direction)
                values.append(loss())
                parameter.copy_(start)
        slope = float(parameter.grad.flatten() @ direction.flatten())
        assert abs(slope) > 1e-4
        assert (values[0] - values[1]).item() / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_parameters_are_saved_and_loaded_like_those_of_any_module(tmp_path):
    from safetensors.torch import load_file, save_file

    model, other = Segmenter(), Segmenter()
    assert set(model.state_dict()) == {"unary.weight", "unary.bias", "pairwise"}
    assert not list(model.marginals.state_dict())
    with torch.no_grad():
        model.pairwise.normal_()
    assert not torch.equal(model(drawn_images()), other(drawn_images()))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(drawn_images()), other(drawn_images()))
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other = Segmenter()
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(model(drawn_images()), other(drawn_images()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_follows_the_dtype_of_the_model(dtype):
    model = Segmenter().to(dtype)
    marginals = model(drawn_images(dtype=dtype))
    assert marginals.dtype == dtype
    marginals[..., 0].log().sum().backward()
    assert model.pairwise.grad.dtype == dtype
    reference = copy.deepcopy(model).double()
    torch.testing.assert_close(marginals.double(), reference(drawn_images(dtype=torch.float64)), rtol=0, atol=1e-6)


def test_a_copy_is_independent_and_whole_modules_can_be_pickled():
    model = Segmenter()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.pairwise.normal_()
    assert not torch.equal(model(drawn_images()), twin(drawn_images()))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(drawn_images()), model(drawn_images()))


def test_training_lowers_the_loss_and_teaches_the_pairwise_terms_what_neighbours_do():
    """Labels that a network without context cannot know: a column of random labels, repeated along each row."""
    generator = torch.Generator().manual_seed(0)
    graph = rf.grid(6, 6, num_states=2, tied=True)
    labels = torch.randint(0, 2, (30, 6, 1), generator=generator).expand(-1, -1, 6).reshape(30, 36)
    noisy = labels + 1.0 * torch.randn(labels.shape, generator=generator)
    pairwise = nn.Parameter(torch.zeros(2, 2, 2))
    slope, layer = nn.Parameter(torch.tensor(1.0)), MarginalInference(graph, rf.Inference(TRW, TRUNCATED))
    optimiser = torch.optim.Adam([pairwise, slope], lr=0.1)

    def marginals():
        unary = torch.stack([torch.zeros_like(noisy), slope * (noisy - 0.5)], -1)
        return graph.node_views(layer(graph.assemble([unary], [pairwise])))[0]

    def agreement():
        return (pairwise[:, 0, 0] + pairwise[:, 1, 1] - pairwise[:, 0, 1] - pairwise[:, 1, 0]).tolist()

    before = rf.metrics.error_rate(marginals().argmax(-1), labels)
    for _ in range(40):
        optimiser.zero_grad()
        loss = -marginals().gather(-1, labels.unsqueeze(-1)).log().mean()
        loss.backward()
        optimiser.step()
    horizontal, vertical = agreement()
    assert horizontal > 2 > 0.5 > abs(vertical)
    assert rf.metrics.error_rate(marginals().argmax(-1), labels) < before / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grid",), "`graph` must be a FactorGraph. Got str."),
        (
            (GRID, "trw"),
            "`inference` must be an algorithm such as `MessagePassing()`, or an object such as "
            "`Inference(MessagePassing(), Stop(sweeps=5, tol=None))`. Got 'trw'.",
        ),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(TypeError) as caught:
        MarginalInference(*arguments)
    assert str(caught.value) == message


def test_an_algorithm_alone_is_run_to_convergence():
    assert MarginalInference(GRID, TRW).inference == rf.Inference(TRW)
    assert rf.nn.GridCRF(2, inference=TRW).inference == rf.Inference(TRW)


def test_errors_name_what_the_caller_passed():
    logits, emissions = torch.zeros(1, 2, 3, 4), torch.zeros(3, 1, 2)
    logits[0, 1, 2, 3] = emissions[2, 0, 1] = float("nan")
    grid, chain = rf.nn.GridCRF(2), rf.nn.LinearChainCRF(2)
    with pytest.raises(ValueError, match=r"`logits` must not hold NaN or \+inf. Got nan at \(0, 1, 2, 3\)"):
        grid(logits)
    with pytest.raises(ValueError, match=r"`emissions` must not hold NaN or \+inf. Got nan at \(2, 0, 1\)"):
        chain(emissions, torch.zeros(3, 1).long())
    with pytest.raises(ValueError, match="`emissions` must not hold NaN"):
        chain.marginals(emissions)
    with torch.no_grad():
        grid.pairwise[1, 0, 0] = chain.transitions[0, 1] = float("inf")
    with pytest.raises(ValueError, match=r"`crf.pairwise` must not hold NaN or \+inf. Got inf at \(1, 0, 0\)"):
        grid(torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"`crf\.transitions` must not hold NaN"):
        chain(torch.zeros(3, 1, 2), torch.zeros(3, 1).long())


def test_the_log_partition_value_comes_with_its_own_gradient():
    graph = rf.chain(4, num_states=3)
    theta = torch.randn(2, graph.theta_size, dtype=torch.float64, requires_grad=True)
    for how in (rf.Inference(rf.Exact()), rf.Inference(rf.Exact(), adjoint=rf.Envelope())):
        mu, value = MarginalInference(graph, how)(theta, log_partition=True)
        torch.testing.assert_close(value, rf.infer(graph, theta.detach(), rf.Exact()).log_partition)
        torch.testing.assert_close(torch.autograd.grad(value.sum(), theta)[0], mu.detach())
    with pytest.raises(rf.errors.AdjointError, match="`Envelope` differentiates the log-partition value only"):
        mu.sum().backward()


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"`theta` must be float32 or float64\. Got torch\.complex64\."):
        MarginalInference(GRID)(GRID.zeros(dtype=torch.complex64))


def test_repr_says_what_it_does():
    how = rf.Inference(rf.MeanField(), TRUNCATED)
    assert repr(MarginalInference(GRID, how)) == f"MarginalInference({GRID!r}, {how!r})"
