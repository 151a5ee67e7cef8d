"""Noisy digits, and six methods that learn to restore them (Domke 2008, section 5).

There are ten training and ten test pictures of each of the digits 1 to 9, drawn from MNIST's own test set. A pixel is 1
where it is brighter than half. Noise sets every pixel, with the probability of the noise level, to 0 or 1 at random.

All methods have fully parametrised potentials that are the same everywhere: a number for every x_i and y_i, and one for
every x_i, x_j, y_i, y_j of neighbours, horizontal or vertical. Convex inference has as many weights of b log b. The
paper took its conditional random fields from another program. Here they have everything that convex inference has
except the weights; `crf_program` has those of that program.

Inference of conditional random fields starts afresh in every evaluation. It has several fixed points. A warm start
stays near the previous one even when the parameters favour another, and training stalls.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

import riskfield as rf
from papers.cells import Result, parameters_of

DIGITS = tuple(range(1, 10))
ERRORS = ("classification", "regression", "L_log", "L_quad")
SIDE = 28
_BRIGHT = 127
_CHUNK = 10  # pictures at once, which fit into the processor's cache
_SWEEPS = 10_000
_CONVEX = rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint())
_TOL, _CONVEX_TOL = 1e-6, 1e-5  # a Newton step that changes so little leaves an error of about its square
_MEAN_FIELD = rf.Inference(rf.MeanField(), rf.Stop(_SWEEPS, _TOL))
_BELIEF_PROPAGATION = rf.Inference(rf.MessagePassing(), rf.Stop(_SWEEPS, _TOL))


@dataclass(frozen=True)
class Method:
    """How a model is trained, and how it predicts."""

    loss: rf.losses.AbstractLoss
    training: rf.Inference | None
    prediction: rf.Inference

    @property
    def convex(self) -> bool:
        """Whether the weights of the entropy are learned."""
        return isinstance(self.prediction.algorithm, rf.ConvexFreeEnergy)


def _likelihood(inference: rf.Inference) -> Method:
    return Method(rf.losses.SurrogateLikelihood(), replace(inference, adjoint=rf.Envelope()), inference)


def _convex(loss: rf.losses.AbstractLoss) -> Method:
    stop = rf.Stop(200, _CONVEX_TOL)
    return Method(loss, rf.Inference(_CONVEX, stop, rf.KKT()), rf.Inference(_CONVEX, stop))


def tables() -> rf.Conditional:
    """Log-potentials of a conditional random field: all 0, free for every x and y."""
    return rf.LinearModel(2, 2, 4)


@dataclass(frozen=True)
class Setup:
    """Choices that the paper leaves open.

    Arguments:
        sample: which pictures are drawn.
        bright: pixels above this, of 255, are 1.
        field: makes the model of a conditional random field.
        mean_field, belief_propagation: how conditional random fields are trained and predict.
    """

    sample: int = 0
    bright: int = 127
    field: Callable[[], rf.Conditional] = tables
    mean_field: rf.Inference = _MEAN_FIELD
    belief_propagation: rf.Inference = _BELIEF_PROPAGATION

    @property
    def methods(self) -> dict[str, Method]:
        """In the order of the paper's tables."""
        return {
            "pseudo + mean field": Method(rf.losses.Pseudolikelihood(), None, self.mean_field),
            "pseudo + BP": Method(rf.losses.Pseudolikelihood(), None, self.belief_propagation),
            "mean field": _likelihood(self.mean_field),
            "BP": _likelihood(self.belief_propagation),
            "L_log": _convex(rf.losses.UnivariateLogistic()),
            "L_quad": _convex(rf.losses.UnivariateQuadratic()),
        }

    def model(self, convex: bool) -> rf.Conditional | rf.models.ConvexModel:
        """All potentials 0, all weights 1."""
        return rf.models.ConvexModel(tables(), {rf.inference.NEGATIVE_ENTROPY: tables()}) if convex else self.field()


PLAIN = Setup()
METHODS = tuple(PLAIN.methods)


@dataclass(frozen=True, eq=False)
class Digits:
    """Pictures of digits to restore."""

    labels: Tensor  # (picture, pixel)  the digits one after the other
    noisy: Tensor

    def examples(self) -> rf.Examples:
        """With indicators of y_i and of (y_i, y_j) for features."""
        graph = _graph()
        pairs = torch.tensor(graph.factor_groups[0].variables)
        joint = 2 * self.noisy[:, pairs[:, 0]] + self.noisy[:, pairs[:, 1]]
        hot = torch.nn.functional.one_hot
        return rf.Examples(
            graph, self.labels, {"nodes": hot(self.noisy, 2).double(), "factors": hot(joint, 4).double()}
        )


