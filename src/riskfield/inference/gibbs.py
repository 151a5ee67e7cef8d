r"""Gibbs sampling: draw joint states by resampling one variable after the other, given all others.

    x_j  ~  p(x_j | all others)  propto  exp( theta_j(x_j) + sum_{c containing j} theta_c(x_j, x_{c \ j}) )

Variables of one colour share no factor, so they are resampled together, for all chains and batch items at once. A draw
is the argmax of logit minus the logarithm of an exponential variate (the Gumbel-max trick), which never selects an
impossible state.

Samples are exact only in the limit. Strong couplings make chains mix slowly. Hard constraints may divide the joint
states into parts between which no change of a single variable leads. Compare several chains, or use
`sample_exactly` if the treewidth is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from riskfield.errors import ImpossibleEvidenceError
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import colours
from riskfield.inference.evidence import Evidence, clamp

NEG_INF = float("-inf")
_START_SWEEPS = 1000
_START_PENALTY = 4.0  # per violated constraint: large enough to remove violations, small enough not to get stuck


def sample(
    graph: FactorGraph,
    theta: Tensor,
    num_samples: int,
    *,
    chains: int = 1,
    burn_in: int = 100,
    thinning: int = 1,
    seed: int | torch.Generator | None = None,
    evidence: Evidence | None = None,
    start: Tensor | None = None,
    progress: bool = False,
) -> Tensor:
    """Draw joint states from p(x) proportional to exp(theta . f(x)) by Gibbs sampling.

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (*batch, graph.theta_size), float32 or float64; -inf marks impossible states.
        num_samples: how many samples each chain returns.
        chains: how many independent chains to run per batch item.
        burn_in: how many sweeps to discard first.
        thinning: keep one sample every `thinning` sweeps.
        seed: an integer or a `torch.Generator` on theta's device; the same seed gives the same samples. By default
            torch's global generator is used.
        evidence: observed states, a dict {variable: state} or an integer tensor of shape (*batch, variable) with -1 for
            unobserved variables.
        start: states to start from, of a shape that broadcasts to (*batch, chains, variable). By default random
            states; if constraints forbid these, a search for possible states comes first.
        progress: show a progress bar.

    Returns:
        States, an int64 tensor of shape (*batch, chains, num_samples, variable).

    Raises:
        ImpossibleEvidenceError: if no joint state of non-zero probability is found to start from.

    >>> from riskfield import chain
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 1.0  # neighbours tend to agree
    >>> states = sample(graph, theta, num_samples=500, chains=40, evidence={0: 1}, seed=0)
    >>> states.shape, (states[..., 2] == 1).double().mean().round(decimals=2)  # 0.6068 by exact inference
    (torch.Size([40, 500, 3]), tensor(0.6000, dtype=torch.float64))
    """
    _check_counts(num_samples=num_samples, chains=chains, burn_in=burn_in, thinning=thinning)
    graph.check_values(theta)
    if evidence is not None:
        theta = clamp(graph, theta, evidence)
    theta = theta.detach()
    batch = theta.shape[:-1]
    flat = theta.reshape(batch.numel(), graph.theta_size)
    generator = make_generator(seed, theta.device)
    blocks = _blocks(graph, theta.device)
    states = _first_states(graph, flat, batch, chains, start, blocks, generator)
    out = torch.empty(batch.numel(), chains, num_samples, graph.num_variables, dtype=torch.int64, device=theta.device)
    for sweep in _counted(burn_in + num_samples * thinning, progress):
        _sweep(graph, flat, states, blocks, generator)
        kept, rest = divmod(sweep + 1 - burn_in, thinning)
        if kept > 0 and rest == 0:
            out[:, :, kept - 1] = states
    return out.reshape(*batch, chains, num_samples, graph.num_variables)


def frequencies(graph: FactorGraph, states: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Count how often every entry of mu occurs: states of shape (*batch, sample, variable) give (*batch, mu).

    >>> from riskfield import chain
    >>> graph = chain(2, num_states=2)
    >>> graph.node_views(frequencies(graph, torch.tensor([[0, 1], [1, 1], [0, 1], [0, 0]])))[0]
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    states = graph.check_states(states)
    if states.ndim < 2 or states.shape[-2] == 0:
        raise ValueError(f"`states` must have shape (*batch, sample, variable). Got {tuple(states.shape)}.")
    batch, count = states.shape[:-2], states.shape[-2]
    states = states.reshape(batch.numel(), count, graph.num_variables)
    entries = [index_tensor(graph.node_start, states.device) + states]
    for group in graph.factor_groups:
        block = torch.arange(group.mu_start, group.mu_stop, group.table_size, device=states.device)
        entries.append(block + group.joint_states(states))
    total = torch.zeros(batch.numel(), graph.mu_size, dtype=dtype, device=states.device)
    for index in entries:
        flat_index = index.flatten(1)
        total.scatter_add_(1, flat_index, torch.ones_like(flat_index, dtype=dtype))
    return (total / count).reshape(*batch, graph.mu_size)


def effective_sample_size(draws: Tensor) -> Tensor:
    r"""How many independent samples would estimate a mean as well as these samples do.

        n_eff = chains * samples / tau,        tau = 1 + 2 sum_t rho_t,

    where rho_t is the autocorrelation at lag t, computed from the variances within and between chains. The sum ends
    before the first pair of lags whose sum is not positive (Geyer 1992; Gelman et al., Bayesian Data Analysis, 3rd ed.,
    section 11.5).

    A value near the number of chains means that the chains have not mixed: use a longer burn-in. If the value is well
    below the number of samples, increase the thinning or draw more samples.

    Arguments:
        draws: floats of shape (*batch, chain, sample, quantity), such as `sample(...).double()`.

    Returns:
        A tensor of shape (*batch, quantity). The samples of a quantity that never changes count as independent.

    >>> import torch
    >>> from riskfield.inference import effective_sample_size
    >>> draws = torch.randn(50, 40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> float(effective_sample_size(draws)) > 1800, float(effective_sample_size(draws.repeat_interleave(2, 1))) < 2200
    (True, True)
    """
    if draws.ndim < 3 or draws.shape[-2] < 4 or not draws.is_floating_point():
        raise ValueError(
            "`draws` must be floats of shape (*batch, chain, sample, quantity), with at least 4 samples. "
            f"Got {tuple(draws.shape)} of {draws.dtype}."
        )
    chains, samples = draws.shape[-3:-1]
    means = draws.mean(-2, keepdim=True)
    centred = draws - means
    lags = [(centred[..., : samples - t, :] * centred[..., t:, :]).sum(-2).mean(-2) / samples for t in range(samples)]
    covariance = torch.stack(lags)  # (lag, *batch, quantity)
    within = covariance[0] * samples / (samples - 1)
    between = means.squeeze(-2).var(-2) if chains > 1 else torch.zeros_like(within)
    total = covariance[0] + between
    constant = total == 0
    rho = 1 - (within - covariance) / torch.where(constant, 1, total)
    pairs = rho[: samples // 2 * 2].unflatten(0, (-1, 2)).sum(1)  # rho_0 + rho_1, rho_2 + rho_3, ...
    positive = (pairs > 0).cumprod(0)
    tau = 2 * (pairs * positive).sum(0) - 1
    return chains * samples / torch.where(constant, 1, tau.clamp(min=1))


@dataclass(frozen=True, eq=False)
class _Contribution:
    """What one slot of one factor group adds to the logits of a block."""

    owner: Tensor  # (factor,)         the position of the variable in the block
    start: Tensor  # (factor,)         where the factor's table starts in theta
    others: Tensor  # (factor, other)   the variables in its other slots
    strides: Tensor  # (other,)
    stride: int  # of the slot itself


@dataclass(frozen=True, eq=False)
class _Block:
    """Variables of one colour with the same number of states, resampled together."""

    variables: Tensor  # (member,)
    entries: Tensor  # (member, state)  positions of their potentials in theta
    contributions: tuple[_Contribution, ...]


def _blocks(graph: FactorGraph, device: torch.device) -> list[_Block]:
    colour = colours(graph)
    keys = np.stack([colour, graph.num_states], axis=1)
    distinct, block_of = np.unique(keys, axis=0, return_inverse=True)
    block_of = block_of.reshape(-1)
    members = [np.flatnonzero(block_of == k) for k in range(len(distinct))]
    position = np.empty(graph.num_variables, np.int64)
    for variables in members:
        position[variables] = np.arange(len(variables))
    contributions: list[list[_Contribution]] = [[] for _ in members]
    for group in graph.factor_groups:
        strides = np.append(np.cumprod(group.shape[:0:-1], dtype=np.int64)[::-1], 1)
        starts = group.theta_start + group.tables * group.table_size
        for slot in range(group.arity):
            mine = group.variables[:, slot]
            others = np.delete(np.arange(group.arity), slot)
            for k in np.unique(block_of[mine]):
                rows = np.flatnonzero(block_of[mine] == k)
                contributions[k].append(
                    _Contribution(
                        index_tensor(position[mine[rows]], device),
                        index_tensor(starts[rows], device),
                        index_tensor(group.variables[rows][:, others], device),
                        index_tensor(strides[others], device),
                        int(strides[slot]),
                    )
                )
    return [
        _Block(
            index_tensor(variables, device),
            index_tensor(graph.node_entries(variables), device),
            tuple(parts),
        )
        for variables, (_, count), parts in zip(members, distinct, contributions, strict=True)
    ]


def _sweep(
    graph: FactorGraph, theta: Tensor, states: Tensor, blocks: list[_Block], generator: torch.Generator | None
) -> None:
    """Resample every variable once; `states`, of shape (batch, chain, variable), change in place."""
    for block in blocks:
        logits = _logits(theta, states, block)
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        states[:, :, block.variables] = (logits - noise).argmax(-1)


def _logits(theta: Tensor, states: Tensor, block: _Block) -> Tensor:
    """Log-probabilities up to a constant, of shape (batch, chain, member, state)."""
    items, chains = states.shape[:2]
    count = block.entries.shape[1]
    first = (torch.arange(items, device=theta.device) * theta.shape[1])[:, None, None, None]
    logits = theta[:, block.entries].unsqueeze(1).repeat(1, chains, 1, 1)
    for part in block.contributions:
        base = part.start + (states[:, :, part.others] * part.strides).sum(-1)
        entries = base.unsqueeze(-1) + part.stride * torch.arange(count, device=theta.device)
        logits.index_add_(2, part.owner, theta.reshape(-1)[first + entries])
    return logits


def _first_states(
    graph: FactorGraph,
    theta: Tensor,
    batch: torch.Size,
    chains: int,
    start: Tensor | None,
    blocks: list[_Block],
    generator: torch.Generator | None,
) -> Tensor:
    shape = (len(theta), chains, graph.num_variables)
    if start is not None:
        states = graph.check_states(start, "start").to(theta.device)
        try:
            states = states.expand(*batch, chains, graph.num_variables).reshape(shape).clone()
        except RuntimeError:
            wanted = (*batch, chains, graph.num_variables)
            raise ValueError(f"`start` must broadcast to shape {wanted}. Got {tuple(start.shape)}.") from None
        if (_scores(graph, theta, states) == NEG_INF).any():
            raise ValueError("`start` must have non-zero probability under `theta` and `evidence`.")
        return states
    states = torch.zeros(shape, dtype=torch.int64, device=theta.device)
    for block in blocks:
        logits = theta[:, block.entries].unsqueeze(1).repeat(1, chains, 1, 1)
        if (logits == NEG_INF).all(-1).any():
            raise ImpossibleEvidenceError("`theta` and `evidence` make every state of some variable impossible.")
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        states[:, :, block.variables] = (logits - noise).argmax(-1)
    return _made_possible(graph, theta, states, blocks, generator)


def _made_possible(
    graph: FactorGraph, theta: Tensor, states: Tensor, blocks: list[_Block], generator: torch.Generator | None
) -> Tensor:
    """Move chains from impossible states to possible ones: sample with a penalty for each violated constraint."""
    penalty = torch.where(theta == NEG_INF, -_START_PENALTY, 0.0).to(theta.dtype)
    # States that evidence excludes, or that are impossible for a single variable, stay excluded.
    penalty[:, : graph.node_size] = torch.where(theta[:, : graph.node_size] == NEG_INF, NEG_INF, 0.0)
    for _ in range(_START_SWEEPS):
        stuck = _scores(graph, theta, states) == NEG_INF
        if not stuck.any():
            return states
        moved = states.clone()
        _sweep(graph, penalty, moved, blocks, generator)
        states = torch.where(stuck.unsqueeze(-1), moved, states)
    raise ImpossibleEvidenceError(
        f"No state of non-zero probability was found in {_START_SWEEPS} sweeps. If you know one, pass it as `start`."
    )


def _scores(graph: FactorGraph, theta: Tensor, states: Tensor) -> Tensor:
    return graph.score(theta.unsqueeze(1), states)


def make_generator(seed: int | torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The generator for a seed; None for torch's global one."""
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    return torch.Generator(device).manual_seed(seed)


def _counted(total: int, progress: bool) -> Iterable[int]:
    if not progress:
        return range(total)
    from tqdm import trange

    return trange(total, unit="sweep", leave=False, delay=0.5)  # type: ignore[no-any-return]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        lowest = 0 if name == "burn_in" else 1
        if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < lowest:
            raise ValueError(f"`{name}` must be an integer of at least {lowest}. Got {count!r}.")
