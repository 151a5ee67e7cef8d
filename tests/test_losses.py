"""Losses against their definitions, their gradients against differences, and invalid arguments."""

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import riskfield as rf
from cases import lines_run, rows
from gradient_cases import CONVERGED, TRUNCATED, finite_differences
from loss_cases import DEFINITIONS, LOSSES, Naive, draw, losses
from strategies import brute_force, forests, graphs, potentials, seeds

# Losses compared with their definitions, with masks, evidence, hidden variables and weights; and invalid arguments.


EXACT = rf.Inference(rf.Exact())
small = graphs(max_variables=4, max_factors=4)
close = {"rtol": 1e-9, "atol": 1e-9}
MIXED = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (1, 2), (2, 0), (2, 1, 3), (3,)])


def case_of(name):
    return next(case for case in LOSSES if case.name == name)


# -- definitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=12)
@given(graph=small, seed=seeds)
def test_definition(name, graph, seed):
    """Exact inference, without and with hidden variables, and with hidden variables and evidence."""
    case = case_of(name)
    theta = potentials(graph, seed, "mild", 2)
    for hidden, observed in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.3)):
        labels, evidence = draw(graph, seed, 2, hidden=hidden, given=observed)
        actual = case.loss(graph, theta, labels, EXACT, evidence=evidence)
        for item in range(2):
            naive = Naive(graph, theta[item], labels[item], None if evidence is None else evidence[item])
            torch.testing.assert_close(float(actual[item]), float(DEFINITIONS[name](naive)), **close)


@settings(max_examples=12)
@given(graph=small, seed=seeds)
def test_surrogate_likelihood_is_the_likelihood_under_exact_inference(graph, seed):
    theta = potentials(graph, seed)
    labels, evidence = draw(graph, seed, given=0.4)
    naive = Naive(graph, theta, labels, evidence)
    actual = rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT, evidence=evidence)
    torch.testing.assert_close(float(actual), naive.log_total(naive.given) - naive.log_total(naive.known), **close)


@settings(max_examples=12)
@given(graph=forests(max_variables=5), seed=seeds)
def test_saddle_point_compares_with_the_best_joint_state(graph, seed):
    theta = potentials(graph, seed)
    labels, evidence = draw(graph, seed, hidden=0.3, given=0.3)
    naive = Naive(graph, theta, labels, evidence)
    at = lambda known: naive.scores[tuple(slice(None) if x < 0 else x for x in known)].max()  # noqa: E731
    actual = rf.losses.SaddlePoint()(graph, theta, labels, evidence=evidence)
    torch.testing.assert_close(float(actual), float(at(naive.given) - at(naive.known)), **close)


PATCHED = [
    (rf.grid(3, 3, 2), [0, 0, 0, 1, 1, 1, 2, 2, 2]),  # rows: trees
    (rf.grid(2, 4, 2), [0, 0, 1, 1, 0, 0, 1, 1]),  # blocks that touch
    (rf.FactorGraph([2, 3, 2, 2], [(0, 1, 2), (2, 3), (3,)]), [7, 7, -2, 5]),  # any integers, a wide factor
    (rf.chain(4, 3), [0, 1, 2, 3]),  # single variables
]


@pytest.mark.parametrize(("graph", "patches"), PATCHED)
def test_patch_pseudolikelihood(graph, patches):
    theta = potentials(graph, 1, "mild", 2)
    labels, evidence = draw(graph, 2, 2, given=0.2)
    for observed in (None, evidence):
        actual = rf.losses.PatchPseudolikelihood(patches)(graph, theta, labels, EXACT, evidence=observed)
        for item in range(2):
            naive = Naive(graph, theta[item], labels[item], None if observed is None else observed[item])
            expected = 0.0
            for patch in set(patches):
                inside = [p == patch and scored for p, scored in zip(patches, naive.is_target, strict=True)]
                outside = [-1 if free else x for free, x in zip(inside, naive.known, strict=True)]
                expected += naive.log_total(outside) - naive.log_total(naive.known)
            torch.testing.assert_close(float(actual[item]), expected, **close)


