"""Decoders and metrics."""

import re

import pytest
import torch

import riskfield as rf
from loss_cases import draw
from riskfield import metrics
from strategies import brute_force, potentials

# Decoders and metrics.


MIXED = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0), (2, 1, 3)])
BINARY = rf.grid(2, 3, 2)
EXACT = rf.Inference(rf.Exact())


def binary_mu(*probabilities):
    """Marginals of single variables with these probabilities of state 1, and their graph."""
    positive = torch.tensor(probabilities, dtype=torch.float64)
    return rf.FactorGraph([2] * len(probabilities)), torch.stack([1 - positive, positive], -1).flatten()


def test_max_marginal_and_map_differ():
    """Two states of the first variable share the probability of its best joint state."""
    graph = rf.FactorGraph([2, 2], [(0, 1)])
    theta = graph.zeros()
    graph.factor(theta, 0).copy_(torch.tensor([[0.4, 0.0], [0.3, 0.3]]).log())
    inference = rf.Inference(rf.MessagePassing(), rf.Stop(tol=1e-10), rf.FixedPoint())
    assert rf.decoders.decode(graph, theta, inference).tolist() == [1, 0]
    assert rf.decoders.decode(graph, theta, inference, rf.decoders.MaxMarginal()).tolist() == [1, 0]
    assert rf.decoders.decode(graph, theta, inference, rf.decoders.MAP()).tolist() == [0, 0]


def test_decode_against_brute_force():
    theta = potentials(MIXED, 2, "mild", 4)
    predicted = rf.decoders.decode(MIXED, theta, EXACT)
    for item in range(4):
        mu = brute_force(MIXED, theta[item]).mu
        assert predicted[item].tolist() == [int(MIXED.node(mu, v).argmax()) for v in range(4)]


@pytest.mark.parametrize(
    "decoder", [rf.decoders.MaxMarginal(), rf.decoders.MAP(), rf.decoders.EqualCount()], ids=lambda d: type(d).__name__
)
def test_evidence_is_predicted_as_it_is(decoder):
    theta = potentials(BINARY, 2, "mild", 3).requires_grad_()
    _, evidence = draw(BINARY, 4, 3, given=0.5)
    predicted = rf.decoders.decode(BINARY, theta, rf.Inference(stop=rf.Stop(tol=1e-8)), decoder, evidence=evidence)
    assert predicted.shape == (3, 6)
    assert predicted.dtype == torch.int64
    assert torch.equal(predicted[evidence >= 0], evidence[evidence >= 0])


def test_soft_decoders_tend_to_hard_ones():
    theta = potentials(BINARY, 2, "mild", 5)
    mu = EXACT(BINARY, theta).mu
    for soft, hard in (
        (rf.decoders.SoftArgmax(1e-3), rf.decoders.MaxMarginal()),
        (rf.decoders.SoftEqualCount(1e-3), rf.decoders.EqualCount()),
    ):
        weights = soft(BINARY, mu)[0]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        torch.testing.assert_close(weights[..., 1].round(), hard(BINARY, mu).double())
        assert (weights.amax(-1) > 0.99).double().mean() > 0.9


def test_soft_argmax_by_its_formula():
    mu = EXACT(MIXED, potentials(MIXED, 2)).mu
    for view, weights in zip(MIXED.node_views(mu), rf.decoders.SoftArgmax(0.4)(MIXED, mu), strict=True):
        torch.testing.assert_close(weights, view**2.5 / (view**2.5).sum(-1, keepdim=True))
    for view, weights in zip(MIXED.node_views(mu), rf.decoders.SoftArgmax(1.0)(MIXED, mu), strict=True):
        torch.testing.assert_close(weights, view)
    for view, weights in zip(MIXED.node_views(mu), rf.decoders.ExpectedValue()(MIXED, mu), strict=True):
        assert torch.equal(weights, view)


def test_soft_argmax_of_impossible_states():
    graph, mu = binary_mu(1.0, 0.3)
    mu.requires_grad_()
    (weights,) = rf.decoders.SoftArgmax(0.1)(graph, mu)
    assert weights[0].tolist() == [0.0, 1.0]
    (gradient,) = torch.autograd.grad(weights.square().sum(), mu)
    assert torch.isfinite(gradient).all()


def test_equal_count():
    graph, mu = binary_mu(0.9, 0.8, 0.3, 0.7)
    assert rf.decoders.EqualCount()(graph, mu).tolist() == [1, 1, 0, 0]
    mask = torch.tensor([[True, True, False, True], [False, False, True, True]])
    assert rf.decoders.EqualCount()(graph, mu, mask)[mask].tolist() == [1, 0, 0, 0, 1]  # of three, the larger half is 0
    for size in (2, 6, 10):
        graph, mu = binary_mu(*torch.rand(size).tolist())
        assert rf.decoders.EqualCount()(graph, mu).sum() == size // 2


def test_soft_equal_count_around_a_half_is_soft_argmax():
    graph, mu = binary_mu(0.2, 0.8, 0.6, 0.4)  # the median of the logits is 0
    torch.testing.assert_close(rf.decoders.SoftEqualCount(0.3)(graph, mu), rf.decoders.SoftArgmax(0.3)(graph, mu))


