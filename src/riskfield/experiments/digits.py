"""Digits to restore, and six ways to learn how (Domke 2008, section 5).

Digits 1 to 9 of MNIST, ten of each to train on and ten others to test with. They are drawn from MNIST's own test set,
1 where a pixel is brighter than half. Of the noisy picture every pixel has, with the probability of the noise level,
been set to 0 or 1 at random.

All methods have potentials that are fully parametrised and the same everywhere: a number for every x_i and y_i, and one
for every x_i, x_j, y_i, y_j of neighbours, horizontal or vertical. Convex inference has as many weights of b log b. The
paper took its conditional random fields from another program, whose parametrisation it names by features alone; here
they have all that convex inference has but the weights.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.kkt import KKT
from riskfield.data.examples import Examples
from riskfield.data.mnist import mnist
from riskfield.data.noise import ReassignmentNoise
from riskfield.errors import ConvergenceWarning, DivergenceWarning
from riskfield.experiments.cells import Result
from riskfield.graph.builders import grid
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference.convex import NEGATIVE_ENTROPY, ConvexFreeEnergy
from riskfield.inference.infer import Stop
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.settings import Inference
from riskfield.inference.solution import Solution
from riskfield.learning.fit import fit
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.objective import flat
from riskfield.learning.result import Fit
from riskfield.learning.warm_start import WarmStart
from riskfield.losses.likelihood import SurrogateLikelihood
from riskfield.losses.loss import AbstractLoss
from riskfield.losses.marginal import UnivariateLogistic, UnivariateQuadratic
from riskfield.losses.pseudolikelihood import Pseudolikelihood
from riskfield.metrics import error_rate
from riskfield.models.conditional import LinearModel
from riskfield.models.convex import ConvexModel, inference_of

DIGITS = tuple(range(1, 10))
ERRORS = ("classification", "regression", "L_log", "L_quad")
_SIDE = 28
_BRIGHT = 127
_CHUNK = 10  # pictures at once: so many fit in the processor's cache
_SWEEPS = 10_000
_MEAN_FIELD, _BELIEF_PROPAGATION = MeanField(), MessagePassing()
_CONVEX = ConvexFreeEnergy(message_passing=False)
_TOL, _CONVEX_TOL = 1e-6, 1e-5  # a Newton step that changes so little leaves an error of about its square


@dataclass(frozen=True)
class Method:
    """How a model is trained, and how it predicts."""

    loss: AbstractLoss
    training: Inference | None
    prediction: Inference

    @property
    def convex(self) -> bool:
        """Whether the weights of the entropy are learned."""
        return isinstance(self.prediction.algorithm, ConvexFreeEnergy)


def _to_convergence(algorithm: MeanField | MessagePassing) -> Method:
    stop = Stop(_SWEEPS, _TOL)
    return Method(SurrogateLikelihood(), WarmStart(algorithm, stop, Envelope()), Inference(algorithm, stop))


def _convex(loss: AbstractLoss) -> Method:
    stop = Stop(200, _CONVEX_TOL)
    return Method(loss, WarmStart(_CONVEX, stop, KKT()), Inference(_CONVEX, stop))


METHODS = {
    "pseudo + mean field": Method(Pseudolikelihood(), None, Inference(_MEAN_FIELD, Stop(_SWEEPS, _TOL))),
    "pseudo + BP": Method(Pseudolikelihood(), None, Inference(_BELIEF_PROPAGATION, Stop(_SWEEPS, _TOL))),
    "mean field": _to_convergence(_MEAN_FIELD),
    "BP": _to_convergence(_BELIEF_PROPAGATION),
    "L_log": _convex(UnivariateLogistic()),
    "L_quad": _convex(UnivariateQuadratic()),
}


@dataclass(frozen=True, eq=False)
class Digits:
    """Pictures of digits to restore."""

    labels: Tensor  # (picture, pixel)  the digits one after the other
    noisy: Tensor

    def examples(self) -> Examples:
        """With indicators of y_i and of (y_i, y_j) for features."""
        graph = _graph()
        pairs = torch.tensor(graph.factor_groups[0].variables)
        joint = 2 * self.noisy[:, pairs[:, 0]] + self.noisy[:, pairs[:, 1]]
        hot = torch.nn.functional.one_hot
        return Examples(graph, self.labels, {"nodes": hot(self.noisy, 2).double(), "factors": hot(joint, 4).double()})


@lru_cache(maxsize=2)
def draw_digits(root: str | None, noise: float, per_digit: int) -> tuple[Digits, Digits]:
    """Pictures to train on and to test with; which ones does not depend on the noise."""
    images, rng = mnist(root), np.random.default_rng(0)
    places = [rng.permutation(np.flatnonzero(images.digits == digit))[: 2 * per_digit] for digit in DIGITS]
    reassign, generator = ReassignmentNoise(noise), np.random.default_rng([1, round(1000 * noise)])
    parts = []
    for part in (slice(per_digit), slice(per_digit, None)):
        labels = (images.images[np.concatenate([place[part] for place in places])] > _BRIGHT).astype(np.int64)
        noisy = reassign(labels, generator).astype(np.int64)
        parts.append(Digits(torch.from_numpy(labels).flatten(1), torch.from_numpy(noisy).flatten(1)))
    return parts[0], parts[1]


def make_model(convex: bool) -> LinearModel | ConvexModel:
    """All potentials 0, all weights 1."""
    theta = LinearModel(2, 2, 4)
    return ConvexModel(theta, {NEGATIVE_ENTROPY: LinearModel(2, 2, 4)}) if convex else theta


def train(model: nn.Module, examples: Examples, method: Method, iterations: int) -> list[Fit]:
    """Fit a model: twice so many iterations, of a convex one the first half with its weights as they are."""
    stages = (False, True) if isinstance(model, ConvexModel) else (None,)
    fits = []
    for free in stages:
        if isinstance(model, ConvexModel):
            model.log_weights.requires_grad_(bool(free))
        optimiser = LBFGS(iterations=iterations if len(stages) > 1 else 2 * iterations, memory=100)
        fits.append(
            fit(model, examples, method.loss, method.training, optimiser=optimiser, chunk_size=_CHUNK, progress=False)
        )
    return fits


@torch.no_grad()
def predict(model: nn.Module, examples: Examples, method: Method) -> list[Solution]:
    """Marginals, some pictures at a time."""
    out = []
    for rows in torch.arange(len(examples)).split(_CHUNK):
        part = examples.select(rows)
        inference = inference_of(model, method.prediction, part.graph, part.inputs)
        assert inference is not None
        out.append(inference(part.graph, model(part.graph, part.inputs)))
    return out


def measure(root: str | None, method: str, noise: float, per_digit: int, iterations: int) -> Result:
    """Train and test one method at one noise level."""
    began, how = time.process_time(), METHODS[method]
    training, tests = (digits.examples() for digits in draw_digits(root, noise, per_digit))
    model = make_model(how.convex)
    with warnings.catch_warnings():
        # How much did not converge is reported.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DivergenceWarning)
        fits = train(model, training, how, iterations)
        trained = time.process_time() - began
        solutions = [predict(model, examples, how) for examples in (training, tests)]
    beliefs = torch.cat([solution.node_marginals[0] for solution in solutions[1]])[..., 1]
    return {
        "train": _errors(solutions[0], training.labels),
        "test": _errors(solutions[1], tests.labels),
        "parameters": flat(list(model.parameters())).tolist(),
        "training": [[one.reason.value, len(one.history), one.history[-1].evaluations] for one in fits],
        "objective": fits[-1].best.objective if fits[-1].best is not None else None,
        "converged": float(torch.cat([solution.converged for solution in solutions[1]]).double().mean()),
        "beliefs": [[round(b, 3) for b in row] for row in beliefs[::per_digit].tolist()],  # the first of each digit
        "seconds": trained,
    }


def _errors(solutions: list[Solution], labels: Tensor) -> dict[str, float]:
    """The four measures, all per pixel."""
    marginals = torch.cat([solution.node_marginals[0] for solution in solutions])
    right = marginals.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    values = (
        error_rate(marginals.argmax(-1), labels),
        float((labels - marginals[..., 1]).square().mean()),
        -float(right.clamp(min=torch.finfo(right.dtype).tiny).log().mean()),
        float((marginals.square().sum(-1) - 2 * right).mean()),
    )
    return dict(zip(ERRORS, values, strict=True))


@lru_cache(maxsize=1)
def _graph() -> FactorGraph:
    return grid(_SIDE, _SIDE, num_states=2)