def test_patch_pseudolikelihood_between_its_extremes():
    graph = rf.grid(3, 3, 2)
    theta, (labels, _) = potentials(graph, 1), draw(graph, 2)
    patched = lambda patches: rf.losses.PatchPseudolikelihood(patches)(graph, theta, labels, EXACT)  # noqa: E731
    singles, whole = patched(torch.arange(9)), patched(torch.zeros(9, dtype=torch.int64))
    torch.testing.assert_close(singles, rf.losses.Pseudolikelihood()(graph, theta, labels))
    torch.testing.assert_close(whole, rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT))


def test_patch_pseudolikelihood_with_message_passing_is_exact_on_rows():
    graph = rf.grid(3, 4, 2)
    theta, (labels, _) = potentials(graph, 1, "mild", 3), draw(graph, 2, 3)
    rows = rf.losses.PatchPseudolikelihood(torch.arange(3).repeat_interleave(4))
    by_messages = rows(graph, theta, labels, rf.Inference(rf.MessagePassing(), rf.Stop(tol=1e-13)))
    torch.testing.assert_close(by_messages, rows(graph, theta, labels, EXACT))


def test_patch_pseudolikelihood_sums_over_hidden_variables():
    """Patches 0 and 2 share no factor, so they have one colour and are predicted jointly through hidden variable 2."""
    graph = rf.chain(5, 2)
    theta, labels = potentials(graph, 3), torch.tensor([0, 1, -1, 1, 0])
    naive = Naive(graph, theta, labels)
    freed = [-1, 1, -1, 1, -1], [0, -1, -1, -1, 0]
    expected = sum(naive.log_total(free) - naive.log_total(naive.known) for free in freed)
    actual = rf.losses.PatchPseudolikelihood([0, 1, 1, 1, 2])(graph, theta, labels, EXACT)
    torch.testing.assert_close(float(actual), expected, **close)


@settings(max_examples=15)
@given(graph=small, seed=seeds)
def test_piecewise_is_never_below_minus_the_log_likelihood(graph, seed):
    theta, (labels, _) = potentials(graph, seed), draw(graph, seed)
    likelihood = rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT)
    assert rf.losses.Piecewise()(graph, theta, labels) >= likelihood - 1e-9


def test_contrastive_divergence_tends_to_the_gradient_of_the_likelihood():
    graph = rf.chain(3, 2)
    theta = potentials(graph, 1).requires_grad_()
    labels = draw(graph, 2)[0].expand(20_000, -1)
    (drawn,) = torch.autograd.grad(rf.losses.ContrastiveDivergence(30, seed=1)(graph, theta, labels).mean(), theta)
    (true,) = torch.autograd.grad(rf.losses.SurrogateLikelihood()(graph, theta, labels, EXACT).mean(), theta)
    torch.testing.assert_close(drawn, true, rtol=0, atol=0.02)


def test_contrastive_divergence_moves_only_what_is_free():
    graph = rf.chain(4, 2)
    theta = potentials(graph, 1).requires_grad_()
    labels, evidence = torch.tensor([[0, 1, -1, 1]] * 50), torch.tensor([1, -1, -1, -1])
    for observed in (evidence, evidence.unsqueeze(0), evidence.expand(50, -1)):
        value = rf.losses.ContrastiveDivergence(1, seed=1)(graph, theta, labels, evidence=observed)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        assert (graph.node(gradient, 0) == 0).all()
        assert (graph.node(gradient, 1) != 0).all()
        again = rf.losses.ContrastiveDivergence(1, seed=1)(graph, theta, labels, evidence=observed)
        assert torch.equal(value, again)


def test_a_weight_of_zero_leaves_a_loss_uncomputed():
    graph = rf.chain(3, 2)
    theta, (labels, _) = potentials(graph, 1), draw(graph, 2)
    never = rf.losses.SurrogateLikelihood()  # raises an error without inference
    for hybrid in (
        rf.losses.Hybrid(rf.losses.Piecewise(), never, 1.0),
        rf.losses.Hybrid(never, rf.losses.Piecewise(), 0.0),
    ):
        torch.testing.assert_close(hybrid(graph, theta, labels), rf.losses.Piecewise()(graph, theta, labels))


