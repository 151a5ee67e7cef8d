r"""How much samples that depend on each other are worth.

    n_eff = chains * samples / tau,        tau = 1 + 2 sum_t rho_t,

with rho_t the autocorrelation at lag t, from the variance within and between chains, summed as long as its sums over
pairs of lags are positive (Geyer 1992; Gelman et al., Bayesian Data Analysis, 3rd ed., section 11.5).
"""

from __future__ import annotations

import torch
from torch import Tensor


def effective_sample_size(draws: Tensor) -> Tensor:
    """How many independent samples would estimate a mean as well as these do.

    Between chains that have not come together it is near their number: burn in longer. Where it is well below the
    number of samples, thin more, or draw more.

    Arguments:
        draws: floats of shape (*batch, chain, sample, quantity), such as `sample(...).double()`.

    Returns:
        A tensor of shape (*batch, quantity); a quantity that is always the same counts as independent.

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
