"""Examples and data sets of them."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import riskfield as rf
from riskfield.examples import blocks, take

GRAPH = rf.chain(3, 2)
LABELS = torch.tensor([[0, 1, 1], [1, 0, -1], [0, 0, 0], [1, 1, 1]])


@dataclass(frozen=True)
class Features:
    nodes: Tensor
    edges: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


ROWS = torch.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize(
    ("inputs", "entry"),
    [
        (ROWS, lambda inputs: inputs),
        ({"nodes": ROWS, "more": [ROWS + 1]}, lambda inputs: inputs["more"][0] - 1),
        (Features(ROWS), lambda inputs: inputs.nodes),
        (Pair(ROWS, ROWS), lambda inputs: inputs.right),
        ((ROWS, None), lambda inputs: inputs[0]),
    ],
    ids=["tensor", "dict", "dataclass", "namedtuple", "tuple"],
)
def test_select_takes_every_part(inputs, entry):
    examples = rf.Examples(
        GRAPH,
        LABELS,
        inputs,
        evidence=torch.full((4, 3), -1),
        mask=LABELS == 1,
        weights=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    chosen = examples.select([2, 0])
    assert type(chosen.inputs) is type(inputs)
    assert torch.equal(entry(chosen.inputs), ROWS[[2, 0]])
    assert torch.equal(chosen.labels, LABELS[[2, 0]])
    assert torch.equal(chosen.mask, LABELS[[2, 0]] == 1)
    assert chosen.weights.tolist() == [3.0, 1.0]
    assert chosen.evidence.shape == (2, 3)
    assert chosen.graph is GRAPH
    assert torch.equal(examples.select(slice(1, 3)).labels, LABELS[1:3])
    assert len(examples.select(torch.tensor([], dtype=torch.int64))) == 0


def test_to_moves_every_part():
    moved = rf.Examples(GRAPH, LABELS, {"nodes": ROWS}, weights=torch.ones(4)).to("meta")
    assert {moved.labels.device.type, moved.inputs["nodes"].device.type, moved.weights.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"graph": "chain"}, TypeError, "`graph` must be a FactorGraph. Got str."),
        ({"labels": LABELS[0]}, ValueError, r"`labels` must have shape \(n, 3\). Got \(3,\)."),
        ({"labels": LABELS + 1}, ValueError, "`labels` of variable 1 must lie in -1..1. Got 2."),
        ({"labels": LABELS.double()}, TypeError, "`labels` must be integers"),
        ({"evidence": LABELS[:2]}, ValueError, r"`evidence` must have shape \(4, 3\) to match `labels`. Got \(2, 3\)."),
        ({"mask": LABELS}, TypeError, "`mask` must be booleans. Got torch.int64."),
        ({"mask": LABELS[:, :2] > 0}, ValueError, r"`mask` must have shape \(4, 3\)"),
        ({"weights": torch.ones(3)}, ValueError, r"`weights` must have shape \(4,\)"),
        ({"weights": -torch.ones(4)}, ValueError, "`weights` must be finite and not negative."),
        ({"inputs": torch.zeros(5, 2)}, ValueError, r"one entry per example, 4, on the first axis. Got \(5, 2\)."),
        ({"inputs": {"nodes": "pixels"}}, TypeError, "`inputs` must be a tensor, or a dict.* Got str."),
    ],
)
def test_bad_examples_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        rf.Examples(**{"graph": GRAPH, "labels": LABELS, **changes})


def test_numbers_count_through_the_blocks():
    data = [rf.Examples(GRAPH, LABELS), rf.Examples(rf.chain(2, 2), torch.tensor([[0, 1], [1, 1], [0, 0]]))]
    first, second = take(data, [6, 3, 0, 5])
    assert torch.equal(first.labels, LABELS[[3, 0]])
    assert torch.equal(second.labels, torch.tensor([[0, 0], [1, 1]]))
    assert [len(part) for part in take(data, [5])] == [0, 1]


def test_a_data_set_holds_examples():
    assert len(blocks(rf.Examples(GRAPH, LABELS))) == 1
    with pytest.raises(TypeError, match=r"`data` must be `Examples` or a sequence of them. Got Tensor."):
        blocks([LABELS])
    with pytest.raises(ValueError, match=r"`data` must hold at least one example."):
        blocks([rf.Examples(GRAPH, LABELS[:0])])