def test_hybrids_of_marginals_infer_once():
    ran = []

    class Counted(rf.Inference):
        def __call__(self, *arguments, **options):
            ran.append(options)
            return super().__call__(*arguments, **options)

    graph = rf.chain(3, 2)
    theta, (labels, _) = potentials(graph, 1), draw(graph, 2)
    rf.losses.Hybrid(rf.losses.UnivariateLogistic(), rf.losses.MSE(), 0.5)(graph, theta, labels, Counted(rf.Exact()))
    assert len(ran) == 1


def test_roles_of_the_runs():
    roles = []

    class Watched(rf.Inference):
        def __call__(self, graph, theta, *, evidence=None, role=rf.losses.Role.FREE):
            roles.append((role, type(self.algorithm)))
            return super().__call__(graph, theta, evidence=evidence, role=role)

    graph = rf.chain(3, 2)
    theta, inference = potentials(graph, 1), Watched(rf.MessagePassing())
    rf.losses.SurrogateEM(clamped=rf.MeanField())(graph, theta, torch.tensor([0, -1, 1]), inference)
    rf.losses.SurrogateEM()(graph, theta, torch.tensor([0, 1, 1]), inference)  # nothing hidden: no clamped run
    assert roles == [
        (rf.losses.Role.FREE, rf.MessagePassing),
        (rf.losses.Role.CLAMPED, rf.MeanField),
        (rf.losses.Role.FREE, rf.MessagePassing),
    ]


# -- properties that all losses share --------------------------------------------------------------------------------

INFERENCE = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-12), rf.FixedPoint())
BINARY = rf.grid(2, 3, 2)
SEEDED = {"contrastive-divergence"}  # a batch draws different random numbers than its items one by one


def suitable(row):
    return BINARY if row.binary else MIXED


@losses(lambda row: row.name not in SEEDED)
def test_batch_is_loop(row):
    graph = suitable(row)
    theta = potentials(graph, 1, "mild", 2, 2)
    labels, evidence = draw(graph, 2, 2, 2, hidden=0.2 * row.hidden, given=0.2)
    whole = row.loss(graph, theta, labels, INFERENCE, evidence=evidence)
    assert whole.shape == (2, 2)
    for i in range(2):
        for j in range(2):
            single = row.loss(graph, theta[i, j], labels[i, j], INFERENCE, evidence=evidence[i, j])
            torch.testing.assert_close(whole[i, j], single, **close)


@losses(lambda row: row.name not in SEEDED)
def test_one_theta_serves_many_examples(row):
    graph = suitable(row)
    theta = potentials(graph, 1)
    labels, _ = draw(graph, 2, 5, hidden=0.2 * row.hidden)
    shared = row.loss(graph, theta, labels, INFERENCE)
    repeated = row.loss(graph, theta.expand(5, -1), labels, INFERENCE)
    torch.testing.assert_close(shared, repeated, **close)


@losses()
def test_no_examples_have_no_losses(row):
    graph = suitable(row)
    theta, labels = potentials(graph, 1), torch.empty(0, graph.num_variables, dtype=torch.int64)
    for own in (theta, theta.expand(0, -1)):
        assert row.loss(graph, own, labels, INFERENCE).shape == (0,)


@losses(lambda row: row.hidden)
def test_masked_variables_are_hidden(row):
    graph = suitable(row)
    theta = potentials(graph, 1, "mild", 3)
    labels, _ = draw(graph, 2, 3)
    mask = draw(graph, 4, 3)[0] > 0
    masked = row.loss(graph, theta, labels, INFERENCE, mask=mask)
    hidden = row.loss(graph, theta, torch.where(mask, labels, -1), INFERENCE)
    torch.testing.assert_close(masked, hidden)


@losses()
def test_evidence_takes_precedence_over_labels(row):
    """Labels of observed variables are ignored."""
    graph = suitable(row)
    theta = potentials(graph, 1, "mild", 3)
    labels, evidence = draw(graph, 2, 3, given=0.3)
    with_labels = row.loss(graph, theta, labels, INFERENCE, evidence=evidence)
    without = row.loss(graph, theta, torch.where(evidence >= 0, -1, labels), INFERENCE, evidence=evidence)
    torch.testing.assert_close(with_labels, without)