@lru_cache(maxsize=2)
def draw_digits(
    root: str | None, noise: float, per_digit: int, sample: int = 0, bright: int = PLAIN.bright, groups: int = 2
) -> tuple[Digits, ...]:
    """Groups of pictures, the first to train on, the second to test with; which ones does not depend on the noise."""
    images, rng = rf.datasets.mnist(root), np.random.default_rng(sample)
    places = [rng.permutation(np.flatnonzero(images.digits == digit)) for digit in DIGITS]
    reassign, generator = rf.datasets.ReassignmentNoise(noise), np.random.default_rng([1 + sample, round(1000 * noise)])
    out = []
    for group in range(groups):
        chosen = np.concatenate([place[group * per_digit : (group + 1) * per_digit] for place in places])
        labels = (images.images[chosen] > bright).astype(np.int64)
        noisy = reassign(labels, generator).astype(np.int64)
        out.append(Digits(torch.from_numpy(labels).flatten(1), torch.from_numpy(noisy).flatten(1)))
    return tuple(out)


def train(model: nn.Module, examples: rf.Examples, method: Method, iterations: int) -> list[rf.learning.Fit]:
    """Fit a model with 2 * `iterations`; the first half keeps the weights of a convex model fixed."""
    stages = (False, True) if isinstance(model, rf.models.ConvexModel) else (None,)
    fits = []
    for free in stages:
        if isinstance(model, rf.models.ConvexModel):
            model.log_weights.requires_grad_(bool(free))
        optimiser = rf.optim.LBFGS(iterations=iterations if len(stages) > 1 else 2 * iterations, memory=100)
        fits.append(
            rf.fit(
                model,
                examples,
                method.loss,
                method.training,
                optimiser=optimiser,
                chunk_size=_CHUNK,
                warm_start=method.convex,
                progress=False,
            )
        )
    return fits


@torch.no_grad()
def predict(model: nn.Module, examples: rf.Examples, method: Method) -> list[rf.Solution]:
    """Marginals, some pictures at a time."""
    out = []
    for rows in torch.arange(len(examples)).split(_CHUNK):
        part = examples.select(rows)
        inference = rf.models.inference_of(model, method.prediction, part.graph, part.inputs)
        assert inference is not None
        out.append(inference(part.graph, model(part.graph, part.inputs)))
    return out


def measure(
    root: str | None, method: str, noise: float, per_digit: int, iterations: int, setup: Setup = PLAIN
) -> Result:
    """Train and test one method at one noise level."""
    began, how = time.process_time(), setup.methods[method]
    drawn = draw_digits(root, noise, per_digit, setup.sample, setup.bright)
    training, tests = (digits.examples() for digits in drawn)
    model = setup.model(how.convex)
    with warnings.catch_warnings():
        # How much did not converge is reported.
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        warnings.simplefilter("ignore", rf.errors.DivergenceWarning)
        fits = train(model, training, how, iterations)
        trained = time.process_time() - began
        solutions = [predict(model, examples, how) for examples in (training, tests)]
    beliefs = torch.cat([solution.node_marginals[0] for solution in solutions[1]])[..., 1]
    return {
        "train": errors(solutions[0], training.labels),
        "test": errors(solutions[1], tests.labels),
        "parameters": parameters_of(model),
        "training": [[one.reason.value, len(one.history), _evaluations(one)] for one in fits],
        "objective": fits[-1].best.objective if fits[-1].best is not None else None,
        "converged": float(torch.cat([solution.converged for solution in solutions[1]]).double().mean()),
        "beliefs": [[round(b, 3) for b in row] for row in beliefs[::per_digit].tolist()],  # the first of each digit
        "seconds": trained,
    }


def _evaluations(result: rf.learning.Fit) -> int:
    """Of the objective; none if there was no iteration."""
    return result.history[-1].evaluations if result.history else 0


def errors(solutions: list[rf.Solution], labels: Tensor) -> dict[str, float]:
    """The four measures, all per pixel."""
    marginals = torch.cat([solution.node_marginals[0] for solution in solutions])
    right = marginals.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    values = (
        rf.metrics.error_rate(marginals.argmax(-1), labels),
        float((labels - marginals[..., 1]).square().mean()),
        -float(right.clamp(min=torch.finfo(right.dtype).tiny).log().mean()),
        float((marginals.square().sum(-1) - 2 * right).mean()),
    )
    return dict(zip(ERRORS, values, strict=True))


@lru_cache(maxsize=1)
def _graph() -> rf.FactorGraph:
    return rf.grid(SIDE, SIDE, num_states=2)
