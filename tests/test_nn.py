"""Inference as a PyTorch layer: on any graph, on chains and on grids."""

import copy
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call, grad, vmap
from torch.nn.functional import log_softmax

import layer_cases
import riskfield as rf
from layer_cases import STEPS, Chain, Grid, Marginals, made, parameters, train
from riskfield.nn import GridCRF, LinearChainCRF, MarginalInference

# Inference as a layer: gradients, state dictionaries, dtypes, copies, training.


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


# The chain layer: against pytorch-crf, which it replaces, and against inference on each sequence alone.


TAGS = 4
LENGTHS = torch.tensor([5, 1, 7, 3, 7])


def batch(batch_first=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    emissions = (2 * torch.randn(len(LENGTHS), 7, TAGS, generator=generator, dtype=torch.float64)).to(dtype)
    tags = torch.randint(0, TAGS, (len(LENGTHS), 7), generator=generator)
    mask = torch.arange(7) < LENGTHS[:, None]
    if batch_first:
        return emissions, tags, mask
    return emissions.transpose(0, 1), tags.transpose(0, 1), mask.transpose(0, 1)


def chain_layer(**settings):
    torch.manual_seed(1)
    crf = LinearChainCRF(TAGS, **settings).double()
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def by_hand(crf, emissions, tags):
    """The score of one tagging of one sequence."""
    steps = sum(crf.transitions[a, b] for a, b in itertools.pairwise(tags))
    return (
        crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]] + steps + emissions[range(len(tags)), tags].sum()
    )


def sequences(emissions):
    return [own[:length] for own, length in zip(emissions, LENGTHS.tolist(), strict=True)]


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")  # in pytorch-crf
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_replaces_pytorch_crf(batch_first, masked):
    """Same state dict, same shapes: the negative of its likelihood, its gradients, its decoder."""
    torchcrf = pytest.importorskip("torchcrf")
    crf = chain_layer(batch_first=batch_first)
    other = torchcrf.CRF(TAGS, batch_first=batch_first).double()
    other.load_state_dict(crf.state_dict())
    emissions, tags, mask = batch(batch_first)
    mask = mask if masked else None
    assert crf.decode(emissions, mask) == other.decode(emissions, mask)
    for reduction in ("none", "sum", "mean", "token_mean"):
        found, wanted = [], []
        for model, sign, out in ((crf, 1, found), (other, -1, wanted)):
            leaf = emissions.clone().requires_grad_()
            loss = sign * model(leaf, tags, mask, reduction=reduction)
            out += [loss, *torch.autograd.grad(loss.sum(), [leaf, *model.parameters()])]
        for own, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-10)


def test_the_example_in_the_readme_of_pytorch_crf_runs_with_another_import():
    model = LinearChainCRF(5)
    emissions = torch.randn(3, 2, 5)
    tags = torch.tensor([[0, 1], [2, 4], [3, 1]], dtype=torch.long)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.uint8)
    assert model(emissions, tags) > 0
    assert model(emissions, tags, mask=mask) > 0
    assert [len(path) for path in model.decode(emissions)] == [3, 3]
    assert [len(path) for path in model.decode(emissions, mask=mask)] == [3, 2]


def test_marginals_likelihood_and_decoder_by_enumeration():
    crf = chain_layer(batch_first=True)
    emissions, tags, mask = batch()
    losses, marginals = crf(emissions, tags, mask, "none"), crf.marginals(emissions, mask)
    decoded = crf.decode(emissions, mask)
    for k, own in enumerate(sequences(emissions)):
        if len(own) > 5:
            continue
        paths = list(itertools.product(range(TAGS), repeat=len(own)))
        scores = torch.stack([by_hand(crf, own, list(path)) for path in paths])
        truth = by_hand(crf, own, tags[k, : len(own)].tolist())
        torch.testing.assert_close(losses[k], scores.logsumexp(0) - truth)
        assert decoded[k] == list(paths[int(scores.argmax())])
        weights = scores.softmax(0)
        for position in range(len(own)):
            chosen = torch.tensor([path[position] for path in paths])
            expected = torch.zeros(TAGS, dtype=torch.float64).index_add(0, chosen, weights)
            torch.testing.assert_close(marginals[k, position], expected)
    assert not marginals[~mask].any()


