"""
Write an inference algorithm
============================

An algorithm is a frozen dataclass with settings. Its run has three methods; ``infer`` owns the loop, the stopping
rule and the warnings. This one is mean field with all variables updated at once. Because it is written in PyTorch,
``Unroll`` differentiates it without further work.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

import riskfield as rf

# %%
# The run holds the state of a batch. This one is for graphs with factors of one shape over two variables. An item that
# has converged does not change any more, even if others continue: so it gives the same in a batch as alone.


class ParallelRun:
    """Node marginals of shape (batch, node, state)."""

    def __init__(self, graph, theta, damping):
        (group,), (self.unary,) = graph.factor_groups, graph.node_views(theta)
        (self.table,) = graph.factor_views(graph.expand(theta))  # one table per factor, even if factors share one
        self.first, self.second = torch.tensor(group.variables).T
        self.q, self.damping = self.unary.softmax(-1), damping
        self.residual = torch.full((len(theta),), torch.inf, dtype=torch.float64)

    def advance(self, sweeps, tol):
        """Sweep; return the last change of a marginal and the number of sweeps, of each item.

        Without a tolerance `tol` is -1, which no residual reaches.
        """
        ran = torch.zeros(len(self.q), dtype=torch.int64)
        for _ in range(sweeps):
            going = ~(self.residual <= tol)
            if not going.any():
                break
            score = self.unary.index_add(1, self.first, (self.table @ self.q[:, self.second, :, None])[..., 0])
            score = score.index_add(1, self.second, (self.q[:, self.first, None] @ self.table)[..., 0, :])
            change = torch.where(going[:, None, None], score.softmax(-1) - self.q, 0)
            self.q = self.q + (1 - self.damping) * change
            self.residual = torch.where(going, change.detach().abs().amax((1, 2)).double(), self.residual)
            ran += going
        return self.residual, ran

    def marginals(self):
        """Those of the variables, then products for the factors."""
        pairs = self.q[:, self.first, :, None] * self.q[:, self.second, None, :]
        return torch.cat([self.q.flatten(1), pairs.flatten(1)], 1)

    def messages(self):
        """Nothing to start another run from."""
        return None


@dataclass(frozen=True)
class ParallelMeanField(rf.inference.AbstractAlgorithm):
    """Mean field, all variables at once."""

    damping: float = 0.0

    def start(self, graph, theta, messages, kernels):
        """Begin a run."""
        return ParallelRun(graph, theta, self.damping)

    def log_partition(self, graph, theta, mu):
        """The lower bound of mean field."""
        return rf.MeanField().log_partition(graph, theta, mu)


# %%
# Where the library's mean field, which updates one variable after the other, has one optimum, both find it.

graph = rf.grid(12, 12, num_states=2)
theta = torch.randn(graph.theta_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
reference = rf.infer(graph, 0.5 * theta, rf.MeanField(), stop=rf.Stop(tol=1e-10))
own = rf.infer(graph, 0.5 * theta, ParallelMeanField(), stop=rf.Stop(tol=1e-10))
assert torch.allclose(own.mu, reference.mu, atol=1e-8)
print(f"sweeps: {int(own.sweeps)} in parallel, {int(reference.sweeps)} in sequence")
batch = rf.infer(graph, torch.stack([0.0 * theta, 0.5 * theta]), ParallelMeanField(), stop=rf.Stop(tol=1e-10))
assert batch.sweeps.tolist() == [1, int(own.sweeps)]

# %%
# Gradients come from ``Unroll``.

leaf = theta.clone().requires_grad_()
rf.infer(graph, leaf, ParallelMeanField(), stop=rf.Stop(10, tol=None)).mu.square().sum().backward()
assert leaf.grad.abs().max() > 0

# %%
# With a strong reward for different neighbours the parallel updates oscillate and the bound falls. Damping helps.

strong = graph.zeros()
graph.node_views(strong)[0][:, 1] = 0.3 * graph.node_views(theta)[0][:, 1]
graph.factor_views(strong)[0][:] = -2.0 * torch.eye(2)
figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
for name, algorithm in {
    "parallel": ParallelMeanField(),
    "parallel, damping 0.5": ParallelMeanField(damping=0.5),
    "sequential": rf.MeanField(),
}.items():
    bounds = [rf.infer(graph, strong, algorithm, stop=rf.Stop(k, tol=None)).log_partition for k in range(1, 25)]
    axis.plot(range(1, 25), bounds, "o-", markersize=3, label=name)
axis.set(xlabel="sweeps", ylabel="bound on log Z", title="Bound on log Z by sweeps")
axis.legend(frameon=False)