@losses()
def test_single_precision(row):
    graph = suitable(row)
    theta, (labels, _) = potentials(graph, 1), draw(graph, 2)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-5))
    single = row.loss(graph, theta.float(), labels, inference)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), row.loss(graph, theta, labels, inference), rtol=1e-3, atol=1e-3)


@losses(lambda row: row.hidden and row.name != "custom")
def test_loss_without_targets_is_zero(row):
    graph = suitable(row)
    theta = potentials(graph, 1)
    labels = torch.full((graph.num_variables,), -1)
    value = row.loss(graph, theta, labels, INFERENCE)
    if row.name not in {"mixed-em", "contrastive-divergence"}:  # their two terms use different approximations
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-9)


def test_impossible_labels_have_infinite_loss():
    graph = rf.chain(2, 2)
    theta = graph.zeros()
    graph.node(theta, 0)[1] = -math.inf
    labels = torch.tensor([1, 0])
    for loss in (
        rf.losses.UnivariateLogistic(),
        rf.losses.CliqueLogistic(),
        rf.losses.SurrogateLikelihood(),
        rf.losses.Independent(),
    ):
        assert loss(graph, theta, labels, EXACT) == math.inf
    for loss in (rf.losses.Pseudolikelihood(), rf.losses.Piecewise()):
        assert loss(graph, theta, labels) == math.inf


@losses(lambda row: row.name != "custom")
def test_impossible_states_other_than_labels_keep_value_and_gradient_finite(row):
    """Also if the variable with impossible states is hidden."""
    graph = suitable(row)
    theta = potentials(graph, 1)
    graph.node(theta, 0)[1] = -math.inf
    graph.factor(theta, 1)[0, 1] = -math.inf
    labels = torch.zeros(graph.num_variables, dtype=torch.int64)
    labels[-1] = -1 if row.hidden else 1
    theta.requires_grad_()
    value = row.loss(graph, theta, labels, INFERENCE)
    (gradient,) = torch.autograd.grad(value, theta)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


# -- the risk --------------------------------------------------------------------------------------------------------


def test_empirical_risk_weighs_and_normalises():
    graph = rf.chain(3, 2)
    theta = potentials(graph, 1, "mild", 3)
    labels, weights = torch.tensor([[0, 1, 1], [1, -1, -1], [0, 0, -1]]), torch.tensor([1.0, 2.0, 0.5])
    values = rf.losses.UnivariateLogistic()(graph, theta, labels, EXACT)

    def risk(**options):
        return rf.losses.empirical_risk(rf.losses.UnivariateLogistic(), graph, theta, labels, EXACT, **options)

    torch.testing.assert_close(risk(), values.sum())
    torch.testing.assert_close(risk(weights=weights), weights.double() @ values)
    torch.testing.assert_close(risk(per_variable=True), values.sum() / 6)
    torch.testing.assert_close(risk(weights=weights, per_variable=True), weights.double() @ values / 6)
    assert rf.losses.num_counted(graph, labels).tolist() == [3, 1, 2]
    evidence = torch.tensor([0, -1, -1])
    assert rf.losses.num_counted(graph, labels, evidence=evidence).tolist() == [2, 0, 1]
    assert rf.losses.num_counted(graph, labels, mask=labels > 0).tolist() == [2, 1, 0]


def test_a_function_is_a_loss():
    graph = rf.chain(3, 2)
    theta, (labels, _) = potentials(graph, 1, "mild", 2), draw(graph, 2, 2)

    def missed(solution, labels, mask):
        return ((solution.mode() != labels) & mask).sum(-1).double()

    assert (
        rf.losses.empirical_risk(missed, graph, theta, labels, EXACT)
        == rf.losses.Custom(missed)(graph, theta, labels, EXACT).sum()
    )
    assert isinstance(rf.losses.Hybrid(missed, rf.losses.MSE(), 0.5).a, rf.losses.Custom)


# -- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [rf.losses.Pseudolikelihood(), rf.losses.Piecewise()], ids=["pseudolikelihood", "piecewise"]
)
def test_losses_without_inference_are_vectorised(loss):
    """Value and gradient run as many lines of Python on a large image as on a small one."""

    def lines(rows, columns):
        graph = rf.grid(rows, columns, 2)
        theta = torch.randn(4, graph.theta_size, dtype=torch.float64, requires_grad=True)
        labels, _ = draw(graph, 1, 4)
        loss(graph, theta, labels)  # what is kept with the graph is computed once
        return lines_run(lambda: loss(graph, theta, labels).sum().backward())

    assert lines(40, 60) == lines(4, 6)