@pytest.mark.parametrize(
    "loss",
    [rf.losses.UnivariateLogistic(), rf.losses.CliqueLogistic(), rf.losses.Pseudolikelihood(), rf.losses.Piecewise()],
    ids=repr,
)
def test_other_losses_see_each_sequence_alone(loss):
    crf = chain_layer(batch_first=True, loss=loss)
    emissions, tags, mask = batch()
    emissions.requires_grad_()
    losses = crf(emissions, tags, mask, "none")
    for k, own in enumerate(sequences(emissions)):
        unary = own.clone()
        unary[0] = unary[0] + crf.start_transitions
        unary[-1] = unary[-1] + crf.end_transitions
        graph = rf.chain(len(own), TAGS, tied=True)
        theta = graph.assemble([unary], [crf.transitions[None]] if len(own) > 1 else [])
        alone = loss(graph, theta, tags[k, : len(own)], rf.Inference(rf.Exact()))
        torch.testing.assert_close(losses[k], alone)
    losses.sum().backward()
    assert not emissions.grad[~mask].any()
    assert crf.transitions.grad.any()


def test_what_padding_holds_does_not_matter():
    crf = chain_layer(batch_first=True)
    emissions, tags, mask = batch()
    other, names = emissions.clone(), tags.clone()
    other[~mask], names[~mask] = float("inf"), -100
    assert torch.equal(crf(other, names, mask), crf(emissions, tags, mask))
    assert crf.decode(other, mask) == crf.decode(emissions, mask)
    assert torch.equal(crf.marginals(other, mask), crf.marginals(emissions, mask))


def test_forbidden_transitions():
    crf = chain_layer(batch_first=True)
    with torch.no_grad():
        crf.transitions[0, 1] = crf.start_transitions[2] = crf.end_transitions[3] = float("-inf")
    emissions, tags, mask = batch()
    for path in crf.decode(emissions, mask):
        assert path[0] != 2
        assert path[-1] != 3
        assert (0, 1) not in itertools.pairwise(path)
    marginals = crf.marginals(emissions, mask)
    assert not marginals[:, 0, 2].any()
    allowed = torch.zeros_like(tags)
    crf(emissions, allowed, mask).backward()
    assert all(parameter.grad.isfinite().all() for parameter in crf.parameters())
    assert crf(emissions, torch.where(mask, 2, 0), mask) == float("inf")


def test_gradients_on_chains_by_differences():
    crf = chain_layer(batch_first=True)
    emissions, tags, mask = (each[[1, 3], :3] for each in batch())
    emissions.requires_grad_()
    assert torch.autograd.gradcheck(lambda e: crf(e, tags, mask), emissions)
    assert torch.autograd.gradcheck(lambda e: crf.marginals(e, mask), emissions)


def test_a_copy_is_independent():
    crf = chain_layer()
    twin = copy.deepcopy(crf)
    emissions, tags, mask = batch(False)
    assert torch.equal(crf(emissions, tags, mask), twin(emissions, tags, mask))
    with torch.no_grad():
        crf.transitions.zero_()
    assert not torch.equal(crf(emissions, tags, mask), twin(emissions, tags, mask))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e, t, m: (e[..., :3], t, m),
            "`emissions` must be floats of shape .* with 4 tags",
        ),
        (lambda e, t, m: (e[:, :0], t[:, :0], m[:, :0]), "`emissions` must have at least one position"),
        (lambda e, t, m: (e, t[:, :2], m), r"`tags` must be integers of shape \(5, 7\). Got \(5, 2\)"),
        (
            lambda e, t, m: (e, t + 3, m),
            r"`tags` must lie in 0..3 where the mask is True. Got 4. Tags are numbered from 0.",
        ),
        (lambda e, t, m: (e, t - 9, m), "Pass a mask that is False at padding."),
        (lambda e, t, m: (e, t, m[:, :3]), r"`mask` must have shape \(5, 7\). Got \(5, 3\)"),
        (lambda e, t, m: (e, t, ~m), "`mask` must be True at the first position"),
        (lambda e, t, m: (e, t, m, "max"), "`reduction` must be one of none, sum, mean, token_mean. Got 'max'"),
    ],
)
def test_refusals_on_chains(change, message):
    with pytest.raises(ValueError, match=message):
        chain_layer(batch_first=True)(*change(*batch()))
    with pytest.raises(ValueError, match="`num_tags` must be a positive integer"):
        LinearChainCRF(0)


