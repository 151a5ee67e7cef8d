"""
Draw samples
============

Gibbs sampling draws joint states. Strong couplings make successive samples similar to each other; the effective
sample size measures how many independent samples they are worth.
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

graph = rf.grid(40, 40, num_states=3, tied=True)
strengths = (0.4, 0.9, 1.2)
thetas = graph.zeros(3)
for tables in graph.factor_views(thetas):
    tables[:] = torch.tensor(strengths, dtype=torch.float64)[:, None, None, None] * torch.eye(3)  # a Potts model

# %%
# Two chains for each of the three models, all at once.

states = rf.sample(graph, thetas, num_samples=100, chains=2, burn_in=100, seed=0)  # (model, chain, sample, variable)
agree = (states[..., 0] == states[..., 1]).double()  # do the first two pixels agree?
for strength, draws in zip(strengths, agree, strict=True):
    size = float(rf.inference.effective_sample_size(draws[..., None]))
    print(f"strength {strength}: {draws.numel()} samples are worth {size:.0f} independent ones")

# %%
# The last sample of each model.

figure, axes = plt.subplots(1, 3, figsize=(8, 3.2), layout="constrained")
figure.suptitle("One sample of each model")
for axis, strength, own in zip(axes, strengths, states[:, 0, -1], strict=True):
    axis.imshow(own.reshape(40, 40).numpy(), cmap="viridis")
    axis.set(xticks=[], yticks=[], title=f"strength {strength}")
