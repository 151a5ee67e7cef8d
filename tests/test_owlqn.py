"""OWL-QN: the minimum of objectives with an L1 penalty."""

import numpy as np
import pytest
import torch

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model, values
from riskfield.learning.objective import Evaluation
from test_lbfgs import Function


class Lasso(Function):
    """A smooth function with an L1 penalty."""

    def __init__(self, function, start, weight):
        super().__init__(function, start)
        self.lasso = weight

    def __call__(self):
        at = super().__call__()
        penalty = self.lasso * float(self.parameters[0].detach().abs().sum())
        return Evaluation(at.value + penalty, at.risk, at.gradient)


def test_the_minimum_of_a_separable_function_is_soft_thresholding():
    centre = torch.tensor([3.0, -2.0, 0.5, -0.2, 0.0], dtype=torch.float64)
    scale = torch.tensor([1.0, 5.0, 1.0, 10.0, 1.0], dtype=torch.float64)
    function = Lasso(lambda x: (scale * (x - centre).square()).sum() / 2, [0.1] * 5, weight=1.0)
    run = rf.optim.LBFGS().start(function, seed=0)
    for k in range(60):
        step = run.step(k + 1)
        if step.converged:
            break
    expected = centre.sign() * (centre.abs() - 1 / scale).clamp(min=0)
    torch.testing.assert_close(function.parameters[0].detach(), expected, atol=1e-6, rtol=0)
    assert (function.parameters[0] == 0).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("start", [1e16, 1e-3], ids=["the step is lost in rounding", "what moves is 0 already"])
def test_no_point_is_evaluated_twice(start):
    seen = []

    def jagged(x):
        """It is lowest where the search starts, though its gradient says otherwise."""
        seen.append(x.item())
        return x.sum() / 2 + 1e3 * float(x.item() != start)

    step = rf.optim.LBFGS().start(Lasso(jagged, [start], weight=0.1), seed=0).step(1)
    assert step.stalled
    assert len(set(seen)) == len(seen)


def lasso_fit(lasso, **settings):
    model = chain_model()
    optimiser = rf.optim.LBFGS(gradient_tol=1e-7, change_tol=1e-14)
    loss = rf.losses.SurrogateLikelihood()
    result = rf.fit(
        model, chain_examples(40), loss, EXACT, lasso=lasso, optimiser=optimiser, progress=False, **settings
    )
    return values(model), result


def test_optimality_and_sparsity():
    weight = 0.02
    found, result = lasso_fit(weight, ridge=1e-3)
    assert result.reason is rf.learning.Reason.CONVERGED
    assert 0 < int((found == 0).sum()) < len(found)
    model = chain_model()
    objective = rf.learning.objective.Objective(
        model, chain_examples(40), rf.losses.SurrogateLikelihood(), EXACT, ridge=1e-3
    )
    rf.learning.objective.assign(objective.parameters, found)
    gradient = objective().gradient  # the subgradient contains 0
    np.testing.assert_allclose(gradient[found != 0], -weight * found[found != 0].sign(), atol=1e-6)
    assert (gradient[found == 0].abs() <= weight + 1e-6).all()
    assert (lasso_fit(10.0)[0] == 0).all()


def test_resumed(tmp_path):
    whole, _ = lasso_fit(0.02)
    few = rf.optim.LBFGS(iterations=3, gradient_tol=1e-7, change_tol=1e-14)
    model, loss = chain_model(), rf.losses.SurrogateLikelihood()
    settings = {"lasso": 0.02, "progress": False, "checkpoint": tmp_path}
    rf.fit(model, chain_examples(40), loss, EXACT, optimiser=few, **settings)
    more = rf.optim.LBFGS(gradient_tol=1e-7, change_tol=1e-14)
    model = chain_model()
    rf.fit(model, chain_examples(40), loss, EXACT, optimiser=more, resume=True, **settings)
    assert torch.equal(values(model), whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lasso": -1.0}, "`lasso` must be a non-negative number. Got -1.0."),
        (
            {"lasso": 1.0, "optimiser": rf.optim.Torch(torch.optim.Adam)},
            "`lasso` needs the optimiser `LBFGS`. Got Torch",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        rf.fit(chain_model(), chain_examples(), rf.losses.Independent(), progress=False, **settings)
    assert message in str(caught.value)