def test_arrays_are_not_tensors():
    emissions, tags, mask = batch()
    for given, name in [
        ((emissions.numpy(force=True), tags, mask), "emissions"),
        ((emissions, tags.numpy(), mask), "tags"),
        ((emissions, tags, mask.numpy()), "mask"),
    ]:
        with pytest.raises(TypeError, match=f"`{name}` must be a torch.Tensor. Got ndarray"):
            chain_layer(batch_first=True)(*given)
    with pytest.raises(TypeError, match=r"`logits` must be a torch.Tensor. Got ndarray"):
        grid_layer()(torch.zeros(1, CLASSES, 4, 5).numpy())


# The grid layer: against `infer` on a graph built by hand.


CLASSES = 3
EXACT = rf.Inference(rf.Exact())


def grid_layer(**settings):
    torch.manual_seed(1)
    crf = GridCRF(CLASSES, **{"inference": EXACT, **settings}).double()
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def logits(*size, batch=2):
    return torch.randn(batch, CLASSES, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def expected(crf, scores, table_of):
    """Log-marginals by `infer`; `table_of(item, direction, first, second)` is the table of an edge."""
    size = scores.shape[2:]
    graph = rf.grid(tuple(size), num_states=CLASSES, connectivity=crf.connectivity)
    theta = graph.zeros(len(scores))
    graph.node_views(theta)[0][:] = scores.flatten(2).transpose(1, 2)
    pixels = torch.cartesian_prod(*(torch.arange(n) for n in size)).reshape(-1, len(size)).tolist()
    steps = []
    for factor in range(graph.num_factors):
        first, second = (pixels[v] for v in graph.scope(factor))
        step = tuple(b - a for a, b in zip(first, second, strict=True))
        steps += [step] if step not in steps else []
        for item in range(len(scores)):
            graph.factor(theta, factor)[item] = table_of(item, steps.index(step), tuple(first), tuple(second))
    mu = rf.infer(graph, theta, (crf.inference or EXACT).algorithm).node_marginals[0]
    return mu.log().transpose(1, 2).reshape(scores.shape)


@pytest.mark.parametrize("connectivity", [4, 8])
def test_constant_edges(connectivity):
    crf, scores = grid_layer(connectivity=connectivity), logits(3, 4)
    assert crf.pairwise.shape == (connectivity // 2, CLASSES, CLASSES)
    wanted = expected(crf, scores, lambda item, k, first, second: crf.pairwise[k].detach())
    torch.testing.assert_close(crf(scores), wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 1), (2, 6), (5, 2)])
def test_any_size_from_call_to_call(size):
    crf = grid_layer()
    crf(logits(3, 3))
    scores = logits(*size)
    # Directions are numbered as they appear; one that is missing has no number.
    present = [k for k, n in enumerate(reversed(size)) if n > 1]
    wanted = expected(crf, scores, lambda item, k, first, second: crf.pairwise[present[k]].detach())
    torch.testing.assert_close(crf(scores), wanted)


def test_volumes():
    crf, scores = grid_layer(num_axes=3), logits(2, 3, 2)
    assert crf.pairwise.shape == (3, CLASSES, CLASSES)
    torch.testing.assert_close(crf(scores), expected(crf, scores, lambda item, k, a, b: crf.pairwise[k].detach()))


def test_contrast():
    crf, scores = grid_layer(contrast=True), logits(3, 4)
    image = torch.rand(2, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    image[1] = 0.5  # no contrast at all
    across = (image[..., 1:] - image[..., :-1]).square().sum(1).flatten(1)
    down = (image[:, :, 1:] - image[:, :, :-1]).square().sum(1).flatten(1)
    scale = torch.cat([across, down], 1).mean(1)

    def table(item, k, first, second):
        square = (image[(item, slice(None), *first)] - image[(item, slice(None), *second)]).square().sum()
        alike = 1.0 if item == 1 else torch.exp(-square / (2 * scale[item]))
        return (crf.pairwise[k] + alike * crf.contrast_pairwise[k]).detach()

    torch.testing.assert_close(crf(scores, image), expected(crf, scores, table))


@pytest.mark.parametrize("shape", ["tables", "strengths"])
def test_edges_from_a_network(shape):
    crf, scores = grid_layer(), logits(3, 4)
    inner = (CLASSES, CLASSES) if shape == "tables" else ()
    given = torch.randn(2, 2, *inner, 3, 4, dtype=torch.float64, requires_grad=True)

    def table(item, k, first, second):
        own = given.detach()[(item, k, ..., *first)]
        return crf.pairwise[k].detach() + (own if shape == "tables" else own * torch.eye(CLASSES))

    found = crf(scores, pairwise=given)
    torch.testing.assert_close(found, expected(crf, scores, table))
    found.sum().backward()
    assert given.grad[:, 0, ..., :3].ne(0).all()
    assert not given.grad[:, 0, ..., 3].any()  # no edge begins in the last column


def test_an_empty_batch_with_edges_from_a_network():
    given = torch.zeros(0, 2, 3, 4, dtype=torch.float64)
    assert grid_layer()(logits(3, 4)[:0], pairwise=given).shape == (0, CLASSES, 3, 4)


def test_pixels_outside_the_mask_take_no_part():
    crf, scores = grid_layer(), logits(3, 4)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0, :, 2:], mask[1, 1:] = False, False
    found = crf(scores, mask=mask)
    torch.testing.assert_close(found[:1, :, :, :2], crf(scores[:1, :, :, :2]))
    torch.testing.assert_close(found[1:, :, :1], crf(scores[1:, :, :1]))
    alone = log_softmax(scores, 1)
    torch.testing.assert_close(found.transpose(0, 1)[:, ~mask], alone.transpose(0, 1)[:, ~mask])


