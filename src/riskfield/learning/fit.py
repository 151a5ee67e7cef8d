r"""`fit`: the training loop.

    examples -> model -> theta -> inference -> loss -> gradient -> optimiser -> parameters

`Objective` computes the first five arrows, and the `step` of an optimiser the last two. The loop decides when to stop.
It keeps the best parameters if training is interrupted or diverges, and writes checkpoints in case the process is
killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from riskfield.devices import as_device, as_dtype
from riskfield.errors import DivergenceWarning, RiskfieldError, warn
from riskfield.examples import DataSet, blocks
from riskfield.infer import InferenceChoice
from riskfield.io._lock import lock_folder
from riskfield.learning.checkpoint import Checkpoints
from riskfield.learning.fit_state import FitState, describe
from riskfield.learning.lbfgs import LBFGS
from riskfield.learning.objective import Diverged, Objective
from riskfield.learning.optimiser import AbstractOptimiser, check_counts
from riskfield.learning.ranks import Ranks
from riskfield.learning.result import Fit, Reason, Record
from riskfield.learning.validation import Validation, Watch, overstatement
from riskfield.learning.warm_start import check_warm_start
from riskfield.losses.loss import LossLike, as_loss
from riskfield.progress import Progress

Callback = Callable[[Record, Module], bool | None]


def fit(
    model: Module,
    data: DataSet,
    loss: LossLike,
    inference: InferenceChoice | None = None,
    *,
    optimiser: AbstractOptimiser | None = None,
    ridge: float = 0.0,
    lasso: float = 0.0,
    per_variable: bool = True,
    validation: Validation | DataSet | None = None,
    chunk_size: int | None = None,
    warm_start: bool = False,
    seed: int = 0,
    checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    ranks: Ranks | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Fit:
    r"""Find parameters of `model` that minimise the empirical risk.

    Training starts from the current parameters of the model, and leaves the best parameters in it. These are the ones
    with the lowest risk on `validation`, if it is given and finite, otherwise those with the lowest objective. For a
    loss whose values cannot be compared, they are the newest. This holds whether training converges, stops early,
    diverges (with a `DivergenceWarning`) or is interrupted by Ctrl-C.

    Arguments:
        model: a module with `theta = model(graph, inputs)`.
        data: `Examples`, or several of them on different graphs.
        loss: a loss such as `UnivariateLogistic()`, or a function of (solution, labels, mask).
        inference: how marginals are computed: `Inference(algorithm, stop, adjoint)` or `ExactOnForests(...)`. Use the
            same for predictions. Losses that need no inference ignore it.
        optimiser: `LBFGS(...)`, `Torch(torch.optim.Adam, {...})` or `SMD(...)`; by default `LBFGS()`.
        ridge: the weight of the sum of the squared parameters, which is added to the risk; by default 0.
        lasso: the weight of the sum of the absolute values of the parameters, which is also added; by default 0. It
            makes many parameters exactly 0. It needs `LBFGS`, which then runs OWL-QN (Andrew & Gao 2007).
        per_variable: divide the risk by the number of targets (the default), so that the effect of `ridge` does not
            depend on the size of the images. With False the losses of all examples are summed.
        validation: examples for early stopping, or a `Validation(...)`. By default training does not stop early.
        chunk_size: how many examples are evaluated at once, to limit memory; by default all that share a graph.
        warm_start: start each run of inference from the messages with which the last run on the same examples ended; by
            default False. Parameters change little between iterations, so fewer sweeps are needed. `inference` must
            stop at a tolerance and have an adjoint that holds at convergence. If inference has one fixed point, as with
            `TRW` or a convex free energy, the result is the same to within the tolerance. Mean field and loopy belief
            propagation may have several; a warm start stays near one of them, and training may stall. The messages are
            dropped at every checkpoint, so that a resumed run gives the same bits.
        seed: the seed of all random numbers, by default 0: the order of examples, and random numbers of the model or
            the loss. The state of torch's own generator does not change.
        checkpoint: a folder for checkpoints, or `Checkpoints(folder, every=...)`. By default none are written.
        resume: continue from the newest checkpoint, if there is one. With the same arguments, the parameters are bit by
            bit those of an uninterrupted run. By default False: a folder that holds checkpoints is then an error.
        callbacks: called as `callback(record, model)` after each iteration; by default none. If one returns True,
            training ends.
        progress: show a progress bar, or without a terminal print a line every ten seconds; by default neither.
        ranks: the processes that share the work, from `ranks()`; by default this process alone. With several, `data`
            and `validation` are this rank's share.
        device: where to train, such as "cuda". Model, data and validation data are moved there, and the model stays
            there. By default they stay where they are, all on one device.
        dtype: the dtype to train in, "float32" or "float64". Model, data and validation data are converted to it. By
            default that of the model.

    Returns:
        A `Fit`, with the reason why training ended and its history.

    Raises:
        TypeError, ValueError: if an argument is not allowed, or the objective is not finite at the start.
        CheckpointError: if a checkpoint could not be written, for example because the disk is full. The previous
            checkpoint is intact, and the model has the best parameters so far.
        FileExistsError: if the folder holds checkpoints, and `resume` is False.
        BlockingIOError: if another process writes to the folder of checkpoints.

    >>> import torch
    >>> from riskfield import Exact, Examples, Inference, chain
    >>> from riskfield.losses import UnivariateLogistic
    >>> from riskfield.models import Generative
    >>> graph = chain(3, num_states=2)
    >>> examples = Examples(graph, labels=torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 1]]))
    >>> model = Generative(graph)
    >>> result = fit(model, examples, UnivariateLogistic(), Inference(Exact()), ridge=1e-3, progress=False)
    >>> result.reason
    <Reason.CONVERGED: 'converged'>
    """
    optimiser = LBFGS() if optimiser is None else optimiser
    ranks = Ranks() if ranks is None else ranks
    checkpoints = Checkpoints(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    _check(optimiser, ridge, lasso, chunk_size, seed, checkpoints, resume)
    if warm_start:
        check_warm_start(inference)
    loss = as_loss(loss)
    if validation is not None and not isinstance(validation, Validation):
        validation = Validation(validation)
    if device is not None or dtype is not None:
        place = None if device is None else as_device(device)
        kind = None if dtype is None else as_dtype(dtype)
        model.to(place, kind)
        data = [block.to(place, kind) for block in blocks(data)]
        if validation is not None:
            moved = [block.to(place, kind) for block in blocks(validation.data, "validation")]
            validation = replace(validation, data=moved)
    for tensor in model.state_dict().values():
        ranks.broadcast_(tensor)
    shared: dict[str, Any] = {"per_variable": per_variable, "chunk_size": chunk_size, "ranks": ranks}
    shared["warm_start"] = warm_start
    objective = Objective(model, data, loss, inference, ridge=ridge, lasso=lasso, **shared)
    watch = None
    if validation is not None:
        watch = Watch(validation, model, loss, inference, **shared)
    run = optimiser.start(objective, seed)
    state = FitState(
        objective,
        run,
        patience=None if watch is None else watch.settings.patience,
        identity={
            "optimiser": type(optimiser).__name__,
            "loss": describe(loss),
            "ridge": float(ridge),
            "lasso": float(lasso),
            "per_variable": per_variable,
            "seed": seed,
            "examples": objective.num_examples,
        },
    )
    with (
        _continued(state, checkpoints, resume),
        _own_randomness(objective),
        Progress(
            "training", optimiser.max_iterations, done=state.iteration, shown=progress and ranks.rank == 0
        ) as shown,
    ):
        try:
            while state.goes_on(optimiser.max_iterations):
                step = run.step(state.iteration + 1)  # examples -> theta -> loss -> gradient -> parameters
                record = state.add(step, None if watch is None else watch.look(state.iteration + 1))
                shown.advance(**_facts(record))
                if _any_true([callback(record, model) for callback in callbacks], ranks):
                    state.end(Reason.CALLBACK, "a callback returned True")
                if checkpoints is not None and record.iteration % checkpoints.every == 0:
                    state.save(checkpoints)
                    objective.forget()
                    if watch is not None:
                        watch.objective.forget()
            if checkpoints is not None:
                state.save(checkpoints)
        except Diverged as error:
            if objective.evaluations <= 1:  # there are no better parameters to return
                if isinstance(error.__cause__, RiskfieldError):
                    raise error.__cause__ from None
                raise ValueError(f"`model` must start where the objective is finite: {error}.") from error
            state.end(Reason.DIVERGED, str(error))
        except KeyboardInterrupt:
            state.end(Reason.INTERRUPTED, "by the keyboard")
        finally:
            state.restore_best()
    result = state.result()
    looks = [record.validation for record in result.history if record.validation is not None]
    if result.best is not None and looks and not any(look < math.inf for look in looks):
        warn(
            f"The risk on `validation` was never finite: it is {looks[-1]}. Check its inputs for NaN, and its labels "
            "for states that are impossible under the model. The model has the parameters of iteration "
            f"{result.best.iteration}, selected by the training objective.",
            DivergenceWarning,
        )
    if result.reason is Reason.DIVERGED:
        kept = "the initial ones" if result.best is None else f"those of iteration {result.best.iteration}"
        _warn(f"{result.explanation}. The model has the best parameters, {kept}")
    elif result.reason is not Reason.INTERRUPTED and (contradiction := overstatement(objective)):
        _warn(f"the risk decreased because inference has not converged: {contradiction}")
    return result


def _warn(what: str) -> None:
    warn(
        f"Training diverged: {what}. Try more sweeps of inference, a larger ridge, a smaller learning rate or a loss "
        "on marginals. `Validation(...)` with a loss on marginals keeps the best parameters so far.",
        DivergenceWarning,
    )


def _check(
    optimiser: AbstractOptimiser,
    ridge: float,
    lasso: float,
    chunk_size: int | None,
    seed: int,
    checkpoints: Checkpoints | None,
    resume: bool,
) -> None:
    if not isinstance(optimiser, AbstractOptimiser):
        raise TypeError(
            f"`optimiser` must be an object such as `LBFGS()` or `Torch(torch.optim.Adam)`. Got {optimiser!r}."
        )
    for name, weight in (("ridge", ridge), ("lasso", lasso)):
        if isinstance(weight, bool | str) or not 0 <= weight < float("inf"):
            raise ValueError(f"`{name}` must be a non-negative number. Got {weight!r}.")
    if lasso > 0 and not isinstance(optimiser, LBFGS):
        raise ValueError(f"`lasso` needs the optimiser `LBFGS`. Got {optimiser!r}.")
    if chunk_size is not None:
        check_counts(chunk_size=chunk_size)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be an integer from 0 to 2**63 - 1. Got {seed!r}.")
    if checkpoints is None:
        if resume:
            raise ValueError("`resume` needs `checkpoint`, the folder that holds the checkpoints.")
    elif not isinstance(checkpoints, Checkpoints):
        raise TypeError(f"`checkpoint` must be a folder or `Checkpoints(...)`. Got {checkpoints!r}.")
    elif not resume and checkpoints.newest() is not None:
        raise FileExistsError(
            f"`checkpoint` {os.fspath(checkpoints.folder)!r} already holds a run. Use `resume=True` to continue it, or "
            "another folder."
        )


@contextmanager
def _continued(state: FitState, checkpoints: Checkpoints | None, resume: bool) -> Iterator[None]:
    """Let no other process write to the folder of checkpoints, and continue from the newest one if asked to."""
    if checkpoints is None:
        yield
        return
    with lock_folder(checkpoints.folder) if state.objective.ranks.rank == 0 else nullcontext():
        if resume:
            state.resume(checkpoints)
        yield


@contextmanager
def _own_randomness(objective: Objective) -> Iterator[None]:
    """Restore the state of torch's generators afterwards."""
    devices = {p.device.index for p in objective.parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


def _any_true(answers: Sequence[bool | None], ranks: Ranks) -> bool:
    """Return whether an answer is True on any rank, so that all ranks stop together."""
    if not answers:
        return False
    count = torch.tensor([float(any(answer is True for answer in answers))], device=ranks.device)
    return bool(ranks.sum_(count) > 0)


def _facts(record: Record) -> dict[str, str]:
    """The objective, the gradient and the evaluations per second, for the progress report."""
    facts = {"loss": f"{record.objective:.5g}", "gradient": f"{record.gradient_norm:.2g}"}
    if record.validation is not None:
        facts["validation"] = f"{record.validation:.5g}"
    return {**facts, "eval/s": f"{record.evaluations / record.seconds:.3g}"}
