"""The chain layer: against pytorch-crf, which it replaces, and against inference on each sequence alone."""

import copy
import itertools

import pytest
import torch

import riskfield as rf
from riskfield.nn import LinearChainCRF

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


def layer(**settings):
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
    crf = layer(batch_first=batch_first)
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
    crf = layer(batch_first=True)
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
    crf = layer(batch_first=True, loss=loss)
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
    crf = layer(batch_first=True)
    emissions, tags, mask = batch()
    other, names = emissions.clone(), tags.clone()
    other[~mask], names[~mask] = float("inf"), -100
    assert torch.equal(crf(other, names, mask), crf(emissions, tags, mask))
    assert crf.decode(other, mask) == crf.decode(emissions, mask)
    assert torch.equal(crf.marginals(other, mask), crf.marginals(emissions, mask))


def test_forbidden_transitions():
    crf = layer(batch_first=True)
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


def test_gradients_by_differences():
    crf = layer(batch_first=True)
    emissions, tags, mask = (each[[1, 3], :3] for each in batch())
    emissions.requires_grad_()
    assert torch.autograd.gradcheck(lambda e: crf(e, tags, mask), emissions)
    assert torch.autograd.gradcheck(lambda e: crf.marginals(e, mask), emissions)


def test_a_copy_is_independent():
    crf = layer()
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
        (lambda e, t, m: (e, t + 3, m), r"`tags` must lie in 0..3 where the mask is True. Got "),
        (lambda e, t, m: (e, t, m[:, :3]), r"`mask` must have shape \(5, 7\). Got \(5, 3\)"),
        (lambda e, t, m: (e, t, ~m), "`mask` must be True at the first position"),
        (lambda e, t, m: (e, t, m, "max"), "`reduction` must be one of none, sum, mean, token_mean. Got 'max'"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        layer(batch_first=True)(*change(*batch()))
    with pytest.raises(ValueError, match="`num_tags` must be a positive integer"):
        LinearChainCRF(0)
