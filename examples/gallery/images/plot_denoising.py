"""
Denoise binary images
=====================

Train a grid of binary variables to restore noisy images. Neighbouring pixels share two tables of pairwise potentials,
one for horizontal and one for vertical edges. The loss is computed from the marginals of five sweeps of
tree-reweighted message passing.
"""

# %%
# Blobs, and noise that leaves little information in a single pixel.

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

import riskfield as rf

rng = np.random.default_rng(0)


def blobs(number, side=32):
    """Binary images, and their noisy versions with one feature per pixel."""
    truth = np.array([gaussian_filter(rng.normal(size=(side, side)), 3) > 0 for _ in range(number)]).astype(int)
    t = rng.random(truth.shape) ** 1.5
    return np.where(truth, 1 - t, t)[..., None], truth


X, y = blobs(8)
X_test, y_test = blobs(8)

# %%
# The estimator has the interface of scikit-learn.

five_sweeps = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps=5, tol=None), rf.Unroll())
crf = rf.GridCRF(inference=five_sweeps, optimiser=rf.optim.LBFGS(iterations=20)).fit(X, y)
print(f"{np.mean((X_test[..., 0] > 0.5) == y_test):.1%} of the pixels are right before")
print(f"{crf.score(X_test, y_test):.1%} of the pixels are right after")

# %%
# Marginals show where the model is unsure: at the boundaries.

white = crf.predict_marginals(X_test[:3])[..., 1]
figure, axes = plt.subplots(3, 3, figsize=(6, 6), layout="constrained")
for line, panels in zip(axes, zip(X_test[:3, ..., 0], y_test[:3], white, strict=True), strict=True):
    for axis, panel, title in zip(line, panels, ["input", "truth", "P(white)"], strict=True):
        axis.imshow(panel, cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[], title=title)
