r"""A Markov random field as a distribution of PyTorch.

    p(x) = exp(theta . f(x) - A(theta)),        H = A(theta) - theta . mu

Here x is a joint state, theta the log-potentials, f(x) the indicators of the states of all variables and factors, mu
their expectation (the marginals), A the log-partition function and H the entropy. With exact inference, all values are
exact. Other inference approximates A and mu, and `log_prob_is` says whether the log-probability is then a bound.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from riskfield.errors import TreewidthError
from riskfield.graph._scopes import index_tensor
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, as_inference
from riskfield.inference.algorithm import AbstractAlgorithm, ValueIs
from riskfield.inference.ancestral import sample_exactly
from riskfield.inference.evidence import Evidence, clamp
from riskfield.inference.exact import Exact, ExactMAP
from riskfield.inference.gibbs import sample
from riskfield.inference.message_passing import MaxProduct
from riskfield.inference.solution import Solution, inner_product
from riskfield.kernels import is_differentiated

_OF_VALUE: dict[ValueIs, ValueIs] = {"upper bound": "lower bound", "lower bound": "upper bound"}


class MRF(Distribution):
    """The distribution p(x) proportional to exp(theta . f(x)) over the joint states x of a graph.

    f(x) are the indicators of the states of all variables and factors, so that theta . f(x) is the sum of the
    log-potentials that x selects. This is a `torch.distributions.Distribution` of integer vectors, one state per
    variable: `event_shape` is (variable,), and `batch_shape` are the leading axes of theta. All values except those of
    `sample` and `mode` are differentiable with respect to theta.

    Arguments:
        graph: the structure.
        theta: log-potentials of shape (*batch, theta), float32 or float64; -inf marks impossible states.
        inference: how marginals and the log-partition value are computed: an `Inference`, or an algorithm such as
            `MessagePassing()`. By default `Exact()`. If the treewidth of the graph is too large for it, the first value
            that is computed raises a `TreewidthError`: pass an approximation instead.

    Raises:
        TypeError: if `graph` is not a `FactorGraph`, or `theta` or `inference` has a wrong type.
        ValueError: if `theta` does not fit the graph, or holds NaN or +inf.

    >>> import torch
    >>> import riskfield as rf
    >>> graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2)], names=["rain", "road", "crash"])
    >>> theta = graph.zeros()
    >>> graph.factor_views(theta)[0][:] = torch.eye(2)  # neighbours tend to agree
    >>> model = rf.MRF(graph, theta)
    >>> model.log_prob(torch.tensor([1, 1, 1])).exp().round(decimals=4)
    tensor(0.2672, dtype=torch.float64)
    >>> model.condition({"rain": 1}).marginals[graph.variable("crash")].round(decimals=4)
    tensor([0.3932, 0.6068], dtype=torch.float64)
    >>> model.sample((1000,)).shape
    torch.Size([1000, 3])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  theta is checked here, and -inf is allowed

    def __init__(self, graph: FactorGraph, theta: Tensor, inference: Inference | AbstractAlgorithm | None = None):
        if not isinstance(graph, FactorGraph):
            raise TypeError(f"`graph` must be a FactorGraph. Got {type(graph).__name__}.")
        graph.check_values(theta)
        self.graph, self.theta = graph, theta.clone()  # what is computed from it is kept
        self.inference = as_inference(Exact() if inference is None else inference)
        super().__init__(theta.shape[:-1], torch.Size([graph.num_variables]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: None = None) -> MRF:
        """Return the same distribution with a larger batch shape.

        Arguments:
            batch_shape: the new batch shape, to which the old one can be broadcast.
        """
        return MRF(self.graph, self.theta.expand(*batch_shape, self.graph.theta_size), self.inference)

    def condition(self, evidence: Evidence) -> MRF:
        """Return the distribution p(x | evidence), on the same graph with some variables observed.

        Arguments:
            evidence: a dict {variable: state}, with the numbers or the names of variables, or an integer tensor of
                shape (*batch, variable) with -1 for unobserved variables.
        """
        return MRF(self.graph, clamp(self.graph, self.theta, evidence), self.inference)

    @property
    def support(self) -> Any:
        """Integer vectors with one state per variable."""
        highest = index_tensor(self.graph.num_states, self.theta.device) - 1
        return constraints.independent(constraints.integer_interval(torch.zeros_like(highest), highest), 1)

    @property
    def mean(self) -> Tensor:
        """Not defined."""
        raise NotImplementedError("States are labels, which have no mean. Use `marginals`.")

    @property
    def variance(self) -> Tensor:
        """Not defined."""
        raise NotImplementedError("States are labels, which have no variance. Use `marginals`.")

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def log_partition(self) -> Tensor:
        """A(theta), of shape (*batch)."""
        return self._solution.log_partition

    def log_prob(self, value: Tensor) -> Tensor:
        """Return theta . f(x) - A(theta), of shape (*sample, *batch).

        It is exact if inference is exact. Otherwise `log_prob_is` says what it is.

        Arguments:
            value: the states x, of shape (*sample, *batch, variable).
        """
        return self.graph.score(self.theta, torch.as_tensor(value, device=self.theta.device)) - self.log_partition

    @property
    def log_prob_is(self) -> ValueIs:
        """What `log_prob` returns: "exact", "lower bound", "upper bound" or "approximation".

        Tree-reweighted message passing bounds A from above, and therefore the log-probability from below, if it has
        converged and its rho is valid. Mean field bounds A from below, and the log-probability from above.
        """
        solution = self._solution
        sweeps, converged = min(solution.sweeps.flatten().tolist(), default=1), bool(solution.converged.all())
        value_is = self.inference.algorithm.value_is(self.graph, sweeps=sweeps, converged=converged)
        return _OF_VALUE.get(value_is, value_is)

    def entropy(self) -> Tensor:
        """Return the entropy A(theta) - theta . mu, of shape (*batch). It is exact if inference is exact."""
        solution = self._solution
        return solution.log_partition - inner_product(self.graph.expand(self.theta), solution.mu)

    @property
    def marginals(self) -> Tensor:
        """P(x_i), of shape (*batch, variable, state). Rows of variables with fewer states than others end in zeros."""
        graph, solution = self.graph, self._solution
        views = solution.node_marginals
        if len(views) == 1:
            return views[0]
        most = int(graph.num_states.max(initial=0))
        out = solution.mu.new_zeros(*self.batch_shape, graph.num_variables, most)
        for group, view in zip(graph.node_groups, views, strict=True):
            padded = torch.nn.functional.pad(view, (0, most - group.num_states))
            out = out.index_copy(out.ndim - 2, index_tensor(group.variables, out.device), padded)
        return out

    @property
    def factor_marginals(self) -> tuple[Tensor, ...]:
        """P(x_c) of all factors c: for each group of factors of one shape, a tensor (*batch, factor, *shape)."""
        return self._solution.factor_marginals

    @property
    def mode(self) -> Tensor:
        """The most probable joint state, of shape (*batch, variable).

        It is exact if elimination fits into memory. Otherwise it is the state that `MaxProduct` finds, which may not be
        the most probable one.
        """
        try:
            return Inference(ExactMAP())(self.graph, self.theta.detach()).mode()
        except TreewidthError:
            return Inference(MaxProduct())(self.graph, self.theta.detach()).mode()

    def sample(
        self, sample_shape: Any = (), *, seed: int | torch.Generator | None = None, burn_in: int = 100
    ) -> Tensor:
        """Draw joint states, an int64 tensor of shape (*sample_shape, *batch, variable).

        If elimination fits into memory, as on trees, the samples are exact and independent. On other graphs, each
        sample is the last state of a separate Gibbs chain.

        Arguments:
            sample_shape: how many samples, as a shape; by default (), one sample.
            seed: an integer, or a `torch.Generator` on the device of theta. By default torch's global generator is
                used.
            burn_in: how many sweeps of a Gibbs chain are discarded before the one that gives the sample, by default
                100.
        """
        shape = torch.Size(sample_shape)
        count = shape.numel()
        try:
            states = sample_exactly(self.graph, self.theta, max(count, 1), seed=seed)
        except TreewidthError:
            chains = sample(self.graph, self.theta, 1, chains=max(count, 1), burn_in=burn_in, seed=seed)
            states = chains.squeeze(-2)
        return states[..., :count, :].movedim(-2, 0).reshape(*shape, *self.batch_shape, self.graph.num_variables)

    def __repr__(self) -> str:
        return f"MRF({self.graph}, batch_shape={tuple(self.batch_shape)}, {self.inference})"

    @property
    def _solution(self) -> Solution:
        # A solution with a gradient serves one backward pass only.
        if is_differentiated(self.theta):
            return self.inference(self.graph, self.theta)
        return self._kept_solution

    @cached_property
    def _kept_solution(self) -> Solution:
        return self.inference(self.graph, self.theta.detach())


@register_kl(MRF, MRF)  # type: ignore[untyped-decorator]
def _kl(p: MRF, q: MRF) -> Tensor:
    """A(theta_q) - A(theta_p) + (theta_p - theta_q) . mu_p."""
    if p.graph is not q.graph:
        raise ValueError("`kl_divergence` needs two MRFs on the same `FactorGraph`. Got two graphs.")
    solution = p._solution
    own, other = (inner_product(p.graph.expand(theta), solution.mu) for theta in (p.theta, q.theta))
    return q.log_partition - solution.log_partition + own - other
