"""`riskfield infer`: inference on files in UAI format."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from riskfield.cli._common import Device, DtypeName
from riskfield.entropy import TRW, Bethe, spanning_tree_rho
from riskfield.errors import ConvergenceWarning, ImpossibleEvidenceError, RiskfieldError, TreewidthError
from riskfield.graph.builders import chain
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.grids import grid
from riskfield.graph.schedule import Coloured, Parallel, Schedule, Sequential
from riskfield.infer import infer as run_inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.exact import Exact, ExactMAP
from riskfield.inference.mean_field import MeanField
from riskfield.inference.message_passing import MaxProduct, MessagePassing
from riskfield.inference.solution import JointMode, Solution
from riskfield.inference.stop import Stop
from riskfield.io._atomic import check_writable
from riskfield.io.uai import UAIModel, read_evidence, read_uai, write_mar, write_mpe, write_pr
from riskfield.kernels import default_schedule

_SHOWN_STATES = 8  # probabilities in one row of the table


class AlgorithmName(StrEnum):
    """The inference algorithms."""

    BP = "bp"
    TRW = "trw"
    MEAN_FIELD = "mean-field"
    EXACT = "exact"
    MAX_PRODUCT = "max-product"


class ScheduleName(StrEnum):
    """The orders of message updates."""

    SEQUENTIAL = "sequential"
    COLOURED = "coloured"
    PARALLEL = "parallel"


def infer(
    model: Annotated[Path, typer.Argument(metavar="MODEL.uai", help="The model, in UAI format.", show_default=False)],
    evidence: Annotated[Path | None, typer.Option(help="Observed states, in a UAI evidence file.")] = None,
    algorithm: Annotated[AlgorithmName, typer.Option(help="The inference algorithm.")] = AlgorithmName.BP,
    rho: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|trees",
            help="trw: appearance probability of all factors, or 'trees' to compute them from spanning trees. [0.5]",
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(help="bp, trw, max-product: order of message updates. [sequential; on a GPU coloured]"),
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="bp, trw, max-product: share of the old message, from 0 to below 1. [0]")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="exact, max-product: GiB of memory for the tables of elimination. [2]")
    ] = None,
    tol: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop when the marginals are about this close to the fixed point. [1e-8; 1e-5 for float32]"
        ),
    ] = None,
    sweeps: Annotated[int, typer.Option(min=1, help="Maximum number of sweeps.")] = 1000,
    dtype: Annotated[DtypeName, typer.Option(help="Precision of the computation.")] = DtypeName.FLOAT64,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the marginals here (.MAR); for max-product the states (.MPE).")
    ] = None,
    pr: Annotated[Path | None, typer.Option(help="Write log10 Z here (.PR).")] = None,
    max_rows: Annotated[int, typer.Option(min=0, help="Number of variables to print.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="Maximum number of threads.")] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 3 if the run has not converged, or the state is not certified."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
) -> None:
    """Compute the marginals of a UAI model, or its best state.

    The command also prints the logarithm of the partition function Z. bp is loopy belief propagation. It is exact on
    trees and usually accurate on other graphs, but with strong couplings it may not converge: then use --damping, or
    trw, which gives an upper bound on Z if rho comes from spanning trees. mean-field gives a lower bound on Z, and its
    marginals are usually overconfident. exact needs a small treewidth. max-product searches for the most probable joint
    state; if message passing cannot certify that its state is the best, elimination finds the best one, provided that
    its tables fit in --memory.

    A run that does not converge prints a warning and still gives its result; with --strict, the exit code is 3. A file
    is written completely or not at all.

    \b
    Examples:
      riskfield infer model.uai
      riskfield infer model.uai --evidence model.uai.evid --out model.MAR --pr model.PR
      riskfield infer grid.uai --algorithm trw --rho trees --damping 0.5
      riskfield infer small.uai --algorithm exact --max-rows 100
      riskfield infer model.uai --algorithm max-product --out model.MPE --quiet
    """
    _refuse_unused(algorithm, rho=rho, schedule=schedule, damping=damping, memory=memory, pr=pr)
    appearances = _appearances(rho)
    _check_files(model, evidence, out, pr)
    if threads is not None:
        from riskfield.threads import set_num_threads

        set_num_threads(threads)
    uai = read_uai(model)
    observed = read_evidence(evidence, uai.graph) if evidence is not None else {}
    if uai.log_constant == -math.inf:
        raise ImpossibleEvidenceError("Every joint state has probability zero: a factor without variables is 0.")
    chosen = _algorithm(algorithm, uai, appearances, _schedule(schedule, device), damping or 0.0, memory)
    tol = tol if tol is not None else 1e-8 if dtype is DtypeName.FLOAT64 else 1e-5
    _load_kernels(uai.graph, bool(observed), device)
    began = time.perf_counter()
    try:
        solution = _run(uai, observed, chosen, Stop(sweeps, tol), dtype, device, progress=not quiet)
    except ImpossibleEvidenceError as error:
        if algorithm is not AlgorithmName.MEAN_FIELD:
            raise
        # Every product distribution it can reach may hit a zero although the model is possible.
        reason = "mean-field found no distribution that avoids the zeros of this model and evidence"
        raise ImpossibleEvidenceError(f"{reason}. Try --algorithm bp or exact.") from error
    except TreewidthError as error:
        allowed = f"--memory allows {_max_bytes(memory) / 2**30:g} GiB"
        raise RiskfieldError(f"{error.need}; {allowed}. Raise it, or try --algorithm bp.") from error
    mode: JointMode | None = None
    if algorithm is AlgorithmName.MAX_PRODUCT:
        mode = _best_state(solution, _max_bytes(memory))
        value = float(mode.score) + uai.log_constant
    else:
        value = float(solution.log_partition) + uai.log_constant
    seconds = time.perf_counter() - began
    if out is not None and mode is not None:
        write_mpe(out, uai.graph, mode.states)
    elif out is not None:
        write_mar(out, uai.graph, solution.mu)
    if pr is not None:
        write_pr(pr, value)
    if not quiet:
        states = solution.mode() if mode is None else mode.states
        _print_table(solution, states.tolist(), observed, max_rows, algorithm)
        _print_summary(solution, mode, value, len(observed), algorithm, rho, seconds)
    if mode is not None and not mode.certified:
        typer.echo(
            "riskfield: WARNING: the state is not certified: there may be a better one. Try more --memory.",
            err=True,
        )
    elif mode is None and not solution.converged:
        remedies = ["more --sweeps"]
        if algorithm is not AlgorithmName.MEAN_FIELD and not damping:
            remedies.append("--damping 0.5")
        if algorithm is AlgorithmName.BP:
            remedies.append("--algorithm trw")
        typer.echo(
            f"riskfield: WARNING: not converged. The marginals still change by {float(solution.residual):.2g} after "
            f"{int(solution.sweeps)} sweeps (tolerance {tol:g}). Try {' or '.join(remedies)}.",
            err=True,
        )
    if strict and not (solution.converged if mode is None else mode.certified):
        raise typer.Exit(3)


def _refuse_unused(algorithm: AlgorithmName, **options: object) -> None:
    """Raise if an option is given that the algorithm would ignore."""
    messages = {AlgorithmName.BP, AlgorithmName.TRW, AlgorithmName.MAX_PRODUCT}
    users = {
        "rho": {AlgorithmName.TRW},
        "schedule": messages,
        "damping": messages,
        "memory": {AlgorithmName.EXACT, AlgorithmName.MAX_PRODUCT},
        "pr": set(AlgorithmName) - {AlgorithmName.MAX_PRODUCT},
    }
    for name, value in options.items():
        if value is not None and algorithm not in users[name]:
            able = ", ".join(sorted(users[name]))
            raise typer.BadParameter(f"--{name} applies to {able}. Got --algorithm {algorithm}.")


def _appearances(rho: str | None) -> float | None:
    """Read `--rho`: a number, or None for spanning trees."""
    if rho == "trees":
        return None
    try:
        number = 0.5 if rho is None else float(rho)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise typer.BadParameter(f"--rho must be 'trees', or a probability above 0 and at most 1. Got {rho!r}.")
    return number


def _check_files(model: Path, evidence: Path | None, out: Path | None, pr: Path | None) -> None:
    """Raise before the work begins if a result could not be written, or would replace an input or the other result."""
    taken = [path for path in (model, evidence) if path is not None]
    for option, path in (("--out", out), ("--pr", pr)):
        if path is None:
            continue
        if any(os.path.realpath(path) == os.path.realpath(other) for other in taken):
            raise typer.BadParameter(f"{option} {path} would overwrite another file of this run.")
        taken.append(path)
        check_writable(path)


def _algorithm(
    name: AlgorithmName,
    uai: UAIModel,
    appearances: float | None,
    order: Schedule,
    damping: float,
    memory: float | None,
) -> AbstractAlgorithm:
    """Build the algorithm the options describe."""
    if not 0 <= damping < 1:
        raise typer.BadParameter(f"--damping must be at least 0 and below 1. Got {damping:g}.")
    match name:
        case AlgorithmName.BP:
            return MessagePassing(Bethe(), order, damping)
        case AlgorithmName.TRW:
            rho = spanning_tree_rho(uai.graph) if appearances is None else appearances
            return MessagePassing(TRW(rho), order, damping)
        case AlgorithmName.MAX_PRODUCT:
            return MaxProduct(Bethe(), order, damping, _max_bytes(memory))
        case AlgorithmName.MEAN_FIELD:
            return MeanField()
        case AlgorithmName.EXACT:
            return Exact(_max_bytes(memory))


def _schedule(name: ScheduleName | None, device: str | None) -> Schedule:
    named: dict[ScheduleName, Schedule] = {
        ScheduleName.SEQUENTIAL: Sequential(),
        ScheduleName.COLOURED: Coloured(),
        ScheduleName.PARALLEL: Parallel(),
    }
    return default_schedule(device or "cpu") if name is None else named[name]


def _max_bytes(memory: float | None) -> int:
    """Read `--memory`, in GiB."""
    if memory is None:
        return Exact().max_bytes
    if not 0 < memory < math.inf:
        raise typer.BadParameter(f"--memory must be above 0. Got {memory:g}.")
    return math.ceil(memory * 2**30)


def _best_state(solution: Solution, max_bytes: int) -> JointMode:
    """The state of max-product if it is certified, or by elimination where that fits.

    Raises:
        RiskfieldError: if only an impossible state was found.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the command prints its own
        mode = solution.joint_mode()
    if not mode.certified:
        try:
            exact = run_inference(solution.graph, solution.theta, ExactMAP(max_bytes))
        except TreewidthError as error:
            if not mode.possible:
                reason = "max-product found only a state of probability zero"
                raise RiskfieldError(f"{reason}. {error.need}; raise --memory.") from error
        else:
            mode = exact.joint_mode()
    return mode


