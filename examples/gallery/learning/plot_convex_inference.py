"""
Learn convex inference
======================

A ``ConvexModel`` also learns the inference: the weights of the entropy of every configuration are parameters (Domke
2008). Marginals are the minimum of a convex function, found by Newton's method, and the gradient comes from its
optimality conditions.
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

torch.manual_seed(0)
graph = rf.grid(8, 8, num_states=2)
field = torch.nn.functional.avg_pool2d(torch.randn(52, 1, 12, 12), 5, stride=1)
labels = (field > 0).long().reshape(52, 64)
noisy = torch.where(torch.rand(52, 64) < 0.25, 1 - labels, labels)

# %%
# The features are indicators of the noisy pixels, so that potentials and weights are arbitrary tables of them.

pairs = torch.tensor(graph.factor_groups[0].variables)
one_hot = torch.nn.functional.one_hot
inputs = {
    "nodes": one_hot(noisy, 2).double(),
    "factors": one_hot(2 * noisy[:, pairs[:, 0]] + noisy[:, pairs[:, 1]], 4).double(),
}
examples = rf.Examples(graph, labels, inputs)
train, test = examples.select(range(40)), examples.select(range(40, 52))

# %%
# First with weights of 1, then with learned ones.

model = rf.models.ConvexModel(rf.LinearModel(2, 2, 4), {rf.inference.NEGATIVE_ENTROPY: rf.LinearModel(2, 2, 4)})
inference = rf.Inference(rf.ConvexFreeEnergy(solver=rf.inference.InteriorPoint()), rf.Stop(tol=1e-6), rf.KKT())
settings = {"warm_start": True, "optimiser": rf.optim.LBFGS(iterations=15), "progress": False, "ridge": 1e-3}
marginals = {}
for free in (False, True):
    model.log_weights.requires_grad_(free)
    rf.fit(model, train, rf.losses.UnivariateLogistic(), inference, **settings)
    with torch.no_grad():
        own = rf.models.inference_of(model, inference, graph, test.inputs)
        solution = own(graph, model(graph, test.inputs))
    name = "learned weights" if free else "weights of 1"
    marginals[name] = solution.node_marginals[0][..., 1]
    loss = rf.metrics.log_loss(solution.node_marginals[0], test.labels)
    print(f"{name}: log loss {loss:.3f}, error {rf.metrics.error_rate(solution.mode(), test.labels):.1%}")

# %%

figure, axes = plt.subplots(2, 4, figsize=(7, 3.6), layout="constrained")
for line, k in zip(axes, (0, 1), strict=True):
    panels = {"input": noisy[40 + k], "truth": test.labels[k]} | {name: own[k] for name, own in marginals.items()}
    for axis, (title, panel) in zip(line, panels.items(), strict=True):
        axis.imshow(panel.reshape(8, 8).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[], title=title)
