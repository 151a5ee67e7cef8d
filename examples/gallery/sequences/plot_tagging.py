"""
Tag the words of sentences
==========================

``CRF`` labels sequences. Each word has a dictionary of features, as in CRFsuite, and labels are strings. The sentences
come from a small random grammar in which many words are ambiguous, so that their neighbours matter.
"""

import matplotlib.pyplot as plt
import numpy as np

import riskfield as rf

rng = np.random.default_rng(0)
WORDS = {
    "article": ["the", "a"],
    "adjective": ["light", "old", "light", "red"],
    "noun": ["light", "watch", "man", "cook"],
    "verb": ["watch", "cook", "light", "see"],
}


def sentence():
    """Tags and words, such as: the old man watch a light."""
    part = ["article", *["adjective"] * rng.integers(0, 3), "noun"]
    tags = [*part, "verb", *part[:1], *["adjective"] * rng.integers(0, 2), "noun"]
    return tags, [str(rng.choice(WORDS[tag])) for tag in tags]


def corpus(number):
    """Features and tags."""
    sentences = [sentence() for _ in range(number)]
    return [[{"word": word} for word in words] for _, words in sentences], [tags for tags, _ in sentences]


X, y = corpus(60)
X_test, y_test = corpus(100)

# %%
# Words alone, and words with their neighbours.

alone = rf.CRF(loss="independent").fit(X, y)
crf = rf.CRF(loss="surrogate-likelihood", initial=()).fit(X, y)
print(f"words alone: {alone.score(X_test, y_test):.1%} of the tags are right")
print(f"as a chain:  {crf.score(X_test, y_test):.1%}")

# %%
# The learned table of transitions, from the tag of a word to that of the next.

table = crf.model_.factors["factors"].weight.detach().reshape(4, 4).numpy()
figure, axis = plt.subplots(figsize=(4.6, 3.8), layout="constrained")
shown = axis.imshow(table - table.mean(), cmap="RdBu_r", vmin=-2, vmax=2)
axis.set_xticks(range(4), crf.classes_, rotation=30)
axis.set_yticks(range(4), crf.classes_)
axis.set(xlabel="next tag", ylabel="tag", title="Learned table of transitions")
figure.colorbar(shown, label="log-potential")