def test_it_begins_as_a_softmax_and_its_default_is_truncated_trw():
    scores = logits(3, 4)
    torch.testing.assert_close(GridCRF(CLASSES).double()(scores), log_softmax(scores, 1))
    crf = grid_layer(inference=None)
    graph = rf.grid(3, 4, CLASSES, tied=True)
    theta = graph.assemble([scores.flatten(2).transpose(1, 2)], [crf.pairwise])
    mu = rf.infer(graph, theta, rf.MessagePassing(rf.TRW(0.5)), stop=rf.Stop(5, tol=None)).node_marginals[0]
    torch.testing.assert_close(crf(scores), mu.log().transpose(1, 2).reshape(scores.shape))


def test_log_marginals_are_finite():
    scores = torch.zeros(1, CLASSES, 2, 2)
    scores[:, 0] = 1e4
    found = GridCRF(CLASSES)(scores)
    assert found.isfinite().all()
    assert found.dtype == torch.float32


def test_errors_name_the_contrast_parameter():
    crf = grid_layer(contrast=True)
    with torch.no_grad():
        crf.contrast_pairwise[1, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"`crf.contrast_pairwise` must not hold NaN or \+inf. Got nan at \(1, 2, 0\)"):
        crf(logits(3, 4), torch.rand(2, 1, 3, 4))


def test_gradients_on_grids_by_differences():
    crf = grid_layer(contrast=True, inference=None)
    image = torch.rand(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    scores = logits(2, 3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(crf, (scores, image))


def test_a_copy_is_independent_and_graphs_are_no_part_of_it():
    crf = grid_layer()
    before = crf(logits(3, 4))
    assert set(crf.state_dict()) == {"pairwise"}
    twin = copy.deepcopy(crf)
    with torch.no_grad():
        crf.pairwise.zero_()
    assert torch.equal(twin(logits(3, 4)), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid_layer()(logits(3)), r"`logits` must be floats of shape \(batch, 3, \*size\) with 2 axes"),
        (lambda: grid_layer(contrast=True)(logits(3, 4)), "`image` must be given, because `contrast=True`"),
        (lambda: grid_layer()(logits(3, 4), logits(3, 4)), "`image` must not be given, because `contrast=False`"),
        (
            lambda: grid_layer(contrast=True)(logits(3, 4), logits(4, 3)),
            r"`image` must have shape \(2, channel, 3, 4\)",
        ),
        (
            lambda: grid_layer(contrast=True)(logits(3, 4), torch.zeros(2, 1, 3, 4, dtype=torch.uint8)),
            r"`image` must hold floats. Got torch.uint8",
        ),
        (
            lambda: grid_layer()(logits(3, 4), pairwise=logits(3, 4)),
            r"`pairwise` must have shape .* or \(2, 2, 3, 4\). Got",
        ),
        (lambda: grid_layer()(logits(3, 4), mask=logits(3, 4)), r"`mask` must be bool of shape \(2, 3, 4\)"),
        (lambda: GridCRF(0), "`num_classes` must be a positive integer. Got 0"),
        (lambda: GridCRF(2, connectivity=6), "`connectivity` must be 4 or 8. Got 6"),
    ],
)
def test_refusals_on_grids(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- with the rest of PyTorch: compile, autocast, several processes, functional transforms, forked workers ------------

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
    theta = torch.zeros(3, layer_cases.GRID.theta_size)
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
    worker = [sys.executable, str(tests / "layer_cases.py"), str(tmp_path / "store")]
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
