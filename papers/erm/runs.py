r"""One run of the study of Stoyanov, Ropson & Eisner (2011): train a random model for a setting, test it in all.

| setting | loss | decoder | trained through |
|---|---|---|---|
| frac-MSE | mean squared error | the marginals themselves | the same |
| int-F | 1 - F, per example | `EqualCount` | `SoftEqualCount` |
| int-L1 | share of errors | `MaxMarginal` | `SoftArgmax` |
| APPR-LOGL | minus the log-likelihood of the outputs given the inputs, by Bethe | | beliefs, as its gradient |
| APPR-LOGL-back | the same, not in the paper | | the iterations, as for a loss |

`-in` begins with three passes of APPR-LOGL; `-hyb` mixes the loss with that of frac-MSE, in shares 0, 1/2 and 1. After
each pass the objective of the whole training set is evaluated, and the best pass of a stage is kept. Numbers that the
paper's text does not give (temperature, gains, batch size, first parameters, schedule of messages, tolerance) are
chosen here; temperatures and gains by `tuning`, on models that are in no table.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import riskfield as rf
from papers.cells import Result, finite, parameters_of
from papers.erm.random_models import GivenInputs, RandomModel, random_model
from papers.pictures.criteria import ApproximateLikelihood

LIKELIHOOD = "APPR-LOGL"
BACK = "APPR-LOGL-back"
RISKS: dict[str, rf.losses.AbstractLoss] = {
    "frac-MSE": rf.losses.MSE(),
    "int-F": rf.losses.FMeasure(rf.decoders.SoftEqualCount(0.1)),
    "int-L1": rf.losses.L1(rf.decoders.SoftArgmax(0.1)),
}
SETTINGS = (*RISKS, LIKELIHOOD)
# Gain and meta-gain are per output variable: a risk is a mean over outputs, of which a parameter moves but a few.
GAINS: dict[str, rf.optim.SMD] = {
    "frac-MSE": rf.optim.SMD(gain=0.15, meta_gain=20.0, decay=0.9, batch_size=20),
    "int-F": rf.optim.SMD(gain=0.05, meta_gain=5.0, decay=0.9, batch_size=50),
    "int-L1": rf.optim.SMD(gain=0.05, meta_gain=5.0, decay=0.9, batch_size=50),
    LIKELIHOOD: rf.optim.SMD(gain=0.15, meta_gain=0.5, decay=0.9, batch_size=5),
    BACK: rf.optim.SMD(gain=0.05, meta_gain=0.5, decay=0.9, batch_size=5),
}
# A name for everything that was chosen for a setting (gains, temperatures, stages, first parameters). It is among the
# settings of a cell, so that cells of other choices do not count. Change the name with the choice.
RECIPES = {
    LIKELIHOOD: "6dbc08fc",
    BACK: "dccf2908",
    "frac-MSE": "23220df4",
    "frac-MSE-in": "efa42997",
    "int-F-hyb": "1c523f88",
    "int-F-in": "277d3d80",
    "int-F-hyb-in": "488b6602",
    "int-L1-hyb": "48a77748",
    "int-L1-in": "b2195df7",
    "int-L1-hyb-in": "0a99f663",
}
CONVERGED = 100  # iterations of BP where it is left to converge
_FIRST = 3  # passes of the likelihood with which `-in` begins
_SHARES = {0.0: 15, 0.5: 5, 1.0: 5}  # of `-hyb`: how many passes each has
_SPREAD = 1.0  # standard deviation of the first parameters, that of the true ones in the paper


def truth(num_variables: int, num_edges: int, seed: int, examples: int, sweeps: int, spread: float = 1.0) -> Result:
    """The losses of the model that the data come from, on test and training examples."""
    drawn = random_model(num_variables, num_edges, seed, 2 * examples, spread)
    model = drawn.true_model()
    return {
        "losses": losses_of(model, drawn.examples(model, examples, 2 * examples), sweeps),
        "training_losses": losses_of(model, drawn.examples(model, 0, examples), sweeps),
        "ess": drawn.sample_size,
    }


def trained(
    num_variables: int,
    num_edges: int,
    seed: int,
    examples: int,
    setting: str,
    restart: int,
    sweeps: int,
    mismatch: float,
    epochs: int,
    recipe: str,
    spread: float,
) -> Result:
    """Train for a setting, from random parameters, and test in all settings."""
    require_recipe(setting, recipe)
    drawn = random_model(num_variables, num_edges, seed, 2 * examples, spread)
    return outcome(drawn, stages(setting, sweeps, epochs, len(drawn.outputs)), sweeps, restart, mismatch)


def outcome(
    drawn: RandomModel, plan: list[rf.learning.Stage], sweeps: int, restart: int = 0, mismatch: float = 0.0
) -> Result:
    """Train by a plan on the first half of the examples; the losses on both halves, and how training went."""
    began = time.process_time()
    model, examples = started(drawn, restart, mismatch), len(drawn.states) // 2
    fits = train(model, drawn.examples(model, 0, examples), plan, restart)
    # The objective of a run that ended in an earlier stage is that of another loss, and does not compare.
    best = fits[-1].best if len(fits) == len(plan) else None
    tests = drawn.examples(model, examples, 2 * examples)
    losses = losses_of(model, tests, sweeps)
    return {
        "losses": losses,
        "converged_losses": losses if sweeps == CONVERGED else losses_of(model, tests, CONVERGED),
        "training_losses": losses_of(model, drawn.examples(model, 0, examples), sweeps),
        "parameters": _small(model),
        "objective": None if best is None or best.validation is None else finite(best.validation),
        "epochs": [len(fit.history) for fit in fits],
        "reasons": [fit.reason.value for fit in fits],
        "seconds": time.process_time() - began,
    }


def _small(model: GivenInputs) -> list[float] | None:
    """The parameters for the cell, to six decimals; None for more than 1000 of them."""
    found = parameters_of(model)
    return [round(value, 6) for value in found] if len(found) <= 1000 else None


def require_recipe(setting: str, recipe: str) -> None:
    """Refuse to compute a cell of other choices."""
    if recipe != RECIPES[setting]:
        raise ValueError(f"`recipe` must be {RECIPES[setting]!r}, which is that of this version. Got {recipe!r}.")


def started(drawn: RandomModel, restart: int, mismatch: float = 0.0) -> GivenInputs:
    """A model of `drawn`'s variables with random parameters."""
    model = drawn.model(mismatch)
    generator = torch.Generator().manual_seed(restart)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_SPREAD * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def stages(
    setting: str,
    sweeps: int,
    epochs: int,
    num_outputs: int,
    *,
    risks: Mapping[str, rf.losses.AbstractLoss] = RISKS,
    gains: Mapping[str, rf.optim.SMD] = GAINS,
) -> list[rf.learning.Stage]:
    """The stages of a training setting such as int-F-hyb-in."""

    def smd(name: str, passes: int = epochs) -> rf.optim.SMD:
        chosen = gains[name]
        gain, meta_gain = num_outputs * chosen.gain, num_outputs * chosen.meta_gain
        return replace(chosen, gain=gain, meta_gain=meta_gain, epochs=min(passes, epochs))

    likelihood, through = (inference(sweeps, adjoint=how) for how in (rf.Envelope(curvature=rf.Unroll()), rf.Unroll()))
    if setting in (LIKELIHOOD, BACK):
        return [
            rf.learning.Stage(ApproximateLikelihood(), likelihood if setting == LIKELIHOOD else through, smd(setting))
        ]
    name = setting.removesuffix("-in").removesuffix("-hyb")
    loss = risks[name]
    plan = [rf.learning.Stage(loss, through, smd(name))]
    if "-hyb" in setting:
        plan = [
            rf.learning.Stage(
                rf.losses.Hybrid(loss, rf.losses.MSE(), share), through, smd(name if share else "frac-MSE", passes)
            )
            for share, passes in _SHARES.items()
        ]
    if setting.endswith("-in"):
        plan.insert(0, rf.learning.Stage(ApproximateLikelihood(), likelihood, smd(LIKELIHOOD, _FIRST)))
    return plan


