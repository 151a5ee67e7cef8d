"""Part-of-speech tagging: the steps of the tutorial of sklearn-crfsuite, on sentences from a small grammar.

Only the import and the line with `CRF` differ from the tutorial. Run `python examples/pos_tagging.py`.
"""

import argparse
import random

from riskfield import CRF

WORDS = {"DET": ["the", "a", "this", "every"], "ADJ": ["light", "old", "cold", "fast"]}
WORDS |= {"NOUN": ["dog", "light", "cold", "walks", "play", "runs"], "ADV": ["fast", "slowly", "often"]}
WORDS |= {"VERB": ["walks", "runs", "play", "light", "sees"]}
PATTERNS = ["DET NOUN VERB", "DET ADJ NOUN VERB ADV", "DET NOUN VERB DET ADJ NOUN", "DET ADJ ADJ NOUN ADV VERB"]


def word2features(sentence, i):
    """The features of word i."""
    word = sentence[i]
    features = {"bias": 1.0, "word": word, "suffix": word[-2:], "first": i == 0}
    return features | ({"before": {"word": sentence[i - 1]}} if i else {})


def main(arguments=None):
    """Draw sentences, train on half of them, and score the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sentences")
    number = 200 if parser.parse_args(arguments).quick else 2000
    draw = random.Random(0)
    y = [draw.choice(PATTERNS).split() for _ in range(number)]
    sentences = [[draw.choice(WORDS[tag]) for tag in tags] for tags in y]
    X = [[word2features(sentence, i) for i in range(len(sentence))] for sentence in sentences]
    crf = CRF(loss="surrogate-likelihood", initial=(), ridge=1e-4).fit(X[: number // 2], y[: number // 2])
    print(f"accuracy on {number - number // 2} new sentences: {crf.score(X[number // 2 :], y[number // 2 :]):.3f}")
    print(*(f"{word}/{tag}" for word, tag in zip(sentences[-1], crf.predict(X[-1:])[0], strict=True)))


if __name__ == "__main__":
    main()
