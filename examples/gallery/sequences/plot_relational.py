"""
Label the members of a network
==============================

Examples of any structure: here people and their friendships. Friends tend to be in the same club, and a weak personal
feature helps. Every network has its own edges, and one model serves them all.
"""

import matplotlib.pyplot as plt
import numpy as np

import riskfield as rf

rng = np.random.default_rng(0)


def network(people=30):
    """Features of shape (person, 1), edges of shape (friendship, 2), and the clubs."""
    club = rng.integers(0, 2, people)
    same = club[:, None] == club
    friends = np.triu(rng.random((people, people)) < np.where(same, 0.16, 0.02), 1)
    return (club[:, None] + 1.2 * rng.normal(size=(people, 1)), np.argwhere(friends)), club


networks = [network() for _ in range(30)]
X, y = [example for example, _ in networks], [club for _, club in networks]

# %%
# Graphs with cycles: inference is tree-reweighted message passing.

alone = rf.CRF(loss="independent").fit(X[:15], y[:15])
crf = rf.CRF(loss="univariate-logistic", optimiser=rf.optim.LBFGS(iterations=30)).fit(X[:15], y[:15])
print(f"each person alone: {alone.score(X[15:], y[15:]):.1%} right")
print(f"with friends:      {crf.score(X[15:], y[15:]):.1%} right")

# %%
# The first network that the model has not seen. The colour is the marginal, and the ring around a person is the true
# club. More people are right here than on average: in some other networks, nearly a whole club is wrong.

(_, edges), truth = X[15], y[15]
(marginals,) = crf.predict_marginals(X[15:16])
print(f"in this network:   {np.mean((marginals[:, 1] > 0.5) == truth):.1%} right")
angle = np.where(truth == 1, 0.0, np.pi) + rng.normal(0, 0.75, len(truth))
place = np.stack([np.cos(angle), np.sin(angle)], 1) * rng.uniform(0.5, 1.2, (len(truth), 1))
figure, axis = plt.subplots(figsize=(5, 4.4), layout="constrained")
for i, j in edges:
    axis.plot(*place[[i, j]].T, color="0.85", zorder=0)
ring = np.where(truth == 1, "tab:red", "tab:blue")
shown = axis.scatter(*place.T, c=marginals[:, 1], cmap="coolwarm", vmin=0, vmax=1, s=120, edgecolors=ring, linewidths=2)
axis.axis("off")
axis.set_title("Marginals and true clubs of one network")
figure.colorbar(shown, label="P(club 1)")