def test_soft_equal_count_has_a_gradient_also_through_the_median():
    graph, mu = binary_mu(0.2, 0.7, 0.6, 0.35, 0.9)
    mask = torch.tensor([True, True, False, True, True])
    decode = lambda m: rf.decoders.SoftEqualCount(0.5)(graph, m, mask)[0]  # noqa: E731
    assert torch.autograd.gradcheck(decode, mu.requires_grad_())
    certain = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64, requires_grad=True)
    (weights,) = rf.decoders.SoftEqualCount(0.5)(rf.FactorGraph([2] * 4), certain)
    assert torch.isfinite(torch.autograd.grad(weights.sum(), certain)[0]).all()


@pytest.mark.parametrize(
    "decoder", [rf.decoders.SoftArgmax(0.5), rf.decoders.SoftEqualCount(0.5)], ids=lambda d: type(d).__name__
)
def test_soft_decoders_have_second_derivatives_beside_variables_that_are_certain(decoder):
    """The first and the last variable are given; Hessian-vector products must not be NaN for that."""
    graph, certain = binary_mu(0.0, 0.2, 0.7, 0.6, 1.0)
    mask = torch.tensor([False, True, True, True, False])
    inner = certain[2:8].clone().requires_grad_()

    def decoded(free):
        return decoder(graph, torch.cat([certain[:2], free, certain[8:]]), mask)[0][1:4]

    assert torch.autograd.gradcheck(decoded, inner)
    assert torch.autograd.gradgradcheck(decoded, inner)
    whole = certain.clone().requires_grad_()
    (slope,) = torch.autograd.grad(decoder(graph, whole, mask)[0][..., 1].square().sum(), whole, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(slope.sum(), whole)[0]).all()


def test_variables_that_are_not_asked_for_do_not_move_the_median():
    graph, theta = rf.FactorGraph([2] * 4), torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0, -5.0, 0.0, -6.0])
    asked = torch.tensor([True, True, False, False])
    assert rf.decoders.decode(graph, theta, EXACT, rf.decoders.EqualCount()).tolist() == [1, 1, 0, 0]
    assert rf.decoders.decode(graph, theta, EXACT, rf.decoders.EqualCount(), mask=asked).tolist()[:2] == [1, 0]
    given = torch.tensor([1, -1, -1, -1])
    predicted = rf.decoders.decode(graph, theta, EXACT, rf.decoders.EqualCount(), mask=~asked, evidence=given)
    assert (predicted[0], predicted[2], predicted[3]) == (1, 1, 0)


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics():
    labels = torch.tensor([[1, 0, 1, 1], [0, 0, -1, 1]])
    predicted = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    assert rf.metrics.error_rate(predicted, labels) == pytest.approx(4 / 7)
    assert rf.metrics.error_rate(predicted, labels, labels == 1) == pytest.approx(2 / 4)
    assert rf.metrics.f_measure(predicted, labels) == pytest.approx((2 * 2 / (3 + 3) + 0) / 2)
    assert rf.metrics.f_measure(torch.zeros(3), torch.zeros(3)) == 1.0
    graph, mu = binary_mu(0.9, 0.8, 0.3, 0.7)
    weights = rf.decoders.ExpectedValue()(graph, mu)
    squares = [0.1**2, 0.8**2, 0.7**2, 0.3**2, 0.9**2, 0.8**2, 0.3**2]
    assert rf.metrics.regression_error(graph, weights, labels) == pytest.approx(sum(squares) / 7)