# -- invalid arguments -----------------------------------------------------------------------------------------------


@losses(lambda row: row.infers)
def test_losses_that_need_inference_require_it(row):
    graph = suitable(row)
    with pytest.raises(ValueError, match="needs `inference`, such as"):
        row.loss(graph, graph.zeros(), draw(graph, 1)[0])


GRAPH = rf.chain(3, 2)
LABELS = torch.tensor([[0, 1, 1], [1, -1, 0]])


def call(**changes):
    arguments = {"graph": GRAPH, "theta": GRAPH.zeros(2), "labels": LABELS, "inference": EXACT} | changes
    return rf.losses.UnivariateLogistic()(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"graph": "chain"}, TypeError, "`graph` must be a FactorGraph. Got str"),
        ({"inference": rf.Exact()}, TypeError, "`inference` must be an object such as `Inference(MessagePassing())`"),
        ({"theta": GRAPH.zeros(2)[:, 1:]}, ValueError, "`theta` must have shape (*batch, 14)"),
        ({"labels": LABELS.double()}, TypeError, "`labels` must be integers"),
        ({"labels": LABELS + 1}, ValueError, "`labels` of variable 1 must lie in -1..1. Got 2"),
        ({"labels": LABELS[:, :2]}, ValueError, "`labels` must have shape (*batch, 3). Got (2, 2)"),
        ({"labels": LABELS[:1]}, ValueError, "`labels` must have the batch shape (2,) of theta. Got shape (1, 3)"),
        ({"evidence": LABELS[:1].expand(3, -1)}, ValueError, "`evidence` must broadcast to the shape (2, 3) of labels"),
        ({"mask": LABELS}, TypeError, "`mask` must be a bool tensor. Got torch.int64"),
        ({"mask": torch.ones(3, 3, dtype=bool)}, ValueError, "`mask` must broadcast to the shape (2, 3) of labels"),
        ({"mask": LABELS > -2}, ValueError, "`mask` must be False for variables whose label is -1"),
        (
            {"mask": LABELS >= 0, "evidence": torch.tensor([0, -1, -1])},
            ValueError,
            "variables that `evidence` observes",
        ),
    ],
)
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rf.losses.SmoothedClassification(0), ValueError, "`alpha` must be above 0 and finite. Got 0"),
        (
            lambda: rf.losses.CliqueSmoothedClassification("5"),
            ValueError,
            "`alpha` must be above 0 and finite. Got '5'",
        ),
        (
            lambda: rf.losses.SurrogateEM("mf"),
            TypeError,
            "`clamped` must be an algorithm such as `MeanField()`, or None",
        ),
        (lambda: rf.losses.SaddlePoint("max"), TypeError, "`algorithm` must be an algorithm such as `MaxProduct()`"),
        (lambda: rf.losses.ContrastiveDivergence(0), ValueError, "`steps` must be a positive integer. Got 0"),
        (lambda: rf.losses.PatchPseudolikelihood([[0]]), ValueError, "`patches` must hold one integer per variable"),
        (lambda: rf.losses.PatchPseudolikelihood([0.5]), ValueError, "`patches` must hold integers"),
        (
            lambda: rf.losses.Hybrid(rf.losses.MSE(), rf.losses.MSE(), 1.5),
            ValueError,
            "`weight` must lie in [0, 1]. Got 1.5",
        ),
        (
            lambda: rf.losses.Hybrid("ul", rf.losses.MSE(), 0.5),
            TypeError,
            "`loss` must be a loss such as `UnivariateLogistic()`",
        ),
        (
            lambda: rf.losses.Hybrid(rf.losses.MSE, rf.losses.MSE(), 0.5),
            TypeError,
            "`loss` must be a loss such as `UnivariateLogistic()`",
        ),
        (
            lambda: rf.losses.L1(rf.decoders.MaxMarginal()),
            TypeError,
            "`decoder` must be a soft decoder such as `SoftArgmax(0.1)`",
        ),
        (lambda: rf.Inference("bp"), TypeError, "`algorithm` must be an object such as `MessagePassing()`. Got 'bp'"),
        (lambda: rf.Inference(stop=3), TypeError, "`stop` must be an object such as `Stop(sweeps=100, tol=1e-6)`"),
        (lambda: rf.Inference(adjoint="unroll"), TypeError, "`adjoint` must be an object such as `Unroll()`, or None"),
    ],
)
def test_bad_settings(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_other_refusals():
    theta = GRAPH.zeros(2)
    with pytest.raises(ValueError, match=r"needs a label for every variable.*use `SurrogateEM`"):
        rf.losses.SurrogateLikelihood()(GRAPH, theta, LABELS, EXACT)
    with pytest.raises(ValueError, match=re.escape("`patches` must hold one integer per variable (3). Got shape (2,)")):
        rf.losses.PatchPseudolikelihood([0, 1])(GRAPH, theta, LABELS, EXACT)
    with pytest.raises(ValueError, match=re.escape("must return one number per example, of shape (2,). Got shape ()")):
        rf.losses.Custom(lambda solution, labels, mask: solution.mu.sum())(GRAPH, theta, LABELS, EXACT)
    with pytest.raises(ValueError, match=r"`FMeasure` is defined for binary variables. Variable 1 has 3 states"):
        rf.losses.FMeasure()(MIXED, MIXED.zeros(), draw(MIXED, 1)[0], EXACT)
    with pytest.raises(ValueError, match="`Envelope` cannot differentiate MaxProduct"):
        rf.losses.SurrogateEM()(GRAPH, theta, LABELS, rf.Inference(rf.MaxProduct()))
    risk = lambda **options: rf.losses.empirical_risk(rf.losses.Independent(), GRAPH, theta, LABELS, **options)  # noqa: E731
    with pytest.raises(ValueError, match=re.escape("`weights` must have shape (2,). Got (3,)")):
        risk(weights=torch.ones(3))
    with pytest.raises(ValueError, match=r"`weights` must be finite and not negative. Got -1.0."):
        risk(weights=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="`per_variable` needs at least one target"):
        rf.losses.empirical_risk(rf.losses.Independent(), GRAPH, theta, torch.full((2, 3), -1), per_variable=True)


def test_brute_force_agrees_with_naive():
    """The reference implementation of this file agrees with the one that the other tests use."""
    theta = potentials(MIXED, 1)
    naive, truth = Naive(MIXED, theta, draw(MIXED, 2)[0]), brute_force(MIXED, theta)
    assert math.isclose(naive.log_total([-1] * 4), truth.log_partition)
    assert math.isclose(naive.marginal((1, 2))[2, 1], float(MIXED.factor(truth.mu, 1)[2, 1]))


# The gradient of every loss with respect to theta, with all algorithms and adjoints, against finite differences.


# Mixed states, arities 1 to 3, a tied pair, a loop.
TIED_MIXED = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (2, 1), (2, 0), (2, 1, 3), (3,)], tables=[0, 0, 1, 2, 3])
BINARY_LOOPS = rf.FactorGraph([2] * 5, [(0, 1), (1, 2), (2, 0), (2, 3, 4)])


