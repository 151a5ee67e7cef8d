"""Errors, overlaps and calibration, against counts by hand."""

import pytest
import torch

from riskfield import metrics

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