def inference(sweeps: int, **adjoint: Any) -> rf.Inference:
    """Loopy belief propagation with the parallel schedule, to convergence or for a number of iterations."""
    return rf.Inference(rf.MessagePassing(schedule=rf.Parallel()), rf.Stop(sweeps, tol=1e-4), **adjoint)


def train(model: GivenInputs, examples: rf.Examples, plan: list[rf.learning.Stage], seed: int) -> list[rf.learning.Fit]:
    """Fit the model stage by stage. Warnings are ignored: the study is about inference that ends early."""
    # SMD's own objective is a mean over a pass; the parameters at its end may be far worse.
    passes = rf.Validation(examples, patience=max(stage.optimiser.max_iterations for stage in plan if stage.optimiser))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        warnings.simplefilter("ignore", rf.errors.DivergenceWarning)
        return rf.learning.fit_stages(model, examples, plan, seed=seed, validation=passes, progress=False)


@torch.no_grad()
def losses_of(model: GivenInputs, examples: rf.Examples, sweeps: int) -> dict[str, float]:
    """The loss in every setting, each with its decoder; the likelihood is per example, as in the paper's tables."""
    graph, labels, mask = examples.graph, examples.labels, examples.labels >= 0
    theta = model(graph, examples.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)
        mu = inference(sweeps)(graph, theta).mu
        likelihood = rf.losses.SurrogateEM()(graph, theta, labels, inference(sweeps))
    return {
        "frac-MSE": rf.metrics.regression_error(graph, rf.decoders.ExpectedValue()(graph, mu), labels),
        "int-F": 1 - rf.metrics.f_measure(rf.decoders.EqualCount()(graph, mu, mask), labels),
        "int-L1": rf.metrics.error_rate(rf.decoders.MaxMarginal()(graph, mu), labels),
        LIKELIHOOD: float(likelihood.mean()),
    }