def total(row, graph, theta, inference):
    """The summed loss of two examples with hidden and observed variables; theta has shape (*batch, theta)."""
    labels, evidence = draw(graph, 3, 2, hidden=0.3 * row.hidden, given=0.2)
    batch = theta.shape[:-1]
    labels, evidence = labels.expand(*batch, -1, -1), evidence.expand(*batch, -1, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        repeated = theta.unsqueeze(-2).expand(*batch, 2, -1)
        return row.loss(graph, repeated, labels, inference, evidence=evidence).sum(-1)


def check(row, inference):
    graph = BINARY_LOOPS if row.binary else TIED_MIXED
    theta = 0.5 * potentials(graph, 1)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(row, graph, leaf, inference), leaf)
    plain = replace(inference, adjoint=None)
    expected = finite_differences(lambda t: total(row, graph, t, plain), theta)
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7 * scale)


@rows(lambda case: case.marginals and case.kernels)
@losses(lambda row: row.infers)
def test_through_the_sweeps_that_ran(row, case):
    """This includes the truncated likelihood and truncated EM."""
    algorithm = case.make(BINARY_LOOPS if row.binary else TIED_MIXED, None)
    check(row, rf.Inference(algorithm, TRUNCATED, rf.Unroll()))


@rows(lambda case: case.marginals and case.kernels)
@losses(lambda row: row.value and not row.marginal)
def test_of_values_at_convergence(row, case):
    """Surrogate likelihood and EM, with dA/dtheta = mu."""
    algorithm = case.make(BINARY_LOOPS if row.binary else TIED_MIXED, None)
    check(row, rf.Inference(algorithm, CONVERGED))


