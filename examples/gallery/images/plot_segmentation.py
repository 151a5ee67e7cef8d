"""
Label textures in images
========================

``ImageCRF`` computes features of pixels and edges, trains a linear model on them, and labels new images. The images
are composed of patches of scikit-image's brick, grass and gravel; test images use other parts of the photographs.
"""

import matplotlib.pyplot as plt
import numpy as np

import riskfield as rf
from riskfield.datasets.bundled import mosaics

train, test = mosaics(4, (48, 64)), mosaics(3, (48, 64), test=True)
crf = rf.ImageCRF(loss="clique-logistic", ridge=1e-3, optimiser=rf.optim.LBFGS(iterations=15))
crf.fit([example.image for example in train], [example.labels for example in train])

# %%
# Predict labels and marginals.

images = [example.image for example in test]
labels = crf.predict(images)
certainty = [marginals.max(-1) for marginals in crf.predict_marginals(images)]
error = np.mean([np.mean(own != example.labels) for own, example in zip(labels, test, strict=True)])
print(f"{error:.1%} of the pixels are wrong")

# %%

figure, axes = plt.subplots(3, 4, figsize=(8, 4.8), layout="constrained")
for line, example, own, sure in zip(axes, test, labels, certainty, strict=True):
    line[0].imshow(example.image, cmap="gray")
    line[1].imshow(example.labels, cmap="viridis", vmin=0, vmax=2)
    line[2].imshow(own, cmap="viridis", vmin=0, vmax=2)
    line[3].imshow(sure, cmap="magma", vmin=1 / 3, vmax=1)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
for axis, title in zip(axes[0], ["image", "truth", "predicted", "largest marginal"], strict=True):
    axis.set_title(title)