def test_losses_on_hard_decodings_are_the_metrics():
    """At a low temperature: L1 and MSE the number of errors, F what the F-measure lacks."""
    theta, (labels, _) = potentials(BINARY, 3, "mild", 6), draw(BINARY, 4, 6)
    risk = lambda loss: float(  # noqa: E731
        rf.losses.empirical_risk(loss, BINARY, theta, labels, EXACT, per_variable=True)
    )
    errors = rf.metrics.error_rate(rf.decoders.decode(BINARY, theta, EXACT), labels)
    assert risk(rf.losses.L1(rf.decoders.SoftArgmax(1e-4))) == pytest.approx(errors, abs=1e-6)
    assert risk(rf.losses.MSE(rf.decoders.SoftArgmax(1e-4))) == pytest.approx(errors, abs=1e-6)
    assert risk(rf.losses.SmoothedClassification(1e5)) == pytest.approx(errors, abs=1e-6)
    found = rf.metrics.f_measure(rf.decoders.decode(BINARY, theta, EXACT, rf.decoders.EqualCount()), labels)
    assert risk(rf.losses.FMeasure(rf.decoders.SoftEqualCount(1e-4))) == pytest.approx(1 - found, abs=1e-6)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rf.decoders.SoftArgmax(0), ValueError, "`temperature` must be above 0 and finite. Got 0"),
        (lambda: rf.decoders.SoftEqualCount(-1), ValueError, "`temperature` must be above 0 and finite. Got -1"),
        (
            lambda: rf.decoders.MAP("max"),
            TypeError,
            "`algorithm` must be an algorithm such as `MaxProduct()`. Got 'max'",
        ),
        (
            lambda: rf.decoders.decode(BINARY, BINARY.zeros(), EXACT, rf.decoders.SoftArgmax()),
            TypeError,
            "`decoder` must be a hard decoder such as `MaxMarginal()`",
        ),
        (
            lambda: rf.decoders.EqualCount()(MIXED, MIXED.zeros()),
            ValueError,
            "`EqualCount` is defined for binary variables. Variable 1 has 3 states",
        ),
        (
            lambda: rf.decoders.SoftEqualCount()(MIXED, MIXED.zeros()),
            ValueError,
            "`SoftEqualCount` is defined for binary variables",
        ),
        (
            lambda: rf.metrics.error_rate(torch.zeros(3), torch.zeros(4)),
            ValueError,
            "`predicted` must have the shape (4,) of labels. Got (3,)",
        ),
        (
            lambda: rf.metrics.f_measure(torch.zeros(3), torch.full((3,), -1)),
            ValueError,
            "`labels` must hold at least one target",
        ),
        (
            lambda: rf.metrics.f_measure(torch.tensor([0, 2]), torch.tensor([0, 1])),
            ValueError,
            "`predicted` must hold states 0 and 1. Got 2.",
        ),
        (
            lambda: rf.metrics.confusion_matrix(torch.ones(3).long(), torch.ones(3).long(), 2, torch.tensor([0, 1, 1])),
            TypeError,
            "`mask` must be booleans. Got torch.int64.",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_graph_without_variables_has_no_states():
    graph, theta, labels = rf.FactorGraph([]), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64)
    assert rf.decoders.decode(graph, theta, EXACT, rf.decoders.EqualCount()).shape == (2, 0)
    assert rf.decoders.SoftEqualCount()(graph, theta) == ()
    assert rf.losses.FMeasure()(graph, theta, labels, EXACT).tolist() == [0, 0]


# Errors, overlaps and calibration, against counts by hand.


LABELS = torch.tensor([[0, 1, 2, -1], [2, 2, 0, 1]])
PREDICTED = torch.tensor([[0, 2, 2, 1], [2, 0, 0, 1]])


def test_confusion_and_overlap():
    confusion = metrics.confusion_matrix(PREDICTED, LABELS, num_states=4)
    assert confusion.tolist() == [[2, 0, 0, 0], [0, 1, 1, 0], [1, 0, 2, 0], [0, 0, 0, 0]]
    overlap = metrics.intersection_over_union(confusion)
    for state in range(3):
        true, chosen = (state == LABELS), (state == PREDICTED) & (LABELS >= 0)
        assert overlap[state] == int((true & chosen).sum()) / int((true | chosen).sum())
    assert overlap[3].isnan()
    masked = metrics.confusion_matrix(PREDICTED, LABELS, 3, mask=LABELS == 2)
    assert masked.tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 2]]


def test_log_loss_and_reliability():
    marginals = torch.softmax(torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)
    counted = [tuple(place) for place in (LABELS >= 0).nonzero().tolist()]
    pairs = [(float(marginals[place][state]), int(LABELS[place] == state)) for place in counted for state in range(3)]
    true = torch.tensor([p for p, right in pairs if right])
    assert metrics.log_loss(marginals, LABELS) == pytest.approx(float(-true.log().mean()))
    found = metrics.reliability(marginals, LABELS, num_bins=4)
    assert found.counts.sum() == len(pairs) == 21
    error = 0.0
    for b in range(4):
        inside = [(p, right) for p, right in pairs if b / 4 < p <= (b + 1) / 4]
        assert found.counts[b] == len(inside)
        if inside:
            mean, share = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            assert float(found.means[b]) == pytest.approx(mean)
            assert float(found.shares[b]) == pytest.approx(share)
            error += len(inside) / 21 * abs(mean - share)
    assert found.calibration_error == pytest.approx(error)
    halves = [metrics.reliability(marginals[k], LABELS[k], num_bins=4) for k in range(2)]
    assert (halves[0] + halves[1]).calibration_error == pytest.approx(error)


def test_refusals():
    with pytest.raises(ValueError, match="`predicted` must have the shape"):
        metrics.confusion_matrix(PREDICTED[:, :2], LABELS, 3)
    with pytest.raises(ValueError, match=r"`predicted` must hold states from 0 to 1\. Got 3"):
        metrics.confusion_matrix(torch.tensor([3]), torch.tensor([0]), 2)  # 3 = 1 * 2 + 1, the place of a right 1
    with pytest.raises(ValueError, match=r"`labels` must hold states from 0 to 1\. Got 2"):
        metrics.confusion_matrix(torch.tensor([0]), torch.tensor([2]), 2)
    with pytest.raises(ValueError, match="`labels` must hold at least one target"):
        metrics.reliability(torch.ones(2, 3), torch.tensor([-1, -1]))
