"""
Observe some pixels, infer the others
=====================================

Evidence fixes the states of observed variables. Here a few scribbles on an image are evidence, and the marginals of
the other pixels follow from them and from a model in which neighbours of similar brightness tend to have the same
label.
"""

import matplotlib.pyplot as plt
import skimage.data
import skimage.transform
import torch

import riskfield as rf

image = torch.from_numpy(skimage.transform.resize(skimage.data.coins()[:150, :190], (60, 76), anti_aliasing=True))
rows, columns = image.shape

# %%
# A reward for equal neighbours that is larger where the image is smooth.

graph = rf.grid(rows, columns, num_states=2)
pairs = torch.tensor(graph.factor_groups[0].variables)
contrast = image.flatten()[pairs[:, 0]] - image.flatten()[pairs[:, 1]]
theta = graph.zeros()
graph.factor_views(theta)[0][:] = (2.5 * torch.exp(-((contrast / 0.06) ** 2)))[:, None, None] * torch.eye(2)

# %%
# Scribbles: coins are 1, the background is 0. Everything else is -1, not observed.

scribbles = torch.full((rows, columns), -1)
scribbles[5, 5:70] = 0
scribbles[36, 5:70] = 0
for column in (18, 40, 62):
    scribbles[21, column - 3 : column + 4] = 1
    scribbles[50, column - 3 : column + 4] = 1
trw = rf.MessagePassing(rf.TRW(0.5))
solution = rf.infer(graph, theta, trw, stop=rf.Stop(tol=1e-3), evidence=scribbles.flatten())

# %%

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
axes[0].imshow(image.numpy(), cmap="gray")
axes[0].imshow(scribbles.where(scribbles >= 0, torch.nan).numpy(), cmap="coolwarm", vmin=0, vmax=1)
axes[0].set_title("image and evidence")
axes[1].imshow(solution.node_marginals[0][:, 1].reshape(rows, columns).numpy(), cmap="gray", vmin=0, vmax=1)
axes[1].set_title("P(coin)")
for axis in axes:
    axis.set(xticks=[], yticks=[])
