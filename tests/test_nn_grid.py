"""The grid layer: against `infer` on a graph built by hand."""

import copy

import pytest
import torch
from torch.nn.functional import log_softmax

import riskfield as rf
from riskfield.nn import GridCRF

CLASSES = 3
EXACT = rf.Inference(rf.Exact())


def layer(**settings):
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
    crf, scores = layer(connectivity=connectivity), logits(3, 4)
    assert crf.pairwise.shape == (connectivity // 2, CLASSES, CLASSES)
    wanted = expected(crf, scores, lambda item, k, first, second: crf.pairwise[k].detach())
    torch.testing.assert_close(crf(scores), wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 1), (2, 6), (5, 2)])
def test_any_size_from_call_to_call(size):
    crf = layer()
    crf(logits(3, 3))
    scores = logits(*size)
    # Directions are numbered as they appear; one that is missing has no number.
    present = [k for k, n in enumerate(reversed(size)) if n > 1]
    wanted = expected(crf, scores, lambda item, k, first, second: crf.pairwise[present[k]].detach())
    torch.testing.assert_close(crf(scores), wanted)


def test_volumes():
    crf, scores = layer(num_axes=3), logits(2, 3, 2)
    assert crf.pairwise.shape == (3, CLASSES, CLASSES)
    torch.testing.assert_close(crf(scores), expected(crf, scores, lambda item, k, a, b: crf.pairwise[k].detach()))


def test_contrast():
    crf, scores = layer(contrast=True), logits(3, 4)
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
    crf, scores = layer(), logits(3, 4)
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


def test_pixels_outside_the_mask_take_no_part():
    crf, scores = layer(), logits(3, 4)
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
    crf = layer(inference=None)
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
    crf = layer(contrast=True)
    with torch.no_grad():
        crf.contrast_pairwise[1, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"`crf.contrast_pairwise` must not hold NaN or \+inf. Got nan at \(1, 2, 0\)"):
        crf(logits(3, 4), torch.rand(2, 1, 3, 4))


def test_gradients_by_differences():
    crf = layer(contrast=True, inference=None)
    image = torch.rand(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    scores = logits(2, 3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(crf, (scores, image))


def test_a_copy_is_independent_and_graphs_are_no_part_of_it():
    crf = layer()
    before = crf(logits(3, 4))
    assert set(crf.state_dict()) == {"pairwise"}
    twin = copy.deepcopy(crf)
    with torch.no_grad():
        crf.pairwise.zero_()
    assert torch.equal(twin(logits(3, 4)), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer()(logits(3)), r"`logits` must be floats of shape \(batch, 3, \*size\) with 2 axes"),
        (lambda: layer(contrast=True)(logits(3, 4)), "`image` must be given, because `contrast=True`"),
        (lambda: layer()(logits(3, 4), logits(3, 4)), "`image` must not be given, because `contrast=False`"),
        (
            lambda: layer(contrast=True)(logits(3, 4), logits(4, 3)),
            r"`image` must have shape \(2, channel, ",
        ),
        (
            lambda: layer(contrast=True)(logits(3, 4), torch.zeros(2, 1, 3, 4, dtype=torch.uint8)),
            r"`image` must hold floats. Got torch.uint8",
        ),
        (lambda: layer()(logits(3, 4), pairwise=logits(3, 4)), r"`pairwise` must have shape .* or \(2, 2, 3, 4\). Got"),
        (lambda: layer()(logits(3, 4), mask=logits(3, 4)), r"`mask` must be bool of shape \(2, 3, 4\)"),
        (lambda: GridCRF(0), "`num_classes` must be a positive integer. Got 0"),
        (lambda: GridCRF(2, connectivity=6), "`connectivity` must be 4 or 8. Got 6"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
