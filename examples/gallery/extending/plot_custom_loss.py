"""
Write a loss
============

Any function of the solution, the labels and a mask is a loss. This one is the focal loss, which gives less weight to
pixels that are already labelled well. Gradients go through inference.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.ndimage import gaussian_filter

import riskfield as rf

rng = np.random.default_rng(0)
truth = np.array([gaussian_filter(rng.normal(size=(24, 24)), 2) > 0 for _ in range(12)]).astype(int)
X = truth[..., None] + 1.5 * rng.normal(size=(*truth.shape, 1))

# %%
# The loss returns one number per example.


def focal(solution, labels, mask):
    """-(1 - mu)^2 log mu of the true states."""
    (marginals,) = solution.node_marginals
    right = marginals.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).clamp(min=1e-12)
    return torch.where(mask, -((1 - right) ** 2) * right.log(), 0).sum(-1)


# %%
# An estimator takes it in place of the name of a loss.

white = {}
for name, loss in {"logistic": "univariate-logistic", "focal": focal}.items():
    crf = rf.GridCRF(loss=loss, optimiser=rf.optim.LBFGS(iterations=20)).fit(X[:6], truth[:6])
    white[name] = crf.predict_marginals(X[6:])[..., 1]
    print(f"{name}: {crf.score(X[6:], truth[6:]):.1%} of the pixels are right")

# %%
# The focal loss leaves marginals closer to 1/2.

figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
axis.hist([own.ravel() for own in white.values()], bins=20, label=list(white))
axis.set(xlabel="P(white)", ylabel="pixels", title="Marginals by training loss")
axis.legend(frameon=False)
