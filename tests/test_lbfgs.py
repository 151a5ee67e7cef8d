"""L-BFGS, and OWL-QN for objectives with an L1 penalty."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import riskfield as rf
from learning_cases import EXACT, chain_examples, chain_model, values
from riskfield.learning.objective import Diverged, Evaluation, Objective, assign

# L-BFGS: the right minimum, no evaluation wasted, and the way out of bad search directions.


class Function:
    """Stands in for an objective: value and gradient of a function of a vector, and all points it was asked for."""

    loss = rf.losses.UnivariateLogistic()
    lasso = 0.0

    def __init__(self, function, start, gradient=None):
        self.parameters = [torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))]
        self.function, self.gradient = function, gradient
        self.asked = []

    def __call__(self):
        (point,) = self.parameters
        self.asked.append(tuple(point.tolist()))
        value = self.function(point)
        (gradient,) = torch.autograd.grad(value, point)
        if self.gradient is not None:
            gradient = self.gradient(point.detach(), gradient)
        return Evaluation(value.item(), value.item(), gradient)


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def test_one_step_is_one_iteration_of_torch_and_asks_for_no_point_twice():
    ours = Function(rosenbrock, [-1.2, 1.0])
    run = rf.optim.LBFGS(memory=7).start(ours, seed=0)
    theirs = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    counted = []

    def closure():
        theirs.grad = None
        counted.append(1)
        value = rosenbrock(theirs)
        value.backward()
        return value

    whole = torch.optim.LBFGS(
        [theirs], max_iter=15, max_eval=1000, history_size=7, tolerance_grad=0, line_search_fn="strong_wolfe"
    )
    whole.step(closure)
    for k in range(15):
        run.step(k + 1)
    assert torch.equal(ours.parameters[0].detach(), theirs.detach())
    assert len(set(ours.asked)) == len(ours.asked) == len(counted)


def test_reaches_the_minimum_scipy_finds():
    data = chain_examples(40)
    model = chain_model()
    result = rf.fit(
        model,
        data,
        rf.losses.UnivariateLogistic(),
        EXACT,
        ridge=1e-2,
        optimiser=rf.optim.LBFGS(gradient_tol=1e-8, change_tol=1e-15),
        progress=False,
    )
    other = chain_model()
    objective = Objective(other, data, rf.losses.UnivariateLogistic(), EXACT, ridge=1e-2)

    def function(gamma):
        assign(objective.parameters, torch.tensor(gamma))
        at = objective()
        return at.value, at.gradient.numpy()

    best = minimize(
        function, np.zeros(len(values(model))), jac=True, method="L-BFGS-B", options={"gtol": 1e-8, "ftol": 0}
    )
    assert result.reason is rf.learning.Reason.CONVERGED
    assert result.best.objective == pytest.approx(best.fun, rel=1e-10)
    assert torch.allclose(values(model), torch.tensor(best.x), atol=1e-5)


def test_a_bad_search_direction_throws_the_memory_away():
    """A small error in a flat direction of the gradient: the memory blows it up, along the gradient it is harmless."""
    scales = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    error = torch.zeros(2, dtype=torch.float64)
    function = Function(
        lambda x: (scales * x.square()).sum() / 2, [1.0, 100.0], gradient=lambda point, gradient: gradient + error
    )
    run = rf.optim.LBFGS().start(function, seed=0)
    for k in range(40):
        before = run.step(k + 1)
        if function.parameters[0][1] < 10:
            break
    assert not before.restarted
    error[1] = -3 * scales[1] * function.parameters[0][1].detach()  # points the other way
    assign(function.parameters, function.parameters[0].detach() + torch.tensor([0.1, 0.0], dtype=torch.float64))
    start = float(function().value)
    step = run.step(41)
    assert step.restarted
    assert not step.stalled
    assert step.at.value < start


def test_where_the_gradient_points_uphill_there_is_nothing_to_be_done():
    function = Function(lambda x: x.square().sum(), [1.0, 2.0], gradient=lambda point, gradient: -gradient)
    step = rf.optim.LBFGS().start(function, seed=0).step(1)
    assert step.stalled
    assert function.parameters[0].tolist() == [1.0, 2.0]


def test_fit_says_when_it_is_stalled():
    class Backwards(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    def loss(solution, labels, mask):
        return Backwards.apply(rf.losses.UnivariateLogistic().of_solution(solution, labels, mask))

    model = chain_model()
    result = rf.fit(model, chain_examples(), loss, EXACT, progress=False)
    assert result.reason is rf.learning.Reason.STALLED
    assert "does not decrease along its gradient" in result.explanation
    assert values(model).abs().max() == 0


def test_a_cliff_in_the_line_search_ends_at_the_lowest_point_before_it():
    def down_to_the_cliff(x):
        if x[0] > 1:
            raise Diverged("over the cliff")
        return -x[0]

    function = Function(down_to_the_cliff, [0.0])
    run = rf.optim.LBFGS().start(function, seed=0)
    step = run.step(1)
    assert step.restarted
    assert step.at.value == -1.0
    with pytest.raises(Diverged, match="over the cliff"):
        run.step(2)
    assert function.parameters[0].tolist() == [1.0]


def test_convergence_is_seen_at_once():
    model = chain_model()
    settings = {"ridge": 1e-2, "progress": False}
    rf.fit(
        model,
        chain_examples(),
        rf.losses.UnivariateLogistic(),
        EXACT,
        optimiser=rf.optim.LBFGS(change_tol=1e-15),
        **settings,
    )
    found = values(model)
    again = rf.fit(model, chain_examples(), rf.losses.UnivariateLogistic(), EXACT, **settings)
    assert again.reason is rf.learning.Reason.CONVERGED
    assert len(again.history) == again.history[0].evaluations == 1
    assert torch.equal(values(model), found)


def test_float32_converges():
    data = chain_examples(40)
    single = rf.Examples(data.graph, data.labels, {"nodes": data.inputs["nodes"].float()})
    result = rf.fit(chain_model().float(), single, rf.losses.UnivariateLogistic(), EXACT, ridge=1e-2, progress=False)
    double = rf.fit(chain_model(), data, rf.losses.UnivariateLogistic(), EXACT, ridge=1e-2, progress=False)
    assert result.reason in (rf.learning.Reason.CONVERGED, rf.learning.Reason.STALLED)
    assert result.best.objective == pytest.approx(double.best.objective, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "`iterations` must be a positive integer. Got 0."),
        ({"memory": 2.5}, "`memory` must be a positive integer. Got 2.5."),
        ({"gradient_tol": -1.0}, "`gradient_tol` must be a positive number. Got -1.0."),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rf.optim.LBFGS(**settings)


def test_a_loss_without_values_is_refused():
    with pytest.raises(ValueError, match="must not be `LBFGS` for the loss ContrastiveDivergence"):
        rf.fit(chain_model(), chain_examples(), rf.losses.ContrastiveDivergence())


# OWL-QN: the minimum of objectives with an L1 penalty.


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


def test_optimisers_of_torch_are_pointed_to():
    with pytest.raises(AttributeError, match=r"has no attribute 'Adam'\. Use `Torch\(torch.optim.Adam, \{...\}\)`."):
        rf.optim.Adam  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'\.$"):
        rf.optim.Nothing  # noqa: B018
