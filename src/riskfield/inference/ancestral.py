r"""Exact, independent samples, by variable elimination.

As `Exact`, the variables are summed out one by one. Backwards through the order, every variable is then drawn given
those drawn before it,

    x_v  ~  p(x_v | x_later)  propto  exp t_v(x_v, x_later),

which on a tree is ancestral sampling from the root. A draw is the argmax of logit minus the logarithm of an exponential
variate (the Gumbel-max trick). Time and memory grow exponentially with the treewidth; use Gibbs sampling, `sample`,
beyond `max_bytes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from riskfield.devices import check_max_bytes
from riskfield.errors import ImpossibleEvidenceError
from riskfield.graph._scopes import check_positive
from riskfield.graph.factor_graph import FactorGraph
from riskfield.inference._buckets import NEG_INF, backtrack, plan
from riskfield.inference.evidence import Evidence, clamp
from riskfield.inference.gibbs import make_generator


def sample_exactly(
    graph: FactorGraph,
    theta: Tensor,
    num_samples: int,
    *,
    seed: int | torch.Generator | None = None,
    evidence: Evidence | None = None,
    max_bytes: int = 2 * 2**30,
) -> Tensor:
    """Draw independent joint states from p(x) proportional to exp(theta . f(x)), exactly.

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (*batch, graph.theta_size), float32 or float64; -inf marks impossible states.
        num_samples: how many samples to draw for each batch item.
        seed: an integer or a `torch.Generator` on theta's device; the same seed gives the same samples. By default
            torch's global generator is used.
        evidence: observed states, a dict {variable: state} or an integer tensor of shape (*batch, variable) with -1 for
            unobserved variables.
        max_bytes: how much memory the tables may take.

    Returns:
        States, an int64 tensor of shape (*batch, num_samples, variable).

    Raises:
        TreewidthError: if the tables of one batch item do not fit into `max_bytes`.
        ImpossibleEvidenceError: if every joint state has probability zero.

    >>> from riskfield import chain
    >>> graph = chain(3, num_states=2)
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:, [0, 1], [0, 1]] = 1.0  # neighbours tend to agree
    >>> states = sample_exactly(graph, theta, 20_000, evidence={0: 1}, seed=0)
    >>> (states[:, 2] == 1).double().mean().round(decimals=2)  # 0.6068 by exact inference
    tensor(0.6100, dtype=torch.float64)
    """
    check_positive("num_samples", num_samples)
    check_max_bytes(max_bytes)
    graph.check_values(theta)
    if evidence is not None:
        theta = clamp(graph, theta, evidence)
    batch = theta.shape[:-1]
    flat = theta.detach().reshape(batch.numel(), graph.theta_size).double()
    generator = make_generator(seed, theta.device)
    cut, tree, items = plan(graph, flat, max_bytes, differentiable=False)

    def draw(scores: Tensor) -> Tensor:
        noise = torch.empty_like(scores).exponential_(generator=generator).log_()
        return (scores - noise).argmax(1)

    out = []
    for start in range(0, max(len(flat), 1), items):
        part = flat[start : start + items]
        tables = cut.tables(part)
        value, messages = tree.collect(part, tables, lambda table: torch.logsumexp(table, 1))
        if (value == NEG_INF).any():
            raise ImpossibleEvidenceError("Every joint state has probability zero: there is nothing to draw from.")
        item = torch.arange(len(part), device=theta.device).repeat_interleave(num_samples)
        out.append(backtrack(tree, cut, tables, messages, item, draw))
    return torch.cat(out).reshape(*batch, num_samples, graph.num_variables)
