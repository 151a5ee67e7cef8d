"""
Learn the edge weight of TRW
============================

Tree-reweighted message passing has a weight rho for every edge. At rho = 1 it is loopy belief propagation, and smaller
weights are more cautious. Marginals can be differentiated with respect to rho. Here one rho for all edges is trained so
that the marginals of random models agree with the exact ones.
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

graph = rf.grid(5, 5, num_states=2)
generator = torch.Generator().manual_seed(0)
thetas = 3 * torch.randn(200, graph.theta_size, dtype=torch.float64, generator=generator)
exact = rf.infer(graph, thetas, rf.Exact()).node_marginals[0]
train, test = slice(0, 100), slice(100, 200)
stop = rf.Stop(sweeps=20, tol=None)


def error(rho, part):
    """Squared error of the marginals."""
    solution = rf.infer(graph, thetas[part], rf.MessagePassing(rf.TRW(rho)), stop=stop)
    return (solution.node_marginals[0] - exact[part]).square().mean()


# %%
# Gradient descent on log rho, from rho = 1/2.

log_rho = torch.tensor(0.5, dtype=torch.float64).log().requires_grad_()
optimiser = torch.optim.Adam([log_rho], lr=0.1)
path = []
for _ in range(20):
    optimiser.zero_grad()
    risk = error(log_rho.exp(), train)
    risk.backward()
    path.append((log_rho.exp().item(), risk.item()))
    optimiser.step()

learned = log_rho.detach().exp()
for rho in (0.5, 1.0, learned):
    print(f"test error with rho = {rho:.2f}: {error(rho, test):.5f}")

# %%
# The path of the training, and the error of other values.

values = torch.linspace(0.4, 1.6, 13)
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
axis.semilogy(values, [error(float(rho), train) for rho in values], color="0.6", label="training models")
axis.semilogy(values, [error(float(rho), test) for rho in values], "--", color="0.6", label="test models")
axis.semilogy(*zip(*path, strict=True), "o", markersize=4, label="steps of the training")
axis.set(xlabel="rho", ylabel="squared error of the marginals", title="Error by edge weight")
axis.legend(frameon=False)
