"""
Are the marginals calibrated?
=============================

Marginals are calibrated if, of all pixels with a marginal of 0.8, 80 % are right. With approximate inference this
depends on how the model was trained. Here one model is trained by two losses, through the same ten sweeps of loopy
belief propagation.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.ndimage import gaussian_filter

import riskfield as rf

rng = np.random.default_rng(0)
truth = np.array([gaussian_filter(rng.normal(size=(32, 32)), 2) > 0 for _ in range(16)]).astype(int)
t = rng.random(truth.shape) ** 1.5
X = np.where(truth, 1 - t, t)[..., None]

# %%
# Train on the first half, and count how often the marginals of the second half are right.

inference = rf.Inference(rf.MessagePassing(), rf.Stop(sweeps=10, tol=None), rf.Unroll())
reliability = {}
for loss in ("pseudolikelihood", "univariate-logistic"):
    crf = rf.GridCRF(loss=loss, inference=inference, optimiser=rf.optim.LBFGS(iterations=20)).fit(X[:8], truth[:8])
    marginals = torch.from_numpy(crf.predict_marginals(X[8:])).flatten(1, 2)
    reliability[loss] = rf.metrics.reliability(marginals, torch.from_numpy(truth[8:]).flatten(1))
    print(f"{loss}: calibration error {reliability[loss].calibration_error:.3f}")

# %%
# A calibrated model lies on the diagonal.

figure, axis = plt.subplots(figsize=(4.5, 4), layout="constrained")
axis.plot([0, 1], [0, 1], color="0.7")
for loss, found in reliability.items():
    axis.plot(found.means, found.shares, "o-", label=loss)
axis.set(xlabel="marginal", ylabel="share of pixels that are in this state", title="Calibration by training loss")
axis.legend(frameon=False)
