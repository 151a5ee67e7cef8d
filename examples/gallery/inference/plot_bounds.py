"""
Bound the partition function
============================

Mean field bounds log Z from below, and tree-reweighted message passing with edge weights from spanning trees bounds
it from above. Loopy belief propagation is an estimate without a guarantee. On a small grid the exact value is known.
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

graph = rf.grid(7, 7, num_states=3)
generator = torch.Generator().manual_seed(0)
noise = torch.randn(graph.theta_size, dtype=torch.float64, generator=generator)
strengths = torch.linspace(0.1, 2, 12)
thetas = strengths[:, None].double() * noise  # a batch of models

# %%
# One call per algorithm runs the whole batch.

exact = rf.infer(graph, thetas, rf.Exact()).log_partition
trees = rf.TRW(rf.entropy.spanning_tree_rho(graph))
algorithms = {"mean field": rf.MeanField(), "loopy BP": rf.MessagePassing(), "TRW": rf.MessagePassing(trees)}
values = {
    name: rf.infer(graph, thetas, algorithm, stop=rf.Stop(2000, 1e-6)).log_partition
    for name, algorithm in algorithms.items()
}
assert (values["mean field"] <= exact).all()
assert (values["TRW"] >= exact).all()

# %%

figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
axis.axhline(0, color="0.7")
for name, value in values.items():
    axis.plot(strengths, value - exact, "o-", markersize=3, label=name)
axis.set(
    xlabel="strength of all potentials", ylabel="estimate of log Z minus log Z", title="Error of log Z by algorithm"
)
axis.legend(frameon=False)
