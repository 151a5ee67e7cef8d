"""Linear chains by exact maximum likelihood, beside CRFsuite."""

import numpy as np
import pytest
import torch

import riskfield as rf

sklearn_crfsuite = pytest.importorskip("sklearn_crfsuite")

STATES, FEATURES, RIDGE = 4, 6, 0.5


def sequences(number, seed):
    """Inputs and labels of chains of 3 to 9 variables, drawn from left to right with weights that are fixed."""
    weights = torch.Generator().manual_seed(0)
    node = 4 * torch.randn(FEATURES, STATES, generator=weights, dtype=torch.float64)
    pair = torch.randn(STATES, STATES, generator=weights, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(number):
        graph = rf.chain(3 + k % 7, STATES, tied=True)
        # Not negative: CRFsuite drops features whose values sum to less than 0.
        inputs = torch.rand(graph.num_variables, FEATURES, generator=generator, dtype=torch.float64)
        labels: list[int] = []
        for scores in inputs @ node:
            logits = scores + pair[labels[-1]] if labels else scores
            labels.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        found.append((graph, inputs, torch.tensor(labels)))
    return found


def as_examples(found):
    """One block per length."""
    by_length = {}
    for graph, inputs, labels in found:
        by_length.setdefault(graph.num_variables, (graph, [], []))[1].append(inputs)
        by_length[graph.num_variables][2].append(labels)
    return [rf.Examples(graph, torch.stack(y), {"nodes": torch.stack(x)}) for graph, x, y in by_length.values()]


def as_tokens(found):
    """What CRFsuite reads: one dict of features per token, one string per label."""
    x = [[{f"f{k}": float(v) for k, v in enumerate(token)} for token in inputs] for _, inputs, _ in found]
    return x, [[str(label) for label in labels.tolist()] for _, _, labels in found]


def predictions(model, blocks):
    """Accuracy of the most probable joint states, and the log-likelihood."""
    right = total = 0
    log_likelihood = 0.0
    for block in blocks:
        theta = model(block.graph, block.inputs).detach()
        best = rf.infer(block.graph, theta, rf.MaxProduct()).mode()
        right, total = right + int((best == block.labels).sum()), total + best.numel()
        log_likelihood -= float(
            rf.losses.SurrogateLikelihood()(block.graph, theta, block.labels, rf.Inference(rf.Exact())).sum()
        )
    return right / total, log_likelihood


def test_exact_likelihood_is_that_of_crfsuite():
    train, test = sequences(70, seed=1), sequences(210, seed=1000)
    theirs = sklearn_crfsuite.CRF(
        algorithm="lbfgs",
        c1=0.0,
        c2=RIDGE,
        max_iterations=500,
        epsilon=1e-9,
        delta=1e-12,
        all_possible_states=True,
        all_possible_transitions=True,
    )
    theirs.fit(*as_tokens(train))
    x, y = as_tokens(test)
    their_accuracy = np.mean(np.concatenate(theirs.predict(x)) == np.concatenate(y))
    their_likelihood = {}
    for name, part in (("train", train), ("test", test)):
        total = 0.0
        for tokens, labels in zip(*as_tokens(part), strict=True):
            theirs.tagger_.set(tokens)
            total += float(np.log(theirs.tagger_.probability(labels)))
        their_likelihood[name] = total

    node = torch.nn.Linear(FEATURES, STATES, bias=False, dtype=torch.float64)
    model = rf.Conditional(node, rf.models.Tables(1, STATES, STATES))
    torch.nn.init.zeros_(node.weight)
    result = rf.fit(
        model,
        as_examples(train),
        rf.losses.SurrogateLikelihood(),
        rf.Inference(rf.Exact()),
        ridge=RIDGE,
        per_variable=False,
        optimiser=rf.optim.LBFGS(gradient_tol=1e-5, change_tol=1e-12),
        progress=False,
    )
    accuracy, likelihood = predictions(model, as_examples(test))
    _, train_likelihood = predictions(model, as_examples(train))
    assert result.reason is rf.learning.Reason.CONVERGED
    assert accuracy > 0.6  # of four states
    assert accuracy == pytest.approx(their_accuracy, abs=0.005)
    assert train_likelihood == pytest.approx(their_likelihood["train"], rel=1e-3)
    assert likelihood == pytest.approx(their_likelihood["test"], rel=1e-3)
    # The weights, too: both minimise the same strictly convex function.
    for (name, label), weight in theirs.state_features_.items():
        assert float(node.weight[int(label), int(name[1:])].detach()) == pytest.approx(weight, abs=1e-3)
    for (first, second), weight in theirs.transition_features_.items():
        assert float(model.factors["factors"].values[0, int(first), int(second)].detach()) == pytest.approx(
            weight, abs=1e-2
        )