@pytest.mark.parametrize("adjoint", [rf.FixedPoint(), rf.KKT(), rf.Perturb(sides=4)], ids=lambda a: type(a).__name__)
@losses(lambda row: row.marginal)
def test_at_convergence(row, adjoint):
    check(row, rf.Inference(rf.MessagePassing(rf.TRW(0.5)), CONVERGED, adjoint))


@losses(lambda row: row.marginal)
def test_of_mean_field_at_convergence(row):
    check(row, rf.Inference(rf.MeanField(), CONVERGED, rf.FixedPoint()))


@losses(lambda row: not row.infers)
def test_without_inference(row):
    theta = potentials(TIED_MIXED, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: total(row, TIED_MIXED, t, None), theta)


@pytest.mark.parametrize(
    "inference",
    [
        rf.Inference(rf.MessagePassing(rf.TRW(0.5)), TRUNCATED, rf.Unroll()),
        rf.Inference(rf.MessagePassing(), CONVERGED),
        rf.Inference(rf.MeanField(), CONVERGED),
        rf.Inference(rf.Exact()),
    ],
    ids=["truncated", "bp", "mean-field", "exact"],
)
def test_of_patches(inference):
    loss = rf.losses.PatchPseudolikelihood([0, 0, 1, 1])
    theta = 0.5 * potentials(TIED_MIXED, 1, "mild", 2)
    labels, evidence = draw(TIED_MIXED, 3, 2, hidden=0.2, given=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        value = lambda t: loss(TIED_MIXED, t, labels, inference, evidence=evidence)  # noqa: E731
        assert torch.autograd.gradcheck(value, theta.requires_grad_())


def test_the_gradient_of_the_likelihood_is_marginals_less_statistics():
    graph = rf.grid(3, 3, 2)
    theta, (labels, _) = potentials(graph, 1).requires_grad_(), draw(graph, 2)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-12))
    (gradient,) = torch.autograd.grad(rf.losses.SurrogateLikelihood()(graph, theta, labels, inference), theta)
    mu = inference(graph, theta.detach()).mu
    torch.testing.assert_close(gradient, mu - rf.inference.frequencies(graph, labels.unsqueeze(0)))


@losses(lambda row: row.marginal and not row.value)
def test_second_derivatives(row):
    graph = BINARY_LOOPS if row.binary else TIED_MIXED
    theta = 0.5 * potentials(graph, 1).requires_grad_()
    labels, _ = draw(graph, 3, hidden=0.3)
    inference = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), TRUNCATED, rf.Unroll())
    assert torch.autograd.gradgradcheck(lambda t: row.loss(graph, t, labels, inference), theta, fast_mode=True)


def test_which_adjoint_serves_a_likelihood():
    from riskfield.losses.likelihood import value_inference

    truncated, exact = rf.Stop(5, None), rf.Exact()
    chosen = lambda *choice: value_inference(rf.Inference(*choice)).adjoint  # noqa: E731
    assert chosen() == rf.Envelope()
    assert chosen(rf.MeanField(), rf.Stop(), rf.FixedPoint()) == rf.Envelope()
    assert chosen(rf.MeanField(), rf.Stop(), rf.Unroll()) == rf.Unroll()
    assert chosen(rf.MeanField(), truncated) is None  # the default of `infer`, `Unroll()`
    assert chosen(rf.MeanField(), truncated, rf.Perturb()) == rf.Perturb()  # it raises its own error when it runs
    assert chosen(exact, truncated) == rf.Envelope()