def _run(
    uai: UAIModel,
    observed: Mapping[int, int],
    algorithm: AbstractAlgorithm,
    stop: Stop,
    dtype: DtypeName,
    device: str | None,
    progress: bool,
) -> Solution:
    theta = uai.theta.to(device or "cpu", torch.float32 if dtype is DtypeName.FLOAT32 else torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the command prints its own
        return run_inference(
            uai.graph, theta, algorithm, stop=stop, evidence=observed or None, progress=progress and sys.stderr.isatty()
        )


def _load_kernels(graph: FactorGraph, observed: bool, device: str | None) -> None:
    """Run inference once on a tiny model of the same kind: the first call loads libraries, which must not be timed.

    Ctrl-C then does not interrupt an import, where Python may end the process before the program can print a message.
    """
    small = chain(2, 2) if graph.is_forest else grid(2, 2, 2)
    theta, evidence = torch.zeros(small.theta_size, device=device or "cpu"), {0: 0} if observed else None
    run_inference(small, theta, MessagePassing(), stop=Stop(9, 1e-3), evidence=evidence)


def _print_table(
    solution: Solution, states: list[int], observed: Mapping[int, int], max_rows: int, algorithm: AlgorithmName
) -> None:
    graph = solution.graph
    shown = min(max_rows, graph.num_variables)
    if shown == 0:
        return
    title = "max-marginals" if algorithm is AlgorithmName.MAX_PRODUCT else "marginals"
    typer.echo(f"variable  best state  {title}")
    for variable in range(shown):
        probabilities = graph.node(solution.mu, variable).tolist()
        numbers = " ".join(f"{p:.6f}" for p in probabilities[:_SHOWN_STATES])
        more = f" ... ({len(probabilities)} states)" if len(probabilities) > _SHOWN_STATES else ""
        note = "  (observed)" if variable in observed else ""
        typer.echo(f"{variable:8d}  {states[variable]:10d}  {numbers}{more}{note}")
    if shown < graph.num_variables:
        left = graph.num_variables - shown
        typer.echo(f"... and {left} more variable{'s' if left > 1 else ''} (see --max-rows and --out)")
    typer.echo()


def _print_summary(
    solution: Solution,
    mode: JointMode | None,
    value: float,
    num_observed: int,
    algorithm: AlgorithmName,
    rho: str | None,
    seconds: float,
) -> None:
    graph, converged = solution.graph, bool(solution.converged)
    if mode is not None:
        known = "optimal" if mode.certified else "not certified as optimal"
        rows = [("ln score", f"{value:.10g}  (of the best state found, unnormalised; {known})")]
    else:
        bound = ""
        if algorithm is AlgorithmName.MEAN_FIELD:
            bound = "  (lower bound)"
        elif algorithm is AlgorithmName.TRW and rho == "trees" and converged:
            bound = "  (upper bound)"
        rows = [("log10 Z", f"{value / math.log(10):.10g}{bound}"), ("ln Z", f"{value:.10g}{bound}")]
    rows = [
        ("model", f"{graph.num_variables} variables, {graph.num_factors} factors, {num_observed} observed"),
        ("algorithm", f"{algorithm}, {seconds:.2g} s"),
        *rows,
        ("sweeps", f"{int(solution.sweeps)}, last change {float(solution.residual):.2g}"),
        ("converged", "yes" if converged else "NO"),
    ]
    for name, text in rows:
        typer.echo(f"{name:<10} {text}")
